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
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu.gloo import GLOO_TIMEOUT
from llmsuite.devices.cpu.kernels.source import PRODUCTS, PROGRAM_FILES, build_kernels, can_be_built
from llmsuite.devices.cpu.processor import has_amx, mkl_path, multiplies_bf16

SPLIT = "LLMSUITE_SPLIT_FLOAT32"
"""Environment variable: if it is 0, float32 products are MKL's even where the processor has AMX."""
_M_TRIM_THRESHOLD = -1  # constants of glibc's malloc.h
_M_MMAP_MAX = -4
_KERNELS = {
    "causal_mask": "no_mask",
    "document_mask": "spans",
    "attention": "attention",
    "rms_norm": "rms_norm",
    "rotary": "rotary",
    "swiglu": "swiglu",
    "joined_swiglu": "joined_swiglu",
    "cross_entropy": "cross_entropy",
    "grouped_matmul": "grouped_matmul",
    "dispatch_rows": "dispatch_rows",
    "combine_rows": "combine_rows",
    "next_logits": "next_logits",
    "cached_attention": "cached_attention",
    "packed_matmul": "packed_matmul",
    "packed_grouped_matmul": "packed_grouped_matmul",
    "packed_embedding": "packed_embedding",
    "write_packed": "write_packed",
    "square_sum": "square_sum",
    "scale": "scale",
    "adamw": "adamw",
}
"""Kernels of every precision: an operation -> a function of `kernels.ops`."""
_GLOO_SECONDS = 1800
_A_YEAR = 365 * 24 * 3600
_TIMEOUT_FACTOR = 4  # at the start of a run the launcher waits for three times launch.stall_seconds
_BF16_BY_ROUNDING = {
    "matmul": "rounded_matmul",
    "rounded_output_matmul": "rounded_io_matmul",
    "round_activation": "round_to_bf16",
    "rounded_grad_cross_entropy": "bf16_grad_cross_entropy",
    "program_matmul": "rounded_linear",
    "grouped_matmul": "rounded_grouped_matmul",
    "joined_swiglu": "rounded_joined_swiglu",
    "next_logits": "rounded_next_logits",
}
"""Kernels of bf16 without bfloat16 instructions: rounded inputs are multiplied in float32."""
_BF16_PRODUCTS = {
    **_BF16_BY_ROUNDING,
    "matmul": "bf16_matmul",
    "sum_matmul": "bf16_sum_matmul",
    "rounded_output_matmul": "bf16_rounded_output_matmul",
    "program_matmul": "bf16_linear",
    "grouped_matmul": "bf16_grouped_matmul",
    "attention": "bf16_attention",
    "cached_attention": "bf16_cached_attention",
    "round_attention_input": "round_to_bf16_in_float32",
    "next_logits": "bf16_next_logits",
}
"""Kernels of bf16 by the processor's bfloat16 instructions."""
_SPLIT_PRODUCTS = {"matmul": "split_matmul", "sum_matmul": "split_sum_matmul", "program_matmul": "split_linear"}
"""Kernels of fp32 by sums of products of bfloat16 parts."""
_BF16_WITHOUT_COMPILER = {"matmul": "plain_rounded_matmul", "round_activation": "plain_round_to_bf16"}


class CpuBackend(DeviceBackend):
    name = "cpu"
    collectives = "gloo"
    deterministic_flags = {}  # noqa: RUF012  (none are needed)
    precisions = ("fp32",)
    training_precisions = ("bf16",)
    weight_only_precisions = ("bf16", "int8", "nf4", "fp4", "int4")
    install = "pip install paddlepaddle==3.3.1"
    forks = True
    kernel_module = "llmsuite.devices.cpu.kernels.ops"
    local_only_kernels = frozenset(_KERNELS)
    document_mask_bytes = 3 * 8
    attention_keeps_output = False
    kernels_in_programs = False
    overlaps_communication = False
    adds_sparse_gradients = True
    supports_interleaving = True
    supports_step_pipelines = True  # without Paddle's events, see `gloo.shims`
    can_offload = False

    def __init__(self, multiplies_bf16: bool | None = None, splits: bool | None = None):
        """
        Args:
            multiplies_bf16: use the processor's instructions for products in bfloat16; None: if it has fast ones, and
                their kernels can be built.
            splits: multiply float32 matrices by these instructions, split into parts; None: if the processor has AMX,
                the kernels can be built, and `SPLIT` is not 0.
        """
        self._multiplies_bf16 = multiplies_bf16
        self._splits = splits

    def _has_bf16(self) -> bool:
        if self._multiplies_bf16 is not None:
            return self._multiplies_bf16
        return multiplies_bf16() and can_be_built() and can_be_built(PRODUCTS)

    def _splits_float32(self) -> bool:
        if self._splits is not None:
            return self._splits
        return _may_split() and has_amx() and can_be_built() and can_be_built(PRODUCTS)

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
        is_plain = not can_be_built()
        table = {} if is_plain else _KERNELS
        if precision != "bf16":
            return {**table, **_SPLIT_PRODUCTS} if self._splits_float32() else table
        by_rounding = _BF16_WITHOUT_COMPILER if is_plain else _BF16_BY_ROUNDING
        return {**table, **(_BF16_PRODUCTS if self._has_bf16() else by_rounding)}

    def loaded_kernels(self, precision: str) -> dict[str, Callable[..., Any]]:
        if can_be_built():
            from llmsuite.devices.cpu.kernels.ops import load

            load()  # if it fails, `can_be_built` returns False afterwards
            needs_products = self._has_bf16() if precision == "bf16" else self._splits_float32()
            if needs_products:
                load(PRODUCTS)
        return super().loaded_kernels(precision)

    def program_kernels(self) -> Sequence[Path]:
        return PROGRAM_FILES

    def padding_free(self, precision: str) -> bool:
        return "attention" in self.fused(precision)

    def prepare_ranks(self) -> None:
        from llmsuite.devices.cpu.gloo import shims

        shims.build_kernels()
        build_kernels()

    def parameter_dtype(self, precision: str) -> str:
        return "float32" if precision == "bf16" else super().parameter_dtype(precision)

    def matmul_backend(self, precision: str) -> str:
        if precision == "bf16" and self._has_bf16():
            return f"by the processor's instructions for bfloat16 ({'AMX' if has_amx() else 'AVX-512'})"
        if precision == "fp32" and self._splits_float32():
            return "float32 in three bfloat16 parts, by AMX"
        path = os.environ.get("MKL_DEBUG_CPU_TYPE")
        mkl = "MKL's" if path is None else f"MKL's, path {path} of MKL_DEBUG_CPU_TYPE"
        return mkl if precision == "fp32" else f"{mkl}, of rounded inputs"

    def precision_warning(self, precision: str) -> str | None:
        if precision != "bf16" or self._has_bf16():
            return None
        return (
            "this processor has no instructions for products in bfloat16 that are faster than those for float32 "
            "(amx_bf16, or avx512_bf16 of AMD), or no compiler is here: inputs are rounded and multiplied in float32, "
            "which is slower than engine.precision fp32"
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
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _may_split() -> bool:
    given = os.environ.get(SPLIT, "1")
    if given not in ("0", "1"):
        raise UserError(f"{SPLIT}: is {given!r} in the environment; unset it, or set it to 0 for products of MKL's")
    return given == "1"


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
