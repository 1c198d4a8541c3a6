"""The base of every config: unknown keys, infinite numbers and booleans in place of numbers are refused."""

import pytest
from pydantic import ValidationError

from gristmill.foundation.config import Config


class Inner(Config):
    on: bool = False


class Example(Config):
    count: int = 1
    share: float | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    by_name: dict[str, float] | None = None
    text: str = ""
    switch: bool | str = False
    inner: Inner = Inner()


@pytest.mark.parametrize(
    "fields",
    [
        {"count": True},
        {"share": False},
        {"pair": [True, 0.5]},
        {"by_name": {"a": True}},
        {"text": True},
        {"inner": True},
        {"share": float("inf")},
        {"pair": [0.0, float("nan")]},
        {"by_name": {"a": float("-inf")}},
        {"unknown": 1},
    ],
)
def test_refused(fields):
    with pytest.raises(ValidationError):
        Example.model_validate(fields)


def test_booleans_where_they_belong():
    assert Example.model_validate({"switch": True, "inner": {"on": True}}).inner.on is True
