"""The stage infer: its answers are those of `llmsuite generate`, and it goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from tests.support.adapter_models import adapted, section, write
from tests.support.written_family import write_family


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("infer") / "model", "llama")


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "Hello", "id": 7}, {"messages": [{"role": "user", "content": "1 2 3"}]}, {"prompt": "What?"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.json"
    content: dict[str, Any] = {
        "stage": "infer",
        "model": {"family": "llama", "weights": str(model)},
        "data": {"prompts": str(prompts)},
        "infer": {"max_new_tokens": 9, "temperature": 1.0, "top_k": 50, "num_return_sequences": 2, "logprobs": 1},
        "seed": 5,
        "output_dir": str(tmp_path / "run"),
    }
    path.write_text(json.dumps(content))
    return path


def test_answers_are_those_of_generate(recipe: Path, model: Path, tmp_path: Path) -> None:
    assert main(["run", str(recipe)]) == 0
    words = ["--max_new_tokens", "9", "--temperature", "1", "--top_k", "50", "--num_return_sequences", "2"]
    words += ["--logprobs", "1", "--seed", "5", "--output", str(tmp_path / "expected.jsonl")]
    assert main(["generate", str(model), "--input", str(tmp_path / "prompts.jsonl"), *words]) == 0
    answers = (tmp_path / "run" / "answers.jsonl").read_text()
    assert answers == (tmp_path / "expected.jsonl").read_text()
    assert len({tuple(a["ids"]) for line in answers.splitlines() for a in json.loads(line)["answers"]}) == 6
    # what a run leaves is a recipe of the same run
    again = tmp_path / "run" / "recipe.json"
    assert main(["run", str(again), f"--output_dir={tmp_path / 'again'}"]) == 0
    assert (tmp_path / "again" / "answers.jsonl").read_text() == answers


def test_a_stopped_stage_resumes(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["run", str(recipe)]) == 0
    target = tmp_path / "run" / "answers.jsonl"
    whole = target.read_bytes()
    assert main(["run", str(recipe)]) == 2
    assert "holds answers.jsonl; add --resume" in capsys.readouterr().err
    target.write_bytes(whole[: whole.index(b"\n") + 20])
    assert main(["run", str(recipe), "--resume"]) == 0
    assert "1 of 3 prompts are answered" in capsys.readouterr().out
    # log-probabilities depend on the rest of the batch by rounding, tokens do not
    before, now = ([json.loads(line)["answers"] for line in text.splitlines()] for text in (whole, target.read_bytes()))
    assert [[a["ids"] for a in answers] for answers in now] == [[a["ids"] for a in answers] for answers in before]
    whole = target.read_bytes()
    assert main(["run", str(recipe), "--resume", "--infer.temperature=0.5"]) == 2
    assert "was written by a recipe with another infer" in capsys.readouterr().err
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Other"}\n' * 3)
    assert main(["run", str(recipe), "--resume"]) == 2
    assert "has answers to other prompts" in capsys.readouterr().err
    assert target.read_bytes() == whole


def test_it_resumes_after_characters_that_end_lines_elsewhere(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one\u2028line\u0085"}\n{"prompt": "another"}\n', encoding="utf-8")
    assert main(["run", str(recipe)]) == 0
    target = tmp_path / "run" / "answers.jsonl"
    target.write_bytes(target.read_bytes().splitlines(keepends=True)[0])
    assert main(["run", str(recipe), "--resume"]) == 0
    assert "1 of 2 prompts are answered" in capsys.readouterr().out


def test_generate_reports_what_it_has_written_when_it_is_stopped(
    recipe: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(*arguments: Any) -> Iterator[list[Any]]:
        yield []
        raise KeyboardInterrupt

    monkeypatch.setattr("llmsuite.cli.generate._answers", answers)
    target = tmp_path / "answers.jsonl"
    assert main(["generate", str(model), "--input", str(tmp_path / "prompts.jsonl"), "--output", str(target)]) == 130
    assert f"stopped: {target} has answers to 1 of 3 prompts\n" in capsys.readouterr().err
    assert json.loads(target.read_text()) == {"prompt": "Hello", "id": 7, "answers": []}


def test_beams_are_those_of_generate(recipe: Path, model: Path, tmp_path: Path) -> None:
    beams = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    assert main(["run", str(recipe), f"--infer={json.dumps(beams)}"]) == 0
    words = [word for key, value in beams.items() for word in (f"--{key}", str(value))]
    words += ["--seed", "5", "--output", str(tmp_path / "expected.jsonl")]
    assert main(["generate", str(model), "--input", str(tmp_path / "prompts.jsonl"), *words]) == 0
    assert (tmp_path / "run" / "answers.jsonl").read_text() == (tmp_path / "expected.jsonl").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train.max_steps=3"], r"train\.max_steps: has no meaning for stage 'infer', which does not train; remove"),
        (["--data.train=x.jsonl"], r"data\.train: has no meaning for stage 'infer'"),
        (["--infer.temprature=1"], r"infer\.temprature: unknown key; did you mean 'temperature'"),
        (["--infer.num_beams=2"], r"infer\.temperature: does not go with num_beams"),
        (
            ["--infer.num_beams=2", "--infer.presence_penalty=1"],
            r"infer\.presence_penalty: does not go with num_beams: beam search has no penalties but length_penalty",
        ),
        (["--infer.min_new_tokens=10"], r"infer\.min_new_tokens: is 10, above max_new_tokens = 9"),
        (["--launch.num_devices=2"], r"launch\.num_devices: 2 devices, but stage infer runs on .* degree = 1"),
        (["--parallel.pipeline_parallel_degree=2"], r"parallel\.pipeline_parallel_degree: has no meaning"),
        (
            ["--engine.precision=bf16"],
            r"engine\.precision: is bf16, which cpu does not support; use fp32, or `llmsuite generate MODEL --input F",
        ),
        (['--loggers=["console"]'], r"loggers: .*"),
    ],
    ids=["train", "data", "unknown", "beams", "penalties", "length", "ranks", "pipeline", "precision", "loggers"],
)
def test_meaningless_options_are_refused(recipe: Path, registry: Registry, words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        plan_run(recipe, words, registry)


def test_missing_prompts_are_named(recipe: Path, capsys: Any) -> None:
    assert main(["run", str(recipe), "--data.prompts=nowhere.jsonl"]) == 2
    assert "data.prompts: nowhere.jsonl is not a file" in capsys.readouterr().err


def test_commands_about_training_refuse_the_stage(recipe: Path, capsys: Any) -> None:
    for words in (["data", "stats"], ["data", "explain"], ["plan"]):
        assert main([*words, str(recipe)]) == 2
        assert "has stage infer, which does not train" in capsys.readouterr().err
    assert main(["validate", str(recipe)]) == 0
    assert "ok (infer, llama, pp1 dp1 sharding1 tp1 on cpu)" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["ours", "peft", "paddlenlp"])
def test_an_adapter_answers_with_its_base(layout: str, recipe: Path, model: Path, tmp_path: Path, capsys: Any) -> None:
    adapter = tmp_path / "adapter"
    merged = tmp_path / "merged"
    lora = section(target_modules=["q_proj", "down_proj"])
    live, modules = adapted("llama", model, lora)
    write(adapter, live, modules, lora, model, **({"layout": "paddlenlp"} if layout == "paddlenlp" else {}))
    if layout != "ours":  # others do not write of which files the base was made
        (adapter / "base.json").unlink()
    assert main(["merge", str(adapter), "-o", str(merged)]) == 0
    rows = []
    for weights in (model, merged, adapter):
        run = tmp_path / f"run-{weights.name}"
        assert main(["run", str(recipe), f"--model.weights={weights}", f"--output_dir={run}"]) == 0
        rows.append((run / "answers.jsonl").read_text())
    ids = [[a["ids"] for line in text.splitlines() for a in json.loads(line)["answers"]] for text in rows]
    assert ids[0] != ids[1] == ids[2]
    words = ["--max_new_tokens", "9", "--temperature", "1", "--top_k", "50", "--num_return_sequences", "2"]
    words += ["--logprobs", "1", "--seed", "5", "--output", str(tmp_path / "said.jsonl")]
    assert main(["generate", str(adapter), "--input", str(tmp_path / "prompts.jsonl"), *words]) == 0
    assert (tmp_path / "said.jsonl").read_text() == rows[2]
    settings = next(path for path in adapter.glob("*_config.json") if "tokenizer" not in path.name)
    settings.write_text(settings.read_text().replace(str(model), "org/of-a-hub"))
    if layout != "ours":
        capsys.readouterr()
        assert main(["generate", str(adapter), "--prompt", "Hi"]) == 2
        assert (
            "the base model of its adapters, org/of-a-hub, is missing; name it with --base" in capsys.readouterr().err
        )
        assert main(["generate", str(adapter), "--base", str(model), "--prompt", "Hi", "--max_new_tokens", "2"]) == 0
