"""The kernels of this machine: by precision, by the instructions of its processor, and by what can be built."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.contract.hookspecs import DeviceKernels
from llmsuite.plugins.cpu_kernels.libraries import (
    KERNELS,
    PRODUCTS,
    PROGRAM_FILES,
    TILE,
    build_kernels,
    can_be_built,
)
from llmsuite.plugins.cpu_kernels.processor import has_amx, multiplies_bf16

SPLIT = "LLMSUITE_SPLIT_FLOAT32"
"""Environment variable: if it is 0, float32 products are MKL's even where the processor has AMX."""
_ALWAYS = {
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
    "decoder_for": "decoder_for",
    "packed_matmul": "packed_matmul",
    "packed_grouped_matmul": "packed_grouped_matmul",
    "packed_embedding": "packed_embedding",
    "write_packed": "write_packed",
    "pack": "pack_parts",
    "pack_stack": "pack_stack",
    "square_sum": "square_sum",
    "scale": "scale",
    "adamw": "adamw",
}
"""Kernels of every precision: an operation -> a function of `kernels`."""
_BF16_BY_ROUNDING = {
    "matmul": "rounded_matmul",
    "rounded_output_matmul": "rounded_io_matmul",
    "round_activation": "round_to_bf16",
    "rounded_grad_cross_entropy": "bf16_grad_cross_entropy",
    "program_matmul": "rounded_linear",
    "grouped_matmul": "rounded_grouped_matmul",
    "joined_swiglu": "rounded_joined_swiglu",
    "decoder_for": "rounded_decoder_for",
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
    "round_attention_input": "round_to_bf16_in_float32",
    "decoder_for": "bf16_decoder_for",
}
"""Kernels of bf16 by the processor's bfloat16 instructions."""
_SPLIT_PRODUCTS = {"matmul": "split_matmul", "sum_matmul": "split_sum_matmul", "program_matmul": "split_linear"}
"""Kernels of fp32 by sums of products of bfloat16 parts."""


class CpuKernels(DeviceKernels):
    """The kernels of the CPU."""

    name = "cpu_kernels"
    help = "fused kernels, products by AVX-512 and AMX, and packed weights"
    device = "cpu"
    module = "llmsuite.plugins.cpu_kernels.kernels"
    local_only = frozenset(_ALWAYS)
    document_mask_bytes = 3 * 8
    attention_keeps_output = False
    is_padding_free = True
    weight_only_precisions = ("bf16", "int8", "nf4", "fp4", "int4")

    def __init__(self, multiplies_bf16: bool | None = None, splits: bool | None = None):
        """
        Args:
            multiplies_bf16: if products in bfloat16 use the processor's instructions; None if it has them and they can
                be built.
            splits: if float32 products are sums of products of bfloat16 parts; None if the processor has AMX, they can
                be built, and `SPLIT` is not 0.
        """
        self._multiplies_bf16 = multiplies_bf16
        self._splits = splits

    def kernels(self, precision: str) -> Mapping[str, str]:
        if not can_be_built():
            return {}
        if precision == "bf16":
            return {**_ALWAYS, **(_BF16_PRODUCTS if self._has_bf16() else _BF16_BY_ROUNDING)}
        return {**_ALWAYS, **_SPLIT_PRODUCTS} if self._splits_float32() else _ALWAYS

    def build(self) -> None:
        build_kernels(KERNELS)

    def load(self, precision: str) -> None:
        if not can_be_built():
            return
        from llmsuite.plugins.cpu_kernels.kernels import load

        load()
        if self._has_bf16() if precision == "bf16" else self._splits_float32():
            load(PRODUCTS)

    def matmul_backend(self, precision: str) -> str:
        if precision != "bf16":
            return "float32 in three bfloat16 parts, by AMX"
        if self._has_bf16():
            return f"by the processor's instructions for bfloat16 ({'AMX' if has_amx() else 'AVX-512'})"
        path = os.environ.get("MKL_DEBUG_CPU_TYPE")
        mkl = "MKL's" if path is None else f"MKL's, path {path} of MKL_DEBUG_CPU_TYPE"
        return f"{mkl}, of rounded inputs"

    def precision_warning(self, precision: str) -> str | None:
        if precision != "bf16" or self._has_bf16():
            return None
        return (
            "this processor has no instructions for products in bfloat16 that are faster than those for float32 "
            "(amx_bf16, or avx512_bf16 of AMD), or no compiler is here: inputs are rounded and multiplied in float32, "
            "which is slower than engine.precision fp32"
        )

    def packed_bytes(self, precision: str, num_inputs: int, num_outputs: int) -> int:
        outputs = -(-num_outputs // TILE) * TILE
        if precision == "bf16":
            return 2 * num_inputs * outputs
        from llmsuite.models.block_quant import block_format

        code_bits = 8 if precision == "int8" else 4
        num_blocks = num_inputs // block_format(precision, num_inputs).block
        return outputs * (num_inputs * code_bits // 8 + 4 * num_blocks)

    def program_files(self) -> Sequence[Path]:
        return PROGRAM_FILES

    def load_for_programs(self) -> bool:
        from llmsuite.plugins.cpu_kernels.kernels import load

        return load()

    def _has_bf16(self) -> bool:
        if self._multiplies_bf16 is not None:
            return self._multiplies_bf16
        return multiplies_bf16() and can_be_built() and can_be_built(PRODUCTS)

    def _splits_float32(self) -> bool:
        if self._splits is not None:
            return self._splits
        return _may_split() and has_amx() and can_be_built() and can_be_built(PRODUCTS)


def _may_split() -> bool:
    given = os.environ.get(SPLIT, "1")
    if given not in ("0", "1"):
        raise UserError(f"{SPLIT}: is {given!r} in the environment; unset it, or set it to 0 for products of MKL's")
    return given == "1"
