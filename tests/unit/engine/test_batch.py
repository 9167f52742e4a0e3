"""Batches with static shapes: what a loss computes from them equals what it computes in eager mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.engine.batch import (
    BatchLayout,
    ProgramBatch,
    as_tokens,
    program_inputs,
    split_pairs,
    stat,
    sum_by_answer,
    sum_of_tokens,
    tensor,
    tokens_by_answer,
    total,
)
from llmsuite.engine.program_engine import ProgramLoss
from llmsuite.parallel.loss_ledger import BatchSum
from llmsuite.parallel.program.forward import MAXIMUM
from tests.support import grpo_case
from tests.support import online_dpo_case as online_dpo

LENGTH = 8
PAIRS: dict[str, Any] = {  # two rows of chosen answers, two of rejected ones; the first ones have two answers
    "input_ids": np.arange(24).reshape(4, 6),
    "lengths": np.array([6, 2, 5, 3]),
    "positions": np.array([0, 1, 3, 4, 5, 7, 12, 14, 15, 16, 19, 20]),
    "targets": np.arange(100, 112),
    "owners": np.array([0, 0, 1, 1, 1, 2, 3, 4, 4, 4, 5, 5]),
    "reference": np.arange(6, dtype="float64"),
    "pair_weights": np.array([1, 0.5, 0.25], "float32"),
    "weight": 1.75,
    "prepass_stats": {"kl": 0.5},
}
PACKED = BatchLayout(
    answers=["reference"], pairs=["pair_weights"], has_pairs=True, has_documents=True, slots=3
)  # fmt: skip


def _program_batch(batch: dict[str, Any], layout: BatchLayout) -> ProgramBatch:
    inputs = program_inputs(batch, layout, LENGTH)
    return ProgramBatch({name: paddle.to_tensor(array) for name, array in inputs.items()}, layout.has_pairs)


def test_answers_and_pairs_of_packed_rows() -> None:
    batch = _program_batch(PAIRS, PACKED)
    values = np.linspace(1, 2, 12).astype("float32")
    expected = np.bincount(PAIRS["owners"], values)
    full = np.zeros([4, LENGTH], "float32")
    full[np.divmod(PAIRS["positions"], 6)] = values
    full = full[[0, 2, 1, 3]]  # the rejected answers of a row follow the chosen ones
    of_answers = sum_by_answer(paddle.to_tensor(full), batch)
    chosen, rejected = split_pairs(of_answers, batch)
    is_taken = [[True, True, False], [True, False, False]]
    np.testing.assert_allclose(chosen.numpy()[is_taken], expected[:3], rtol=1e-6)
    np.testing.assert_allclose(rejected.numpy()[is_taken], expected[3:], rtol=1e-6)
    counts = split_pairs(tokens_by_answer(batch), batch)[0].numpy()
    assert counts.tolist() == [[2, 3, 2], [1, 1, 1]]  # an empty slot repeats the first answer of its row
    assert tensor(batch, "pair_weights").numpy().tolist() == [[1, 0.5, 0], [0.25, 0, 0]]
    assert split_pairs(tensor(batch, "reference"), batch)[1].numpy().tolist() == [[3, 4, 3], [5, 5, 5]]
    assert stat(batch, "kl").shape == [2, 3]
    assert float(sum_of_tokens(paddle.to_tensor(full + 1), batch)) == pytest.approx(values.sum() + 12)
    eager = sum_by_answer(paddle.to_tensor(values), PAIRS)
    np.testing.assert_allclose(eager.numpy(), expected, rtol=1e-6)


def test_positions_without_a_target_have_zeros() -> None:
    batch = _program_batch(PAIRS, PACKED)
    found = as_tokens(paddle.ones([4 * LENGTH]), batch).numpy()
    assert found.sum(1).tolist() == [5, 4, 1, 2]
    assert tensor(batch, "targets").numpy()[0].tolist() == [100, 101, 0, 102, 103, 104, 0, 0]


def test_numbers_are_known_to_the_engine_only() -> None:
    batch = _program_batch(PAIRS, PACKED)
    assert total(PAIRS, "weight") == 1.75
    assert total(batch, "weight") == batch["weight"] == BatchSum("weight")
    assert total(PAIRS, "pair_weights") == 1.75
    with pytest.raises(UserError, match=r'uses batch\["scores"\], which its `batch_layout` does not list; or set'):
        tensor(batch, "scores")


def test_rows_of_another_kind() -> None:
    layout = BatchLayout(rows=["x"])
    inputs = program_inputs({"x": np.ones([3, 2]), "weight": 3.0, "prepass_stats": {"mean": 2.0}}, layout, 0)
    assert {name: array.shape for name, array in inputs.items()} == {"x": (3, 2), "prepass_stats.mean": (3,)}


GRPO = {
    "tokens": (),
    "sequences and a correction": (
        "--grpo.importance_sampling_level=sequence",
        "--grpo.rollout_correction=tis",
        "--grpo.beta=0.1",
        "--grpo.reference=copy",
        "--rollout.temperature=0.7",
    ),
    "cispo": ("--grpo.loss=cispo",),
}


@pytest.mark.parametrize("name", [*GRPO, "online_dpo"])
def test_the_loss_of_completions_is_the_same_in_a_program(registry: Registry, name: str) -> None:
    live = grpo_case.model()
    batch: dict[str, Any]
    stage: Any
    if name == "online_dpo":
        stage = online_dpo.stage(registry, "--online_dpo.sft_weight=0.5")
        (batch,) = online_dpo.batches(stage, 3)
        batch["prepass_stats"] = {"pairs_per_token": 0.2}
    else:
        stage = grpo_case.stage(registry, *GRPO[name])
        batch = stage.collate(grpo_case.groups())
        rng = np.random.default_rng(0)
        shape = batch["targets"].shape
        batch["old"] = batch["sampled_logps"] + rng.normal(size=shape).astype("float32") * 0.1
        if "--grpo.beta=0.1" in GRPO[name]:
            batch["reference"] = rng.normal(size=shape).astype("float32") - 3
    terms = stage.loss(live, batch)
    terms.total.backward()
    expected = {name: p.grad.numpy().copy() for name, p in live.named_parameters()}
    live.clear_gradients()
    length = batch["input_ids"].shape[1] + 3
    inputs = program_inputs(batch, stage.batch_layout, length)
    loss = ProgramLoss(stage)
    found = loss(live, {key: paddle.to_tensor(array) for key, array in inputs.items()})
    found["loss"].backward()
    assert float(found["loss"]) == pytest.approx(float(terms.total), rel=1e-5, abs=1e-5)
    assert found.keys() == {"loss", *terms.sums, *(f"{MAXIMUM}{name}" for name in terms.maxima)}
    for key, (summed, weight) in terms.sums.items():
        assert float(found[key]) == pytest.approx(float(summed), rel=1e-5, abs=1e-5), key
        assert np.sum(batch[loss.denominators[key]]) == weight, key
    for key, values in terms.maxima.items():
        assert float(found[f"{MAXIMUM}{key}"].max()) == pytest.approx(float(values.max()), rel=1e-6)
    for key, parameter in live.named_parameters():
        far = np.linalg.norm(parameter.grad.numpy() - expected[key])
        assert far <= 1e-5 * np.linalg.norm(expected[key]), key
