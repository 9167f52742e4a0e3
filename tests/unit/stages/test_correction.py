"""Importance weights of tokens that another engine, or older weights, sampled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.grpo import Group
from tests.support.grpo_case import RECIPE, advantages_of, groups, logps, model, stage

CAP = 1.2


def sampled_elsewhere(temperature: float) -> list[Group]:
    """Groups whose log-probabilities are some way off those of the model."""
    live = model()
    moved = np.random.default_rng(2)

    def off(group: Group) -> Group:
        completions = [
            dataclasses.replace(c, logprobs=(logps(live, c, temperature) + moved.normal(0, 0.3, len(c.ids))).tolist())
            for c in group.completions
        ]
        return dataclasses.replace(group, completions=completions)

    return [off(group) for group in groups()]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["tis", "mis"])
def test_tokens_are_weighted_by_importance_weights(registry: Registry, kind: str, level: str) -> None:
    words = [f"--grpo.rollout_correction={kind}", f"--grpo.correction_level={level}", f"--grpo.correction_cap={CAP}"]
    made = stage(registry, *words, "--rollout.temperature=0.7")
    live = model()
    samples = sampled_elsewhere(0.7)
    terms = made.loss(live, made.collate(samples))
    total = 0.0
    weight = 0
    factors = []
    for group in samples:
        for c, advantage, is_trained in zip(group.completions, advantages_of(group), group.is_trained):
            difference = logps(live, c, 0.7) - np.array(c.logprobs)
            factor = np.exp(difference if level == "token" else np.full_like(difference, difference.mean()))
            inside = (factor >= 1 / CAP) & (factor <= CAP)
            factor = np.where(inside, factor, 0) if kind == "mis" else np.minimum(factor, CAP)
            factors += factor.tolist()
            if is_trained:  # the ratio to the model before the update is 1
                total -= float((factor * advantage).sum())
                weight += len(c.ids)
    assert float(terms.total) / terms.weight == pytest.approx(total / weight, rel=2e-5)
    found = {name: float(value) / count for name, (value, count) in terms.sums.items()}
    assert found["correction"] == pytest.approx(np.mean(factors), rel=1e-5)
    bounded = [factor == 0 if kind == "mis" else factor == CAP for factor in factors]
    assert found["correction/bounded"] == pytest.approx(np.mean(bounded))
    assert 0 < np.mean(bounded) < 1


def test_no_correction_is_applied_by_default(registry: Registry) -> None:
    made = stage(registry)
    live = model()
    there, elsewhere = (made.loss(live, made.collate(samples)) for samples in (groups(), sampled_elsewhere(1.0)))
    assert float(there.total) == float(elsewhere.total)
    assert not {"correction", "correction/bounded"} & there.sums.keys()


_STALE = ("--rollout.max_staleness=1", "--rollout.engine=openai", '--rollout.openai.urls=["http://a"]')
_TIS = "--grpo.rollout_correction=tis"


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        (_STALE, "rollout.max_staleness", "set grpo.rollout_correction to tis or mis"),
        ((*_STALE, _TIS, "--grpo.updates=2", "--train.max_steps=4"), "rollout.max_staleness", "grpo.updates 2"),
        ((*_STALE, _TIS, "--rollout.dynamic_sampling=true"), "rollout.max_staleness", "dynamic_sampling"),
        (("--rollout.max_staleness=1", _TIS), "rollout.max_staleness", "engine local samples in the training process"),
        (("--rollout.engine=openai",), "rollout.openai.urls", "is empty; start `llmsuite serve MODEL --rl`"),
        (("--rollout.engine=nothing",), "rollout.engine", "no rollout engine is called 'nothing'"),
        (
            ("--rollout.engine=vllm",),
            "rollout.engine",
            "registered: local, openai; for a vLLM server use engine openai",
        ),
        (("--grpo.correction_cap=3",), "grpo.correction_cap", "has no effect"),
        ((_TIS, "--grpo.correction_cap=1"), "grpo.correction_cap", "expected number > 1"),
        (('--rollout.openai.urls=["x"]',), "rollout.openai.urls", "write http://HOST:PORT"),
        (('--rollout.openai.urls=["http://a", "http://a"]',), "rollout.openai.urls", "names a server twice"),
    ],
)
def test_keys_that_cancel_each_other_are_refused(
    registry: Registry, words: tuple[str, ...], key: str, says: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        plan_run(RECIPE, words, registry, smoke=True)
    found = [problem for problem in raised.value.problems if problem.key == key]
    assert any(says in problem.message for problem in found), str(raised.value)
