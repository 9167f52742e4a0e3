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
_OLDER_NAMES = {
    "add": "elementwise_add",
    "add_grad": "elementwise_add_grad",
    "multiply": "elementwise_mul",
    "embedding": "lookup_table_v2",
    "embedding_grad": "lookup_table_v2_grad",
    "transpose": "transpose2",
    "cross_entropy_with_softmax": "softmax_with_cross_entropy",
    "cross_entropy_with_softmax_grad": "softmax_with_cross_entropy_grad",
    "full": "fill_constant",
    "arange": "range",
}
"""Names of operations in Paddle 3.3.1's list of kernels, where these are others."""
_KEY = re.compile(r"data_type\[(.*?)\].*place\[Place\(([^:)]+)")


def kernel_dtypes(operation: str, device: str) -> set[str]:
    """Dtypes in which an operation of Paddle has a kernel for a type of device; empty where it has none, or where
    Paddle does not know the operation. Without a kernel Paddle computes on the CPU."""
    from paddle.base import core

    registered: Any = core._get_all_register_op_kernels  # type: ignore[attr-defined]
    keys = registered("phi").get(_OLDER_NAMES.get(operation, operation), ())
    found = (match.groups() for match in map(_KEY.search, keys) if match is not None)
    return {_DTYPES.get(dtype, dtype) for dtype, place in found if place == device}
