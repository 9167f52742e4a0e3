"""16-bit models on a CPU whose Paddle lacks most 16-bit kernels, with the dtypes that devices take and give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import paddle
import paddle.nn.functional as F
import pytest
from paddle import _C_ops

LOW = (paddle.bfloat16, paddle.float16)

ALIKE = ("matmul", "mm", "linear", "layer_norm", "concat", "stack", "where")
"""Kernels that take tensors of one dtype only."""
FREE = (
    *("softmax", "silu", "gelu", "sigmoid", "tanh", "exp", "log", "rsqrt", "sqrt", "square", "abs", "mean", "sum"),
    *("clip", "scale", "max", "index_select", "embedding", "cross_entropy", "add", "subtract", "multiply", "divide"),
)
"""Those that take one, or give the wider dtype of two."""
OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul")


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute operations of 16-bit tensors in float32 and round the result, as kernels of devices do. What only takes
    tensors of one dtype there is refused others."""
    places = (paddle, F, _C_ops, paddle.Tensor)
    for name in (*ALIKE, *FREE):
        for place in places:
            if (original := getattr(place, name, None)) is not None:
                monkeypatch.setattr(place, name, _emulated(name, original, name in ALIKE))
    for name in OPERATORS:
        if (original := getattr(paddle.Tensor, f"__{name}__", None)) is None:
            continue
        monkeypatch.setattr(paddle.Tensor, f"__{name}__", _emulated(name, original, "matmul" in name))


def _emulated(name: str, original: Callable[..., Any], alike: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*arguments: Any, **options: Any) -> Any:
        floats = {t.dtype for t in _tensors([*arguments, *options.values()]) if t.dtype in (*LOW, paddle.float32)}
        if not floats & set(LOW):
            return original(*arguments, **options)
        assert not alike or len(floats) == 1, f"{name} of {sorted(map(str, floats))}"
        dtype = floats.pop() if len(floats) == 1 else paddle.float32
        wide = [_each(value, _widened) for value in arguments]
        result = original(*wide, **{key: _each(value, _widened) for key, value in options.items()})
        return _each(result, lambda t: t.astype(dtype) if t.dtype == paddle.float32 else t)

    return run


def _widened(tensor: Any) -> Any:
    return tensor.astype("float32") if tensor.dtype in LOW else tensor


def _tensors(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, paddle.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(list(value))


def _each(value: Any, act: Callable[[Any], Any]) -> Any:
    if isinstance(value, paddle.Tensor):
        return act(value)
    return type(value)(_each(one, act) for one in value) if isinstance(value, list | tuple) else value
