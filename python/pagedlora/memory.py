"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, in bytes.

    The smaller of what the kernel estimates for the machine and what the control group (the
    container's limit) leaves. Both count file pages that the kernel gives up on demand as free.
    """
    machine = _meminfo_bytes("MemAvailable")
    if machine is None:
        machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_bytes("memory.max")
    used = _cgroup_bytes("memory.current")
    if limit is None or used is None:
        return machine
    reclaimable = _cgroup_stat("inactive_file")
    return min(machine, max(limit - used + reclaimable, 0))


def total_memory_bytes() -> int:
    """Memory of the machine, or the control group's limit where that is smaller, in bytes."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_bytes("memory.max")
    return machine if limit is None else min(machine, limit)


def _meminfo_bytes(field: str) -> int | None:
    """One field of /proc/meminfo in bytes, or None where there is no such file or field."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def _cgroup_bytes(file: str) -> int | None:
    """A byte count of the version 2 control group, or None without a limit or without a group."""
    try:
        text = (_CGROUP / file).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_stat(field: str) -> int:
    """One field of the control group's memory.stat in bytes; 0 where there is none."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field} ")), 0)
