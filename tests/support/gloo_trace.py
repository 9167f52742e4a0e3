"""Counts what a rank gives to collectives and sends to other ranks over Gloo, for tests and benchmarks.

It is counted in C++ (gloo_trace.cc), where all of it passes: what the engine sends, what static programs send, and
what Paddle's operators send by themselves to reshard distributed tensors.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from llmsuite.devices.cpp_library import build_library
from llmsuite.devices.cpu.gloo.shims import FRONT

Messages = collections.Counter[tuple[int, str, tuple[int, ...], int]]
"""How often each (communicator, operation, shape of what this rank gives, bytes of an element)."""
_tracer: list[ctypes.CDLL] = []


def install() -> None:
    """Build and load the tracer; once a process, before Paddle's first import."""
    source = dataclasses.replace(FRONT, sources=(Path(__file__).with_name("gloo_trace.cc"),))
    tracer = ctypes.CDLL(str(build_library(source)), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
    tracer.trace_stop.restype = ctypes.c_char_p
    _tracer.append(tracer)


@contextlib.contextmanager
def traced(messages: Messages) -> Iterator[None]:
    """While active, what this rank sends is noted; afterwards it is in `messages`."""
    (tracer,) = _tracer
    tracer.trace_start()
    try:
        yield
    finally:
        for line in tracer.trace_stop().decode().splitlines():
            name, communicator, width, *dims = line.split()
            messages[int(communicator), name, tuple(map(int, dims)), int(width)] += 1
