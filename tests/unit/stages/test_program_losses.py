"""What stages that compare answers give a program: the loss and the metrics that they have op by op."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.cache import private_cache
from llmsuite.stages.kto import _answers
from llmsuite.stages.pairs import join
from llmsuite.stages.rm import RmStage
from llmsuite.stages.sections import RmSection
from llmsuite.train.stage import Stage
from tests.unit import dpo_case
from tests.unit.stages.test_kto import made as made_kto

LENGTH = 256
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"label_smoothing": 0.1},
    "sigmoid and sft": {"sft_weight": 0.3},
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
    return (RmStage(RmSection(**RM[name]), dpo.context) if name in RM else dpo), pairs


def _gradients(model: Any) -> dict[str, np.ndarray]:
    found = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients()
    return found


@pytest.mark.parametrize(
    ("name", "is_packed"), [*((name, False) for name in (*DPO, *KTO, *RM)), *((name, True) for name in (*DPO, *RM))]
)
def test_equals_the_loss_op_by_op(name: str, is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(private_cache(tmp_path)))
    stage, samples = _made(name)
    model = dpo_case.model(head="score" if name in RM else "language_model")
    if name in RM:
        model.score.weight.set_value(
            np.random.default_rng(0).normal(size=[model.config.hidden_size, 1]).astype("float32")
        )
    stage.before_training(model, samples)
    model.train()
    if (reference := getattr(stage, "_reference", None)) and reference.known:
        by_row = [_answers([sample]) if name in KTO else sample.answers for sample in samples]
        answers = list(itertools.chain.from_iterable(by_row))
        reference.known = dpo_case.MovedLogps(reference.known, -0.5, answers)
    if is_packed:  # rows of two pairs, one and two, and places for three
        samples = [join(samples[:2]), samples[2], join(samples[3:])]
        monkeypatch.setattr(stage, "_is_packed", True)
        monkeypatch.setattr(stage, "_most_pairs", 3)
    batch = {**stage.collate(samples), "prepass_stats": STATS}
    terms = stage.loss(model, batch)
    terms.total.backward()
    expected = _gradients(model)

    # as the engine does: divided before, and other means brought to their own weight
    inputs = dict(stage.program_inputs(batch, LENGTH))
    assert {len(array) for array in inputs.values()} <= {len(samples), 2 * len(samples)}
    assert {size for array in inputs.values() for size in array.shape[1:]} <= {2, LENGTH, *([3] if is_packed else [])}
    inputs["weights"] = (inputs["weights"] / terms.weight).astype("float32")
    found = stage.program_loss(model, {key: paddle.to_tensor(array) for key, array in inputs.items()})
    found["loss"].backward()
    assert float(found["loss"]) == pytest.approx(float(terms.total) / terms.weight, rel=1e-6)
    weights = stage.program_weights(batch)
    assert found.keys() == {"loss", *terms.sums}
    for key, (total, weight) in terms.sums.items():
        assert weights.get(key, terms.weight) == weight, key
        # margins are differences of sums over an answer, which may be large beside them: their rounding is absolute
        assert float(found[key]) * terms.weight == pytest.approx(float(total), rel=1e-5, abs=1e-5), key
    for key, gradient in _gradients(model).items():
        far = np.linalg.norm(gradient * terms.weight - expected[key])
        assert far <= 3e-6 * np.linalg.norm(expected[key]), key


def test_a_pair_stays_together() -> None:
    """Programs cut rows over data ranks: each has both answers of its pairs."""
    stage, pairs = _made("rm")
    inputs = stage.program_inputs(stage.collate(pairs), LENGTH)
    for i, pair in enumerate(pairs):
        for row, answer in zip(inputs["input_ids"][2 * i : 2 * i + 2], pair.answers):
            ids = [*answer.prompt, *answer.ids]
            assert row[: len(ids)].tolist() == ids
    assert inputs["last"].sum(1).tolist() == [1.0] * 2 * len(pairs)
