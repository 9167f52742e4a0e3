"""`llmsuite recipe new`: degrees by its rule; what it writes is valid for any stage, family and number of devices."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.cli import new_recipe as new_recipe_command
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.recipe.new import METHODS, Choice, RowLengths, choose_degrees, data_ranks, fit_to_rows, new_recipe
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text
from tests.support.families import FAMILIES
from tests.support.paths import ROOT

BILLION = 10**9


@pytest.mark.parametrize(
    ("parameters", "devices", "adapters", "degrees"),
    [
        (1 * BILLION, 8, False, (1, 1)),  # 6 + 12 / 8 bytes
        (8 * BILLION, 8, False, (4, 1)),  # 8 / 2 x (6 + 3) = 36 GB; 8 / 4 x (6 + 6) = 24
        (8 * BILLION, 8, True, (1, 1)),  # 16 GB
        (8 * BILLION, 1, False, (1, 1)),  # it is not more than there is
        (70 * BILLION, 64, False, (8, 4)),  # 70 / 16 x (6 + 3) = 39; 70 / 32 x (6 + 6) = 26
        (8 * BILLION, 6, False, (2, 1)),  # four do not divide six
    ],
)
def test_degrees_fit_model_and_devices(parameters: int, devices: int, adapters: bool, degrees: tuple[int, int]) -> None:
    assert choose_degrees(parameters, devices, adapters, lambda tp, pp: True) == degrees


def test_models_that_tensor_parallel_cannot_shard_get_a_pipeline() -> None:
    assert choose_degrees(8 * BILLION, 8, False, lambda tp, pp: tp == 1) == (1, 4)
    assert choose_degrees(8 * BILLION, 8, False, lambda tp, pp: tp <= 2 and pp == 1) == (2, 1)


def test_every_choice_is_valid(registry: Registry, tmp_path: Path) -> None:
    sizes = {"llama": 8, "qwen": 8, "qwen_moe": 30, "ernie": 0.4, "ernie_moe": 22, "gpt": 1.5, "deepseek": 236}
    presets = {
        "llama": "llama-3.1-8b", "qwen": "qwen3-8b", "qwen_moe": "qwen3-30b-a3b", "ernie": "ernie-4.5-0.3b",
        "ernie_moe": "ernie-4.5-21b-a3b", "gpt": "gpt2-xl", "deepseek": "deepseek-v2",
    }  # fmt: skip
    path = tmp_path / "recipe.json"
    for stage, family, devices, device in itertools.product(
        ("pretrain", "sft", "lora", "dpo"), sizes, (1, 2, 8, 12, 64, 256), ("gpu", "cpu")
    ):
        choice = Choice(stage, registry.models[family], presets[family], devices, device)
        recipe = new_recipe(
            choice, int(sizes[family] * BILLION), "adapters_only" in registry.stages[stage].capabilities
        )
        path.write_text(recipe_text(recipe))
        plan = plan_run(path, [], registry)
        assert plan.parallel.degrees.num_ranks == devices, choice
        if device == "cpu":
            assert plan.parallel.degrees.num_data_ranks == devices


def test_text_in_another_column_of_a_table_is_to_do(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = weights.parent / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"body": "a"}]), rows)
    words = ["--no-plugins", "recipe", "new", "--stage", "pretrain", "--weights", str(weights), "--device", "cpu"]
    assert main([*words, "--num_devices", "1", "--data", str(rows), "-o", str(weights.parent / "a.json")]) == 0
    todo = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to do: data")]
    assert todo == [
        f"to do: data.train: {rows}: has no column 'text'; it has body; pretrain.key, or --key of `llmsuite data "
        "index`, names the column, such as --pretrain.key=body"
    ]


def test_a_stage_without_recipes(registry: Registry) -> None:
    with pytest.raises(UserError, match="llmsuite has no recipe to start from"):
        new_recipe(Choice("next", registry.models["llama"], "llama-7b", 1, "cpu"), 7, False)


def test_the_command_writes_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "mine.json"
    words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--family", "qwen", "--num_devices", "8"]
    assert main([*words, "--preset", "qwen2.5-0.5b", "--weights", "runs/x", "-o", str(target)]) == 0
    assert json.loads(target.read_text())["model"]["weights"] == "runs/x"
    assert main(["--no-plugins", "validate", str(target)]) == 0
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(words) == 2
    assert "--preset: is required without a terminal for questions" in capsys.readouterr().err
    assert main([*words, "--preset", "qwen3-9b"]) == 2
    assert "did you mean qwen3-8b?" in capsys.readouterr().err


TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory with a model, as far as recipes look at it."""
    directory = tmp_path / "Tiny-1"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY))
    return directory


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    return path


@pytest.mark.parametrize("stage", ["sft", "lora", "dpo", "kto", "rm", "grpo", "online_dpo", "ppo"])
@pytest.mark.parametrize("num_devices", [1, 8])
def test_every_method_is_valid(registry: Registry, tmp_path: Path, stage: str, num_devices: int) -> None:
    rolls_out = "rollout" in registry.stages[stage].sections
    for method in METHODS:
        if (method == "qlora" and rolls_out) or (method == "full" and stage == "lora"):
            continue
        choice = Choice(stage, registry.models["llama"], "llama-3.1-8b", num_devices, "gpu", method=method)
        recipe = new_recipe(choice, 8 * BILLION, "adapters_only" in registry.stages[stage].capabilities)
        path = tmp_path / f"{method}.json"
        path.write_text(recipe_text(recipe))
        plan = plan_run(path, [], registry)
        assert (plan.model.lora.rank is None) == (method == "full")
        assert (plan.model.lora.base_dtype is None) == (method != "qlora")
        before = json.loads((ROOT / f"recipes/llama/{stage}.json").read_text())["train"]["learning_rate"]
        by = 1 if method == "full" or stage == "lora" else 10
        assert plan.train.section.learning_rate == pytest.approx(by * before)


def test_unwritable_outputs_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "a file"
    place.write_text("{}")
    words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--preset", "smollm2-135m", "--num_devices", "1"]
    assert main([*words, "--family", "llama", "-o", str(place / "recipe.json")]) == 2
    assert capsys.readouterr().err == f"{place}/recipe.json: cannot be written: File exists; nothing was changed\n"
    assert main([*words, "--family", "nothing", "-o", str(place)]) == 2
    assert capsys.readouterr().err.startswith(f"{place} exists; choose another --output"), "before any question"


def test_own_weights_and_data(weights: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = weights.parent / "my recipe.json"
    words = ["--no-plugins", "recipe", "new", "--stage", "dpo", "--weights", str(weights), "--device", "cpu"]
    words += ["--num_devices", "1", "--data", str(rows), "--method", "lora"]
    assert main([*words, "-o", str(target)]) == 0
    recipe = json.loads(target.read_text())
    assert recipe["model"] == {"family": "llama", "weights": str(weights)}, "its config.json has the shape"
    assert recipe["data"] == {"train": str(rows), "max_length": 256}
    assert "eval_steps" not in recipe["train"]
    assert recipe["lora"]["rank"] == 8
    assert recipe["output_dir"] == "runs/tiny-1-dpo"
    uncounted, *said = capsys.readouterr().out.splitlines()
    assert uncounted.startswith("data: not counted")
    assert "has neither tokenizer.json" in uncounted
    assert said[0] == f"wrote {target}"
    assert [line for line in said if line.startswith("to do")] == []
    name = said[-1].removeprefix("then: llmsuite run ")
    assert shlex.split(name) == [str(target)]
    assert main(["--no-plugins", "validate", str(target)]) == 0
    assert main([*words, "--eval_data", str(rows)]) == 0
    printed = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert printed["data"]["eval"] == str(rows)
    assert printed["train"]["eval_steps"] == 100


def test_adapters_are_no_model(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = weights.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    words = ["--no-plugins", "recipe", "new", "--stage", "dpo", "--weights", str(adapter), "--device", "cpu"]
    assert main(words) == 2
    assert f"--weights: {adapter} has adapters, not a model; merge them" in capsys.readouterr().err


def test_weights_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path / "nowhere", tmp_path):
        words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--weights", str(place), "--device", "cpu"]
        assert main([*words, "--num_devices", "1"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"--weights: {place} is not a directory with a model; import one with")
        assert ("give its shape with --family and --preset" in said) == (not place.exists())


def test_a_deployment_has_its_model_below(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deployed = weights.parent / "deployed"
    deployed.mkdir()
    weights.rename(deployed / "hf")
    words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--weights", str(deployed), "--device", "cpu"]
    assert main([*words, "--num_devices", "1"]) == 2
    said = f"--weights: {deployed} is not a directory with a model, but {deployed}/hf is; use that\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("stage", "row", "says"),
    [
        ("sft", {"question": "a", "answer": "b"}, "keys ['answer', 'question'] fit no format with conversation rows"),
        ("sft", {"messages": "a"}, "'messages' is not a list of turns"),
        (
            "pretrain",
            {"body": "a"},
            "has no key 'text', which is to hold the text; it has the keys ['body']; pretrain.key",
        ),
        ("sft", {"prompt": "a", "completion": "b"}, None),
        ("grpo", {"prompt": "a", "answer": "b"}, None),
        ("pretrain", {"text": "a"}, None),
    ],
)
def test_columns_that_do_not_fit_are_to_do(
    weights: Path, stage: str, row: dict[str, str], says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = weights.parent / "rows.jsonl"
    target = weights.parent / "a.json"
    rows.write_text(f"{json.dumps(row)}\n" * 2)
    words = ["--no-plugins", "recipe", "new", "--stage", stage, "--weights", str(weights), "--device", "cpu"]
    assert main([*words, "--num_devices", "1", "--data", str(rows), "-o", str(target)]) == 0
    todo = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to do: data")]
    assert len(todo) == (says is not None)
    for line in todo:
        assert line.startswith(f"to do: data.train: {rows}:1: {says}")


def test_the_option_that_maps_columns_is_shown(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = weights.parent / "mine.csv"
    target = weights.parent / "a.json"
    rows.write_text("Question,Our Answer\nWhy?,Because.\n")
    words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--weights", str(weights), "--device", "cpu"]
    assert main([*words, "--num_devices", "1", "--data", str(rows), "-o", str(target)]) == 0
    (todo,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to do: data")]
    assert "fit no format" in todo
    assert main(["--no-plugins", "validate", str(target)]) == 2
    option = shlex.split(todo.partition(", add ")[2])
    assert option == ['--data.columns={"instruction":"Question","output":"Our Answer"}']
    assert main(["--no-plugins", "validate", str(target), *option]) == 0


@pytest.mark.parametrize(
    ("stage", "header", "answers", "columns"),
    [
        ("sft", "Question,Our Answer", ["", ""], {"instruction": "Question", "output": "Our Answer"}),
        ("sft", "eins,zwei", ["zwo", "zwei", "{eins}!"], {"instruction": "zwei", "output": "{eins}!"}),
        ("pretrain", "body,id", ["{", ""], "body"),
    ],
)
def test_columns_are_asked_for(
    weights: Path, stage: str, header: str, answers: list[str], columns: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    rows = weights.parent / "mine.csv"
    target = weights.parent / "a.json"
    rows.write_text(f"{header}\na,b\n")
    method = [] if stage == "pretrain" else [""]
    asked = ask(monkeypatch, *method, *answers)
    words = ["--no-plugins", "recipe", "new", "--stage", stage, "--weights", str(weights), "--device", "cpu"]
    assert main([*words, "--num_devices", "1", "--data", str(rows), "-o", str(target)]) == 0
    assert asked == ["method"] * len(method) + ["column"] * len(answers)
    recipe = json.loads(target.read_text())
    assert (recipe["pretrain"]["key"] if stage == "pretrain" else recipe["data"]["columns"]) == columns
    out = capsys.readouterr().out
    assert "to do: data" not in out
    assert ("'zwo' is no column; there are 'eins', 'zwei'" in out) == ("zwo" in answers)
    assert main(["--no-plugins", "validate", str(target)]) == 0


def test_missing_files_are_listed_as_to_do(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--weights", str(weights), "--device", "cpu"]
    target = weights.parent / "a.json"
    assert main([*words, "--num_devices", "1", "--data", "rows-that-are-not-here.jsonl", "-o", str(target)]) == 0
    said = capsys.readouterr().out
    assert "to do: data.train: rows-that-are-not-here.jsonl is not a file" in said
    assert main([*words, "--num_devices", "1", "--eval_data", "x.jsonl"]) == 2
    assert "--eval_data: needs --data" in capsys.readouterr().err
    assert main([*words, "--num_devices", "1", "--stage", "grpo", "--method", "qlora"]) == 2
    assert "--method qlora: is none of full, lora" in capsys.readouterr().err


def ask(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Give answers at a terminal; returns the questions, as they come."""
    left = iter(answers)
    asked = list[str]()

    def answer(question: str) -> str:
        asked.append(re.split(r"[ ,:]", question)[0])
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    return asked


def test_questions_lead_to_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ask(monkeypatch, "dpo", "nowhere", "", "nothing", "llama", "smollm2-135m", "", "", "cpu", "none", "2", "")
    assert main(["--no-plugins", "recipe", "new"]) == 0
    recipe = json.loads((tmp_path / "smollm2-135m-dpo.json").read_text())
    assert (recipe["stage"], recipe["model"]["preset"], recipe["launch"]) == ("dpo", "smollm2-135m", {"num_devices": 2})
    assert asked == [
        "stage", "weights", "weights", "family", "family", "preset", "data", "method", "device", "num_devices",
        "num_devices", "file",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "nowhere is not a directory with a model; import" in said
    assert "to do: model.weights: models/smollm2-135m is not a directory with a model" in said
    assert said.splitlines()[-1] == "then: llmsuite run smollm2-135m-dpo.json"


def test_defaults_are_taken_by_empty_answers(
    weights: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(weights.parent)
    asked = ask(monkeypatch, "", "Tiny-1", "rows.jsonl", "", "lora", "", "", "")
    assert main(["--no-plugins", "recipe", "new"]) == 0
    assert asked == ["stage", "weights", "data", "eval_data", "method", "device", "num_devices", "file"]
    recipe = json.loads(Path("tiny-1-lora.json").read_text())
    assert (recipe["stage"], recipe["model"]["weights"], recipe["data"]["train"]) == ("lora", "Tiny-1", "rows.jsonl")
    assert "eval" not in recipe["data"]
    ask(monkeypatch, "", "Tiny-1")
    assert main(["--no-plugins", "recipe", "new"]) == 2
    assert "no answer; nothing is written" in capsys.readouterr().err


def test_weights_whose_hub_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fetch(*arguments: object) -> None:
        raise UserError("hf:org/name: no hub can be asked")

    monkeypatch.setattr("llmsuite.cli.new_recipe.fetch", fetch)
    monkeypatch.setattr("llmsuite.cli.new_recipe.cached", lambda name, want: None)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--weights", "hf:org/name", "--num_devices", "1"]
    assert main(words) == 2
    assert "so its family and shape are unknown\n--family: is required" in capsys.readouterr().err


def fitted(rows: RowLengths, device: str = "gpu", devices: int = 1, stage: str = "sft") -> dict[str, Any]:
    """A new recipe for rows."""
    recipe = new_recipe(Choice(stage, FAMILIES["llama"], "llama-3.1-8b", devices, device, data="a"), 10**9, False)
    fit_to_rows(recipe, rows)
    return recipe


def test_numbers_of_a_small_file() -> None:
    recipe = fitted(RowLengths(50, 78, 1), "cpu")
    assert recipe["data"]["max_length"] == 128
    train = recipe["train"]
    assert "max_steps" not in train
    # 64, 32, 16 and 8 rows would be fewer than 10 steps
    assert (train["num_epochs"], train["global_batch_size"], train["micro_batch_size"]) == (3, 4, 4)
    assert recipe["checkpoint"]["save_steps"] == "epoch"


def test_numbers_of_a_large_file() -> None:
    recipe = fitted(RowLengths(50_000, 5_000, 1))
    assert recipe["data"]["max_length"] == 2048, "the limit of the stage's recipe"
    train = recipe["train"]
    assert (train["num_epochs"], train["global_batch_size"], train["micro_batch_size"]) == (1, 64, 2)


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(1, 100_000),
    longest=st.integers(1, 9000),
    devices=st.sampled_from([1, 2, 8, 12]),
    pair=st.booleans(),
)
def test_fitted_batches_can_be_dealt_to_the_ranks(count: int, longest: int, devices: int, pair: bool) -> None:
    recipe = fitted(RowLengths(count, longest, 1 + pair), "gpu", devices, "dpo" if pair else "sft")
    train = recipe["train"]
    ranks = data_ranks(recipe)
    batch = train["global_batch_size"]
    assert batch % (ranks * train["micro_batch_size"]) == 0
    assert batch <= max(count, ranks)
    assert recipe["data"]["max_length"] >= min(longest, 2048)
    sequences = train["micro_batch_size"] * (1 + pair)
    assert train["micro_batch_size"] == 1 or sequences * recipe["data"]["max_length"] <= 4096


@pytest.fixture
def with_tokenizer(weights: Path) -> Path:
    for file in (ROOT / "data/tokenizer").iterdir():
        shutil.copy(file, weights / file.name)
    return weights


def test_a_new_recipe_counts_its_rows(with_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = with_tokenizer
    rows = weights.parent / "rows.jsonl"
    turns = [{"role": "user", "content": "say hi " * 4}, {"role": "assistant", "content": "hi"}]
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 45)
    words = ["--no-plugins", "recipe", "new", "--stage", "lora", "--weights", str(weights), "--device", "cpu"]
    path = weights.parent / "a.json"
    assert main([*words, "--num_devices", "1", "--data", str(rows), "-o", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "data: 45 rows, 45 used, of " in printed
    assert "run: 3 epochs are 34 steps of 4 rows" in printed  # 135 rows
    assert re.search(r"memory: [0-9.]+ MiB for each device", printed)
    recipe = json.loads(path.read_text())
    assert recipe["train"]["num_epochs"] == 3
    assert recipe["data"]["max_length"] == 64


def test_more_memory_than_the_machine_has_is_told(
    with_tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = with_tokenizer
    rows = weights.parent / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    monkeypatch.setattr(new_recipe_command, "available_memory_bytes", lambda: 1000)
    words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--weights", str(weights), "--device", "cpu"]
    assert main([*words, "--method", "full", "--num_devices", "1", "--data", str(rows)]) == 0
    assert "more than the 0.977 KiB that are free here" in capsys.readouterr().err
