"""Config of the proxy model that compares tokenizers. Does not import torch."""

from gristmill.foundation.config import Config


class ProxyConfig(Config):
    """Defaults: about a million parameters, a minute a model on one core. text_bytes: training text, the same for every
    tokenizer. held_out_bytes: of each language, at most. seeds: number of models per tokenizer."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    sequence_length: int = 128
    batch: int = 16
    text_bytes: int = 2_000_000
    held_out_bytes: int = 20_000
    learning_rate: float = 3e-3
    seeds: int = 3
