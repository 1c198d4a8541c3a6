"""Slurm's controller and one node of two CPUs on this machine."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SLURM_CONF = """\
ClusterName=gristmill
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
SlurmctldPort=17817
SlurmdPort=17818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def one_node_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SLURM_CONF names it inside the block. Skips the test where Slurm is not installed."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None or os.geteuid() != 0:
        pytest.skip("Slurm is not installed (apt install slurmctld slurmd slurm-client), or this is not root")
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(SLURM_CONF.format(host=host, folder=folder))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    with (folder / "log").open("wb") as log:
        daemons = [subprocess.Popen([name, "-D"], stdout=log, stderr=log) for name in ("slurmctld", "slurmd")]
    try:
        for _ in range(100):
            answer = subprocess.run(["sinfo", "--noheader", "--format=%t"], capture_output=True, text=True, check=False)
            if answer.stdout.strip() == "idle":
                break
            time.sleep(0.2)
        else:
            raise TimeoutError((folder / "log").read_text()[-3000:])
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
