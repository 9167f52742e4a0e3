"""16-bit parameters inside of step programs: a program updates float32 masters, and the model computes with 16-bit
copies that the program casts from them. Slices are cast where they are gathered (`slices.gather_where_used`).

So gradients become float32 at the cast, and their sum over micro-batches, the norm and the update are in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

from llmsuite.base.typing import Tensor


@contextlib.contextmanager
def cast_masters(model: Any, compute_dtypes: Mapping[str, Any]) -> Iterator[None]:
    """While active, a program that is being built has 16-bit copies instead of masters.

    Args:
        model: with masters as parameters, over [data, tp].
        compute_dtypes: dtypes of the copies by the name of a parameter.
    """
    modules = dict(model.named_sublayers(include_self=True))
    masters = []
    for name, dtype in compute_dtypes.items():
        prefix, _, attribute = name.rpartition(".")
        module = modules[prefix]
        if module._parameters[attribute].placements[0].is_shard():
            continue
        masters.append((module._parameters, attribute, module._parameters[attribute]))
        module._parameters[attribute] = getattr(module, attribute).astype(dtype)  # casts the value in the program
    try:
        yield
    finally:
        for table, attribute, master in masters:
            table[attribute] = master


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """While active, programs that are being built copy a bfloat16 tensor instead of sharing its memory, such as where
    an axis that cuts it has one rank: Paddle 3.3.1 has no bfloat16 kernel of `share_data_` on CPUs."""
    before = paddle._C_ops.share_data_

    def share(x: Tensor) -> Tensor:
        return paddle.assign(x) if x.dtype == paddle.bfloat16 else before(x)

    paddle._C_ops.share_data_ = share
    try:
        yield
    finally:
        paddle._C_ops.share_data_ = before
