"""Keys of the recipe that may change when a run is resumed."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.train_state import FORMAT, TrainState
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.engine.output import recipe_text
from llmsuite.engine.resume import file_digests, run_digest
from llmsuite.engine.run_record import RunRecord, training_keys
from llmsuite.parallel.learning_rate import Schedule
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT


def test_the_batch_size_of_sampling_may_change_on_resume(registry: Registry) -> None:
    def keys(*words: str) -> dict[str, object]:
        plan = plan_run(ROOT / "recipes/llama/grpo.json", words, registry, smoke=True)
        return training_keys(as_plain(plan.recipe))

    free = ("--rollout.batch_size=3", "--reward.workers=1", "--train.micro_batch_size=1")
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
        plan = plan_run(ROOT / "recipes/llama/sft.json", recipe, registry, smoke=True)
        RunRecord.from_recipe(plan.loaded, plan.output_dir).check()

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


def test_another_length_is_checked_before_any_data_is_read(tmp_path: Path, registry: Registry) -> None:
    words = [f"--output_dir={tmp_path}", "--train.warmup_ratio=0"]

    def check(*more: str) -> None:
        plan = plan_run(ROOT / "recipes/llama/sft.json", [*words, *more], registry, smoke=True)
        RunRecord.from_recipe(plan.loaded, plan.output_dir).check()

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


def recorded(directory: Path, registry: Registry, *words: str) -> RunRecord:
    """Return the record of a run with a checkpoint; writes the recipe that it was started with if there is none."""
    given = [f"--output_dir={directory}", *words]
    plan = plan_run(ROOT / "recipes/llama/sft.json", given, registry, smoke=True)
    path = directory / "recipe.json"
    if not path.exists():
        path.write_text(recipe_text(as_plain(plan.recipe)))
        (directory / "checkpoints" / "step-2").mkdir(parents=True)
    return RunRecord.from_recipe(plan.loaded, plan.output_dir)


def test_a_run_of_an_earlier_version_is_named_as_such(tmp_path: Path, registry: Registry) -> None:
    record = recorded(tmp_path, registry)
    record.check()
    path = tmp_path / "recipe.json"
    recipe = json.loads(path.read_text())
    del recipe["data"]["fill"], recipe["data"]["text_template"]  # the latter is null
    path.write_text(json.dumps(recipe))
    earlier = r"was written by an earlier version of llmsuite, whose recipe lacks data\.fill, data\.text_template"
    with pytest.raises(UserError, match=rf"{earlier}; it cannot be resumed; give it as model.weights"):
        record.check()
    with pytest.raises(UserError, match=rf"{earlier}, and differs in train\.learning_rate; it"):
        recorded(tmp_path, registry, "--train.learning_rate=1").check()
    recipe["data"]["fill"] = {}
    path.write_text(json.dumps(recipe))
    with pytest.raises(UserError, match=r"whose recipe lacks data\.text_template; it"):
        record.check()


def test_another_order_of_a_mixture_is_named(tmp_path: Path, registry: Registry) -> None:
    first, second = '"data/sft/eval.jsonl":0.5', '"data/sft/train.jsonl":null'
    recorded(tmp_path, registry, f"--data.mix={{{first},{second}}}").check()
    with pytest.raises(UserError, match=r"differs in the order of data\.mix;"):
        recorded(tmp_path, registry, f"--data.mix={{{second},{first}}}").check()


def test_the_order_of_evaluation_sets_does_not_matter(registry: Registry) -> None:
    class Reader:
        def mixed_files(self) -> dict[str, Path]:
            return {}

        def digest(self, path: Path) -> str:
            return str(path)

    def digest(*names: str) -> str:
        sets = ",".join(f'"{name}":"data/{name}/eval.jsonl"' for name in names)
        words = [f"--data.eval={{{sets}}}"]
        plan = plan_run(ROOT / "recipes/llama/sft.json", words, registry, smoke=True)
        stage: Any = types.SimpleNamespace(reader=Reader())
        return run_digest(training_keys(as_plain(plan.recipe)), "model", file_digests(plan.data, stage))

    assert digest("sft", "preference") == digest("preference", "sft")
