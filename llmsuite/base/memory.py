"""The memory of this process and of this machine."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """The most resident memory that this process has had."""
    if sys.platform == "linux":
        # `ru_maxrss` there begins with the peak of the process that has started this one: exec keeps it
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return int(value.removesuffix("kB")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory_bytes() -> int | None:
    """The memory of this machine that new processes can get without swapping; None where it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
