"""`--smoke` makes a small run of any recipe: the same stage and loss, a tiny shape, embedded data, CPU processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmsuite.base.resources import bundled
from llmsuite.contract.registry import Registry, load_plugins
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.section import as_plain
from llmsuite.recipe.load import REMOVE
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.recipe.smoke import overrides_data, overrides_reward
from tests.conftest import PluginSite

Plan = Callable[..., RunPlan]
RECIPES = sorted(bundled("recipes").glob("*/*.json"))


@pytest.fixture(params=RECIPES, ids=lambda p: f"{p.parent.name}/{p.name}")
def recipe(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_recipe_has_a_smoke_run(
    recipe: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # nothing of it may depend on where it is started
    plan = plan_run(recipe, [], registry, smoke=True)
    plan.check_files()
    assert plan.parallel.device.name == "cpu"
    assert plan.model.weights is None
    shape = plan.model.config
    full = plan_run(recipe, [], registry).model.config
    assert shape.hidden_size == plan.model.family.smoke["hidden_size"]
    for key in plan.model.family.smoke_keeps:
        small = getattr(shape, key)
        large = getattr(full, key)
        assert small == large or (type(small) is int and type(large) is int)


def test_a_smoke_run_keeps_strategy_and_schedule(recipe: Path, registry: Registry) -> None:
    full, small = (plan_run(recipe, [], registry, smoke).recipe for smoke in (False, True))
    stage = full.stage
    changed = {key.partition(".")[2] for key in registry.stages[stage].smoke if key.startswith(f"{stage}.")}
    for key in ("stage", stage, "seed"):
        before = as_plain(full)[key]
        now = as_plain(small)[key]
        if key == "lora":  # blocks that divide tiny matrices
            changed.add("base_block")
        if key == "lora" or (key == stage and not registry.stages[stage].trains):  # answers are short
            before, now = ({k: v for k, v in section.items() if k not in changed} for section in (before, now))
        if key == "ppo":  # the critic begins with no weights either, and learns as fast as the tiny model
            for critic in (before["critic"], now["critic"]):
                for name in ("weights", "learning_rate"):
                    assert f"critic.{name}" in changed
                    critic.pop(name)
        if key == "gkd":  # the teacher is as tiny as the model, and begins with no weights either
            assert now["teacher"] is None
            for name in ("teacher", "teacher_preset", "teacher_config"):
                before.pop(name)
                now.pop(name)
        assert now == before
    assert small.model.family == full.model.family
    assert small.output_dir == f"{full.output_dir}-smoke"  # a real run is not written over
    if not registry.stages[stage].trains:
        return
    for key in ("lr_schedule", "warmup_ratio", "optimizer", "weight_decay", "max_grad_norm"):
        assert as_plain(small.train)[key] == as_plain(full.train)[key]
    assert small.engine.recompute == full.engine.recompute
    for key in ("sharding", "sequence_parallel", "pipeline_schedule", "virtual_pipeline_degree", "pipeline_cut"):
        assert as_plain(small.parallel)[key] == as_plain(full.parallel)[key]


COLUMNS = {"chosen": "good", "rejected": "bad"}
OF_COLUMNS = {"data.columns": COLUMNS, "data.format": "trl_preference"}


@pytest.mark.parametrize("smoke", [False, True])
def test_rows_that_the_command_line_names_are_read_as_the_recipe_says(plan: Plan, smoke: bool) -> None:
    data = plan(OF_COLUMNS, "--data.train=mine.csv", smoke=smoke).recipe.data
    assert (data.train, data.columns, data.format) == ("mine.csv", COLUMNS, "trl_preference")
    assert data.eval == ("mine.csv" if smoke else plan(OF_COLUMNS).recipe.data.eval)
    words = ("--data.train=mine.csv", "--data.eval=held.csv", "--data.columns.rejected=text", "--data.format=auto")
    data = plan(OF_COLUMNS, *words, smoke=smoke).recipe.data
    assert (data.eval, data.columns, data.format) == ("held.csv", {**COLUMNS, "rejected": "text"}, "auto")
    data = plan(OF_COLUMNS, "--data.train=mine.csv", "--data.columns={}", smoke=smoke).recipe.data
    assert data.columns == {}


@pytest.mark.parametrize("word", ['--reward.functions={"exact": 2}', '--reward={"functions": {"exact": 2}}'])
def test_rewards_that_the_command_line_names_stay(registry: Registry, word: str) -> None:
    recipe = bundled("recipes") / "llama/grpo.json"
    for words, functions in (([], {"format": 1.0}), (["--reward.workers=1"], {"format": 1.0}), ([word], {"exact": 2})):
        plan = plan_run(recipe, words, registry, smoke=True)
        assert plan.train.reward.functions == functions
        assert overrides_reward(plan.loaded) == ("exact" in functions), "so a run says"
        assert ("reward", "format", "pattern") not in plan.loaded.given or "format" in functions, "nothing reads it"


def test_a_reward_that_the_command_line_names_has_a_pattern(registry: Registry) -> None:
    recipe = bundled("recipes") / "llama/grpo.json"
    word = '--reward.functions={"format": 0.5, "exact": 1}'
    own = "--reward.format.pattern=[0-9]+"
    for words, pattern in (([word], "[a-m].*"), ([word, own], "[0-9]+")):
        reward = plan_run(recipe, words, registry, smoke=True).recipe.reward
        assert (reward.functions, reward.format.pattern) == ({"format": 0.5, "exact": 1}, pattern)


def test_rewards_read_columns_of_the_rows_that_the_command_line_names(registry: Registry) -> None:
    recipe = bundled("recipes") / "llama/grpo.json"
    mine = "--data.train=mine.jsonl"
    held = "--data.eval=held.jsonl"
    for words, name in (([mine], "mine.jsonl"), ([mine, held], "held.jsonl"), ([], "data/digits/sft/eval.jsonl")):
        assert plan_run(recipe, words, registry, smoke=True).recipe.data.eval == name


def test_embedded_rows_are_read_as_they_are(plan: Plan) -> None:
    data = plan(OF_COLUMNS, smoke=True).recipe.data
    assert (data.columns, data.format) == ({}, "auto")
    embedded = data.eval
    assert plan({}, "--data.train=mine.csv", smoke=True).recipe.data.eval == embedded


def test_variables_of_the_own_template_are_left_out(plan: Plan) -> None:
    made = plan({"data.chat_template_kwargs": {"enable_thinking": False}}, smoke=True)
    assert made.recipe.data.chat_template_kwargs == {}


def test_a_stage_without_embedded_rows_reads_those_of_the_recipe(
    write_recipe: Callable[..., Path], site: PluginSite
) -> None:
    site.install("spin")
    path = write_recipe({"stage": "spin", "data.train": "mine.csv", "data.columns": COLUMNS})
    plan = plan_run(path, [], load_plugins(), smoke=True)
    assert (plan.data.section.train, plan.data.section.columns) == ("mine.csv", COLUMNS)
    assert overrides_data(plan.loaded, plan.train.stage), "so a run says"


def test_prompts_of_columns(registry: Registry, tmp_path: Path) -> None:
    recipe = tmp_path / "infer.json"
    value = json.loads((bundled("recipes") / "llama/infer.json").read_text(encoding="utf-8"))
    value["data"] = {"prompts": "questions.csv", "columns": {"prompt": "question"}}
    recipe.write_text(json.dumps(value), encoding="utf-8")
    assert plan_run(recipe, [], registry, smoke=True).recipe.data.columns == {}
    mine = plan_run(recipe, ["--data.prompts=mine.csv"], registry, smoke=True).recipe.data
    assert (mine.prompts, mine.columns) == ("mine.csv", {"prompt": "question"})


@pytest.mark.parametrize(("steps", "expected"), [(30, 2), (2, 2), (1, 1)])
def test_steps_of_the_warm_up_fit_the_run(plan: Plan, steps: int, expected: int) -> None:
    found = plan({"train.warmup_ratio": 0.0, "train.warmup_steps": steps}, smoke=True)
    assert found.recipe.train.warmup_steps == expected


def test_a_smoke_run_is_small_and_cuts_what_is_cut(recipe: Path, registry: Registry) -> None:
    full, small = (plan_run(recipe, [], registry, smoke) for smoke in (False, True))
    assert small.smoke_of == full.parallel.degrees
    assert small.parallel.degrees.num_ranks == min(8, full.parallel.degrees.num_ranks)
    for axis in ("pp", "sharding", "tp"):  # what is cut stays cut
        assert (getattr(small.parallel.degrees, axis) > 1) == (getattr(full.parallel.degrees, axis) > 1)
    if not small.train.stage.trains:
        return
    assert small.recipe.train.max_steps <= 8  # type: ignore[operator]
    assert small.recipe.data.max_length <= small.model.config.max_position_embeddings
    assert small.recipe.train.micro_batch_size <= 4
    samples = (
        small.recipe.train.micro_batch_size * small.parallel.accumulate_steps * small.parallel.degrees.num_data_ranks
    )
    assert samples == small.recipe.train.global_batch_size


@pytest.mark.parametrize(
    ("devices", "degrees", "small"),  # pp, dp, sharding, tp
    [
        (8, (2, 1, 2, 2), (2, 1, 2, 2)),
        (16, (1, 1, 16, 1), (1, 1, 8, 1)),
        (128, (16, 1, 1, 8), (2, 1, 1, 4)),
        (2048, (16, 1, 32, 4), (2, 1, 2, 2)),
        (16, (2, 2, 2, 2), (2, 1, 2, 2)),  # four axes do not fit
        (64, (2, 16, 2, 1), (2, 2, 2, 1)),
        (3, (1, 3, 1, 1), (1, 2, 1, 1)),  # a batch of eight is not cut by three
        (6, (6, 1, 1, 1), (6, 1, 1, 1)),
        (12, (12, 1, 1, 1), (6, 1, 1, 1)),
    ],
)
def test_degrees_are_halved_until_they_fit(
    plan: Plan, devices: int, degrees: tuple[int, ...], small: tuple[int, ...]
) -> None:
    pp, dp, sharding, tp = degrees
    parallel: dict[str, object] = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp}
    if sharding > 1:
        parallel |= {"sharding": "stage1", "sharding_parallel_degree": sharding if dp > 1 else 1}
    changes = {"launch.num_devices": devices, "parallel": parallel, "train.global_batch_size": 2 * dp * sharding}
    found = plan(changes, smoke=True)
    assert dataclasses.astuple(found.smoke_of)[:4] == degrees  # type: ignore[arg-type]
    assert dataclasses.astuple(found.parallel.degrees)[:4] == small


def test_batch_is_the_same_on_any_mesh(plan: Plan) -> None:
    one = plan(smoke=True)
    two = plan(None, "--launch.num_devices=2", smoke=True)
    assert (one.parallel.degrees.num_ranks, two.parallel.degrees.num_ranks) == (1, 2)
    assert one.recipe.train.global_batch_size == two.recipe.train.global_batch_size
    assert one.parallel.accumulate_steps == 2 * two.parallel.accumulate_steps


INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_pipeline_degree": 3}


@pytest.mark.parametrize(
    ("stages", "keys", "kept", "layers"),
    [
        (4, INTERLEAVED, INTERLEAVED, 12),
        (4, {"pipeline_cut": "parameters"}, {"pipeline_cut": "parameters"}, 4),
        (4, {"pipeline_cut": [8, 16, 20]}, {"pipeline_cut": [1, 2, 3]}, 4),
        # cut down to 8 ranks
        (16, {"pipeline_cut": list(range(2, 32, 2))}, {"pipeline_cut": [1, 2, 3, 4, 5, 6, 7]}, 8),
    ],
)
def test_a_pipeline_stays_what_it_is(
    plan: Plan, stages: int, keys: dict[str, object], kept: dict[str, object], layers: int
) -> None:
    changes = {"launch.num_devices": stages, "parallel": {"pipeline_parallel_degree": stages, **keys}}
    small = plan(changes, smoke=True)
    assert small.parallel.degrees.pp == min(stages, 8)
    for key, value in kept.items():
        assert as_plain(small.recipe.parallel)[key] == value
    assert small.model.config.num_hidden_layers == layers


def test_overrides_lie_over_it(plan: Plan) -> None:
    small = plan({"train.num_epochs": 3, "train.max_steps": REMOVE}, "--train.max_steps=2", smoke=True)
    assert small.recipe.train.max_steps == 2
    assert small.recipe.train.num_epochs is None
    small = plan(None, "--model.config.num_hidden_layers=1", "--output_dir=here", smoke=True)
    assert small.model.config.num_hidden_layers == 1
    assert small.model.config.hidden_size == 64
    assert small.recipe.output_dir == "here"


def test_values_of_a_smoke_run_name_their_origin(plan: Plan, tmp_path: Path) -> None:
    loaded = plan({"model.config": {"rope_theta": 7}}, "--seed=1", smoke=True).loaded
    assert loaded.origin(("model", "config", "hidden_size")) == "--smoke"
    assert loaded.origin(("data", "max_length")) == "--smoke"
    assert loaded.origin(("seed",)) == "--seed=1"
    assert loaded.origin(("stage",)).startswith(f"{tmp_path / 'recipe.json'}:")
    assert ("model", "preset") not in loaded.origins


def test_recipe_has_to_be_right_before_it_is_made_small(problems: Callable[..., list[object]]) -> None:
    (problem,) = problems({"data.max_length": 0}, smoke=True)
    assert "data.max_length: expected integer > 0, found 0" in str(problem)


def test_a_stage_brings_its_own_data(plan: Plan, registry: Registry) -> None:
    changes = {"data": {"train": "mine.jsonl", "eval": "mine.jsonl", "format": "sharegpt_preference"}}
    small = plan(changes, smoke=True)
    assert as_plain(small.recipe.data)["train"] == registry.stages["dpo"].smoke["data.train"]
    assert as_plain(small.recipe.data)["eval"] == registry.stages["dpo"].smoke["data.eval"]
    assert small.recipe.data.format == "auto"
    small.check_files()


@pytest.mark.parametrize("recipe", ["llama/grpo.json", "llama/ppo.json", "llama/sft.json"])
def test_sections_of_a_stage_come_behind_the_keys_of_all_recipes(recipe: str, registry: Registry) -> None:
    """In `recipe.json`, in what loggers get, and in the lists of keys."""
    given = list(as_plain(plan_run(bundled("recipes") / recipe, [], registry, smoke=True).recipe))
    common = [field.name for field in dataclasses.fields(Recipe)]
    assert given[: len(common)] == common
    assert not {*given[len(common) :]} & {*common}
