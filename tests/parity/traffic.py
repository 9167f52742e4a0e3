"""What a rank gives to collectives and sends to other ranks, by operation and shape.

Noted in C++ (trace.cc), where everything that goes over Gloo passes: what the engine sends, what static programs send,
and what Paddle's operators send of themselves to bring distributed tensors together.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from llmsuite.devices.cpu.build import library
from llmsuite.devices.cpu.gloo.shims import KERNELS

Traffic = collections.Counter[tuple[str, tuple[int, ...]]]
"""How often each (operation, shape of what this rank gives)."""
Messages = collections.Counter[tuple[int, str, tuple[int, ...], int]]
"""How often each (communicator, operation, shape of what this rank gives, bytes of an element)."""
_tracer: list[ctypes.CDLL] = []


def install() -> None:
    """Build and load the tracer; once a process, before Paddle's first import."""
    source = dataclasses.replace(KERNELS, sources=(Path(__file__).with_name("trace.cc"),))
    tracer = ctypes.CDLL(str(library(source)), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
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


def communicators() -> dict[int, tuple[int, ...]]:
    """The ranks of each communicator that the engine has for this rank, told by sending through all of them.

    Every rank of the run calls it. What Paddle makes for itself, along tp, and the pairs of a pipeline are not in it.
    """
    import paddle
    import paddle.distributed as dist

    from llmsuite.engine import collective

    mesh = collective.mesh()
    if mesh.degrees.num_ranks == 1:
        return {}
    experts, every = mesh.of_experts, tuple(range(mesh.degrees.num_ranks))
    groups = [mesh.tensor_group, mesh.data_group, mesh.dp_group, mesh.sharding_group, mesh.pipeline_group]
    groups += [mesh.tied_group, mesh.reading_group, experts.expert_group, experts.data_group, experts.dp_group]
    groups += [experts.sharding_group]
    found: dict[int, tuple[int, ...]] = {}
    for group in [None, *(group for group in groups if group is not None)]:
        sent: Messages = collections.Counter()
        with traced(sent):
            dist.all_reduce(paddle.zeros([1]), group=group)
        ((communicator, *_),) = sent
        found[communicator] = every if group is None else tuple(group.ranks)
    return found
