"""Forms of products, and inputs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle

from llmsuite.plugins.cpu_kernels.libraries import PRODUCTS, can_be_built

CPU_INFO = Path("/proc/cpuinfo")
INSTRUCTIONS = can_be_built(PRODUCTS) and bool({"avx512_bf16", "amx_bf16"} & set(CPU_INFO.read_text().split()))
FORMS = {"by rounding": False, **({"by instructions": True} if INSTRUCTIONS else {})}
"""True where the processor's own instructions multiply, which are tried wherever it has some."""
LIMIT = 1e-6
"""Limit of the largest difference, relative to the largest value: sums are float32."""


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).standard_normal(shape).astype("float32")


def leaf(values: np.ndarray, wants: bool = True) -> Any:
    return paddle.to_tensor(values, stop_gradient=not wants)


def rounded(values: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, in float64."""
    return values.astype(ml_dtypes.bfloat16).astype("float64")
