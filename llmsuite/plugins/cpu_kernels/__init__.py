"""Bundled plugin: fused kernels in C++ for training and generation on the CPU, products by AVX-512 and AMX, and weights
packed in 16, 8 or 4 bits. One pass over memory where Paddle's CPU wheel has several."""

from __future__ import annotations

from llmsuite import hookimpl
from llmsuite.contract.hookspecs import DeviceKernels


@hookimpl
def llmsuite_register_kernels() -> list[DeviceKernels]:
    from llmsuite.plugins.cpu_kernels.cpu import CpuKernels

    return [CpuKernels()]
