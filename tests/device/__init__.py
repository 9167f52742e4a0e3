"""The device `sim`: an accelerator in Paddle's own runtime, for tests of what only devices show.

`runtime/` is a plug-in for Paddle's CPU wheel, in C++: streams that are threads, memory that the host cannot touch,
kernels and messages between ranks that are over later. Paddle's eager mode, programs and process groups run on it as
they do on the accelerators of vendors. The library is built once, like the CPU's kernels.

| file | what |
|---|---|
| `runtime.cc` | the interface that Paddle asks for |
| `memory.cc` | device memory, mapped twice |
| `streams.cc` | streams and events |
| `order.cc` | the check of happens-before: each read and write of device memory is ordered with the writes before |
| `kernels.cc`, `call.cc` | every kernel of the CPU as one of the device |
| `collectives.cc`, `messages.cc` | the communication library, over shared memory |
| `simulated_reshard.cc` | placements of distributed tensors |

What it shares with the virtual device is in `llmsuite/plugins/rehearse/runtime/shared`: the way from Paddle's calls of
kernels to one function, and placements of distributed tensors.

Environment variables, each with its default:

| variable | what |
|---|---|
| `SIM_ORDER=1` | 1: what is not ordered raises an error that names both operations; 2: it is printed; 0: no check |
| `SIM_PROTECT=1` | the host ends with SIGSEGV where it touches device memory |
| `SIM_POISON=1` | new memory, outputs of kernels and buffers of messages are NaN until they are written |
| `SIM_COPIES_WAIT=0` | 1: blocking copies wait for all streams, as on CUDA |
| `SIM_SYNC=0` | 1: the host waits for each kernel |
| `SIM_ONE_STREAM=0` | 1: all streams are one |
| `SIM_LATE_US=0`, `SIM_LATE_MESSAGES_US=0` | microseconds by which kernels and messages are late |
| `SIM_PATIENCE=120` | seconds after which a rank that waits for others ends |
| `SIM_DEVICES=8` | number of devices |

A build with `SIM_LEAVES_OUT`, a regular expression of names, lacks those kernels, as plug-ins do: Paddle then
computes on the host, and what it writes in place on a view is lost.

In the error, an operation is named with its number on its stream; stream 1 is Paddle's own for kernels.

It cannot be in a process that Paddle is already imported in, nor in forks of one that uses it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import llmsuite
from llmsuite.contract.specs import DeviceSpec
from llmsuite.devices.cpp_library import CppLibrary
from llmsuite.devices.custom import CustomBackend
from llmsuite.plugins.rehearse.library import SHARED, plugin_directory, sources

_SOURCES = Path(__file__).parent / "runtime"
_LIBRARY = CppLibrary(
    name="sim",
    sources=sources(_SOURCES, SHARED, first=_SOURCES / "runtime.cc"),
    options=("-O1", "-fvisibility=hidden", "-DPADDLE_WITH_CUSTOM_DEVICE"),
    links=("libphi_core.so", "libcommon.so"),
    is_for_this_cpu=False,
    without=("the simulated device needs", "leave its tests out"),
    include_directories=(SHARED,),
)


@functools.cache
def library_directory(leaves_out: str = "") -> Path:
    """A directory with the library and no other, as Paddle loads all that it finds; builds it if it is not there.
    `leaves_out` is a regular expression of kernels that it lacks."""
    return plugin_directory(_LIBRARY if not leaves_out else _without(leaves_out))


def _without(kernels: str) -> CppLibrary:
    return dataclasses.replace(_LIBRARY, options=(*_LIBRARY.options, f'-DSIM_LEAVES_OUT="{kernels}"'))


class SimBackend(CustomBackend):
    name = "sim"
    install = "the tests build it"
    deterministic_flags = {}  # noqa: RUF012  (sums have one order)

    def environment(self, local_ranks: int, inference_only: bool = False) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // local_ranks))
        return {
            **super().environment(local_ranks, inference_only),
            "CUSTOM_DEVICE_ROOT": os.environ.get("CUSTOM_DEVICE_ROOT") or str(library_directory()),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }


@llmsuite.hookimpl
def llmsuite_register_devices() -> list[DeviceSpec]:
    return [DeviceSpec(name="sim", help="a simulated accelerator", factory=SimBackend)]
