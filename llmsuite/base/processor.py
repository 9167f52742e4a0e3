"""The processor and its instruction sets, from /proc/cpuinfo."""

from __future__ import annotations

AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})
"""The flags of AVX-512 that code for it uses together; some processors have only some of them."""


def processor_flags() -> set[str]:
    """Names of the instruction sets of this machine's processor; empty where they are not known."""
    return set((processor_facts() or {}).get("flags", "").split())


def processor_facts() -> dict[str, str] | None:
    """The entries of the first processor in /proc/cpuinfo, such as `vendor_id`; None where there is no such file."""
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
