"""NVIDIA GPUs: NCCL, bf16 and fp16 with master weights, flash attention and Paddle's fused kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsuite.devices.base import FLASH_ATTENTION, DeviceBackend, selected

_KERNELS = {
    "rms_norm": "fused_rms_norm",
    "rotary": "fused_rotary",
    "swiglu": "fused_swiglu",
    "square_sum": "one_read_square_sum",
    "adamw": "merged_adamw",
}

_SELECTED = "FLAGS_selected_gpus"


class GpuBackend(DeviceBackend):
    name = "gpu"
    collectives = "nccl"
    visible_devices = ("CUDA_VISIBLE_DEVICES",)
    # without them the gradients of flash attention and of embeddings are sums by atomic additions, in any order
    deterministic_flags = {"FLAGS_cudnn_deterministic": "1", "FLAGS_embedding_deterministic": "1"}  # noqa: RUF012
    precisions = ("fp32", "bf16", "fp16")
    supports_interleaving = True  # see `devices.tensors`
    supports_step_pipelines = True
    profiler_target = "GPU"
    install = (
        "pip uninstall -y paddlepaddle && "
        "pip install paddlepaddle-gpu==3.3.1 -i https://www.paddlepaddle.org.cn/packages/stable/cu126/"
    )

    def kernels(self, precision: str) -> Mapping[str, str]:
        # flash attention supports 16-bit inputs only
        return _KERNELS if precision == "fp32" else {**_KERNELS, **FLASH_ATTENTION}

    def environment(self, local_ranks: int, inference_only: bool = False) -> dict[str, str]:
        # TF32 would make float32 runs differ between strategies by 1e-3; bf16 is the way to ask for speed
        return {"NVIDIA_TF32_OVERRIDE": "0"}

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        return {_SELECTED: str(local_rank)}  # init_parallel_env requires it

    def unavailable(self, num_devices: int) -> str | None:
        import paddle

        if not paddle.is_compiled_with_cuda():
            return f"this Paddle ({paddle.__version__}) is built without CUDA; install one with: {self.install}"
        found = paddle.device.cuda.device_count()
        if found < num_devices:
            return f"{num_devices} GPUs are requested and {found} are visible; lower launch.num_devices"
        return None

    def activate(self, local_rank: int) -> None:
        import paddle

        paddle.set_device(f"gpu:{selected(_SELECTED, local_rank)}")

    def configure_predictor(self, config: Any, number: int, num_threads: int) -> None:
        config.enable_use_gpu(512, number)  # MiB that are allocated at the start

    def device_name(self) -> str | None:
        import paddle

        return str(paddle.device.cuda.get_device_name())

    def peak_memory_bytes(self) -> int:
        import paddle

        return int(paddle.device.cuda.max_memory_allocated())
