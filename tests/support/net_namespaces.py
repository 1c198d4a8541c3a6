"""Network namespaces as machines: each with its own address on a bridge of this machine. Needs root and iproute2."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

BRIDGE, PREFIX = "gm-bridge", "10.231.7"
HOST = f"{PREFIX}.1"


def why_not() -> str:
    """Why there can be no namespaces here, or ""."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    try:
        _ip("netns", "add", "gm-probe")
        _ip("netns", "del", "gm-probe")
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here ({error.stderr.strip()})"
    return ""


class Network:
    """machines: number -> address, from 2 on. `command` runs a program on one of them."""

    def __init__(self) -> None:
        self.machines: dict[int, str] = {}

    def add(self) -> int:
        number = max(self.machines, default=1) + 1
        name, cable = f"gm-{number}", f"gm-veth{number}"
        _ip("netns", "add", name)
        self.machines[number] = f"{PREFIX}.{number}"
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", cable, "master", BRIDGE, "up")
        _ip("-n", name, "addr", "add", f"{PREFIX}.{number}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
        return number

    def command(self, number: int, *arguments: object) -> list[str]:
        return ["ip", "netns", "exec", f"gm-{number}", *map(str, arguments)]

    def command_on_own_disk(self, number: int, folders: Sequence[Path], *arguments: object) -> list[str]:
        """As `command`, in a mount namespace of its own: these folders are empty there and nobody else sees what is
        written to them; all else cannot be written to."""
        mounts = " && ".join(f"mkdir -p '{folder}' && mount -t tmpfs tmpfs '{folder}'" for folder in folders)
        script = f'{mounts} && mount -o remount,ro,bind / && exec "$@"'
        return self.command(number, "unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", *arguments)

    def cut(self, number: int) -> None:
        """Pull the cable of a machine; its processes go on."""
        _ip("link", "set", f"gm-veth{number}", "down")

    def join(self, number: int) -> None:
        _ip("link", "set", f"gm-veth{number}", "up")

    def close(self) -> None:
        for number in self.machines:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"gm-{number}")


@contextmanager
def network(machines: int) -> Iterator[Network]:
    """A bridge whose own address is HOST, and so many machines on it; removed at the end."""
    _remove_rest(machines)
    _ip("link", "add", BRIDGE, "type", "bridge")
    made = Network()
    try:
        _ip("addr", "add", f"{HOST}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for _ in range(machines):
            made.add()
        yield made
    finally:
        made.close()
        _ip("link", "del", BRIDGE)


def _remove_rest(machines: int) -> None:
    """What a killed test left."""
    numbers = range(2, machines + 12)
    commands: list[Sequence[str]] = [("netns", "del", f"gm-{number}") for number in numbers]
    commands += [("link", "del", f"gm-veth{number}") for number in numbers]
    for command in [*commands, ("link", "del", BRIDGE)]:
        with suppress(subprocess.CalledProcessError):
            _ip(*command)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
