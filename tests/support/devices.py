"""The CPU with its kernels, also in programs that load no plugins."""

from __future__ import annotations

from llmsuite.devices.cpu import CpuBackend
from llmsuite.plugins.cpu_kernels.cpu import CpuKernels


def cpu_backend(multiplies_bf16: bool | None = None, splits: bool | None = None) -> CpuBackend:
    """The CPU with kernels that multiply as given, or as this processor does."""
    return CpuBackend().with_kernels(CpuKernels(multiplies_bf16, splits))
