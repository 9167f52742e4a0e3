"""What a process may use that runs somebody else's template or tokenizer: set by itself, held by the kernel.

The time is that of the processor: a machine that is busy or asleep is nobody's fault. Imports nothing heavy.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

from llmsuite.regular import is_dir


def limit_memory(more: int) -> None:
    """Let this process take `more` bytes beyond what it has, and leave no core dump."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) if is_dir(Path("/proc")) else 0
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + more)
    _lower(resource.RLIMIT_CORE, 0)


def limit_seconds(more: int) -> None:
    """Let this process compute for `more` seconds from now; SIGXCPU ends it then, whatever it is at."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(time.process_time()) + 1 + more
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _lower(which: int, limit: int) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(which, (limit, hard))
