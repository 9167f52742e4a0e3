"""Experts that compute only their tokens, on one rank and dealt over several: equal to every expert for every token."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.ops import Ops
from llmsuite.models.experts import Experts, sort_rows
from llmsuite.models.sparse_plan import PLAN
from llmsuite.parallel.collective import _peers
from llmsuite.parallel.experts import ExpertParallelDispatcher
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.partition import local_slice
from llmsuite.parallel.sharding import ParameterShard
from tests.support import many

HIDDEN = 12
WIDTH = 8
NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def stacks(num_experts: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((num_experts, HIDDEN, WIDTH), (num_experts, HIDDEN, WIDTH), (num_experts, WIDTH, HIDDEN))
    return {name: rng.normal(0, 0.3, shape).astype("float32") for name, shape in zip(NAMES, shapes)}


def experts_of(values: dict[str, np.ndarray]) -> Experts:
    result = Experts(len(values[NAMES[0]]), HIDDEN, WIDTH, Ops())
    for name, parameter in result.named_parameters():
        parameter.set_value(paddle.to_tensor(values[name]))
    return result


def batch(seed: int, num_experts: int, num_chosen: int, tokens: int = 10, of: int | None = None) -> list[np.ndarray]:
    """Tokens [2, tokens / 2, D], weights and numbers of their experts, which are among the first `of`."""
    rng = np.random.default_rng(seed)
    shape = 2, tokens // 2
    chosen = [rng.permutation(of or num_experts)[:num_chosen] for _ in range(tokens)]
    x = rng.normal(size=(*shape, HIDDEN))
    weights = rng.uniform(0.1, 1, (*shape, num_chosen))
    return [x.astype("float32"), weights.astype("float32"), np.reshape(chosen, (*shape, num_chosen))]


def dense(experts: Experts, x: Any, weights: Any, chosen: Any) -> Any:
    """Every expert for every token, times the weight it has."""
    gate, up, down = (part.weight for part in (experts.gate_proj, experts.up_proj, experts.down_proj))
    table = (F.one_hot(chosen, gate.shape[0]) * weights.unsqueeze(-1)).sum(-2)  # [B, L, E]
    parts = [
        paddle.matmul(F.silu(paddle.matmul(x, gate[e])) * paddle.matmul(x, up[e]), down[e]) * table[..., e : e + 1]
        for e in range(gate.shape[0])
    ]
    return paddle.add_n(parts)


def learn(function: Any, experts: Experts, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs, and the gradients of tokens, weights and matrices."""
    x, weights, chosen = map(paddle.to_tensor, arrays)
    x.stop_gradient = weights.stop_gradient = False
    y = function(x, weights, chosen)
    (y * paddle.cos(paddle.arange(y.numpy().size, dtype="float32").reshape(y.shape))).sum().backward()
    return [y.numpy(), x.grad.numpy(), weights.grad.numpy(), *(p.grad.numpy() for p in experts.parameters())]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


@pytest.mark.parametrize(("num_experts", "num_chosen", "of"), [(8, 2, None), (8, 2, 3), (5, 5, None), (1, 1, None)])
def test_equal_to_every_expert_for_every_token(num_experts: int, num_chosen: int, of: int | None) -> None:
    arrays = batch(0, num_experts, num_chosen, of=of)
    experts = experts_of(stacks(num_experts))
    expected = learn(lambda *given: dense(experts, *given), experts, arrays)
    experts.clear_gradients()
    assert_equal(learn(experts, experts, arrays), expected)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    experts = experts_of(stacks(6))
    *_, gate, up, down = learn(experts, experts, batch(0, 6, 2, of=4))
    for gradient in (gate, up, down):
        assert (gradient[4:] == 0).all()
        assert all(np.abs(one).max() > 0 for one in gradient[:4])


def test_frozen_experts_pass_gradients_on() -> None:
    experts = experts_of(stacks(4))
    arrays = batch(0, 4, 2)
    expected = learn(experts, experts, arrays)[:3]
    for parameter in experts.parameters():
        parameter.stop_gradient = True
        parameter.clear_gradient()
    x, weights, chosen = map(paddle.to_tensor, arrays)
    x.stop_gradient = weights.stop_gradient = False
    y = experts(x, weights, chosen)
    (y * paddle.cos(paddle.arange(y.numpy().size, dtype="float32").reshape(y.shape))).sum().backward()
    assert_equal([y.numpy(), x.grad.numpy(), weights.grad.numpy()], expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 5))
def test_rows_are_sorted_and_found_again(experts: list[int], num_here: int) -> None:
    wanted = [min(expert, num_here) for expert in experts]
    route = sort_rows(paddle.to_tensor(wanted), num_here)
    order = route.order.tolist()
    places = route.inverse_order.tolist()
    assert route.counts == [wanted.count(expert) for expert in range(num_here)]
    assert order == [i for expert in range(num_here) for i, e in enumerate(wanted) if e == expert]
    assert [places[i] for i in order] == list(range(len(order)))
    assert all(places[i] >= len(order) for i, e in enumerate(wanted) if e == num_here)


@pytest.mark.parametrize("num_ranks", range(2, 10))
def test_every_rank_meets_every_other_at_the_same_time(num_ranks: int) -> None:
    """Else two that wait for each other would wait for ever."""
    waiting = [_peers(rank, num_ranks) for rank in range(num_ranks)]
    assert [sorted(peers) for peers in waiting] == [[p for p in range(num_ranks) if p != r] for r in range(num_ranks)]
    while any(waiting):
        meeting = [(r, peers[0]) for r, peers in enumerate(waiting) if peers and waiting[peers[0]][0] == r]
        assert meeting
        for rank, _ in meeting:
            waiting[rank].pop(0)


@pytest.mark.parametrize("of", [None, 2], ids=["all", "ranks without tokens"])
@pytest.mark.parametrize("ep", [2, 4])
def test_experts_of_several_ranks(ep: int, of: int | None) -> None:
    """Each rank has tokens of its own, of different numbers."""
    degrees = Degrees(1, ep, 1, 1, ep)
    whole = stacks(8)
    batches = [batch(rank, 8, 2, tokens=4 + 2 * rank, of=of) for rank in range(ep)]

    def work(mesh: Mesh) -> list[np.ndarray]:
        mine = {n: v[local_slice(f"model.layers.1.mlp.experts.{n}", v.shape, PLAN, mesh)[0]] for n, v in whole.items()}
        experts = experts_of(mine)
        return learn(
            functools.partial(ExpertParallelDispatcher(experts, mesh).run, experts), experts, batches[mesh.rank]
        )

    found = many.run(degrees, work, "NCCL")
    total = None
    for rank, arrays in enumerate(batches):
        experts = experts_of(whole)
        expected = learn(lambda *given: dense(experts, *given), experts, arrays)  # noqa: B023
        assert_equal(found[rank][:3], expected[:3])
        total = expected[3:] if total is None else [a + b for a, b in zip(total, expected[3:])]
    assert_equal([np.concatenate(parts) for parts in zip(*(result[3:] for result in found))], total)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("degrees", [d for d in many.EXPERT_MESHES if d.pp == 1], ids=str)
def test_a_stack_learns_on_any_mesh_what_it_learns_on_one_rank(degrees: Degrees, stage: int) -> None:
    """A rank's gradient has what all ranks of its expert group have sent; whole numbers, whose sums are exact."""
    name = "model.layers.1.mlp.experts.up_proj.weight"
    shape = (12, 3, 5)
    values = np.random.default_rng(0).standard_normal(shape).astype("float32")
    gradients = np.random.default_rng(1).integers(-8, 9, (degrees.num_data_ranks, *shape)).astype("float32")
    train = TrainSection(
        max_steps=1, global_batch_size=1, micro_batch_size=1, learning_rate=0.5, optimizer="sgd",
        lr_schedule="constant", max_grad_norm=None,
    )  # fmt: skip

    def work(mesh: Mesh) -> tuple[float, np.ndarray]:
        (index, *_) = local_slice(name, shape, PLAN, mesh)
        first = mesh.data_rank - mesh.data_rank % degrees.ep
        sent_here = gradients[first : first + degrees.ep].sum(0)[index]
        zeros = paddle.nn.initializer.Constant(0.0)
        parameter = paddle.create_parameter(list(sent_here.shape), "float32", default_initializer=zeros)
        parameter.set_value(paddle.to_tensor(values[index]))
        shard = ParameterShard(name, parameter, mesh.expert_mesh, 0, stage)
        assert shard.shape[0] * degrees.tp == 12  # here tp is no distributed tensor, which knows of itself
        optimizer = Optimizer([shard], train, 1)
        shard.gather()
        (shard.parameter * paddle.to_tensor(sent_here)).sum().backward()
        norm = optimizer.finish_gradients(2.0)
        optimizer.step(1)
        return norm, shard.gather_parameter().numpy()

    total = gradients.sum(0) / 2.0
    for norm, updated in many.run(degrees, work):
        assert norm == pytest.approx(np.linalg.norm(total), rel=1e-6)
        np.testing.assert_allclose(updated, values - 0.5 * total, rtol=1e-6, atol=1e-6)
