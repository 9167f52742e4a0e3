"""Answers that are generated at an evaluation: those of the checkpoint, the same on every mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape

from llmsuite.contract.registry import Registry
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.generation import METRIC_NAMES
from llmsuite.engine.text_scores import scores
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import Generator
from llmsuite.inference.load import load_model, open_any
from llmsuite.inference.prompts import Prompter
from llmsuite.inference.sampling import Sampling
from llmsuite.observe.report import content
from llmsuite.observe.runs import read_run
from tests.multi.conftest import Runner, learnt
from tests.parity.cases import few
from tests.support.paths import ROOT

LONGEST = 6
ROWS = 5
STEPS = 2
DRAWS = {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
"""The most likely tokens of a model that has learnt so little are always the same."""
TRAINS = (
    "--smoke", f"--train.max_steps={STEPS}", "--train.eval_steps=1", "--train.learning_rate=1e-3",
    "--train.global_batch_size=8", "--train.lr_schedule=constant", "--train.warmup_ratio=0", "--data.max_length=64",
    "--model.config.num_hidden_layers=3",
)  # fmt: skip
ANSWERS = (
    *(f"--generation.{key}={value}" for key, value in DRAWS.items()),
    f"--generation.max_new_tokens={LONGEST}", f"--generation.max_samples={ROWS}", "--generation.batch_size=2",
    "--checkpoint.best_metric=eval/rougel", "--checkpoint.best_is=highest",
)  # fmt: skip
KEPT = 3
OWN = {
    "sft": ["--generation.save=true"],
    "lora": ["--generation.save=true", "--lora.dropout=0.1"],
    "dpo": [f"--generation.log_samples={KEPT}"],
    "pretrain": [f"--generation.log_samples={KEPT}", "--train.min_lr_ratio=0"],
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp3": (3, {"pipeline_parallel_degree": 3}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "stage3": (2, {"sharding": "stage3"}),
}
PROGRAMS = "--engine.mode=to_static"
AGAIN = {  # stage, mesh, words on top of those of the run on one process
    "pp3": ("sft", "pp3", ["--data.group_by_length=false"]),
    "stage3": ("sft", "stage3", []),
    "programs": ("sft", "one", [PROGRAMS]),
    "programs, tp2": ("sft", "tp2", [PROGRAMS]),
    "adapters, tp2": ("lora", "tp2", []),
    "adapters, stage3": ("lora", "stage3", []),
    "pairs, pp3": ("dpo", "pp3", []),
    "pairs, tp2": ("dpo", "tp2", []),
    "text, tp2": ("pretrain", "tp2", []),
}
AGAIN = few(AGAIN, "stage3", "programs", "adapters, stage3", "pairs, tp2")


def run(runner: Runner, stage: str, mesh: str = "one", *words: str, answers: bool = True) -> Path:
    num_ranks, parallel = MESHES[mesh]
    directory = runner.directory / " ".join([stage, mesh, *words, *([] if answers else ["without"])])
    if not (directory / "metrics.jsonl").exists():
        own = [*ANSWERS, *OWN[stage]] if answers else [word for word in OWN[stage] if "generation" not in word]
        given = [f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={num_ranks}", f"--output_dir={directory}"]
        runner.run("run", f"recipes/llama/{stage}.json", *TRAINS, *own, *given, *words)
    return directory


def rows(directory: Path, step: int) -> list[dict[str, str]]:
    lines = (directory / f"generations/step-{step}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def all_prompts(tokenizer: TextTokenizer) -> list[list[int]]:
    """Everything before the last answer of each row that is evaluated on."""
    prompter = Prompter(tokenizer, "tokenizer")
    lines = (ROOT / "data/sft/eval.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["messages"] for line in lines]
    return [prompter.turns([Message(turn["role"], turn["content"]) for turn in row[:-1]]) for row in turns]


def evaluations(directory: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "eval/loss" in line}


def test_answers_are_those_of_the_checkpoint(runner: Runner, registry: Registry) -> None:
    directory = run(runner, "sft")
    found = rows(directory, STEPS)
    assert len(found) == ROWS
    assert len({row["output"] for row in found}) > 1
    assert rows(directory, 1) != found, "the weights are those of the moment"
    checkpoint = directory / f"checkpoints/step-{STEPS}"
    tokenizer = TextTokenizer(checkpoint)
    model = load_model(open_any(checkpoint, registry.models), CpuBackend())
    generator = Generator(ModelDecoder(model), tokenizer, tokenizer.stop_token_ids(checkpoint))
    prompts = {tokenizer.decode(ids): ids for ids in all_prompts(tokenizer)}
    chosen = [prompts[row["prompt"]] for row in found]
    sampling = Sampling(max_new_tokens=LONGEST, seed=42, **DRAWS)  # type: ignore[arg-type]
    for row, (answer,) in zip(found, generator.answers(chosen, sampling, max_length=64)):
        assert row["output"] == answer.text
    wanted = scores([row["output"] for row in found], [row["tgt"] for row in found])
    metrics = evaluations(directory)[STEPS]
    assert {name: metrics[f"eval/{name}"] for name in METRIC_NAMES} == pytest.approx(wanted)


def test_the_best_checkpoint_is_that_with_the_best_answers(runner: Runner) -> None:
    directory = run(runner, "sft")
    found = {step: metrics["eval/rougel"] for step, metrics in evaluations(directory).items()}
    best = json.loads((directory / "checkpoints/best").read_text())
    assert best["metric"] == "eval/rougel"
    assert best["value"] == max(found.values()) == found[best["step"]]


@pytest.mark.parametrize("name", AGAIN)
def test_every_run_gives_the_answers_of_one_process(runner: Runner, name: str) -> None:
    stage, mesh, words = AGAIN[name]
    one = run(runner, stage)
    many = run(runner, stage, mesh, *words)
    assert evaluations(one).keys() == {1, STEPS}
    for step, metrics in evaluations(one).items():
        assert rows(one, step) == rows(many, step)
        assert all(evaluations(many)[step][f"eval/{name}"] == metrics[f"eval/{name}"] for name in METRIC_NAMES)


@pytest.mark.parametrize(("stage", "kept"), [("sft", ROWS), ("dpo", KEPT), ("pretrain", KEPT)])
def test_some_answers_are_kept_and_shown(runner: Runner, stage: str, kept: int) -> None:
    directory = run(runner, stage)
    html = content([read_run(directory)])["html"]
    for step in (1, STEPS):
        found = rows(directory, step)
        assert len(found) == kept
        assert f"Answers after step {step}<" in html
        assert all(str(escape(text)) in html for row in found for text in row.values())
    assert rows(directory, 1)[0]["prompt"] == rows(directory, STEPS)[0]["prompt"]


def test_pairs_ask_for_the_chosen_answer(runner: Runner) -> None:
    lines = (ROOT / "data/preference/eval.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = {json.loads(line)["chosen"][-1]["content"].strip() for line in lines}
    assert {row["tgt"].strip() for row in rows(run(runner, "dpo"), 1)} <= chosen


@pytest.mark.parametrize(("stage", "mesh"), [("lora", "one"), ("dpo", "tp2"), ("pretrain", "one")])
def test_answers_change_nothing_of_the_training(runner: Runner, stage: str, mesh: str) -> None:
    given = run(runner, stage, mesh)
    without = run(runner, stage, mesh, answers=False)
    assert not (without / "generations").exists()
    assert learnt(runner.metrics(given.name)) == learnt(runner.metrics(without.name))
    assert evaluations(given)[STEPS]["eval/loss"] == evaluations(without)[STEPS]["eval/loss"]
    for stem in ("adapter_model" if stage == "lora" else "model", "optimizer"):
        one, other = (runner.weights(directory.name, STEPS, stem) for directory in (given, without))
        assert one.keys() == other.keys() != set()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_run_goes_on_with_other_answers(runner: Runner) -> None:
    directory = run(runner, "dpo")
    before = rows(directory, STEPS)
    (directory / f"generations/step-{STEPS + 1}.jsonl").write_text("of a run that went further")
    (directory / "metrics.jsonl").write_text("")  # as if it was killed before its last evaluation
    words = [word for word in ANSWERS if "max_new_tokens" not in word]
    said = runner.run(
        "run", "recipes/llama/dpo.json", *TRAINS, *words, "--generation.max_new_tokens=2", "--generation.log_samples=1",
        "--parallel={}", "--launch.num_devices=1", f"--output_dir={directory}", "--resume",
    )  # fmt: skip
    assert "differs" not in said
    (row,) = rows(directory, STEPS)
    assert before[0]["output"].startswith(row["output"].rstrip("\ufffd"))
    assert sorted(path.name for path in (directory / "generations").iterdir()) == ["step-1.jsonl", "step-2.jsonl"]
