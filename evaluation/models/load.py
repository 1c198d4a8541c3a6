"""Load a gristmill checkpoint or a Hugging Face folder, with its tokenizer, for evaluation."""

from dataclasses import dataclass
from pathlib import Path

import torch

from gristmill.evaluation.config import EvaluateConfig
from gristmill.evaluation.models.causal_lm import CausalLM
from gristmill.evaluation.models.huggingface import has_family, is_huggingface, read_huggingface
from gristmill.evaluation.models.local_causal_lm import LocalCausalLM
from gristmill.evaluation.models.quantization import quantize
from gristmill.evaluation.models.sharded_causal_lm import load_sharded
from gristmill.evaluation.models.transformers_causal_lm import TransformersCausalLM
from gristmill.evaluation.workdir import CheckpointPaths
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import file_digest
from gristmill.foundation.manifest import read_manifest
from gristmill.tokenizers.tokenizer import Tokenizer, load_tokenizer
from gristmill.training.auto_tp.transformers_folder import open_causal_folder
from gristmill.training.checkpoint import load_model, read_model_config
from gristmill.training.layout_config import LayoutConfig
from gristmill.training.parallel.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PADDING = 1024  # embedding tables are padded to a multiple of at most so many rows (Megatron-LM pads to 128 x tensor)


@dataclass(frozen=True)
class LoadedModel:
    """digest: of the weight files, the tokenizer and the precision; equal digests give equal results."""

    name: str
    causal_lm: CausalLM
    codec: Tokenizer
    digest: str


def load_for_evaluation(
    paths: CheckpointPaths, config: EvaluateConfig, device: str | torch.device = "cpu"
) -> LoadedModel:
    """Loads model and tokenizer. Raises InputError on an incomplete or damaged checkpoint, and if the tokenizer is not
    its."""
    checkpoint, folder = paths.resolve()
    codec = load_tokenizer(folder)
    dtype = DTYPES[config.precision]
    foreign = is_huggingface(checkpoint)
    if not foreign:
        check_causal(checkpoint, read_model_config(checkpoint)["model"].get("attention", "causal"))
    if foreign and not has_family(checkpoint):
        return _load_of_transformers(checkpoint, folder, codec, config, device)
    if foreign:
        model, saved_config = read_huggingface(checkpoint, device, dtype)
        check_causal(checkpoint, model.config.attention)
    else:
        model, _ = load_model(checkpoint, device, dtype)
        saved_config = read_model_config(checkpoint)
    check_tokenizer(
        folder,
        codec,
        saved_config["vocab_size"],
        saved_config["end_of_document"],
        padded=foreign or "padded_rows" in saved_config,
    )
    if config.weights != "as_trained":
        quantize(model, config.weights, codec.end_of_document)
    parts = [weights_digest(checkpoint), codec.fingerprint, config.precision, config.weights]
    return LoadedModel(checkpoint.name, LocalCausalLM(model, model.config.sequence_length), codec, fingerprint(parts))


def _load_of_transformers(
    checkpoint: Path, tokenizer: Path, codec: Tokenizer, config: EvaluateConfig, device: str | torch.device
) -> LoadedModel:
    """A model whose architecture is in transformers and not in gristmill."""
    folder = open_causal_folder(checkpoint)
    if config.weights != "as_trained":
        raise RecipeError(f"weights: {config.weights} is not built for {folder.architecture.__name__}; leave it out")
    if codec.vocab_size > folder.vocab_size:
        raise InputError(
            f"{tokenizer}: the tokenizer has {codec.vocab_size} tokens and {checkpoint} {folder.vocab_size}; give the "
            "tokenizer it was trained with"
        )
    parts = [weights_digest(checkpoint), codec.fingerprint, config.precision, config.weights]
    causal_lm = TransformersCausalLM(folder, device, DTYPES[config.precision])
    return LoadedModel(checkpoint.name, causal_lm, codec, fingerprint(parts))


def load_for_evaluation_sharded(
    paths: CheckpointPaths, config: EvaluateConfig, layout: LayoutConfig, mesh: Mesh
) -> LoadedModel:
    """This rank's shard of a gristmill checkpoint. Raises InputError as `load_for_evaluation` does."""
    checkpoint, folder = paths.resolve()
    codec, saved_config = load_tokenizer(folder), read_model_config(checkpoint)
    check_causal(checkpoint, saved_config["model"].get("attention", "causal"))
    check_tokenizer(
        folder, codec, saved_config["vocab_size"], saved_config["end_of_document"], padded="padded_rows" in saved_config
    )
    causal_lm = load_sharded(checkpoint, layout, mesh, DTYPES[config.precision])
    parts = [weights_digest(checkpoint), codec.fingerprint, config.precision, config.weights]
    return LoadedModel(checkpoint.name, causal_lm, codec, fingerprint(parts))


def check_causal(checkpoint: Path, attention: str) -> None:
    """Raises InputError for a model that sees what stands behind a token, which no task can ask for the next one."""
    if attention != "causal":
        raise InputError(
            f"{checkpoint}: attention is {attention}, and tasks and generation need a causal model; its own objective "
            "is scored by the stage evaluate of its recipe"
        )


def check_tokenizer(folder: Path, codec: Tokenizer, vocab_size: int, end_of_document: int, padded: bool) -> None:
    """Raises InputError unless the tokenizer fits the model. padded: the embedding table may have unused rows."""
    spare = vocab_size - codec.vocab_size
    if spare < 0 or (spare > 0 and not (padded and spare < PADDING)):
        raise InputError(
            f"{folder}: the tokenizer has {codec.vocab_size} tokens and the checkpoint was trained on {vocab_size}; "
            "give the tokenizer it was trained with"
        )
    if codec.end_of_document != end_of_document:
        raise InputError(
            f"{folder}: documents end with token {codec.end_of_document}, those the checkpoint was trained on with "
            f"{end_of_document}; give the tokenizer it was trained with"
        )


def weights_digest(checkpoint: Path) -> str:
    """Digest of the weights: from the manifest of a gristmill checkpoint, from the files of a Hugging Face folder."""
    if is_huggingface(checkpoint):
        files = sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"])
        return fingerprint([[path.name, file_digest(path)] for path in files])
    return fingerprint([[output.path, output.sha256] for output in read_manifest(checkpoint).outputs])
