"""Instruction sets of the processor, from /proc/cpuinfo."""

from __future__ import annotations

import platform

_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
"""Features that MKL's path for AVX-512 uses; it crashes on a processor that lacks one of them."""
_AVX2 = {"avx2", "fma"}
"""Features that MKL's path for AVX2 uses."""


def mkl_path() -> str | None:
    """Value of MKL_DEBUG_CPU_TYPE for this processor's fastest path; None where MKL selects it by default.

    The MKL in the wheel of Paddle 3.3.1 takes its slowest path on AMD unless this variable selects AVX2 ("5") or
    AVX-512 ("7").
    """
    facts = _facts()
    if facts is None:
        return "5" if "AMD" in platform.processor() else None
    if facts.get("vendor_id") != "AuthenticAMD":
        return None
    if _flags() >= _AVX512:
        return "7"
    return "5" if _flags() >= _AVX2 else None


def has_amx() -> bool:
    """True if this processor has AMX for bfloat16, with which products of float32 matrices split into bfloat16 parts
    are faster than with float32 instructions: on a Xeon 400 GFLOP/s on two cores, against 150 by MKL."""
    return "amx_bf16" in _flags() and _flags() >= _AVX512


def multiplies_bf16() -> bool:
    """True if this processor has instructions for products in bfloat16 that are faster than those for float32.

    On AMD those of avx512_bf16 are twice as fast, on Intel slower: a Xeon with them but without AMX reached 134 GFLOP/s
    with oneDNN against 194 in float32, and 150 with torch 2.13 against 260.
    """
    flags = _flags()
    is_amd = (_facts() or {}).get("vendor_id") == "AuthenticAMD"
    return has_amx() or (is_amd and flags >= _AVX512 | {"avx512_bf16"})


def _flags() -> set[str]:
    return set((_facts() or {}).get("flags", "").split())


def _facts() -> dict[str, str] | None:
    """The entries of the first processor in /proc/cpuinfo, or None where there is no such file."""
    try:
        with open("/proc/cpuinfo") as lines:
            facts: dict[str, str] = {}
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon:
                    break
                facts[name.strip()] = value.strip()
            return facts
    except OSError:
        return None
