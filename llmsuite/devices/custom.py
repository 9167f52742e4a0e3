"""Devices of Paddle's CustomDevice interface: accelerators whose vendors give a plug-in to Paddle, such as npu, mlu or
gcu. `llmsuite.devices.vendors` has their names. A plugin of llmsuite may derive its own backend.

No such accelerator has run llmsuite yet; the tests run this class on a simulated one, see `tests.device`.
"""

from __future__ import annotations

from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.devices.base import PADDLE_DTYPE, DeviceBackend, selected
from llmsuite.devices.registered_kernels import kernel_dtypes


class CustomBackend(DeviceBackend):
    """One type of custom device; `name` is Paddle's name of the type."""

    collectives = "xccl"
    precisions = ("fp32", "bf16", "fp16")
    # Paddle 3.3.1 has these for CPU, CUDA and XPU only
    accumulates_distributed_gradients = False
    runs_step_programs = False

    @property
    def _selected(self) -> str:
        return f"FLAGS_selected_{self.name}s"

    def environment(self, local_ranks: int, inference_only: bool = False) -> dict[str, str]:
        return {
            "PADDLE_DISTRI_BACKEND": self.collectives,
            "PADDLE_XCCL_BACKEND": self.name,
            # a program gives memory back before other streams have read it, see docs/notes/upstream.md
            "FLAGS_fast_eager_deletion_mode": "0",
        }

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        return {self._selected: str(local_rank)}  # init_parallel_env requires it

    def unavailable(self, num_devices: int) -> str | None:
        import paddle

        if self.name not in (paddle.device.get_all_custom_device_type() or []):
            return (
                f"this Paddle ({paddle.__version__}) has no plug-in for device {self.name}; install it with: "
                f"{self.install}"
            )
        found = [place for place in paddle.device.get_available_custom_device() or [] if self._is_own(place)]
        if len(found) < num_devices:
            return f"{num_devices} devices are requested and {len(found)} are visible; lower launch.num_devices"
        return None

    def _is_own(self, place: str) -> bool:
        return place.partition(":")[0] == self.name

    def activate(self, local_rank: int) -> None:
        import paddle

        paddle.set_device(f"{self.name}:{selected(self._selected, local_rank)}")

    def check_precision(self, precision: str) -> None:
        dtype = PADDLE_DTYPE[precision]
        found = kernel_dtypes("matmul", self.name)
        if found and dtype not in found:  # a plug-in that registers none may compute in its own way
            able = [name for name in self.precisions if PADDLE_DTYPE[name] in found]
            raise UserError(
                f"precision {precision}: the plug-in for device {self.name} has no matrix product in {dtype}; "
                f"use {' or '.join(able)}"
            )

    def peak_memory_bytes(self) -> int:
        import paddle

        return int(paddle.device.max_memory_allocated(paddle.device.get_device()))

    def to_host(self, tensor: Any) -> Any:
        return tensor.cpu()  # Paddle 3.3.1 has pinned memory for CUDA and XPU only

    def to_device(self, tensor: Any) -> Any:
        import paddle

        kind, _, number = paddle.device.get_device().partition(":")
        return tensor._copy_to(paddle.CustomPlace(kind, int(number)), True)
