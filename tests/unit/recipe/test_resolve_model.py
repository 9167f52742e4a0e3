"""Sources of a model's shape, weights, tokenizer and data, and the messages if they are missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import Problem, RecipeError
from llmsuite.base.resources import bundled
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.models.families.llama import PRESETS, LlamaConfig
from llmsuite.recipe.load import REMOVE
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.conftest import position
from tests.support.paths import DATA

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[Problem]]

TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
TINY = {**TINY, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A model directory as far as its shape goes."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "silu", **TINY}))
    return directory


def from_weights(weights: Path, **changes: Any) -> dict[str, Any]:
    return {"model.weights": str(weights), "model.preset": REMOVE, "model.tokenizer": REMOVE, **changes}


def test_shape_of_a_preset(plan: Plan) -> None:
    assert plan().model.config == LlamaConfig(**PRESETS["llama-7b"])


def test_single_dimensions_lie_over_the_preset(plan: Plan) -> None:
    config = plan({"model.config": {"num_hidden_layers": 2, "rope_theta": 5}}).model.config
    assert (config.num_hidden_layers, config.rope_theta, config.rms_norm_eps) == (2, 5.0, 1e-6)


def test_shape_without_a_preset(plan: Plan) -> None:
    config = plan({"model.preset": REMOVE, "model.config": TINY}).model.config
    assert config == LlamaConfig(**TINY)


def test_shape_of_the_weights(plan: Plan, weights: Path) -> None:
    found = plan(from_weights(weights))
    assert found.model.config == LlamaConfig(**TINY)
    assert found.model.weights == weights
    assert found.model.tokenizer == weights  # the one that lies with the weights


def test_tokenizer_of_its_own(plan: Plan, weights: Path) -> None:
    found = plan(from_weights(weights, **{"model.tokenizer": "data/tokenizer"}))
    assert found.model.tokenizer is not None
    assert found.model.tokenizer.resolve() == (bundled("data") / "tokenizer").resolve()


def test_recipe_and_weights_differ(problems: Problems, weights: Path, tmp_path: Path) -> None:
    (problem,) = problems({"model.weights": str(weights), "model.config": {"hidden_size": 16, "vocab_size": 65}})
    assert problem.key == "model.weights"
    assert problem.where == position(tmp_path / "recipe.json", '"weights"')
    assert problem.message == (
        f"{weights} has another shape: rms_norm_eps is 1e-06 in the recipe and 1e-05 in config.json; "
        "vocab_size is 65 in the recipe and 64 in config.json. "
        "`--model.preset=null --model.config='{}'` takes the shape from config.json"
    )


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ({}, ["--model.preset=null"]),
        ({"model.preset": REMOVE, "model.config": {"vocab_size": 65}}, ["--model.config={}"]),
        ({"model.config": {"vocab_size": 65}}, ["--model.preset=null", "--model.config={}"]),
    ],
)
def test_the_advice_of_the_message_takes_the_shape_of_the_weights(
    write_recipe: Callable[..., Path], registry: Registry, weights: Path, named: dict[str, Any], options: list[str]
) -> None:
    path = write_recipe({"model.weights": str(weights), "model.tokenizer": REMOVE, **named})
    with pytest.raises(RecipeError) as caught:
        plan_run(path, [], registry)
    (problem,) = caught.value.problems
    assert f". `{' '.join(options)}` takes the shape from config.json".replace("{}", "'{}'") in problem.message
    assert plan_run(path, options, registry).model.config == LlamaConfig(**TINY)


def test_recipe_may_repeat_and_change_what_only_beginnings_depend_on(plan: Plan, weights: Path) -> None:
    same = {**TINY, "initializer_range": 0.5, "max_position_embeddings": 9, "bos_token_id": 7, "eos_token_id": [1]}
    assert plan(from_weights(weights, **{"model.config": same})).model.config == LlamaConfig(**TINY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not supported; supported: llama"),
        ("{}", "model_type None is not supported"),
        ("{", "config.json"),
        ('{"model_type": "llama", "hidden_act": "gelu"}', "hidden_act is 'gelu'"),
    ],
)
def test_weights_with_an_odd_config(problems: Problems, weights: Path, tmp_path: Path, text: str, message: str) -> None:
    (weights / "config.json").write_text(text)
    (problem,) = problems(from_weights(weights))
    assert problem.key == "model.weights"
    assert problem.where == position(tmp_path / "recipe.json", '"weights"')
    assert message in problem.message


def test_unknown_preset(problems: Problems, tmp_path: Path) -> None:
    (problem,) = problems({"model.preset": "lama-7b"})
    known = ", ".join(sorted(PRESETS))
    assert problem == Problem(
        position(tmp_path / "recipe.json", '"preset"'),
        "model.preset",
        f"family llama has no preset 'lama-7b'; known: {known}",
    )


def test_model_of_unknown_size(problems: Problems, tmp_path: Path) -> None:
    (problem,) = problems({"model.preset": REMOVE})
    assert problem.where == position(tmp_path / "recipe.json", '"model"')
    assert problem.message == "has no shape; set model.weights, model.preset or model.config"


def test_weights_that_are_not_there(plan: Plan, problems: Problems, tmp_path: Path) -> None:
    (problem,) = problems({"model.weights": "runs/model", "model.preset": REMOVE})
    assert (problem.key, problem.where) == ("model.weights", position(tmp_path / "recipe.json", '"weights"'))
    assert problem.message.startswith("runs/model is not a directory with a model;")
    assert "`llmsuite import SOURCE -o runs/model`" in problem.message
    assert "name one on a hub, such as --model.weights=hf:ORG/NAME" in problem.message
    assert "or set model.preset" in problem.message
    # with a preset the recipe can be checked; only a run needs the files
    found = plan({"model.weights": "runs/model"})
    assert found.model.weights == Path("runs/model")
    with pytest.raises(RecipeError) as caught:
        found.check_files()
    where = position(tmp_path / "recipe.json", '"weights"')
    assert [(p.key, p.where) for p in caught.value.problems] == [("model.weights", where)]


def test_missing_files_are_reported_together(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()  # with nothing to read in it
    changes = {"data.train": "no.jsonl", "data.eval": "d", "model.weights": "w", "model.tokenizer": "t"}
    with pytest.raises(RecipeError) as caught:
        plan(changes).check_files()
    path = tmp_path / "recipe.json"
    found = {p.key: (p.where, p.message) for p in caught.value.problems}
    assert found.keys() == {"data.train", "data.eval", "model.weights", "model.tokenizer"}
    assert found["data.train"] == (
        position(path, '"train": "'), f"no.jsonl is not a file (working directory: {tmp_path})"
    )  # fmt: skip
    assert "d: cannot be read: is a directory without .json, .jsonl" in found["data.eval"][1]
    assert found["model.tokenizer"][1].startswith("t is not a directory with a tokenizer")
    assert "--model.tokenizer=hf:ORG/NAME" in found["model.tokenizer"][1]


def test_tokenizer_is_required_without_weights(problems: Problems) -> None:
    (problem,) = problems({"model.tokenizer": REMOVE})
    assert problem.key == "model.tokenizer"
    assert problem.message.endswith("add --model.tokenizer=DIR_OR_NAME, with a tokenizer.json")


def test_validate_refuses_a_missing_key_and_notes_a_missing_file(
    write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    why = "model.tokenizer: is required without model.weights"
    assert main(["--no-plugins", "validate", str(write_recipe({"model.tokenizer": REMOVE}))]) == 2
    assert why in capsys.readouterr().err
    assert main(["--no-plugins", "validate", str(write_recipe({"model.tokenizer": "nowhere"}))]) == 0
    assert "note: " in (out := capsys.readouterr().out)
    assert "nowhere is not a directory with a tokenizer" in out


def test_files_that_are_there(plan: Plan, weights: Path) -> None:
    plan().check_files()
    plan(from_weights(weights)).check_files()


def test_working_directory_goes_before_what_is_bundled(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan().data.train_file == bundled("data") / "preference" / "train.jsonl"
    own = tmp_path / "data" / "preference"
    own.mkdir(parents=True)
    (own / "train.jsonl").touch()
    assert plan().data.train_file.resolve() == (own / "train.jsonl").resolve()


def test_a_new_run_does_not_mix_with_an_old_one(plan: Plan, tmp_path: Path) -> None:
    found = plan({"output_dir": str(tmp_path / "run")})
    found.check_output()
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    with pytest.raises(RecipeError, match="holds checkpoints; add --resume") as caught:
        found.check_output()
    assert caught.value.problems[0].where == position(tmp_path / "recipe.json", '"output_dir"')


def test_unused_fields_do_not_make_another_shape(registry: Registry, tmp_path: Path) -> None:
    """qwen3_moe has no shared expert, and its config.json no width of one; that of the smoke recipes is another one."""
    family = registry.models["qwen_moe"]
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(family.config_cls(**family.smoke).to_hf()))
    recipe = bundled("recipes") / "qwen_moe" / "sft.json"
    words = [f"--model.weights={directory}"]
    words.append(f"--model.tokenizer={bundled('data') / 'tokenizer'}")
    found = plan_run(recipe, words, registry, smoke=True).model.config
    assert (found.num_hidden_layers, found.shared_size) == (family.smoke["num_hidden_layers"], 0)
    with pytest.raises(RecipeError, match="has another shape: moe_intermediate_size is 48 in the recipe and 32 in"):
        plan_run(recipe, [*words, "--model.config.moe_intermediate_size=48"], registry, smoke=True)


def test_a_new_model_ends_where_its_tokenizer_does(plan: Plan, tmp_path: Path) -> None:
    tokenizer = shutil.copytree(DATA / "tokenizer", tmp_path / "tokenizer")
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    named = {**config, "eos_token": "<|endoftext|>", "bos_token": "<|im_end|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(named))
    shape = {key: value for key, value in TINY.items() if not key.endswith("_token_id")}
    given = {"model.preset": REMOVE, "model.tokenizer": str(tokenizer), "model.config": {**shape, "vocab_size": 512}}
    found = plan(given).model.config
    assert (found.bos_token_id, found.eos_token_id) == (2, 0)
    found = plan({**given, "model.config": {**given["model.config"], "eos_token_id": [3]}}).model.config
    assert (found.bos_token_id, found.eos_token_id) == (2, [3])
