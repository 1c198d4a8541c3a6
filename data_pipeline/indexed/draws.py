"""What a run draws from each source, computed without drawing: shares, epochs, caps."""

from dataclasses import dataclass

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.epochs import repeat_warnings
from gristmill.foundation.errors import InputError


@dataclass(frozen=True)
class Draw:
    """What a run takes from one source. epoch_samples: samples in one pass over it. cap: of the passes."""

    source: str
    samples: int
    epoch_samples: int
    sample_tokens: int
    cap: float | None

    @property
    def tokens(self) -> int:
        return self.samples * self.sample_tokens

    @property
    def epochs(self) -> float:
        """How often the run sees the source."""
        return self.samples / self.epoch_samples


class DrawForecast:
    """Forecasts for a run of `num_samples`, from what a subclass gives as `drawn`."""

    def drawn(self, num_samples: int) -> list[Draw]:
        raise NotImplementedError

    def budget(self, num_samples: int) -> str:
        """The draws of a run in a line: "books 75.0% (12,288 tokens, 0.41 epochs), notes 25.0% (...)"."""
        draws = self.drawn(num_samples)
        whole = max(1, sum(draw.tokens for draw in draws))
        return ", ".join(
            f"{draw.source} {draw.tokens / whole:.1%} ({draw.tokens:,} tokens, {draw.epochs:.2f} epochs)"
            for draw in draws
        )

    def repeat_warnings(self, num_samples: int) -> list[str]:
        """A line for each source that a run of `num_samples` sees more than 4 times."""
        draws = self.drawn(num_samples)
        epochs = {draw.source: draw.epochs for draw in draws}
        tokens = {draw.source: draw.epoch_samples * draw.sample_tokens for draw in draws}
        return repeat_warnings(epochs, tokens, sum(draw.tokens for draw in draws))

    def check_budget(self, num_samples: int) -> None:
        """Raises InputError, before training starts, if a run of `num_samples` would overdraw a capped source."""
        for draw in self.drawn(num_samples):
            if draw.cap is not None and draw.epochs > draw.cap:
                raise InputError(overdrawn(draw.source, draw.epochs, draw.cap))


def cap_of(config: IndexConfig, source: str) -> float | None:
    return config.max_epochs.get(source) if isinstance(config.max_epochs, dict) else config.max_epochs


def overdrawn(source: str, epochs: float, cap: float) -> str:
    return (
        f"source {source!r} would be seen {epochs:.2f} times, its cap is {cap}; train on fewer tokens, lower the "
        "source's weight, give it more text, or raise index.max_epochs"
    )
