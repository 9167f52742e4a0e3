"""Limits of memory and CPU time for a process that runs an untrusted template or tokenizer, enforced by the kernel.

CPU time is limited, not wall time: a machine may be busy or asleep. Imports nothing heavy.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

from llmsuite.base.safe_files import is_dir


def limit_memory(more: int) -> None:
    """Let this process take `more` bytes in addition to its present size, and leave no core dump."""
    pages = 0
    if is_dir(Path("/proc")):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + more)
    _lower(resource.RLIMIT_CORE, 0)


def limit_seconds(more: int) -> None:
    """Let this process use `more` seconds of CPU time from now; then SIGXCPU ends it."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(time.process_time()) + 1 + more
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _lower(which: int, limit: int) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(which, (limit, hard))
