"""Which keys a run may change when it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmsuite.errors import UserError
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
