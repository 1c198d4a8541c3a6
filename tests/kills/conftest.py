"""Fixtures of the kill tests."""

import pytest
from kills import Launcher


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("logs"))
    yield launcher
    launcher.close()
