"""Kunlun XPUs: BKCL, bf16 and fp16 with master weights, the fused kernels their Paddle has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmsuite.devices.base import DeviceBackend

if TYPE_CHECKING:
    from llmsuite.devices.ops import Ops


class XpuBackend(DeviceBackend):
    name = "xpu"
    collectives = "bkcl"
    precisions = ("fp32", "bf16", "fp16")
    install = (
        "pip uninstall -y paddlepaddle && "
        "pip install paddlepaddle-xpu==3.3.1 -i https://www.paddlepaddle.org.cn/packages/stable/xpu-p800/"
    )

    def fused(self, precision: str) -> frozenset[str]:
        return frozenset({"rotary", "swiglu", *([] if precision == "fp32" else ["attention"])})

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        return {"FLAGS_selected_xpus": str(local_rank)}  # init_parallel_env insists on it

    def unavailable(self, num_devices: int) -> str | None:
        import paddle

        if not paddle.is_compiled_with_xpu():
            return f"this Paddle ({paddle.__version__}) is built without XPU; install one with: {self.install}"
        found = paddle.device.xpu.device_count()
        if found < num_devices:
            return f"{num_devices} XPUs are asked for and {found} are visible; lower launch.num_devices"
        return None

    def activate(self, local_rank: int) -> None:
        import paddle

        paddle.set_device(f"xpu:{local_rank}")

    def ops(self, precision: str) -> Ops:
        from llmsuite.devices import ops

        if precision == "fp32":
            return ops.Ops(rotary=ops.fused_rotary, swiglu=ops.fused_swiglu)
        # no fused RMSNorm: on XPU it comes from a package of its own, not with Paddle
        return ops.Ops(
            causal_mask=ops.no_mask,
            document_mask=ops.document_ends,
            attention=ops.flash_attention,
            rotary=ops.fused_rotary,
            swiglu=ops.fused_swiglu,
        )

    def peak_memory_bytes(self) -> int:
        import paddle

        return int(paddle.device.xpu.max_memory_allocated())
