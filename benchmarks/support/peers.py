"""Runs peers that need another environment in .venv-peers, next to .venv.

It is made by: python -m venv .venv-peers && .venv-peers/bin/pip install -r benchmarks/peers/requirements.txt"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
REQUIREMENTS = ROOT / "benchmarks" / "peers" / "requirements.txt"
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def run_peer(python: Path, program: str, *arguments: str) -> dict:
    """The result of a program of `benchmarks/peers`, from its last line: {"cpu_seconds": ..., ...}."""
    command = [str(python), str(ROOT / "benchmarks" / "peers" / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{program} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peers_there(python: Path) -> bool:
    """Whether the peers' environment exists; prints how to create it if not."""
    if python.exists():
        return True
    print(
        f"{python} is absent, so datatrove and text-dedup are left out; make it with\n"
        f"  python -m venv .venv-peers && .venv-peers/bin/pip install -r {REQUIREMENTS.relative_to(ROOT)}"
    )
    return False
