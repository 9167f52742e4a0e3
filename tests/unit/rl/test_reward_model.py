"""Scores of completions by a reward model, against passes over one completion at a time."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import Score
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.recipe.resolve import plan_run
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_model import model
from llmsuite.rl.reward_sections import BUILTIN, ModelRewardSection
from llmsuite.rl.reward_services import RewardServices
from llmsuite.rl.rewards import Rewards
from tests.support import tiny_llama
from tests.support.paths import ROOT
from tests.support.reward_case import section

SHAPE = dataclasses.replace(tiny_llama.CONFIG, vocab_size=512, head="score")
SERVICES = RewardServices(families=tiny_llama.FAMILIES, device=CpuBackend(), precision="fp32")
PROMPT = "What is 2 + 2?"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_llama.write(tmp_path / "rm", SHAPE, tokenizer=tiny_llama.TOKENIZER)
    return tmp_path / "rm"


def completions() -> list[Completion]:
    prompt = TextTokenizer(tiny_llama.TOKENIZER).encode(PROMPT)
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, 512, length).tolist() for length in (4, 1, 9, 2, 6)]
    return [
        Completion(
            prompt_ids=prompt, ids=row, logprobs=[-1.0] * len(row), finish_reason="stop", text="", columns={},
            group=0, number=number, prompt=PROMPT,
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip


def scorer(path: Path | None, size: int = 16) -> Score:
    return model(ModelRewardSection(weights=None if path is None else str(path), batch_size=size), SERVICES)


@paddle.no_grad()
def alone(rows: Sequence[Completion]) -> list[float]:
    """The score of each by a pass of its own."""
    live = tiny_llama.model(SHAPE)
    hidden = [live.hidden_states(paddle.to_tensor([[*c.prompt_ids, *c.ids]]))[0][0, -1:] for c in rows]
    return [live.scores(last).item() for last in hidden]


@pytest.mark.parametrize("size", [1, 2, 16])
def test_a_score_is_that_of_the_last_token(directory: Path, size: int) -> None:
    rows = completions()
    expected = alone(rows)
    assert max(expected) - min(expected) > 0.01
    # rows of other lengths are padded, which changes the rounding only
    np.testing.assert_allclose(scorer(directory, size)(rows), expected, rtol=1e-5, atol=1e-6)


def test_a_reward_model_is_a_reward_like_others(directory: Path) -> None:
    known = {spec.name: spec for spec in BUILTIN}
    own: dict[str, Any] = {"model": ModelRewardSection(weights=str(directory))}
    rewards = Rewards(section({"model": 2.0}, own), known, SERVICES)
    found = rewards.total(rewards.score(completions()))
    np.testing.assert_allclose(found, 2 * np.array(alone(completions())), rtol=1e-5, atol=1e-6)
    rewards.close()


def test_a_model_without_scores_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.model\.weights: is required"):
        scorer(None)
    tiny_llama.write(tmp_path / "lm", dataclasses.replace(SHAPE, head="language_model"))
    with pytest.raises(UserError, match="is a language model, which has no score head"):
        scorer(tmp_path / "lm")


def test_another_tokenizer_is_refused(directory: Path) -> None:
    rows = [dataclasses.replace(row, prompt_ids=[*row.prompt_ids[::-1]]) for row in completions()]
    with pytest.raises(UserError, match="has another tokenizer than the trained model"):
        scorer(directory)(rows)


def test_a_recipe_without_the_model_is_refused(registry: Registry, directory: Path) -> None:
    def checked(*words: str) -> None:
        functions = '--reward.functions={"model": 1.0}'
        plan_run(ROOT / "recipes" / "llama" / "ppo.json", [functions, *words], registry, smoke=True).check_files()

    with pytest.raises(RecipeError, match=r"reward\.model\.weights: is required"):
        checked()
    shutil.move(directory, moved := directory.with_name("moved"))
    with pytest.raises(RecipeError, match=r"reward\.model\.weights: .* is not a directory with a model"):
        checked(f"--reward.model.weights={directory}")
    checked(f"--reward.model.weights={moved}")
