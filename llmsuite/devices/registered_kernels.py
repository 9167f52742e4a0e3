"""The kernels that Paddle has registered for a device. Imports Paddle where it is asked."""

from __future__ import annotations

import re
from typing import Any

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "::phi::dtype::bfloat16": "bfloat16",
    "::phi::dtype::float16": "float16",
}
_KEY = re.compile(r"data_type\[(.*?)\].*place\[Place\(([^:)]+)")


def kernel_dtypes(operation: str, device: str) -> set[str]:
    """Dtypes in which an operation of Paddle has a kernel for a type of device; empty where it has none, or where
    Paddle does not know the operation. Without a kernel Paddle computes on the CPU."""
    from paddle.base import core

    registered: Any = core._get_all_register_op_kernels  # type: ignore[attr-defined]
    keys = registered("phi").get(operation, ())
    found = (match.groups() for match in map(_KEY.search, keys) if match is not None)
    return {_DTYPES.get(dtype, dtype) for dtype, place in found if place == device}
