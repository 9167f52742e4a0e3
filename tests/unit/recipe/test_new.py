"""`llmsuite recipe new`: degrees by its rule; what it writes is valid for any stage, family and number of devices."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from llmsuite.cli.main import main
from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.new import Choice, choose_degrees, new_recipe
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text

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
def test_degrees(parameters: int, devices: int, adapters: bool, degrees: tuple[int, int]) -> None:
    assert choose_degrees(parameters, devices, adapters, lambda tp, pp: True) == degrees


def test_what_cannot_be_cut_over_tensor_parallel_ranks_gets_a_pipeline() -> None:
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
        recipe = new_recipe(choice, int(sizes[family] * BILLION), registry.stages[stage].adapters)
        path.write_text(recipe_text(recipe))
        plan = plan_run(path, [], registry)
        assert plan.degrees.num_ranks == devices, choice
        if device == "cpu":
            assert plan.degrees.num_data_ranks == devices


def test_a_stage_without_recipes(registry: Registry) -> None:
    with pytest.raises(UserError, match="llmsuite comes with no recipe for it"):
        new_recipe(Choice("next", registry.models["llama"], "llama-7b", 1, "cpu"), 7, False)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "mine.json"
    words = ["--no-plugins", "recipe", "new", "--stage", "sft", "--family", "qwen", "--num_devices", "8"]
    assert main([*words, "--preset", "qwen2.5-0.5b", "--weights", "runs/x", "-o", str(target)]) == 0
    assert json.loads(target.read_text())["model"]["weights"] == "runs/x"
    assert main(["--no-plugins", "validate", str(target)]) == 0
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(words) == 2
    assert "--preset: is required without a terminal to ask in" in capsys.readouterr().err
    assert main([*words, "--preset", "qwen3-9b"]) == 2
    assert "did you mean qwen3-8b?" in capsys.readouterr().err


def test_questions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["dpo", "nothing", "llama", "smollm2-135m", "none", "2"])
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["--no-plugins", "recipe", "new"]) == 0
    recipe = json.loads(capsys.readouterr().out)
    assert (recipe["stage"], recipe["model"]["preset"], recipe["launch"]) == ("dpo", "smollm2-135m", {"num_devices": 2})
    assert [question.split(" (")[0].split(",")[0] for question in asked] == [
        "stage", "family", "family", "preset", "num_devices", "num_devices",
    ]  # fmt: skip
