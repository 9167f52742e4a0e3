"""A run whose rank is killed in the middle of a rollout goes on where it was, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PluginSite
from tests.multi.conftest import Runner, learnt
from tests.support.interrupted_runs import children_of, wait_until_gone
from tests.support.paths import ROOT

STEPS = 4
SAVED = 2
KILLED = 4
_REWARD = """
import time
from pathlib import Path

GATE = Path({gate!r})

def score(completions):
    while GATE.exists():  # until the test has killed a rank, which ends this process too
        (GATE / "waits").touch()
        time.sleep(0.05)
    return [float(c.text[:1] < "k") for c in completions]
"""
_HEARD = """
import json
import llmsuite

@llmsuite.hookimpl
def llmsuite_rollouts(run, step, completions):
    with open(run.output_dir / "heard.jsonl", "a") as heard:
        heard.writelines(json.dumps({"step": step, **row}) + "\\n" for row in completions)
"""


SHARDED = {"sharding": "stage2"}


def _words(
    runner: Runner, name: str, reward: Path, saved: int | None = SAVED, ranks: int = 2, parallel: Any = SHARDED
) -> list[str]:
    functions = json.dumps({"functions": {f"{reward}:score": 1.0}, "time_limit": 100.0, "workers": 1})
    return [
        "run", "recipes/llama/grpo.json", "--smoke", f"--output_dir={runner.directory / name}",
        f"--train.max_steps={STEPS}", f"--checkpoint.save_steps={json.dumps(saved)}", "--train.global_batch_size=8",
        "--train.micro_batch_size=2", "--data.max_length=64", "--data.eval=null", f"--reward={functions}",
        "--rollout.dynamic_sampling=true", "--rollout.num_generations=2", f"--launch.num_devices={ranks}",
        f"--parallel={json.dumps(parallel)}", "--model.config.num_hidden_layers=3",
    ]  # fmt: skip


def test_a_rank_is_killed_in_the_middle_of_a_rollout(runner: Runner) -> None:
    gate = runner.directory / "gate"
    reward = runner.directory / "reward.py"
    reward.write_text(_REWARD.format(gate=str(gate)))
    site = runner.directory / "site of heard"
    site.mkdir()
    PluginSite(site).install("heard", _HEARD)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    runner.run(*_words(runner, "whole", reward), LLMSUITE_PLUGINS="heard", PYTHONPATH=path)
    heard, rows = ((runner.directory / "whole" / name).read_text() for name in ("heard.jsonl", "completions.jsonl"))
    written = [{key: value for key, value in json.loads(row).items() if key != "schema"} for row in rows.splitlines()]
    assert [json.loads(row) for row in heard.splitlines()] == written != []
    words = _words(runner, "killed", reward)
    process = runner.start_and_hold("killed", KILLED - 1, *words, saved=SAVED)
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    gate.mkdir()
    runner.let_go("killed")
    deadline = time.monotonic() + 100
    while not (gate / "waits").exists():  # completions of the step are drawn, and none is scored
        assert time.monotonic() < deadline, "no reward was asked for"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    wait_until_gone(ranks)
    assert runner.metrics("killed")[-1]["step"] == KILLED - 1
    (gate / "waits").unlink()
    gate.rmdir()
    output = runner.run(*words, "--resume")
    assert f"step-{SAVED}" in output
    assert learnt(_without_seconds(runner, "killed")) == learnt(_without_seconds(runner, "whole"))
    written, wanted = ((runner.directory / name / "completions.jsonl").read_bytes() for name in ("killed", "whole"))
    assert written == wanted
    assert len(wanted.splitlines()) > STEPS * 8 * 2  # dynamic sampling has drawn more than a global batch
    manifests = [
        json.loads((runner.directory / name / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())["files"]
        for name in ("killed", "whole")
    ]
    assert manifests[0] == manifests[1]


_JUDGE = """
from pathlib import Path

DOWN = Path({down!r})

def score(completions):
    if DOWN.exists() and completions[0].group >= 4:  # half of the prompts
        raise ConnectionError("the judge is down")
    return [float(c.text[:1] < "k") for c in completions]
"""


MESHES = pytest.mark.parametrize(
    ("name", "ranks", "parallel"),
    [("data", 2, SHARDED), ("pipeline with a middle", 3, {"pipeline_parallel_degree": 3})],
)


@MESHES
def test_what_was_learnt_before_a_failing_rollout_is_saved(
    runner: Runner, name: str, ranks: int, parallel: dict[str, Any]
) -> None:
    down = runner.directory / f"down {name}"
    reward = runner.directory / f"judge of {name}.py".replace(" ", "_")
    reward.write_text(_JUDGE.format(down=str(down)))

    def words(run: str) -> list[str]:
        return _words(runner, run, reward, None, ranks, parallel)

    runner.run(*words(f"whole {name}"))
    failing = f"failing {name}"
    process = runner.start_and_hold(failing, KILLED - 1, *words(failing))
    down.touch()
    runner.let_go(failing)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 2, output
    assert "reward.max_failed" in output
    assert "the judge is down" in output
    assert (runner.directory / failing / "checkpoints" / "latest").read_text().strip() == f"step-{KILLED - 1}"
    down.unlink()
    runner.run(*words(failing), "--resume")
    assert learnt(_without_seconds(runner, failing)) == learnt(_without_seconds(runner, f"whole {name}"))
    written, wanted = ((runner.directory / n / "completions.jsonl").read_bytes() for n in (failing, f"whole {name}"))
    assert written == wanted


_JUDGE_OF_EVALUATIONS = """
def score(completions):
    if completions[0].columns.get("held_out"):
        raise ConnectionError("the judge is down")
    return [float(c.text[:1] < "k") for c in completions]
"""


@MESHES
def test_what_was_learnt_before_a_failing_evaluation_is_saved(
    runner: Runner, name: str, ranks: int, parallel: dict[str, Any]
) -> None:
    reward = runner.directory / "judge_of_evaluations.py"
    held_out = runner.directory / "held_out.jsonl"
    reward.write_text(_JUDGE_OF_EVALUATIONS)
    rows = [{"prompt": f"Say {word}.", "answer": word, "held_out": True} for word in ("one", "two", "three", "four")]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = f"evaluating {name}"
    words = [word for word in _words(runner, run, reward, None, ranks, parallel) if not word.startswith("--data.eval=")]
    output = runner.run(*words, f"--data.eval={held_out}", "--train.eval_steps=2", expect=2)
    assert "the judge is down" in output
    assert "reward.max_failed" in output
    assert (runner.directory / run / "checkpoints" / "latest").read_text().strip() == "step-2"


def _without_seconds(runner: Runner, name: str) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.endswith("seconds")} for record in runner.metrics(name)]
