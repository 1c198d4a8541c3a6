"""Names and types of all signals: the columns of signals/SPLIT/SOURCE-00000.parquet, in this order."""

from collections.abc import Sequence

import pyarrow as pa

COUNTS = (
    "num_bytes",
    "num_chars",
    "num_words",
    "num_plain_words",  # words that are not punctuation alone
    "num_lines",
    "num_paragraphs",
    "num_sentences",
    "num_stop_words",  # how many different ones of Gopher's eight
    "num_urls",
    "num_emails",
    "num_ip_addresses",
)
RATIOS = (
    "mean_word_length",  # of plain words, in characters
    "hash_word_ratio",
    "ellipsis_word_ratio",
    "bullet_line_ratio",
    "ellipsis_line_ratio",
    "alpha_word_ratio",  # words with a letter over all words, those of punctuation too
    "upper_char_ratio",
    "digit_char_ratio",
    "dup_line_ratio",
    "dup_line_char_ratio",
    "dup_paragraph_ratio",
    "dup_paragraph_char_ratio",
    "top_2gram_char_ratio",
    "top_3gram_char_ratio",
    "top_4gram_char_ratio",
    "dup_5gram_char_ratio",
    "dup_6gram_char_ratio",
    "dup_7gram_char_ratio",
    "dup_8gram_char_ratio",
    "dup_9gram_char_ratio",
    "dup_10gram_char_ratio",
    "line_punctuation_ratio",
    "short_line_ratio",
    "repeated_line_char_ratio",
    "newline_word_ratio",
    "alpha_plain_word_ratio",  # words with a letter over plain words
)
SIGNALS = COUNTS + RATIOS
SIGNAL_FIELDS = [pa.field(name, pa.int64()) for name in COUNTS] + [pa.field(name, pa.float64()) for name in RATIOS]


def before(edit: str, signal: str) -> str:
    """Column name of a signal of the text before an edit."""
    return f"before_{edit}_{signal}"


def edit_fields(edit: str, counts: Sequence[str]) -> list[pa.Field]:
    """Columns that an edit adds: every signal of the text before it, its counts, the share of words it removed."""
    columns = [pa.field(before(edit, field.name), field.type) for field in SIGNAL_FIELDS]
    columns += [pa.field(f"{edit}_{name}", pa.int64()) for name in counts]
    return [*columns, pa.field(f"{edit}_removed_word_ratio", pa.float64())]
