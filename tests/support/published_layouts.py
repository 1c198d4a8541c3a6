"""Replicas of published model folders: tokenizers, settings and templates of the same shape, tiny random weights."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from tests.support.transformers_models import tiny_model
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "The mill turns all day, and at night it stands. 1234 bags of flour!",
    "user system assistant You are a helpful assistant. What's the weather?",
    "é über naïve — “quoted” text\n\nwith lines\tand tabs",
] * 8
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = GPT4_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n<|eot_id|>' }}\n"
    "{%- for message in messages %}{%- if message.role == 'system' %}{%- continue %}{%- endif %}\n"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}"
    "{{- '<|eot_id|>' }}"
    "{%- endfor %}\n{%- if tools %}{{- tools | tojson(indent=4) }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}\n"
)
MISTRAL = (
    "{%- set ns = namespace(index=0) -%}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{% if tools and loop.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}"
    "{% set ns.index = ns.index + 1 %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = 'user' %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
QWEN = (
    "{%- if tools %}\n{{- '<|im_start|>system\\n# Tools\\n<tools>' }}\n{%- for tool in tools %}{{- '\\n' }}"
    "{{- tool | tojson }}{%- endfor %}\n{{- '\\n</tools><|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n{%- if message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>' + "
    "message.content + '</tool_response><|im_end|>\\n' }}\n{%- elif message.tool_calls %}"
    "{{- '<|im_start|>assistant' }}{%- for call in message.tool_calls %}{{- '\\n<tool_call>' + call.function.name + "
    "(call.function.arguments | tojson) + '</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}\n"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
PHI3 = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{% elif message.role == 'assistant' %}{% set content = message.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<｜Assistant｜>' + content + eos_token }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
OLMO = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
COMMAND_R = (
    "{{ bos_token }}{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|><|' + message.role | upper + '_TOKEN|>' + "
    "message.content + '<|END_OF_TURN_TOKEN|>' }}{% if loop.index > 8 %}{% break %}{% endif %}{% endfor %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
)
COMMAND_R_TOOLS = COMMAND_R + "{{ tools | tojson(indent=2) }}"


def byte_level(
    symbols: list[str], split: str | None = None, prefix: list[Any] = (), normalizer: Any = None
) -> Tokenizer:
    """GPT-2's kind. split: pattern before the byte-level step; prefix: other pre-tokenizers before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    steps = [*prefix]
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 60 + len(symbols),
        special_tokens=symbols,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def metaspace(symbols: list[str], form: str) -> Tokenizer:
    """SentencePiece BPE with byte fallback as converted. form: how spaces are written, prepend, first or none."""
    tokenizer = Tokenizer(models.BPE(unk_token=symbols[0], fuse_unk=True, byte_fallback=True))
    scheme = {"prepend": "always", "first": "first", "none": "never"}[form]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=256 + 160, special_tokens=[*symbols, *byte_pieces], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in byte_pieces]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.pre_tokenizer = None
    if form == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif form == "none":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([] if form == "none" else [decoders.Strip(" ", 1, 0)]))
    return tokenizer


def sentencepiece_model() -> bytes:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=content, vocab_size=400, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    return content.getvalue()


def add(tokenizer: Tokenizer, symbols: list[str], special: bool = True, **flags: bool) -> Tokenizer:
    tokens = [AddedToken(symbol, special=special, normalized=False, **flags) for symbol in symbols]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    return tokenizer


def begins(tokenizer: Tokenizer, symbol: str, byte_step: bool = False) -> Tokenizer:
    """Puts the symbol before every text, as Llama's post-processors do."""
    template = processors.TemplateProcessing(
        single=f"{symbol} $A",
        pair=f"{symbol} $A {symbol} $B:1",
        special_tokens=[(symbol, tokenizer.token_to_id(symbol))],
    )
    steps = [processors.ByteLevel(trim_offsets=True), template]
    tokenizer.post_processor = processors.Sequence(steps) if byte_step else template
    return tokenizer


@dataclass(frozen=True)
class Layout:
    """build: the tokenizer. settings: of tokenizer_config.json. template: goes there; a mapping is a named list.
    template_file: chat_template.jinja. ends: symbols of generation_config.json's eos_token_id. family: of tiny_model,
    None where nothing generates text. model_file: a SentencePiece model beside or in place of tokenizer.json."""

    build: Callable[[], Tokenizer | None]
    settings: Mapping[str, Any]
    family: str | None = "llama"
    template: str | Mapping[str, str] | None = None
    template_file: str | None = None
    ends: tuple[str, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    model_file: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_chat(self) -> bool:
        return self.template is not None or self.template_file is not None


def settings(kind: str, bos: str | None, eos: str, **others: Any) -> dict[str, Any]:
    symbols = {} if bos is None else {"bos_token": bos}
    return {"tokenizer_class": kind, **symbols, "eos_token": eos, "clean_up_tokenization_spaces": False, **others}


LLAMA_SYMBOLS = ["<unk>", "<s>", "</s>"]
LLAMA3_SYMBOLS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
GEMMA_SYMBOLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
QWEN_SYMBOLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEEPSEEK_SYMBOLS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
PHI_SYMBOLS = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"]
DIGITS = pre_tokenizers.Digits(individual_digits=True)
COHERE_SYMBOLS = ["<PAD>", "<UNK>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"]
COHERE_SYMBOLS += ["<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"]


def _qwen() -> Tokenizer:
    tokenizer = byte_level([], QWEN_SPLIT, normalizer=normalizers.NFC())
    return add(add(tokenizer, QWEN_SYMBOLS), ["<tool_call>", "</tool_call>", "<think>", "</think>"], special=False)


def _llama(form: str = "first", added: tuple[str, ...] = (), **flags: bool) -> Tokenizer:
    return begins(add(metaspace(LLAMA_SYMBOLS, form), [*added], **flags), "<s>")


def _gpt2() -> Tokenizer:
    tokenizer = byte_level(["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _falcon() -> Tokenizer:
    digits = [pre_tokenizers.Punctuation(behavior="contiguous")]
    return byte_level([">>QUESTION<<", "<|endoftext|>"], prefix=digits)


def _bloom() -> Tokenizer:
    return byte_level(["<unk>", "<s>", "</s>", "<pad>"], r" ?[^(\s|[.,!?…。，、।۔،])]+")


def _t5() -> Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words = sorted({word for text in TEXT for word in text.split()})
    letters = sorted({letter for word in words for letter in word})
    vocabulary = dict([*pieces, *((f"▁{word}", -5.0) for word in words), *((letter, -9.0) for letter in letters)])
    tokenizer = Tokenizer(models.Unigram([*vocabulary.items()], unk_id=2))
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return add(tokenizer, ["<pad>", "</s>", "<unk>"])


LAYOUTS: dict[str, Layout] = {
    "llama1": Layout(
        lambda: None, settings("LlamaTokenizer", "<s>", "</s>", unk_token="<unk>", add_bos_token=True), model_file=True
    ),
    "llama2": Layout(
        lambda: _llama("prepend"),
        settings("LlamaTokenizer", "<s>", "</s>", unk_token="<unk>", legacy=False),
        template=LLAMA2, ends=("</s>",), generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    ),
    "llama3": Layout(
        lambda: begins(add(byte_level([], GPT4_SPLIT), LLAMA3_SYMBOLS), "<|begin_of_text|>", byte_step=True),
        settings("PreTrainedTokenizerFast", "<|begin_of_text|>", "<|eot_id|>"),
        template=LLAMA3, ends=("<|end_of_text|>", "<|eot_id|>"),
    ),
    "mistral": Layout(
        lambda: _llama("first", ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")),
        settings("LlamaTokenizer", "<s>", "</s>", unk_token="<unk>", legacy=False), template=MISTRAL, ends=("</s>",),
    ),
    "gemma": Layout(
        lambda: begins(metaspace(GEMMA_SYMBOLS, "none"), "<bos>"),
        settings("GemmaTokenizer", "<bos>", "<eos>", unk_token="<unk>", pad_token="<pad>"), family="gemma",
        template=GEMMA, ends=("<eos>", "<end_of_turn>"),
    ),
    "qwen2": Layout(
        _qwen, settings("Qwen2Tokenizer", None, "<|im_end|>", pad_token="<|endoftext|>"), family="qwen3",
        template=QWEN, ends=("<|im_end|>", "<|endoftext|>"),
        generation={"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05},
    ),
    "qwen3": Layout(
        _qwen, settings("Qwen2Tokenizer", None, "<|im_end|>", pad_token="<|endoftext|>"), family="qwen3",
        template_file=QWEN + "{%- if enable_thinking is defined and not enable_thinking %}"
        "{{- '<think>\\n\\n</think>' }}{%- endif %}",
        ends=("<|im_end|>", "<|endoftext|>"),
    ),
    "phi3": Layout(
        lambda: add(_llama("prepend"), PHI_SYMBOLS, rstrip=True),
        settings("LlamaTokenizer", "<s>", "<|endoftext|>", unk_token="<unk>", legacy=False, add_bos_token=False),
        family="phi3", template=PHI3, ends=("<|endoftext|>", "<|end|>"),
    ),
    "hermes": Layout(
        lambda: _llama("first", ("<|im_start|>", "<|im_end|>")),
        settings("LlamaTokenizer", "<s>", "<|im_end|>", unk_token="<unk>", legacy=False), template=CHATML,
        ends=("<|im_end|>",),
    ),
    "zephyr": Layout(
        lambda: _llama("prepend"), settings("LlamaTokenizer", "<s>", "</s>", unk_token="<unk>", legacy=True),
        template=ZEPHYR, ends=("</s>",),
    ),
    "deepseek": Layout(
        lambda: begins(add(byte_level([], GPT4_SPLIT), DEEPSEEK_SYMBOLS), DEEPSEEK_SYMBOLS[0], byte_step=True),
        settings("LlamaTokenizerFast", DEEPSEEK_SYMBOLS[0], DEEPSEEK_SYMBOLS[1]), template=DEEPSEEK,
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.95},
    ),
    "gpt2": Layout(_gpt2, settings("GPT2Tokenizer", "<|endoftext|>", "<|endoftext|>"), family="gpt2"),
    "neox": Layout(
        lambda: byte_level(["<|endoftext|>", "<|padding|>"], normalizer=normalizers.NFC()),
        settings("GPTNeoXTokenizerFast", "<|endoftext|>", "<|endoftext|>"), family="neox",
    ),
    "bloom": Layout(
        _bloom, settings("BloomTokenizerFast", "<s>", "</s>", unk_token="<unk>", pad_token="<pad>"), family="bloom"
    ),
    "olmo2": Layout(
        lambda: add(byte_level(["<|endoftext|>"], GPT4_SPLIT), ["<|endofprompt|>"]),
        settings("GPT2Tokenizer", "<|endoftext|>", "<|endoftext|>"), family="olmo2", template=OLMO,
    ),
    "smollm": Layout(
        lambda: byte_level(QWEN_SYMBOLS, prefix=[DIGITS]),
        settings("GPT2Tokenizer", "<|im_start|>", "<|im_end|>"), template=CHATML, ends=("<|im_end|>",),
    ),
    "falcon": Layout(_falcon, settings("PreTrainedTokenizerFast", None, "<|endoftext|>"), family="falcon"),
    "command_r": Layout(
        lambda: begins(
            byte_level(COHERE_SYMBOLS, prefix=[DIGITS], normalizer=normalizers.NFC()),
            "<BOS_TOKEN>",
        ),
        settings("CohereTokenizerFast", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", unk_token="<UNK>", pad_token="<PAD>"),
        family="cohere", template={"default": COMMAND_R, "tool_use": COMMAND_R_TOOLS},
    ),
    "stablelm": Layout(
        lambda: byte_level(["<|endoftext|>", "<|user|>", "<|assistant|>"], normalizer=normalizers.NFC()),
        settings("GPTNeoXTokenizerFast", "<|endoftext|>", "<|endoftext|>"), template=ZEPHYR,
    ),
    "t5": Layout(_t5, settings("T5TokenizerFast", None, "</s>", unk_token="<unk>", pad_token="<pad>"), family=None),
}  # fmt: skip


def write_layout(folder: Path, name: str, weights: bool = False) -> Path:
    """The folder of a replica. weights: with a tiny model, whose end tokens are likely."""
    layout = LAYOUTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(layout.settings)
    if isinstance(layout.template, str):
        fields["chat_template"] = layout.template
    elif layout.template is not None:
        fields["chat_template"] = [{"name": key, "template": text} for key, text in layout.template.items()]
    if layout.template_file is not None:
        (folder / "chat_template.jinja").write_text(layout.template_file)
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    if layout.model_file:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    tokenizer = layout.build()
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    if weights and layout.family is not None:
        _write_weights(folder, layout, tokenizer)
    return folder


def _write_weights(folder: Path, layout: Layout, tokenizer: Tokenizer | None) -> None:
    size = (
        sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model")).vocab_size() if tokenizer is None else 0
    )
    id_of = {"<s>": 1, "</s>": 2}.get if tokenizer is None else tokenizer.token_to_id
    if tokenizer is not None:
        size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    eos, bos = id_of(layout.settings["eos_token"]), id_of(layout.settings.get("bos_token", ""))
    sizes = {"vocab_size": size, "eos_token_id": eos, "bos_token_id": bos, **layout.model}
    sizes |= {"n_positions": 128} if layout.family == "gpt2" else {"max_position_embeddings": 128}
    model = tiny_model(layout.family, **sizes)
    generator = torch.Generator().manual_seed(3)
    ends = [id_of(symbol) for symbol in layout.ends] or [eos]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        head = model.get_output_embeddings().weight
        head[ends] *= 3.0
    model.save_pretrained(folder)
    config = {"eos_token_id": ends if len(ends) > 1 else ends[0], "bos_token_id": bos, **layout.generation}
    (folder / "generation_config.json").write_text(json.dumps(config))
