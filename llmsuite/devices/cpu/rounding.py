"""Products of inputs that are rounded to bfloat16, by Paddle's casts and its products in float32: the reference of bf16
on the CPU."""

from __future__ import annotations

import paddle

from llmsuite.base.typing import Tensor


def rounded_matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """`MatmulOps.matmul` of inputs that are rounded to bfloat16, with float32 sums."""
    x, y = (t.astype("bfloat16").astype("float32") for t in (x, y))
    return paddle.matmul(x, y, transpose_x, transpose_y)


def round_to_bf16(x: Tensor) -> Tensor:
    """x rounded to bfloat16, half of the memory."""
    return x.astype("bfloat16")
