"""The laws write thousands of small files; that each is forced to disk is tested where `atomic_path` is."""

import pytest

from gristmill.foundation import files


@pytest.fixture(autouse=True)
def no_forced_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "sync", lambda path: None)
