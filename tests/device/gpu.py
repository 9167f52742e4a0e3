"""The device `sim` with the policy of a GPU: its dtypes and its fused kernels, which refuse what the real ones refuse.

The kernels are `tests.standin.gpu_kernels`.
"""

from __future__ import annotations

import llmsuite
from llmsuite.contract.specs import DeviceSpec
from llmsuite.devices.gpu import GpuBackend
from tests.device import SimBackend


class SimGpu(SimBackend):
    kernels = GpuBackend.kernels

    def activate(self, local_rank: int) -> None:
        super().activate(local_rank)
        from tests.standin import gpu_kernels

        gpu_kernels.install()


@llmsuite.hookimpl
def llmsuite_register_devices() -> list[DeviceSpec]:
    return [DeviceSpec(name="sim", help="a simulated GPU", factory=SimGpu)]
