"""What stages that compare answers give a program: the loss and the metrics that they have op by op."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.cache import isolated_cache
from llmsuite.engine.batch import program_inputs
from llmsuite.engine.program_engine import ProgramLoss
from llmsuite.engine.row_reader import PackingReader
from llmsuite.engine.stage import Stage
from llmsuite.stages.kto import _answers
from llmsuite.stages.pairs import join
from llmsuite.stages.rm import RmStage
from llmsuite.stages.sections import RmSection
from tests.support import dpo_case
from tests.support.graphs import SLOW_ON_GPUS, gradient_nodes
from tests.support.kto_case import made as made_kto

LENGTH = 256
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"label_smoothing": 0.1},
    "sigmoid and sft": {"sft_weight": 0.3},
    "cpo and sft of answers": {"loss": "cpo", "beta": 0.5, "sft_weight": 0.3, "sft_mean": "answers"},
    "hinge": {"loss": "hinge"},
    "ipo": {"loss": "ipo"},
    "ipo_mean": {"loss": "ipo_mean"},
    "kto_pair": {"loss": "kto_pair", "beta": 0.5},
    "orpo": {"loss": "orpo", "beta": 0.5},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.5},
}
KTO: dict[str, dict[str, Any]] = {
    "kto": {"undesirable_weight": 1.5},
    "apo_zero": {"loss": "apo_zero", "desirable_weight": 0.5},
}
RM: dict[str, dict[str, Any]] = {"rm": {"margin": 0.5, "center_rewards": 0.01}}
STATS = {"kl/chosen": 0.7, "kl/rejected": -0.3, "kl": 0.4, "pairs_per_token": 0.03}


def _made(name: str) -> tuple[Stage[Any], list[Any]]:
    if name in KTO:
        stage, samples, _ = made_kto(**KTO[name])
        return stage, samples
    dpo = dpo_case.stage(**DPO.get(name, {}))
    pairs, _ = dpo_case.pairs(dpo, dpo_case.rows(5))
    if name not in RM:
        return dpo, pairs
    pairs = [dataclasses.replace(pair, margin=own) for pair, own in zip(pairs, (None, 0.0, 1.5, -2.0, None))]
    return RmStage(RmSection(**RM[name]), dpo.context), pairs


def _gradients(model: Any) -> dict[str, np.ndarray]:
    found = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients()
    return found


@pytest.mark.parametrize(
    ("name", "is_packed"), [*((name, False) for name in (*DPO, *KTO, *RM)), *((name, True) for name in (*DPO, *RM))]
)
def test_the_program_loss_equals_the_eager_loss(
    name: str, is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))
    stage, samples = _made(name)
    model = dpo_case.model(head="score" if name in RM else "language_model")
    if name in RM:
        model.score.weight.set_value(
            np.random.default_rng(0).normal(size=[model.config.hidden_size, 1]).astype("float32")
        )
    stage.before_training(model, samples)
    model.train()
    if (reference := getattr(stage, "_reference", None)) and reference.table:
        by_row = [_answers([sample]) if name in KTO else sample.answers for sample in samples]
        answers = list(itertools.chain.from_iterable(by_row))
        reference.table = dpo_case.MovedLogps(reference.table, -0.5, answers)
    if is_packed:  # rows of two pairs, one and two, and places for three
        samples = [join(samples[:2]), samples[2], join(samples[3:])]
        monkeypatch.setattr(stage, "_is_packed", True)
        reader = PackingReader(stage, stage.context.data.max_length, join)
        reader.max_pack_size = 3
        monkeypatch.setattr(stage, "reader", reader)
    batch = {**stage.collate(samples), "prepass_stats": STATS}
    terms = stage.loss(model, batch)
    assert not gradient_nodes(terms.total) & SLOW_ON_GPUS
    terms.total.backward()
    expected = _gradients(model)

    inputs = program_inputs(batch, stage.batch_layout, LENGTH)
    assert {len(array) for array in inputs.values()} <= {len(samples), 2 * len(samples)}
    assert {size for array in inputs.values() for size in array.shape[1:]} <= {2, LENGTH, *([3] if is_packed else [])}
    loss = ProgramLoss(stage)
    found = loss(model, {key: paddle.to_tensor(array) for key, array in inputs.items()})
    found["loss"].backward()
    assert float(found["loss"]) == pytest.approx(float(terms.total), rel=1e-6)
    assert found.keys() == {"loss", *terms.sums}
    for key, (total, weight) in terms.sums.items():
        assert np.sum(batch[loss.denominators[key]]) == weight, key
        # margins are differences of sums over an answer, which may be much larger: their rounding is absolute
        assert float(found[key]) == pytest.approx(float(total), rel=1e-5, abs=1e-5), key
    for key, gradient in _gradients(model).items():
        far = np.linalg.norm(gradient - expected[key])
        assert far <= 3e-6 * np.linalg.norm(expected[key]), key


def test_a_pair_stays_together() -> None:
    """Programs cut rows over data ranks: each has both answers of its pairs."""
    stage, pairs = _made("rm")
    inputs = program_inputs(stage.collate(pairs), stage.batch_layout, LENGTH)
    for i, pair in enumerate(pairs):
        for row, answer in zip(inputs["input_ids"][2 * i : 2 * i + 2], pair.answers):
            ids = [*answer.prompt, *answer.ids]
            assert row[: len(ids)].tolist() == ids
    assert inputs["answers"].sum(1).tolist() == [1.0] * 2 * len(pairs)
