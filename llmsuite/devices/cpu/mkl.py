"""The path of Intel's MKL that is fastest on this processor."""

from __future__ import annotations

import platform

from llmsuite.base.processor import AVX512, processor_facts, processor_flags

_AVX2 = {"avx2", "fma"}
"""Features that MKL's path for AVX2 uses. That for AVX-512 crashes on a processor that lacks one of `AVX512`."""


def mkl_path() -> str | None:
    """Value of MKL_DEBUG_CPU_TYPE for this processor's fastest path; None where MKL selects it by default.

    The MKL in the wheel of Paddle 3.3.1 takes its slowest path on AMD unless this variable selects AVX2 ("5") or
    AVX-512 ("7").
    """
    facts = processor_facts()
    if facts is None:
        return "5" if "AMD" in platform.processor() else None
    if facts.get("vendor_id") != "AuthenticAMD":
        return None
    if processor_flags() >= AVX512:
        return "7"
    return "5" if processor_flags() >= _AVX2 else None
