"""In a backward pass of a matrix that is cut by its outputs, the sum is under way while the other product is made."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.models.llama.shard_plan import PLAN
from llmsuite.parallel import overlap

MESH: Any = types.SimpleNamespace(tensor=dist.ProcessMesh([0], dim_names=["tp"]), tensor_group=object())


class Model(nn.Layer):
    """Two linear layers under names that the plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 6, bias_attr=False)
        self.other = nn.Linear(4, 6)


def on_mesh(values: np.ndarray, placements: list[Any]) -> Any:
    tensor = dtensor_from_local(paddle.to_tensor(values), MESH.tensor, placements)
    tensor.stop_gradient = False
    return tensor


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_sum_is_under_way_while_the_gradient_of_the_weight_is_made(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, events, matmul = Model(), list[str](), paddle.matmul
    values = np.arange(24, dtype="float32").reshape(4, 6) / 10
    model.lm_head.weight._set_impl(on_mesh(values, [dist.Shard(1)]))
    model.lm_head.weight.stop_gradient = is_frozen
    overlap.overlap_sums(model, PLAN, MESH)
    assert "forward" not in vars(model.other), "it is not cut"
    x = on_mesh(np.ones([2, 3, 4], "float32"), [dist.Replicate()])
    y = model.lm_head(x)
    assert y.placements == [dist.Shard(2)]

    def product(*args: Any, **options: Any) -> Any:
        events.append("product")
        return matmul(*args, **options)

    def begin_sum(tensor: Any, group: Any) -> Any:
        assert group is MESH.tensor_group
        events.append("the sum sets out")
        return types.SimpleNamespace(wait=lambda: events.append("it is there"))

    monkeypatch.setattr(paddle, "matmul", product)
    monkeypatch.setattr(overlap.collective, "begin_sum", begin_sum)
    paddle.autograd.backward([y], [on_mesh(np.ones([2, 3, 6], "float32"), [dist.Shard(2)])])
    beside = [] if is_frozen else ["product"]
    assert events == ["product", "the sum sets out", *beside, "it is there"]
    np.testing.assert_allclose(x.grad._local_value().numpy(), np.tile(values.sum(1), [2, 3, 1]), rtol=1e-6)
    if is_frozen:
        assert model.lm_head.weight.grad is None
    else:
        assert np.array_equal(model.lm_head.weight.grad._local_value().numpy(), np.full([4, 6], 6.0, "float32"))
