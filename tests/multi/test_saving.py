"""Checkpoints that are asked for, kept for their evaluation, written in the background, and learnt from."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.support.interrupted_runs import MESHES, SMALL

COMMON = ("--train.max_steps=8", "--checkpoint.save_steps=2", *SMALL)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_in_the_background_the_same_bytes_are_written(runner: Runner, ranks: int) -> None:
    for name in ("true", "false"):
        options = f"--checkpoint.async_save={name}", "--checkpoint.keep_last=9"
        output = runner.run(*runner.smoke(f"async-{ranks}-{name}", *COMMON, *MESHES[ranks], *options))
        assert [line.split("/")[-1] for line in output.splitlines() if line.startswith("saved ")] == [
            f"step-{step}" for step in (2, 4, 6, 8)
        ]
    for step in (2, 4, 6, 8):
        manifests = [
            (runner.directory / f"async-{ranks}-{name}/checkpoints/step-{step}/manifest.json").read_bytes()
            for name in ("true", "false")
        ]
        assert manifests[0] == manifests[1]
    assert learnt(runner.metrics(f"async-{ranks}-true")) == learnt(runner.metrics(f"async-{ranks}-false"))
    runner.run(*runner.smoke(f"async-{ranks}-true", *COMMON, *MESHES[ranks]), "--resume")


@pytest.mark.parametrize("ranks", [1, 2])
def test_touching_save_now_saves_at_the_next_step(runner: Runner, ranks: int) -> None:
    name = f"touched-{ranks}"
    steps = "--train.max_steps=20000", "--checkpoint.save_steps=1000", *SMALL
    process = runner.start(*runner.smoke(name, *MESHES[ranks], *steps))
    run = runner.directory / name
    runner.wait_for_step(name, 2, process)
    (run / "save-now").touch()
    deadline = time.monotonic() + 120
    while not (run / "checkpoints/latest").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    assert not (run / "save-now").exists()
    step = int((run / "checkpoints/latest").read_text().removeprefix("step-"))
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    last = runner.metrics(name)[-1]["step"]
    assert 2 < step <= last < 20000
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == sorted({f"step-{step}", f"step-{last}"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_touching_stop_now_stops_after_the_step(runner: Runner, ranks: int) -> None:
    name = f"stopped-{ranks}"
    steps = "--train.max_steps=20000", "--checkpoint.save_steps=1000", *SMALL
    process = runner.start_fork(*runner.smoke(name, *MESHES[ranks], *steps))
    run = runner.directory / name
    runner.wait_for_step(name, 2, process)
    (run / "stop-now").touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert not (run / "stop-now").exists()
    last = runner.metrics(name)[-1]["step"]
    assert 2 < last < 20000
    assert (run / "checkpoints/latest").read_text() == f"step-{last}\n"
    event = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["step"]) == ("stopped", last)


def test_a_stop_now_of_before_does_not_stop_a_run(runner: Runner) -> None:
    words = (*SMALL, *MESHES[1], "--train.lr_schedule=constant", "--train.warmup_ratio=0", "--train.min_lr_ratio=0")
    runner.run(*runner.smoke("stale", *words, "--train.max_steps=2"))
    request = runner.directory / "stale" / "stop-now"
    request.touch()
    output = runner.run(*runner.smoke("stale", *words, "--train.max_steps=4"), "--resume")
    assert "removed a file stop-now from before the first step" in output
    assert not request.exists()
    assert runner.metrics("stale")[-1]["step"] == 4


def test_the_best_checkpoint_is_kept_on_every_mesh(runner: Runner) -> None:
    words = ("--train.eval_steps=1", "--checkpoint.best_metric=eval/rewards/accuracy")
    words = (*words, "--checkpoint.best_is=highest", "--train.learning_rate=0.01")
    for ranks in (1, 2, 4):  # of 4 pipeline stages two have no metric but the loss
        name = f"best-{ranks}"
        runner.run(*runner.smoke(name, *COMMON, *MESHES[ranks], *words))
        records = [json.loads(line) for line in (runner.directory / name / "metrics.jsonl").read_text().splitlines()]
        values = {r["step"]: r["eval/rewards/accuracy"] for r in records if "eval/loss" in r}
        assert len(values) == 8
        first = min(step for step, value in values.items() if value == max(values.values()))
        best = json.loads((runner.directory / name / "checkpoints/best").read_text())
        assert best == {"step": first, "metric": "eval/rewards/accuracy", "value": values[first]}
        kept = {p.name for p in (runner.directory / name / "checkpoints").glob("step-*")}
        assert f"step-{first}" in kept
        assert "step-8" in kept
        assert len(kept) <= 3


def test_a_run_starts_from_the_weights_of_another(runner: Runner, tmp_path: Path) -> None:
    runner.run(*runner.smoke("first", *COMMON, *MESHES[1]))
    weights = runner.directory / "first"
    step = "--train.max_steps=1", *SMALL, "--train.optimizer=sgd", "--train.learning_rate=1e-30"
    for name, source in (("of-run", weights), ("of-step", weights / "checkpoints/step-8")):
        given = f"--model.weights={source}", "--model.config={}", "--model.tokenizer=data/tokenizer"
        plain = "run", "recipes/llama/dpo.json", "--smoke", f"--output_dir={runner.directory / name}"
        # --smoke draws its weights: what it changes is given on top of it
        output = runner.run(*plain, *MESHES[1], *step, *given)
        assert f"loading {weights / 'checkpoints/step-8'} (hf layout)" in output
        then = runner.weights("first", 8)
        now = runner.weights(name, 1)
        assert then.keys() == now.keys()
        assert all(np.array_equal(then[key], now[key]) for key in then)
        assert not runner.weights(name, 1, "optimizer")  # sgd has none: nothing of the other run's came along
