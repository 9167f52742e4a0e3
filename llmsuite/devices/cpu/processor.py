"""What the processor can do, as the operating system tells it."""

from __future__ import annotations

import platform

_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
"""What MKL's path for AVX-512 computes with; it ends a process on a processor that lacks one of them."""
_AVX2 = {"avx2", "fma"}
"""The same of its path for AVX2."""


def mkl_path() -> str | None:
    """The value of MKL_DEBUG_CPU_TYPE for this processor's fastest path, or None where MKL finds it by itself.

    The MKL in the wheel of Paddle 3.3.1 takes its slowest path on AMD unless it is told that the processor has
    AVX2 ("5") or AVX-512 ("7").
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
    """Whether this processor has AMX for bfloat16, by which products of float32 matrices in parts of that type are
    faster than its instructions for float32: on a Xeon 400 GFLOP/s on two cores, by MKL 150."""
    return "amx_bf16" in _flags() and _flags() >= _AVX512


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for products in bfloat16 that are faster than those for float32.

    On AMD those of avx512_bf16 are twice as fast, on Intel slower: a Xeon that has them and shows no AMX gave 134
    GFLOP/s by oneDNN's products for 194 in float32, and by those of torch 2.13 150 for 260.
    """
    flags, is_amd = _flags(), (_facts() or {}).get("vendor_id") == "AuthenticAMD"
    return has_amx() or (is_amd and flags >= _AVX512 | {"avx512_bf16"})


def _flags() -> set[str]:
    return set((_facts() or {}).get("flags", "").split())


def _facts() -> dict[str, str] | None:
    """The lines of the first processor in /proc/cpuinfo, or None where there is no such file."""
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
