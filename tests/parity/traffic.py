"""What a rank gives to collectives and sends to other ranks, by operation and shape.

Noted in C++ (trace.cc), where everything that goes over Gloo passes: what the engine sends, what static programs send,
and what Paddle's operators send of themselves to bring distributed tensors together.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from llmsuite.devices.cpu.gloo.build import library

Traffic = collections.Counter[tuple[str, tuple[int, ...]]]
"""How often each (operation, shape of what this rank gives)."""
_tracer: list[ctypes.CDLL] = []


def install() -> None:
    """Build and load the tracer; once a process, before Paddle's first import."""
    tracer = ctypes.CDLL(str(library(Path(__file__).with_name("trace.cc"))), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
    tracer.trace_stop.restype = ctypes.c_char_p
    _tracer.append(tracer)


@contextlib.contextmanager
def traced(traffic: Traffic) -> Iterator[None]:
    """While active, what this rank sends is noted; afterwards it is in `traffic`."""
    (tracer,) = _tracer
    tracer.trace_start()
    try:
        yield
    finally:
        for line in tracer.trace_stop().decode().splitlines():
            name, *dims = line.split()
            traffic[name, tuple(map(int, dims))] += 1
