"""A checkpoint and its tokenizer from disk, ready to be asked."""

from pathlib import Path

import torch

from gristmill.data_pipeline.errors import InputError
from gristmill.evaluation.config import EvaluateConfig
from gristmill.evaluation.transformer_backbone import TransformerBackbone
from gristmill.tokenizers.tokenizer import Tokenizer, load_tokenizer
from gristmill.training.checkpoint import load_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_backbone(checkpoint: Path, config: EvaluateConfig, device: str = "cpu") -> TransformerBackbone:
    """The whole model in this process, whatever layout saved it, in the precision the config names."""
    model, model_config = load_model(checkpoint, device=device, dtype=DTYPES[config.precision])
    return TransformerBackbone(model, model_config.context)


def load_codec(tokenizer: Path) -> Tokenizer:
    if not tokenizer.is_dir():
        raise InputError(
            f"{tokenizer}: no such folder; name the folder of the tokenizer the checkpoint was trained with"
        )
    return load_tokenizer(tokenizer)
