"""Parameters in 16 bits inside of whole-step programs: a program updates float32 masters, and the model computes with
copies that it makes of them, of slices where these are brought together (`slices.whole_where_used`).

So gradients become float32 where the copies were made, and their sum over micro-batches, the norm and the update are
float32 without a further word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

from llmsuite.typing import Tensor


@contextlib.contextmanager
def in_16_bits(model: Any, narrow: Mapping[str, Any]) -> Iterator[None]:
    """While active, a program that is made has copies in 16 bits in the place of masters.

    Args:
        model: whose parameters are masters, over [data, tp].
        narrow: dtypes of the copies by the name of a parameter.
    """
    modules, masters = dict(model.named_sublayers(include_self=True)), []
    for name, dtype in narrow.items():
        prefix, _, attribute = name.rpartition(".")
        module = modules[prefix]
        if module._parameters[attribute].placements[0].is_shard():
            continue
        masters.append((module._parameters, attribute, module._parameters[attribute]))
        module._parameters[attribute] = getattr(module, attribute).astype(dtype)  # of the program's own value
    try:
        yield
    finally:
        for table, attribute, master in masters:
            table[attribute] = master


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """While active, programs that are made copy a tensor in bfloat16 where another one would be in its memory, as where
    one rank is all that cuts it: of `share_data_` Paddle 3.3.1 has no bfloat16 on CPUs."""
    before = paddle._C_ops.share_data_

    def share(x: Tensor) -> Tensor:
        return paddle.assign(x) if x.dtype == paddle.bfloat16 else before(x)

    paddle._C_ops.share_data_ = share
    try:
        yield
    finally:
        paddle._C_ops.share_data_ = before
