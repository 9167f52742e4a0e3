"""A device that CPU processes stand in for: the 16-bit policy of GPUs, run for real.

Parameters, activations and messages are bfloat16 or float16, as `DeviceBackend.parameter_dtype` has it. What Paddle's
CPU wheel lacks for that is in `sixteen_bits.cc`. The GPU's fused kernels are functions that refuse what the real ones
refuse, and then compute plainly in float32. Calls between ranks return at once and are over later, see `late`.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import llmsuite
from llmsuite.contract.specs import DeviceSpec
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpp_library import CppLibrary, build_library
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.gpu import GpuBackend

_LIBRARY = CppLibrary(
    name="standin",
    sources=(Path(__file__).parent / "sixteen_bits.cc",),
    options=("-O1",),
    links=("libphi_core.so", "libcommon.so"),
    is_for_this_cpu=False,
    without=("the stand-in needs", "leave its tests out"),
)


class StandIn(CpuBackend):
    """Processes of the CPU; precision, kernels and calls of a GPU."""

    name = "standin"
    precisions = GpuBackend.precisions
    training_precisions = ()
    kernel_module = DeviceBackend.kernel_module
    kernels_in_programs = True
    runs_job_plans = DeviceBackend.runs_job_plans
    overlaps_communication = DeviceBackend.overlaps_communication

    kernels = GpuBackend.kernels
    parameter_dtype = DeviceBackend.parameter_dtype
    own_matmul_backend = DeviceBackend.own_matmul_backend
    own_precision_warning = DeviceBackend.own_precision_warning

    def activate(self, local_rank: int) -> None:
        super().activate(local_rank)
        load()
        from tests.standin import late

        late.install()


@functools.cache
def load() -> None:
    """Give Paddle what it lacks on the CPU, in this process."""
    import paddle  # noqa: F401  (the library registers with it)

    from tests.standin import gpu_kernels

    ctypes.CDLL(str(build_library(_LIBRARY)))
    gpu_kernels.install()


@llmsuite.hookimpl
def llmsuite_register_devices() -> list[DeviceSpec]:
    return [DeviceSpec(name="standin", help="a GPU in tests", factory=StandIn)]
