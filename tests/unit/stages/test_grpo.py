"""What the stage `grpo` learns from fixed completions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import paddle
import pytest

from llmsuite.contract.registry import Registry
from llmsuite.inference.sampling import log_softmax
from llmsuite.models.dense import DenseLM
from llmsuite.rl.completion import Completion
from llmsuite.stages import rl_losses
from llmsuite.stages.grpo import Group, GrpoStage
from tests.support.graphs import SLOW_ON_GPUS, gradient_nodes
from tests.support.grpo_case import LENGTHS, advantages_of, groups, logps, model, stage
from tests.support.sampled import sampled_positions


def expected_loss(live: DenseLM, old: Sequence[np.ndarray], temperature: float, loss: str) -> float:
    """The losses of the papers, completion by completion, with clip 0.2 and 0.28."""
    total = 0.0
    weight = 0.0
    flat = [
        (c, a, k) for group in groups() for c, a, k in zip(group.completions, advantages_of(group), group.is_trained)
    ]
    for (c, advantage, is_trained), before in zip(flat, old):
        if not is_trained:
            continue
        now = logps(live, c, temperature)
        ratio = np.exp(now - before)
        if loss == "gspo":
            ratio = np.full_like(ratio, np.exp((now - before).mean()))
        terms = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
        if loss == "cispo":
            terms = -np.minimum(ratio, 1.28) * advantage * now
        total += {"dapo": terms.sum(), "cispo": terms.sum(), "dr_grpo": terms.sum() / 7}.get(loss, terms.mean())
        weight += len(c.ids) if loss in ("dapo", "cispo") else 1
    return total / weight


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "cispo", "gspo"])
@pytest.mark.parametrize(("temperature", "padding_free"), [(1.0, False), (0.7, True)])
def test_losses_are_those_of_the_papers(registry: Registry, loss: str, temperature: float, padding_free: bool) -> None:
    words = (
        ["--grpo.loss=grpo", "--grpo.importance_sampling_level=sequence"] if loss == "gspo" else [f"--grpo.loss={loss}"]
    )
    clip = ["--grpo.epsilon_high=0.28", f"--rollout.temperature={temperature}"]
    made = stage(registry, *words, *clip, padding_free=padding_free)
    live = model()
    moved = np.random.default_rng(1)
    flat = [c for group in groups() for c in group.completions]
    old = [logps(live, c, temperature) + moved.normal(0, 0.3, len(c.ids)) for c in flat]
    batch = made.collate(groups())
    batch["old"] = np.concatenate(old).astype("float32")
    terms = made.loss(live, batch)
    assert not gradient_nodes(terms.total) & SLOW_ON_GPUS
    assert float(terms.total) / terms.weight == pytest.approx(expected_loss(live, old, temperature, loss), rel=2e-5)


@pytest.mark.parametrize(
    ("loss", "names"),
    [("dapo", ["clip_ratio/high", "clip_ratio/low"]), ("cispo", ["clip_ratio/high"]), ("sapo", [])],
)
def test_a_loss_with_a_clip_has_its_metrics(registry: Registry, loss: str, names: list[str]) -> None:
    made = stage(registry, f"--grpo.loss={loss}")
    found = made.loss(model(), made.collate(groups()))
    assert sorted(name for name in found.sums if name.startswith("clip_ratio")) == names


@pytest.mark.parametrize("padding_free", [False, True])
def test_observations_are_input_and_not_trained_on(registry: Registry, padding_free: bool) -> None:
    """The loss is that of the model's own tokens, each after all that stands before it."""
    made = stage(registry, padding_free=padding_free)
    live = model()
    episodes = []
    count = 0
    for group in groups():
        rows = []
        for c, is_trained in zip(group.completions, group.is_trained):
            sampled_mask = [i % 3 != 1 for i in range(len(c.ids))]
            rows.append(dataclasses.replace(c, sampled_mask=sampled_mask, logprobs=[-1.0] * sum(sampled_mask)))
            count += sum(sampled_mask) if is_trained else 0
        episodes.append(dataclasses.replace(group, completions=rows))
    batch = made.collate(episodes)
    assert batch["num_supervised"] == sum(c.num_sampled for group in episodes for c in group.completions)
    assert batch["completion_lengths"] == [c.num_sampled for group in episodes for c in group.completions]
    found = made.loss(live, batch)
    assert found.weight == count
    # at a ratio of 1 the clip is not felt, so that the gradient is that of -advantage x log p
    (found.total / found.weight).backward()
    gradient = {name: p.grad.numpy().copy() for name, p in live.named_parameters() if p.grad is not None}
    expected = _gradient_of_own_tokens(episodes, count)
    assert gradient.keys() == expected.keys()
    for name in gradient:
        assert np.abs(gradient[name] - expected[name]).max() <= 1e-6 * max(1.0, np.abs(expected[name]).max()), name


def _gradient_of_own_tokens(episodes: Sequence[Group], count: int) -> dict[str, np.ndarray]:
    """Of -advantage x log p, completion by completion, by forward passes of their own."""
    live = model()
    for group in episodes:
        for c, advantage, is_trained in zip(group.completions, advantages_of(group), group.is_trained):
            if is_trained:
                logits = live(paddle.to_tensor([[*c.prompt_ids, *c.ids]]))[0]
                next_logits = logits[len(c.prompt_ids) - 1 : -1]
                found = paddle.nn.functional.log_softmax(next_logits)[list(range(len(c.ids))), list(c.ids)]
                (-float(advantage) / count * sum(found[i] for i in sampled_positions(c))).backward()
    return {name: p.grad.numpy() for name, p in live.named_parameters() if p.grad is not None}


def _gradients(made: GrpoStage, size: int) -> tuple[dict[str, np.ndarray], list[float]]:
    live = model()
    weight = 0.0
    ratios = []
    samples = groups()
    for i in range(0, len(samples), size):
        terms = made.loss(live, made.collate(samples[i : i + size]))
        terms.total.backward()
        weight += terms.weight
        total, count = terms.sums["ratio"]
        ratios.append(float(total) / count)
    return {name: p.grad.numpy() / weight for name, p in live.named_parameters()}, ratios


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_a_gradient_does_not_depend_on_the_cut(registry: Registry, loss: str) -> None:
    full, ratios = _gradients(stage(registry, f"--grpo.loss={loss}"), 3)
    assert ratios == [1.0]
    for size, padding_free in itertools.product((1, 2, 3), (False, True)):
        found, ratios = _gradients(stage(registry, f"--grpo.loss={loss}", padding_free=padding_free), size)
        assert set(ratios) == {1.0}
        for name, expected in full.items():
            assert np.abs(found[name] - expected).max() <= 1e-6 * max(1.0, np.abs(expected).max()), name


def _entropies(live: DenseLM, c: Completion, temperature: float) -> np.ndarray:
    with paddle.no_grad():
        logits = live(paddle.to_tensor([[*c.prompt_ids, *c.ids]])).numpy()[0]
    rows = np.array([log_softmax(row) for row in logits[len(c.prompt_ids) - 1 : -1] / temperature])
    return -(np.exp(rows) * rows).sum(-1)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_the_entropy_is_a_mean_over_tokens_whatever_the_loss_is(registry: Registry, loss: str) -> None:
    words = [f"--grpo.loss={loss}", "--rollout.temperature=0.7"]
    live = model()
    counted = [c for g in groups() for c, counts in zip(g.completions, g.is_trained) if counts]
    normaliser = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant"}[loss]
    weight = rl_losses.entropy_weight(normaliser, *[[len(c.ids) for c in counted]] * 2, 7)  # type: ignore[arg-type]
    weighed = [dataclasses.replace(group, entropy_weight=weight) for group in groups()]

    def value(coef: float, size: int) -> float:
        made = stage(registry, *words, f"--grpo.entropy_coef={coef}", padding_free=size == 2)
        terms = [made.loss(live, made.collate(weighed[i : i + size])) for i in range(0, 3, size)]
        return sum(float(t.total) for t in terms) / sum(t.weight for t in terms)

    mean = np.concatenate([_entropies(live, c, 0.7) for c in counted]).mean()
    for size in (1, 2, 3):
        assert value(0.5, size) - value(0.0, size) == pytest.approx(-0.5 * mean, abs=2e-6)


def test_completions_that_do_not_count_change_nothing(registry: Registry) -> None:
    made = stage(registry)
    live = model()
    changed = groups()
    assert not changed[1].is_trained[1]
    before = made.loss(live, made.collate(changed))
    advantages_of(changed[1])[1] = 1e3
    after = made.loss(live, made.collate(changed))
    assert float(before.total) == float(after.total)
    assert after.weight == sum(map(sum, LENGTHS)) - LENGTHS[1][1]
