"""Number of copies from the device to the host in a step, each of which waits for the accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices.ops import Ops
from llmsuite.engine.batch import Batch
from llmsuite.engine.eager_engine import EagerEngine, train_step
from llmsuite.engine.expert_balance import ExpertBalance
from llmsuite.engine.passes import MicroBatchLoader, Passes
from llmsuite.engine.rules import StepRules
from llmsuite.models.families.deepseek import SMOKE, DeepSeekConfig
from llmsuite.models.sparse import SparseLM
from llmsuite.models.sparse_plan import PLAN
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossTerms
from llmsuite.parallel.pipeline import PipelineStage
from tests.support import alone, dpo_case

STEPS = 4


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """While active: copies made by `collective.read`, and whatever makes a number or an array of a tensor."""
    counts = {"read": 0, "all": 0}
    with monkeypatch.context() as patch:
        for name in ("numpy", "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__array__"):
            patch.setattr(paddle.Tensor, name, _counting(getattr(paddle.Tensor, name), counts, "all"))
        patch.setattr(collective, "read", _counting(collective.read, counts, "read"))
        yield counts


def _counting(function: Any, counts: dict[str, int], what: str) -> Any:
    def counting(*given: Any, **named: Any) -> Any:
        counts[what] += 1
        return function(*given, **named)

    return counting


class ManySums:
    """A loss with further metrics, all of them sums on the device."""

    def __init__(self, num_sums: int):
        self._num_sums = num_sums

    def collate(self, samples: Sequence[float]) -> Batch:
        return {"factors": samples, "num_tokens": len(samples), "num_supervised": len(samples)}

    def prepass(self, kind: Any, model: Any, batch: Batch) -> Any:
        raise AssertionError("there are no pre-passes")

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        total = sum((model.weight * factor).sum() for factor in batch["factors"])
        return LossTerms(total, 1.0, {f"sum {i}": (total.detach() * i, 2.0) for i in range(self._num_sums)})


@pytest.mark.parametrize("num_sums", [0, 1, 12])
def test_the_number_of_reads_does_not_depend_on_the_number_of_metrics(
    num_sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two a step: the loss with all metrics of the step, and the norm of its gradient. Both decide about it."""
    model = paddle.nn.Linear(3, 2, bias_attr=False)
    train = dpo_case.train_section(optimizer="adamw", weight_decay=0.1, max_grad_norm=1.0)
    optimizer = alone.optimizer(dict(model.named_parameters()), train, total_steps=STEPS)
    with counted(monkeypatch) as counts:
        for number in range(1, STEPS + 1):
            metrics = alone.step(number, [[1.0], [2.0, -0.5]], ManySums(num_sums), model, optimizer)
    assert len([name for name in metrics if name.startswith("sum")]) == num_sums
    assert counts == {"read": 2 * STEPS, "all": 2 * STEPS}


def test_8_bit_moments_are_updated_without_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paddle.nn.Linear(64, 128, bias_attr=False)
    train = dpo_case.train_section(optimizer="adamw_8bit", weight_decay=0.1, max_grad_norm=1.0)
    optimizer = alone.optimizer(dict(model.named_parameters()), train, total_steps=STEPS)
    with counted(monkeypatch) as counts:
        for number in range(1, STEPS + 1):
            alone.step(number, [[1.0], [2.0, -0.5]], ManySums(0), model, optimizer)
    assert counts == {"read": 2 * STEPS, "all": 2 * STEPS}


class NextTokens:
    """Rows of ids, each of which is trained to be followed by itself."""

    def collate(self, samples: Sequence[list[int]]) -> Batch:
        ids = np.array(samples)
        lengths = np.full(len(ids), ids.shape[1])
        return {
            "ids": ids, "lengths": lengths, "weight": float(ids.size), "num_tokens": ids.size,
            "num_supervised": ids.size,
        }  # fmt: skip

    def prepass(self, kind: Any, model: Any, batch: Batch) -> Any:
        raise AssertionError("there are no pre-passes")

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        hidden, _ = model.hidden_states(paddle.to_tensor(batch["ids"]))
        nll = model.token_nll(hidden.flatten(0, 1), paddle.to_tensor(batch["ids"].reshape(-1)))
        return LossTerms(nll.sum(), batch["weight"])


def run_of_experts(log_steps: int) -> list[dict[str, float]]:
    """Steps of a model with experts, balanced by a loss and a bias, of which one in `log_steps` is logged."""
    paddle.seed(3)
    made = SparseLM(DeepSeekConfig(**{**SMOKE, "num_hidden_layers": 3}), Ops())
    made.train()
    train = dpo_case.train_section(optimizer="adamw", weight_decay=0.1, max_grad_norm=1.0)
    optimizer = alone.optimizer(dict(made.named_parameters()), train, total_steps=STEPS)
    balance = ExpertBalance([made], PLAN, optimizer.shards, alone.MESH, 0.3, 0.25)
    part = PipelineStage([made], alone.MESH, made.config.hidden_size, [], None)
    found = []
    for number in range(1, STEPS + 1):
        rows = [[[number + 3, 8, 5, 7]], [[9, 4, 6, number + 30]]]
        engine = EagerEngine(Passes(NextTokens(), part, "1F1B"), optimizer, StepRules(callbacks=[balance]))
        batches = MicroBatchLoader(rows, NextTokens().collate)
        metrics = train_step(engine, number, batches, {"stop": False}, is_logged=number % log_steps == 0)
        metrics.pop("reader_seconds")
        found.append(metrics)
    return found


def test_metrics_of_callbacks_are_read_only_in_logged_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of experts, once in so many steps; what is logged is the same, bit for bit."""
    counts = {}
    runs = {}
    for log_steps in (1, 2, STEPS):
        with monkeypatch.context() as patch:
            copies = counts[log_steps] = {"read": 0}
            patch.setattr(collective, "read", _counting(collective.read, copies, "read"))
            runs[log_steps] = run_of_experts(log_steps)
    assert {log_steps: found["read"] for log_steps, found in counts.items()} == {
        1: 3 * STEPS,
        2: 2 * STEPS + STEPS // 2,
        STEPS: 2 * STEPS + 1,
    }
    for log_steps in (2, STEPS):
        for number in range(log_steps, STEPS + 1, log_steps):
            assert runs[log_steps][number - 1] == runs[1][number - 1]
        assert "experts/max_load" not in runs[log_steps][0]
    assert runs[1][-1]["experts/max_load"] >= 1


def test_a_step_with_a_request_returns_all_metrics() -> None:
    """It is logged if the vote stops the run."""
    made = SparseLM(DeepSeekConfig(**{**SMOKE, "num_hidden_layers": 3}), Ops())
    made.train()
    train = dpo_case.train_section(optimizer="sgd", weight_decay=0.0)
    optimizer = alone.optimizer(dict(made.named_parameters()), train, total_steps=2)
    balance = ExpertBalance([made], PLAN, optimizer.shards, alone.MESH, 0.0, 0.0)
    part = PipelineStage([made], alone.MESH, made.config.hidden_size, [], None)
    engine = EagerEngine(Passes(NextTokens(), part, "1F1B"), optimizer, StepRules(callbacks=[balance]))
    all_metrics = [
        train_step(engine, 1, MicroBatchLoader([[[5, 6, 7]]], NextTokens().collate), {"stop": asked}, is_logged=False)
        for asked in (False, True)
    ]
    assert ["experts/max_load" in metrics for metrics in all_metrics] == [False, True]
