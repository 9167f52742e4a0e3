"""Which keys a run may change when it goes on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from llmsuite.checkpoint.train_state import FORMAT, TrainState
from llmsuite.errors import UserError
from llmsuite.parallel.learning_rate import Schedule
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.schema.section import as_plain
from llmsuite.train.output import recipe_text
from llmsuite.train.resume import _training_keys, check_recipe
from tests.paths import ROOT


def test_how_many_are_drawn_together_is_no_part_of_a_run(registry: Registry) -> None:
    def keys(*words: str) -> dict[str, object]:
        plan = plan_run(ROOT / "recipes/llama/grpo.json", words, registry, smoke=True)
        return _training_keys(as_plain(plan.recipe))

    free = ("--rollout.batch_size=3", "--reward.workers=1", "--environment.workers=1", "--train.micro_batch_size=1")
    assert keys(*free) == keys()
    assert keys("--rollout.temperature=0.5") != keys()


@pytest.mark.parametrize(
    ("words", "anew"),
    [
        ((), "or give it as model.weights of a run"),
        (("--lora.rank=4",), "or `llmsuite merge` it and give that as model.weights"),
        (("--reft.rank=4",), "or choose another --output_dir"),
    ],
)
def test_another_recipe_is_refused_by_its_keys_alone(
    tmp_path: Path, registry: Registry, words: tuple[str, ...], anew: str
) -> None:
    def check(*more: str) -> None:
        recipe = [f"--output_dir={tmp_path}", *words, *more]
        check_recipe(plan_run(ROOT / "recipes/llama/sft.json", recipe, registry, smoke=True))

    started = plan_run(ROOT / "recipes/llama/sft.json", [f"--output_dir={tmp_path}", *words], registry, smoke=True)
    (tmp_path / "recipe.json").write_text(recipe_text(as_plain(started.recipe)))
    check("--engine.precision=bf16")  # without a checkpoint it begins at step 0
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    check("--engine.loss_chunk_tokens=8", "--engine.offload_optimizer=true", "--engine.recompute=none")
    with pytest.raises(UserError) as error:
        check("--engine.precision=bf16", "--train.learning_rate=1")
    assert f"{tmp_path}: was written by a run that differs in engine.precision, train.learning_rate;" in str(
        error.value
    )
    assert anew in str(error.value)


def test_another_length_is_judged_before_anything_is_read(tmp_path: Path, registry: Registry) -> None:
    words = [f"--output_dir={tmp_path}", "--train.warmup_ratio=0"]

    def check(*more: str) -> None:
        check_recipe(plan_run(ROOT / "recipes/llama/sft.json", [*words, *more], registry, smoke=True))

    started = plan_run(ROOT / "recipes/llama/sft.json", [*words, "--train.max_steps=4"], registry, smoke=True)
    (tmp_path / "recipe.json").write_text(recipe_text(as_plain(started.recipe)))
    last = tmp_path / "checkpoints" / "step-4"
    last.mkdir(parents=True)
    schedule = Schedule.of(as_plain(started.recipe.train), 4)
    state = TrainState(step=4, samples=32, seed=42, recipe_sha256="", schedule=dataclasses.asdict(schedule))
    for saved in (state, dataclasses.replace(state, schedule={})):  # and one of a version that did not tell
        (last / "state.json").write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(saved)}))
        check("--train.max_steps=4")
        with pytest.raises(UserError, match=rf"^{last}: the run had 4 steps and is to have 8; its learning rate was"):
            check("--train.max_steps=8")
        check("--train.max_steps=8", "--train.lr_schedule=cosine")
        with pytest.raises(UserError, match=f"^{last}: has step 4, and the run is to have 3 steps now"):
            check("--train.max_steps=3")
        with pytest.raises(UserError, match=r"differs in train.learning_rate;"):
            check("--train.max_steps=8", "--train.lr_schedule=cosine", "--train.learning_rate=1")
