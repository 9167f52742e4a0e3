"""Parameters get their values a slice at a time, in the dtype of the run, and again when a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.devices.ops import Ops
from llmsuite.models.dense import DenseLM
from llmsuite.models.dense_plan import PLAN
from llmsuite.parallel.materialize import materialize, read_local_values
from llmsuite.parallel.sharding import ParameterShard
from tests.support import alone, tiny_llama


def lazy() -> DenseLM:
    with paddle.LazyGuard():
        return DenseLM(tiny_llama.CONFIG, Ops())


class Source:
    """Gives slices of known values, and notes what was asked for."""

    def __init__(self, seed: int):
        self.values = tiny_llama.values(seed=seed)
        self.asked = dict[str, tuple[int, ...]]()

    def __call__(self, name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        assert tuple(shape) == self.values[name].shape
        self.asked[name] = tuple(part.stop - part.start for part in index)
        return self.values[name][tuple(index)]


def assert_has(model: Any, source: Source, dtype: str) -> None:
    assert source.asked == {name: value.shape for name, value in source.values.items()}
    for name, parameter in model.named_parameters():
        assert alone.dtype_of(parameter) == dtype, name
        expected = paddle.to_tensor(source.values[name]).astype(dtype).astype("float32").numpy()
        assert np.array_equal(parameter.astype("float32").numpy(), expected), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("started", [False, True], ids=["lazy", "gains are there"])
def test_values_are_taken_over_and_replaced(dtype: str, started: bool) -> None:
    model = lazy()
    if started:  # as by a draw from the seed: gains start as their layers say, in float32
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.initialize()
    first = Source(0)
    second = Source(1)
    materialize(model, PLAN, alone.MESH, first, dtype)
    assert_has(model, first, dtype)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for name, parameter in model.named_parameters():
        shard = ParameterShard(name, parameter, alone.MESH, None, 0)
        shard.load(read_local_values(name, parameter.shape, PLAN, alone.MESH, second))
    assert_has(model, second, dtype)
    # in the same memory: an optimizer may share it by now
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert not any(parameter.stop_gradient for parameter in model.parameters())


def test_filled_parameters_learn() -> None:
    model = lazy()
    source = Source(0)
    materialize(model, PLAN, alone.MESH, source, "float32")
    expected = tiny_llama.model()
    ids = paddle.to_tensor([[3, 1, 4, 1, 5]])
    for made in (model, expected):
        made.train()
        made(ids).square().mean().backward()
    for (name, found), (_, wanted) in zip(model.named_parameters(), expected.named_parameters()):
        assert np.array_equal(found.grad.numpy(), wanted.grad.numpy()), name


def test_values_of_another_shape_are_refused() -> None:
    def read(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        return np.zeros([*shape[:-1], shape[-1] + 1], dtype="float32")

    with pytest.raises(UserError, match=r"parameter 'model\.embed_tokens\.weight' is \[19, 24\]; its values do not"):
        materialize(lazy(), PLAN, alone.MESH, read, "float32")
