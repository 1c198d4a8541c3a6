"""Every signal by name and type: the columns of signals/SPLIT/SOURCE-00000.parquet, in this order."""

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
    "alpha_word_ratio",
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
)
SIGNALS = COUNTS + RATIOS
SIGNAL_FIELDS = [pa.field(name, pa.int64()) for name in COUNTS] + [pa.field(name, pa.float64()) for name in RATIOS]
