"""Days and money of a whole training, with the time that interruptions take and the best interval of checkpoints."""

from dataclasses import dataclass
from math import exp, expm1, sqrt

from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.planner.hardware import Hardware
from gristmill.training.planner.plan_request import PlanRequest
from gristmill.training.planner.search import Forecast

CHECKPOINT_BYTES = 12  # of a parameter: float32 weight and two moments


def days(request: PlanRequest, forecast: Forecast) -> float | None:
    """Days of training for the token budget without interruptions; None without a budget."""
    return None if request.tokens is None else request.tokens / forecast.tokens_per_second / 86400


def cost(request: PlanRequest, forecast: Forecast) -> float | None:
    """Price of these days in the profile's currency; None without a budget or a price."""
    length, price = days(request, forecast), request.hardware.price_per_gpu_hour
    return None if length is None or price is None else length * 24 * price * request.gpus


def best_interval(checkpoint_seconds: float, mttf_seconds: float) -> float:
    """Seconds of training between checkpoints that waste the least time (Daly 2006, A higher order estimate of the
    optimum checkpoint interval, equation 37). Its first term is Young's sqrt(2 C M) (1974).

    C = 60 s, M = 24 h: sqrt(2 x 60 x 86,400) = 3,220 s by Young, 3,180 s here."""
    if checkpoint_seconds >= 2 * mttf_seconds:
        return mttf_seconds
    share = checkpoint_seconds / (2 * mttf_seconds)
    young = sqrt(2 * checkpoint_seconds * mttf_seconds)
    return young * (1 + sqrt(share) / 3 + share / 9) - checkpoint_seconds


@dataclass(frozen=True)
class Interruptions:
    """Interruptions of a whole job, in seconds: mean time to the next one, of a restart until training goes on, of a
    checkpoint."""

    mttf: float
    restart: float
    checkpoint: float

    @classmethod
    def of(cls, hardware: Hardware, request: PlanRequest) -> "Interruptions | None":
        """None where the profile states no time to failure. Any GPU's interruption stops the job."""
        if hardware.gpu_mttf_hours is None:
            return None
        num_bytes = CHECKPOINT_BYTES * parameter_count(request.shape)
        written = num_bytes / (hardware.store_gb_per_second * 1e9 * request.gpus)
        return cls(hardware.gpu_mttf_hours * 3600 / request.gpus, hardware.restart_minutes * 60, written)

    @property
    def best(self) -> float:
        return best_interval(self.checkpoint, self.mttf)

    def slowdown(self, interval: float) -> float:
        """Expected time over that without interruptions and checkpoints (Daly 2006, equation 20), for interruptions
        that come as a Poisson process, also during restarts and checkpoints. interval: of training, in seconds."""
        return self.mttf * exp(self.restart / self.mttf) * expm1((interval + self.checkpoint) / self.mttf) / interval


def sentences(request: PlanRequest, forecast: Forecast) -> list[str]:
    """Sentences on the whole training: days and price with their ranges, and what interruptions add."""
    length, price = days(request, forecast), cost(request, forecast)
    lines = [] if length is None else [f"Training takes {_duration(length, forecast)}{_price(request, forecast)}."]
    interruptions = Interruptions.of(request.hardware, request)
    if interruptions is None:
        return lines
    slowdown = interruptions.slowdown(interruptions.best)
    text = (
        f"An interruption every {interruptions.mttf / 3600:.1f} h (of {request.gpus} GPUs, one in "
        f"{request.hardware.gpu_mttf_hours:,.0f} h each), {interruptions.restart / 60:.0f} min of restart and "
        f"{interruptions.checkpoint:.0f} s a checkpoint: a checkpoint every {interruptions.best / 60:.0f} min "
        f"({max(1, round(interruptions.best / forecast.time.total)):,} steps; Young and Daly) costs {slowdown - 1:.1%} "
        "of the time"
    )
    if length is not None:
        text += f": {length * slowdown:,.1f} days in all"
    if length is not None and price is not None:
        text += f", {price * slowdown:,.0f} {request.hardware.currency}"
    return [*lines, f"{text}.", *_recipes(request, forecast, interruptions)]


def _recipes(request: PlanRequest, forecast: Forecast, interruptions: Interruptions) -> list[str]:
    """The recipe's own interval beside the best."""
    if request.train is None:
        return []
    every = request.train.checkpoint.every
    if not every:
        return [
            "The recipe saves at the end only (train.checkpoint.every: 0): an interruption loses all since the start."
        ]
    seconds = every * forecast.time.total
    own = interruptions.slowdown(seconds) - 1
    return [f"The recipe's checkpoint every {every:,} steps ({seconds / 60:,.1f} min) costs {own:.1%}."]


def _duration(length: float, forecast: Forecast) -> str:
    """Days, or hours below 2 days, or minutes below 2 hours."""
    unit, number = ("days", 1) if length >= 2 else ("hours", 24) if length >= 2 / 24 else ("minutes", 24 * 60)
    return _range(length * number, forecast, unit)


def _range(value: float, forecast: Forecast, unit: str) -> str:
    """The value with the range of the forecast's throughput."""
    slowest, fastest = forecast.tokens_per_second_range
    low, high = (value * forecast.tokens_per_second / speed for speed in (fastest, slowest))
    form = ",.1f" if value < 100 else ",.0f"
    return f"{value:{form}} {unit} ({low:{form}} to {high:{form}})"


def _price(request: PlanRequest, forecast: Forecast) -> str:
    price = cost(request, forecast)
    return "" if price is None else f" and costs {_range(price, forecast, request.hardware.currency)}"
