"""Loads of experts, the loss of uneven ones and the bias against them: by hand, and however a batch is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.ops import Ops
from llmsuite.engine.expert_balance import ExpertBalance
from llmsuite.models.experts import LoadBalance
from llmsuite.models.families.deepseek import SMOKE, DeepSeekConfig
from llmsuite.models.sparse import SparseLM
from llmsuite.models.sparse_plan import PLAN
from llmsuite.parallel.materialize import materialize
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.program.experts import BALANCE_LOSS, LOADS
from llmsuite.parallel.sharding import ParameterShard
from tests.support import alone, many

# two tokens of the first sequence choose experts 0 and 1, its third one is padding; both of the second 2
CHOSEN = np.array([[[0], [1], [3]], [[2], [2], [2]]])
SCORES = np.array([[[0.6, 0.2, 0.1, 0.1], [0.1, 0.3, 0.1, 0.1], [9, 9, 9, 9]], [[0.0, 0.0, 1.0, 0.0]] * 3], "float32")
COUNTED = np.array([[1, 1, 0], [1, 1, 1]], "float32")


def test_loads_and_loss_by_hand() -> None:
    balance = LoadBalance()
    balance.factor = 0.5
    weights = paddle.ones([2, 3, 1])
    scores = paddle.to_tensor(SCORES)
    scores.stop_gradient = weights.stop_gradient = False
    out = balance.record(weights, paddle.to_tensor(CHOSEN), scores, paddle.to_tensor(COUNTED))
    np.testing.assert_array_equal(out.numpy(), weights.numpy())
    assert balance.load.tolist() == [1, 1, 3, 0]
    # f = E / (k T) x tokens: 4 / 2 x [1, 1, 0, 0] and 4 / 3 x [0, 0, 3, 0]; P: means of the scores' parts
    parts = np.array([0.6 + 0.1 / 0.6, 0.2 + 0.3 / 0.6]) / 2
    assert float(balance.loss) == pytest.approx(2 * parts.sum() + 4 * 1.0, rel=1e-6)
    out.sum().backward()
    # of token 0: d/ds_i of sum_j f_j s_j / sum s / T = (f_i - sum_j f_j s_j) / T where the scores add up to 1
    f = np.array([2.0, 2.0, 0.0, 0.0])
    np.testing.assert_allclose(scores.grad.numpy()[0, 0], 0.5 * (f - f @ SCORES[0, 0]) / 2, rtol=1e-5)
    assert (scores.grad.numpy()[0, 2] == 0).all(), "padding"
    np.testing.assert_array_equal(weights.grad.numpy(), np.ones([2, 3, 1], "float32"))


def test_an_even_choice_costs_one() -> None:
    """Whatever the numbers of experts and of tokens."""
    balance = LoadBalance()
    balance.factor = 1.0
    chosen = np.stack([np.arange(8), (np.arange(8) + 1) % 8], -1)[None]
    balance.record(paddle.ones([1, 8, 2]), paddle.to_tensor(chosen), paddle.full([1, 8, 8], 0.3), None)
    assert float(balance.loss) == pytest.approx(1.0)
    assert balance.load.tolist() == [2.0] * 8


def model() -> Any:
    made = SparseLM(DeepSeekConfig(**{**SMOKE, "num_hidden_layers": 3}), Ops())
    rng = np.random.default_rng(0)
    for _, parameter in made.named_parameters():
        if parameter.ndim > 1:
            parameter.set_value(paddle.to_tensor(rng.normal(0, 0.1, parameter.shape).astype("float32")))
    made.train()
    return made


LENGTHS = [9, 5, 7, 3]


def step(mesh: Mesh, rows: list[list[int]], factor: float = 0.3) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Rows of each micro-batch, through a model; metrics, gradients as the optimizer gets them, and biases."""
    made = model()
    shards = [ParameterShard(name, parameter, mesh, None, 0) for name, parameter in made.named_parameters()]
    balance = ExpertBalance([made], PLAN, shards, mesh, factor, bias_rate=0.25)
    ids = np.random.default_rng(1).integers(3, 500, (4, max(LENGTHS)))
    batches = [
        {"weight": sum(LENGTHS[r] for r in batch), "lengths": np.array([LENGTHS[r] for r in batch])} for batch in rows
    ]
    balance.before_passes(lambda: batches, 1.0)
    for batch in rows:
        longest = max(LENGTHS[r] for r in batch)
        lengths = np.array([LENGTHS[r] for r in batch])
        document_starts = np.where(np.arange(longest) < lengths[:, None], 0, -1)
        hidden, _ = made.hidden_states(
            paddle.to_tensor(ids[batch, :longest]), document_starts=paddle.to_tensor(document_starts)
        )
        nll = F.cross_entropy(made.logits(hidden), paddle.to_tensor(ids[batch, :longest]), reduction="none").squeeze(-1)
        (nll * paddle.to_tensor((document_starts == 0).astype("float32"))).sum().backward()
    found = {s.name: g.numpy() / sum(LENGTHS) for s in shards if (g := s.finish_gradient()) is not None}
    balance.after_passes()
    metrics = balance.metrics()
    balance.after_update()
    found |= {n: p.numpy() for n, p in made.named_parameters() if n.endswith("bias")}
    return metrics, found


def test_loads_do_not_depend_on_how_a_batch_is_split() -> None:
    """Over micro-batches, whose padding differs, and over ranks."""
    metrics, expected = step(alone.MESH, [[0, 1, 2, 3]])
    without, unbalanced = step(alone.MESH, [[0, 1, 2, 3]], factor=0.0)
    assert metrics["experts/balance_loss"] > 1
    assert without == {"experts/max_load": metrics["experts/max_load"]}
    gate = "model.layers.1.mlp.gate.weight"
    assert np.linalg.norm(expected[gate] - unbalanced[gate]) > 0.01 * np.linalg.norm(expected[gate])
    several = [step(alone.MESH, [[0, 3], [1, 2]])]
    several += many.run(Degrees(1, 2, 1, 1), lambda mesh: step(mesh, [[[0], [3]], [[2, 1]]][mesh.rank]))
    for measured, found in several:
        assert measured == pytest.approx(metrics, rel=1e-6)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert np.linalg.norm(found[name] - value) <= 2e-6 * np.linalg.norm(value), name


def test_a_bias_moves_towards_the_mean() -> None:
    _, found = step(alone.MESH, [[0, 1, 2, 3]], factor=0.0)
    for name, bias in found.items():
        if name.endswith("bias"):
            assert bias.dtype == np.float32
            assert set(np.abs(bias)) <= {np.float32(0.25), np.float32(0)}
            assert (bias > 0).any()
            assert (bias < 0).any()


def test_a_pipeline_stage_picks_its_own_loads_from_the_sums_of_a_program() -> None:
    """And says of all of them how even they are."""
    whole = model()
    part = model()
    del part.model.layers._sub_layers["0"], part.model.layers._sub_layers["1"]
    shards = [ParameterShard(name, p, alone.MESH, None, 0) for name, p in part.named_parameters()]
    balance = ExpertBalance([part], PLAN, shards, alone.MESH, 0.5, 0.25, every_stage=whole)
    loads = np.array([[8, 0, 0, 0, 0, 0, 0, 0], [3, 0, 1, 1, 1, 1, 1, 0]], "float64")  # the first layer has no gate
    sums = {"loss": 2.0, LOADS: loads.flatten(), BALANCE_LOSS: 0.6}
    balance.use_program_sums(sums)
    assert sums == {"loss": 2.0}
    assert balance.metrics() == {"experts/max_load": (8 + 3) / 2, "experts/balance_loss": pytest.approx(1.2)}
    balance.after_update()
    (bias,) = (p for name, p in part.named_parameters() if name.endswith(PLAN.gate_bias))
    assert bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0.25]


def test_a_stage_without_the_weight_of_its_loss_is_refused() -> None:
    made = model()
    balance = ExpertBalance([made], PLAN, [], alone.MESH, 0.1, 0.0)
    with pytest.raises(UserError, match=r"train\.expert_balance_loss"):
        balance.before_passes(lambda: [{"lengths": np.array([3])}], 1.0)


def test_a_shape_without_experts_has_no_load() -> None:
    made = SparseLM(DeepSeekConfig(**{**SMOKE, "first_k_dense_replace": SMOKE["num_hidden_layers"]}), Ops())
    balance = ExpertBalance([made], PLAN, [], alone.MESH, 0.0, 0.25)
    balance.before_passes(list, 1.0)
    balance.after_passes()
    balance.after_update()
    assert (balance.num_gates, balance.metrics()) == (0, {})


def test_evaluation_counts_nothing() -> None:
    made = model()
    balance = ExpertBalance([made], PLAN, [], alone.MESH, 0.0, 0.0)
    made.eval()
    made.hidden_states(paddle.to_tensor([[5, 6, 7]]))
    made.train()
    with paddle.no_grad():  # the first pass of a layer that is computed again
        made.hidden_states(paddle.to_tensor([[5, 6, 7]]))
    assert all(float(b.load.sum()) == 0 for b, _ in balance._layers)


def test_a_bias_is_float32_in_a_16_bit_model() -> None:
    """Next to bfloat16 weights with float32 main parameters; a step of 0.001 would be lost in bfloat16."""
    with paddle.LazyGuard():
        made = SparseLM(DeepSeekConfig(**{**SMOKE, "num_hidden_layers": 2}), Ops())
    materialize(made, PLAN, alone.MESH, lambda name, shape, index: np.ones(shape, "float32"), "bfloat16")
    shards = {name: ParameterShard(name, p, alone.MESH, None, 1) for name, p in made.named_parameters()}
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert [n for n, shard in shards.items() if not shard.has_master] == [name]
    balance = ExpertBalance([made], PLAN, list(shards.values()), alone.MESH, 0.0, 0.001)
    balance.before_passes(list, 1.0)
    (layer,) = (b for b, _ in balance._layers)
    for _ in range(3):
        layer.load = paddle.to_tensor([3.0, 1, 1, 1, 1, 1, 1, 1])
        balance.after_passes()
        balance.after_update()
    moved = np.float32(0.001)
    up = np.float32(1) + moved + moved + moved
    down = np.float32(1) - moved - moved - moved
    np.testing.assert_array_equal(shards[name].gather_parameter().numpy(), np.array([down] + [up] * 7))
    train = TrainSection(max_steps=1, global_batch_size=1, micro_batch_size=1, learning_rate=0.1)
    state = {entry.name: entry.value for entry in Optimizer(list(shards.values()), train, 1).state()}
    assert state[f"{name}/master"].numpy()[0] == down
