"""Folders of tiny random models with tokenizers that begin and end texts in several ways."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.transformers_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

KINDS = ("llama", "gemma", "gpt2", "bos_without_template", "bos_and_eos", "flag_only", "plain")
VOCABULARY = 300
BOS, END = "<s>", "</s>"


def write_tokenizer(folder: Path, kind: str) -> None:
    """tokenizer.json of the bytes with <s> = 256 and </s> = 257, and tokenizer_config.json."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    begin = "<bos>" if kind == "gemma" else BOS
    tokenizer = Tokenizer(models.BPE(vocab={**letters, begin: 256, END: 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([begin, END])
    templates = {"llama": f"{begin} $A", "gemma": f"{begin} $A", "bos_and_eos": f"{begin} $A {END}"}
    if kind in templates:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=templates[kind], special_tokens=[(begin, 256), (END, 257)]
        )
    elif kind != "plain":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    if kind not in ("gpt2", "plain"):
        settings["bos_token"] = begin
    if kind == "gpt2":
        settings["bos_token"] = END
    if kind == "llama":
        settings["bos_token"] = {
            "__type": "AddedToken",
            "content": begin,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
        }
    if kind == "flag_only":
        settings["add_bos_token"] = True  # which transformers ignores beside a tokenizer.json
    settings["clean_up_tokenization_spaces"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path, kind: str, family: str = "llama", **fields: Any) -> Path:
    """A model whose logits differ much between tokens, so that greedy choices do not hang on rounding."""
    sizes = {"vocab_size": VOCABULARY, "eos_token_id": 257, "bos_token_id": 256, **fields}
    model = tiny_model(family, **sizes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        model.get_output_embeddings().weight[258:] = 0  # rows of padding, which no tokenizer knows
    model.save_pretrained(folder)
    write_tokenizer(folder, kind)
    return folder
