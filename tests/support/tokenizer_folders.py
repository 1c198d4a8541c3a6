"""Folders as the stage `tokenizer` writes them: trained by each algorithm, and adopted from files of other shapes."""

from pathlib import Path

from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.export import write_huggingface
from gristmill.tokenizers.pretrained import copy_pretrained, write_json
from gristmill.tokenizers.tokenizer import MODEL_NAME
from gristmill.tokenizers.train_tokenizer import END_OF_DOCUMENT, train_byte_level, train_on_words
from gristmill.tokenizers.word_counts import count_texts
from tests.support.published_layouts import TEXT
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONFIGS = {
    "bpe": TokenizerConfig(vocab_size=310),
    "unigram": TokenizerConfig(vocab_size=310, algorithm="unigram"),
    "characters": TokenizerConfig(vocab_size=310, algorithm="characters"),
    "byte_bpe": TokenizerConfig(vocab_size=310, algorithm="byte_bpe"),
    "case marks": TokenizerConfig(vocab_size=310, preset="case"),
}
ADOPTED = ("word pieces between [CLS] and [SEP]", "bytes with <s> before and </s> behind")


def write_tokenizer_folder(folder: Path, kind: str) -> Path:
    """kind: one of CONFIGS, or of ADOPTED."""
    folder.mkdir()
    if kind in ADOPTED:
        path = folder.with_name("adopted.json")
        adopted = _word_pieces() if kind == ADOPTED[0] else _bounded_bytes()
        adopted.save(str(path))
        end = "[SEP]" if kind == ADOPTED[0] else "</s>"
        copy_pretrained(TokenizerConfig(pretrained=str(path), end_of_document=end), folder)
    elif kind == "byte_bpe":
        words = count_texts(TEXT, byte_level=True)
        write_json(folder, train_byte_level(words, TEXT, CONFIGS[kind]), END_OF_DOCUMENT)
    else:
        (folder / MODEL_NAME).write_bytes(train_on_words(count_texts(TEXT), CONFIGS[kind]))
        write_huggingface(folder)
    return folder


def _word_pieces() -> Tokenizer:
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def _bounded_bytes() -> Tokenizer:
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    return tokenizer
