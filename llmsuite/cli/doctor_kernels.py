"""The command `llmsuite doctor --kernels`: a table of every operation of a device, and of messages between devices."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmsuite.contract.registry import Registry

if TYPE_CHECKING:
    from llmsuite.devices.base import DeviceBackend

MESSAGES = "messages: "
"""Beginning of the line in which rank 0 prints its results."""
_FAILED = 2


def show_kernels(args: Any, registry: Registry, start_ranks: Callable[..., tuple[int, list[str]]]) -> int:
    """Print the tables, then each failure by its name. Returns the exit code, which is not 0 if there are any.

    Args:
        args: options of the command.
        registry: of devices.
        start_ranks: starts a rank for each device; returns the exit code and the lines that they print.
    """
    backend = registry.device(args.device).factory()
    os.environ.update(backend.deterministic_flags or {})
    faults: list[str] = []
    if args.node_rank == 0:
        faults += _operations(backend)
    if args.num_devices * args.nnodes > 1:
        faults += _messages(*start_ranks(args, registry, "--kernels"), is_first=args.node_rank == 0)
    for fault in faults:
        print(f"BAD   {fault}")
    print(f"{len(faults)} failures" if faults else f"ok    all of {args.device}")
    return _FAILED if faults else 0


def _operations(backend: DeviceBackend) -> list[str]:
    from llmsuite.devices.start import start_paddle

    start_paddle(backend, 1)
    if reason := backend.unavailable(1):
        return [f"device {backend.name}: {reason}"]
    from llmsuite.devices.kernel_checks import check_kernels, unchecked

    backend.activate(0)
    is_deterministic = backend.deterministic_flags is not None
    faults = []
    for precision in backend.precisions_of(trains=True):
        print(f"{backend.name}, {precision}: largest difference from the plain form on the host, in float32")
        print(
            f"  {'operation':15} {'case':26} {'form':5} {'output':>8} {'gradient':>8} {'limit':>8}  twice     ms    MiB"
        )
        for result in check_kernels(backend, precision):
            form = "fused" if result.is_fused else "plain"
            gradient = "-" if result.backward is None else f"{result.backward:.1e}"
            twice = "same" if result.is_repeatable else "other"
            if result.error is not None:
                print(f"  {result.operation:15} {result.case:26} {form:5} fails: {result.error}", flush=True)
            else:
                print(
                    f"  {result.operation:15} {result.case:26} {form:5} {result.forward:8.1e} {gradient:>8} "
                    f"{result.limit:8.1e}  {twice:5} {result.milliseconds:6.1f} {result.memory_bytes / 2**20:6.1f}",
                    flush=True,
                )
            faults += result.faults(is_deterministic)
        if names := unchecked(backend, precision):
            print(f"  not compared here: {', '.join(names)}")
    return faults


def _messages(code: int, lines: list[str], is_first: bool) -> list[str]:
    if code != 0:
        return [f"messages: the ranks ended with exit code {code}:\n" + "\n".join(lines[-20:])]
    if not is_first:
        return []
    (text,) = (line.removeprefix(MESSAGES) for line in lines if line.startswith(MESSAGES))
    faults = []
    print("messages, in the engine's order")
    for result in json.loads(text):
        right = "right" if result["is_right"] else "WRONG"
        speed = result["bytes_per_second"] / 1e9
        print(f"  {result['name']:15} {result['dtype']:9} {right}  {result['seconds'] * 1e3:8.2f} ms {speed:7.2f} GB/s")
        if not result["is_right"]:
            faults.append(f"{result['name']} ({result['dtype']}): a rank has wrong values")
    return faults
