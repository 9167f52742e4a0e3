"""A run that is killed, stopped or loses a rank goes on where it was, with the numbers of one that was not."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.conftest import PluginSite
from tests.multi.conftest import Runner, learnt
from tests.support.interrupted_runs import MESHES, SMALL, children_of, wait_until_gone
from tests.support.paths import ROOT

STEPS = 8
ROWS = 38  # an epoch ends within step 5
COMMON = (f"--train.max_steps={STEPS}", "--checkpoint.save_steps=2", *SMALL)


def _words(runner: Runner, name: str, ranks: int, *more: str) -> list[str]:
    return runner.smoke(name, *COMMON, runner.few_rows(ROWS), *MESHES[ranks], *more)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two pipeline stages"])
def ranks(request: pytest.FixtureRequest, runner: Runner) -> int:
    """Runs the uninterrupted run once, as `whole-N`."""
    runner.run(*_words(runner, f"whole-{request.param}", request.param))
    return int(request.param)


def _assert_same_as_whole(runner: Runner, name: str, ranks: int) -> None:
    assert learnt(runner.metrics(name)) == learnt(runner.metrics(f"whole-{ranks}"))
    manifests = [
        json.loads((runner.directory / n / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())["files"]
        for n in (name, f"whole-{ranks}")
    ]
    assert manifests[0] == manifests[1]  # bit for bit: parameters, optimizer, position


def test_killed_run_resumes_bit_exactly(runner: Runner, ranks: int) -> None:
    name = f"killed-{ranks}"
    words = _words(runner, name, ranks)
    process = runner.start_and_hold(name, 3, *words, saved=2)
    left = children_of(process.pid)
    process.kill()
    process.wait()
    wait_until_gone(left)  # ranks do not outlive the process that started them
    assert runner.metrics(name)[-1]["step"] == 3
    output = runner.run(*words, expect=2)
    assert "--resume" in output  # a new run does not trample on the old one
    output = runner.run(*words, "--resume")
    assert "resuming from" in output
    _assert_same_as_whole(runner, name, ranks)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_run_saves_and_resumes_bit_exactly(runner: Runner, ranks: int, number: signal.Signals) -> None:
    name = f"stopped-{ranks}-{number.name}"
    words = _words(runner, name, ranks)
    process = runner.start_and_hold(name, 3, *words, fresh=True)
    process.send_signal(number)
    runner.let_go(name)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopping after this step" in output
    stopped_at = runner.metrics(name)[-1]["step"]
    latest = runner.directory / name / "checkpoints" / "latest"
    assert latest.read_text() == f"step-{stopped_at}\n"
    runner.run(*words, "--resume")
    _assert_same_as_whole(runner, name, ranks)


@pytest.mark.parametrize(("stages", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_dead_rank_ends_the_run_and_is_named(runner: Runner, stages: int, victim: int) -> None:
    """The neighbours of a pipeline stage wait for what it would have sent, the others for them."""
    name = f"dead-rank-{stages}-{victim}"
    process = runner.start_and_hold(name, 3, *_words(runner, name, stages))
    children = children_of(process.pid)
    assert len(children) == stages
    os.kill(children[victim], signal.SIGKILL)
    start = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert time.monotonic() - start < 25, "the other ranks were left waiting"
    place = runner.directory / name
    cause = f"rank {victim} was killed by SIGKILL; its log: {place / 'logs'}/workerlog.{victim}"
    lines = output.splitlines()
    assert lines[-1] == f"{cause}; to continue, add --resume to the same command"
    assert cause in lines, "it is told at once"
    if victim:
        assert "Traceback" not in output, "how others fail because of it is in their logs"
    last = json.loads((place / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["error"]) == ("failed", cause)
    assert f"failed: {cause}" in runner.run("runs", "show", str(place))


_CRASH = """
import ctypes, llmsuite

@llmsuite.hookimpl
def llmsuite_step_end(run, step, metrics):
    ctypes.string_at(0)
"""


def test_a_crash_is_told_with_its_place_in_python(runner: Runner) -> None:
    site = runner.directory / "crashing"
    site.mkdir()
    PluginSite(site).install("crash", _CRASH)
    words = _words(runner, "crashes", 2)
    output = runner.run(*words, expect=1, LLMSUITE_PLUGINS="crash", PYTHONPATH=f"{site}:{ROOT}")
    assert "Fatal Python error: Segmentation fault" in output
    assert re.search(r'crash.py", line \d+ in llmsuite_step_end', output), output
    assert "rank 0 was killed by SIGSEGV" in output


def test_resume_falls_back_from_a_damaged_checkpoint(runner: Runner) -> None:
    name = "damaged"
    words = _words(runner, name, 1)
    runner.run(*words)
    newest = runner.directory / name / "checkpoints" / f"step-{STEPS}"
    victim = next(newest.glob("model-*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    output = runner.run(*words, "--resume")
    assert "is damaged and passed over" in output
    assert f"resuming from {runner.directory / name / 'checkpoints' / f'step-{STEPS - 2}'}" in output


def test_resume_with_another_recipe_is_refused(runner: Runner, ranks: int) -> None:
    words = _words(runner, f"whole-{ranks}", ranks, "--train.learning_rate=0.5")
    output = runner.run(*words, "--resume", expect=2)
    assert "differs" in output


def test_what_a_run_lacks_behind_its_last_checkpoint_is_done(runner: Runner) -> None:
    words = runner.smoke("late", "--train.max_steps=2", *SMALL, runner.few_rows(ROWS), *MESHES[1])
    runner.run(*words)
    place = runner.directory / "late"
    metrics = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "eval/loss" in metrics[-1]
    # killed between the last checkpoint and its name, and so before the evaluation
    events = (place / "events.jsonl").read_text().splitlines(keepends=True)
    (place / "metrics.jsonl").write_text("".join(metrics[:-1]))
    (place / "events.jsonl").write_text("".join(line for line in events if '"ended"' not in line))
    (place / "checkpoints" / "latest").unlink()
    (place / "checkpoints" / "latest.tmp").write_text("step-")
    runner.run(*words, "--resume")
    assert (place / "metrics.jsonl").read_text().splitlines(keepends=True) == metrics
    assert json.loads((place / "events.jsonl").read_text().splitlines()[-1])["event"] == "ended"
    assert (place / "checkpoints" / "latest").read_text() == "step-2\n"
    assert not (place / "checkpoints" / "latest.tmp").exists()
    assert "nothing to do: step 2 of 2 is done" in runner.run(*words, "--resume")
    # and a checkpoint that is not what was saved is no beginning of another run
    (shard,) = (place / "checkpoints" / "step-2").glob("model*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    more = runner.smoke("begun", "--train.max_steps=1", *SMALL, *MESHES[1], f"--model.weights={place}")
    assert "does not have the sha256 it was written with" in runner.run(*more, expect=2)
