"""Memory is refused at steps of a limit: one message, an exit code, and the same command goes on to the same bytes."""

import pytest

from tests.support import kills
from tests.support.kills import Launcher, files_of, orphans_of, write_corpus

MEGABYTES = (0.1, 3, 10, 30, 60, 100, 140, 200, 300, 500)


@pytest.mark.slow
def test_curation_under_limits_of_addresses(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "STUCK_SECONDS", 60)
    launcher, recipe = (
        Launcher(tmp_path / "logs", None, ("gristmill.pipelines.cli.stages",)),
        write_corpus(tmp_path / "raw"),
    )

    def run(name: str, memory: int | None = None) -> tuple[int, str]:
        command = ("curate", recipe, "--workdir", tmp_path / name, "--workers", 2)
        started = launcher.start(*command, cwd=tmp_path, memory=memory)
        code = started.finish()
        assert orphans_of(started.pid) == []
        return code, started.output()

    assert run("whole")[0] == 0
    codes = []
    for number, megabytes in enumerate(MEGABYTES):
        code, said = run(f"limited-{number}", int(megabytes * 1e6))
        assert code in (0, 1) and "Traceback" not in said, (megabytes, said)
        assert code == 0 or "memory" in said.splitlines()[-1], (megabytes, said)
        assert run(f"limited-{number}")[0] == 0
        assert files_of(tmp_path / f"limited-{number}") == files_of(tmp_path / "whole"), megabytes
        codes.append(code)
    launcher.close()
    assert codes[0] == 1
