"""Instruction sets of the processor that the kernels choose by."""

from __future__ import annotations

from llmsuite.base.processor import AVX512, processor_facts, processor_flags


def has_amx() -> bool:
    """True if this processor has AMX for bfloat16, with which products of float32 matrices split into bfloat16 parts
    are faster than with float32 instructions: on a Xeon 400 GFLOP/s on two cores, against 150 by MKL."""
    flags = processor_flags()
    return "amx_bf16" in flags and flags >= AVX512


def multiplies_bf16() -> bool:
    """True if this processor has instructions for products in bfloat16 that are faster than those for float32.

    On AMD those of avx512_bf16 are twice as fast, on Intel slower: a Xeon with them but without AMX reached 134 GFLOP/s
    with oneDNN against 194 in float32, and 150 with torch 2.13 against 260.
    """
    is_amd = (processor_facts() or {}).get("vendor_id") == "AuthenticAMD"
    return has_amx() or (is_amd and processor_flags() >= AVX512 | {"avx512_bf16"})
