"""Disable network access of datasets and huggingface_hub: a download fails at once with a clear error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets.config
import huggingface_hub.constants

VARIABLES = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
SWITCHES: tuple[tuple[Any, str], ...] = (
    (huggingface_hub.constants, "HF_HUB_OFFLINE"),
    (datasets.config, "HF_HUB_OFFLINE"),
)


@contextmanager
def offline(wanted: bool = True) -> Iterator[None]:
    """Disables network access. The two libraries read the environment only at import, so their flags are set too."""
    if not wanted:
        yield
        return
    before = {name: os.environ.get(name) for name in VARIABLES}
    values = [getattr(module, name) for module, name in SWITCHES]
    os.environ.update(VARIABLES)
    for module, name in SWITCHES:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(SWITCHES, values, strict=True):
            setattr(module, name, value)
        for name, old in before.items():
            os.environ.pop(name) if old is None else os.environ.update({name: old})
