"""CPU processes over Gloo: the laptop's way to run a recipe, and the test bed.

All tensors that a run sends are float32. With `engine.precision: bf16` the inputs of matrix products are rounded to
bfloat16: those of linear layers, adapters, experts and heads, and those of their gradients; also those inside
attention, where the processor has instructions for it. Activations between the products of a gated MLP, and their
gradients, are bfloat16 from where they are computed (`MatmulOps.rounded_output_matmul`); where the inputs inside
attention are rounded, so are activations between the products around it (`MatmulOps.rounds_attention`). Sums are
float32, and so is all else: parameters, other activations, messages, gradients of matrices and the optimizer. PyTorch's
autocast does the same with matrix products. The rollout copy of such a model computes in the same way, from weights
that are stored in bfloat16.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from typing import Any

from llmsuite.base.memory import peak_memory_bytes
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu.gloo import GLOO_TIMEOUT
from llmsuite.devices.cpu.mkl import mkl_path

_M_TRIM_THRESHOLD = -1  # constants of glibc's malloc.h
_M_MMAP_MAX = -4
_GLOO_SECONDS = 1800
_A_YEAR = 365 * 24 * 3600
_TIMEOUT_FACTOR = 4  # at the start of a run the launcher waits for three times launch.stall_seconds
_BF16 = {"matmul": "rounded_matmul", "round_activation": "round_to_bf16"}
"""Products in bf16: rounded inputs, multiplied in float32."""


class CpuBackend(DeviceBackend):
    name = "cpu"
    collectives = "gloo"
    deterministic_flags = {}  # noqa: RUF012  (none are needed)
    precisions = ("fp32",)
    training_precisions = ("bf16",)
    install = "pip install paddlepaddle==3.3.1"
    forks = True
    kernel_module = "llmsuite.devices.cpu.rounding"
    kernels_in_programs = False
    overlaps_communication = False
    adds_sparse_gradients = True
    supports_interleaving = True
    supports_step_pipelines = True
    runs_job_plans = False  # there are no streams, and host memory is what a step needs
    can_offload = False

    def environment(self, local_ranks: int, inference_only: bool = False) -> dict[str, str]:
        threads = max(1, (os.cpu_count() or 1) // local_ranks)
        variables = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # milliseconds that a thread spins before it sleeps: a step has thousands of parallel loops, each of which
            # would have to wake threads; but spinning threads take cores from other ranks, and slow down programs of
            # Paddle Inference
            "KMP_BLOCKTIME": "1" if local_ranks == 1 and not inference_only else "0",
            "PADDLE_DISTRI_BACKEND": self.collectives,
        }
        if path := mkl_path():
            variables["MKL_DEBUG_CPU_TYPE"] = path
        return variables

    def timeout_variables(self, stall_seconds: float | None) -> dict[str, str]:
        seconds = _A_YEAR
        if stall_seconds is not None:
            seconds = max(_GLOO_SECONDS, math.ceil(_TIMEOUT_FACTOR * stall_seconds))
        return {GLOO_TIMEOUT: os.environ.get(GLOO_TIMEOUT) or str(seconds)}

    def kernels(self, precision: str) -> Mapping[str, str]:
        return _BF16 if precision == "bf16" else {}

    def prepare_ranks(self) -> None:
        from llmsuite.devices.cpu.gloo import shims

        shims.build_kernels()
        self.build_kernels()

    def parameter_dtype(self, precision: str) -> str:
        return "float32" if precision == "bf16" else super().parameter_dtype(precision)

    def own_matmul_backend(self, precision: str) -> str:
        path = os.environ.get("MKL_DEBUG_CPU_TYPE")
        mkl = "MKL's" if path is None else f"MKL's, path {path} of MKL_DEBUG_CPU_TYPE"
        return mkl if precision == "fp32" else f"{mkl}, of rounded inputs"

    def own_precision_warning(self, precision: str) -> str | None:
        if precision != "bf16":
            return None
        return (
            "no kernels multiply in bfloat16 here (those that come with llmsuite need g++, and --no-plugins leaves "
            "them out): inputs are rounded and multiplied in float32, which is slower than engine.precision fp32"
        )

    def before_paddle(self) -> None:
        from llmsuite.devices.cpu.gloo.shims import preload

        preload()

    def after_paddle(self) -> None:
        from llmsuite.devices.cpu.gloo.shims import install

        install()

    def unavailable(self, num_devices: int) -> str | None:
        return None

    def activate(self, local_rank: int) -> None:
        import paddle

        paddle.set_device("cpu")
        keep_freed_memory()

    def to_host(self, tensor: Any) -> Any:
        return tensor

    def to_device(self, tensor: Any) -> Any:
        return tensor

    def configure_predictor(self, config: Any, number: int, num_threads: int) -> None:
        config.disable_gpu()
        config.disable_mkldnn()  # with it, decoding one token at a time is several times slower (3.3.1)
        config.set_cpu_math_library_num_threads(num_threads)

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes()


def keep_freed_memory() -> None:
    """Let the C library keep up to 512 MiB of freed memory.

    By default it keeps little, so every training step returns memory to the system and faults it in again page by page:
    logits and the gradient of an embedding, which are over 32 MiB, in any case, unless they come from the heap too.
    Nothing is changed where malloc is tuned by its own variables, or replaced by another one.
    """
    library = ctypes.CDLL(None)
    names = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"}
    if hasattr(library, "mallopt") and not names & os.environ.keys():
        library.mallopt(_M_TRIM_THRESHOLD, 512 << 20)
        library.mallopt(_M_MMAP_MAX, 0)
