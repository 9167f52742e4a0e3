"""Kunlun XPUs: BKCL, bf16 and fp16 with master weights, the fused kernels their Paddle has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsuite.devices.base import FLASH_ATTENTION, DeviceBackend, selected
from llmsuite.devices.pipeline_events import without_pipeline_events

# no fused RMSNorm: on XPU it is in a separate package, not in Paddle
_KERNELS = {"rotary": "fused_rotary", "swiglu": "fused_swiglu"}

_SELECTED = "FLAGS_selected_xpus"


class XpuBackend(DeviceBackend):
    name = "xpu"
    collectives = "bkcl"
    visible_devices = ("XPULINK_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES")
    precisions = ("fp32", "bf16", "fp16")
    supports_step_pipelines = True
    profiler_target = "XPU"
    install = (
        "pip uninstall -y paddlepaddle && "
        "pip install paddlepaddle-xpu==3.3.1 -i https://www.paddlepaddle.org.cn/packages/stable/xpu-p800/"
    )

    def kernels(self, precision: str) -> Mapping[str, str]:
        # flash attention supports 16-bit inputs only
        return _KERNELS if precision == "fp32" else {**_KERNELS, **FLASH_ATTENTION}

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        return {_SELECTED: str(local_rank)}  # init_parallel_env requires it

    def after_paddle(self) -> None:
        without_pipeline_events()

    def unavailable(self, num_devices: int) -> str | None:
        import paddle

        if not paddle.is_compiled_with_xpu():
            return f"this Paddle ({paddle.__version__}) is built without XPU; install one with: {self.install}"
        found = paddle.device.xpu.device_count()
        if found < num_devices:
            return f"{num_devices} XPUs are requested and {found} are visible; lower launch.num_devices"
        return None

    def activate(self, local_rank: int) -> None:
        import paddle

        paddle.set_device(f"xpu:{selected(_SELECTED, local_rank)}")

    def configure_predictor(self, config: Any, number: int, num_threads: int) -> None:
        config.enable_xpu()
        config.set_xpu_device_id(number)

    def peak_memory_bytes(self) -> int:
        import paddle

        return int(paddle.device.xpu.max_memory_allocated())
