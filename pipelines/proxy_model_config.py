"""The small model that tokenizers are compared by, apart from its code: that needs torch, and this does not."""

from gristmill.foundation.config import Config


class ProxyConfig(Config):
    """At these defaults a million parameters and a minute on two cores. text_bytes is what each candidate sees."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    sequence_length: int = 128
    batch: int = 16
    text_bytes: int = 2_000_000
    held_out_bytes: int = 200_000
    learning_rate: float = 3e-3
    seed: int = 0
