"""Base class for devices of Paddle's CustomDevice interface: accelerators whose vendors give a plug-in to Paddle, such
as npu, mlu, gcu or iluvatar_gpu. A plugin of llmsuite derives a backend from it and registers it.

No such accelerator has run llmsuite yet; the tests run this class on a simulated one, see `tests.device`.
"""

from __future__ import annotations

from typing import Any

from llmsuite.devices.base import DeviceBackend, selected


class CustomBackend(DeviceBackend):
    """One type of custom device; `name` is Paddle's name of the type."""

    collectives = "xccl"
    precisions = ("fp32", "bf16", "fp16")

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

    def peak_memory_bytes(self) -> int:
        import paddle

        return int(paddle.device.max_memory_allocated(paddle.device.get_device()))

    def to_host(self, tensor: Any) -> Any:
        return tensor.cpu()  # Paddle 3.3.1 has pinned memory for CUDA and XPU only

    def to_device(self, tensor: Any) -> Any:
        import paddle

        kind, _, number = paddle.device.get_device().partition(":")
        return tensor._copy_to(paddle.CustomPlace(kind, int(number)), True)
