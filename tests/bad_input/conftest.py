"""Fixture `expect_error`: runs one row of the table of bad inputs."""

import pytest


@pytest.fixture
def expect_error(request, call, tmp_path, monkeypatch):
    """Runs a case: its exit code, its words, and no traceback (in this process an unexpected error ends the test)."""

    def check(case) -> None:
        case.write(tmp_path)
        for name, value in case.environment.items():
            monkeypatch.setenv(name, value)
        code, said = call(*case.arguments({name: request.getfixturevalue(name) for name in case.fixtures}))
        assert code == case.code, said
        for word in case.words:
            assert word in said
        for word in ("Traceback", *case.never):
            assert word not in said

    return check
