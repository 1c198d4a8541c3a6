"""Memory of the machine that this process may still take."""

import os
from pathlib import Path

MEMORY_INFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def available_bytes(memory_info: Path = MEMORY_INFO, group: Path = GROUP) -> int:
    """Bytes that can be taken without swapping (Linux's MemAvailable), or fewer where the limit of this process's
    control group leaves fewer; elsewhere half of the machine's memory."""
    if not memory_info.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    lines = memory_info.read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    limit, used = (group / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available
