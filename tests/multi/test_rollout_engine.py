"""A server as the engine of runs: they learn what they would learn alone, also when it dies or the run is resumed."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.parity.cases import LIMIT
from tests.support.rollout_servers import ALONE, PIPELINE, asking, completions, served
from tests.support.server import Server

STEPS = 5
SAVED = 2
WORDS = (
    "run", "recipes/llama/grpo.json", "--smoke", f"--train.max_steps={STEPS}", "--train.global_batch_size=8",
    "--train.lr_schedule=constant", "--train.warmup_ratio=0", "--train.optimizer=sgd", "--train.learning_rate=0.1",
    "--data.max_length=64", "--data.eval=null", f"--checkpoint.save_steps={SAVED}", "--checkpoint.keep_last=9",
    "--rollout.batch_size=8",
)  # fmt: skip
STALE = (
    "--rollout.max_staleness=1", "--rollout.max_logprob_gap=null", "--grpo.rollout_correction=tis",
    "--grpo.correction_cap=1.5",
)  # fmt: skip


def run(runner: Runner, name: str, *words: str, expect: int = 0) -> str:
    return runner.run(*WORDS, *words, f"--output_dir={runner.directory / name}", expect=expect)


@pytest.fixture(scope="module")
def local(runner: Runner) -> Path:
    """A run whose own engine draws."""
    run(runner, "local", *ALONE)
    return runner.directory / "local"


@pytest.fixture(scope="module")
def server(runner: Runner, local: Path) -> Iterator[list[Server]]:
    """The server is the last of the list; a test that kills it appends another at the same port."""
    found = [Server(runner, local, "--rl", "--batch_size", "8")]
    yield found
    assert found[-1].stop() == 0


@pytest.fixture(scope="module")
def stale(runner: Runner, server: list[Server]) -> Path:
    """A run that learns from completions of the weights before."""
    run(runner, "stale", *ALONE, *STALE, *served(server[-1]))
    return runner.directory / "stale"


def test_a_server_draws_what_the_run_would_draw_itself(runner: Runner, server: list[Server], local: Path) -> None:
    run(runner, "remote", *ALONE, *served(server[-1]))
    alone = runner.metrics("local")
    found = runner.metrics("remote")
    assert len(alone) == len(found) == STEPS
    for a, b in zip(alone, found, strict=True):
        assert {key: a[key] for key in _EXACT} == {key: b[key] for key in _EXACT}
        for key in ("loss", "grad_norm", "entropy", "logprob_gap"):
            assert math.isclose(a[key], b[key], rel_tol=LIMIT, abs_tol=LIMIT), key
    assert any(record["grad_norm"] > 1e-3 for record in found)
    texts = [[row["text"] for row in completions(place)] for place in (local, runner.directory / "remote")]
    assert texts[0] == texts[1]


_EXACT = ("tokens", "supervised_tokens", "reward", "completions/length", "groups/without_signal")


def test_completions_are_as_old_as_they_may_be(runner: Runner, stale: Path) -> None:
    records = runner.metrics("stale")
    assert [record["staleness"] for record in records] == [0, 1, 1, 1, 1]
    assert [record["staleness/max"] for record in records] == [0, 1, 1, 1, 1]
    versions = [row["version"] for row in completions(stale)]
    assert sorted(set(versions)) == [0, 1, 2, 3]
    assert versions.count(0) == 2 * versions.count(1)  # two steps learn from what the first weights have drawn
    assert records[0]["correction"] == pytest.approx(1, abs=1e-5)
    assert all(abs(record["correction"] - 1) > 1e-4 for record in records[1:])


def test_staleness_is_the_same_in_a_pipeline(runner: Runner, server: list[Server], stale: Path) -> None:
    run(runner, "pipeline", *PIPELINE, *STALE, *served(server[-1]))
    for a, b in zip(runner.metrics("stale"), runner.metrics("pipeline"), strict=True):
        assert {key: a[key] for key in _EXACT} == {key: b[key] for key in _EXACT}
        assert abs(a["loss"] - b["loss"]) <= LIMIT  # it is near 0
        for key in ("grad_norm", "correction"):  # the weight of each token has the rounding of two log-probabilities
            assert math.isclose(a[key], b[key], rel_tol=10 * LIMIT), key


def same_weights(runner: Runner, name: str) -> None:
    for stem in ("model", "optimizer"):
        expected = runner.weights("stale", STEPS, stem)
        found = runner.weights(name, STEPS, stem)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[key], found[key]) for key in expected)


def test_a_run_without_its_server_ends_and_is_resumed(runner: Runner, server: list[Server], stale: Path) -> None:
    again = runner.directory / "again"
    shutil.copytree(stale, again)
    for step in range(SAVED + 1, STEPS + 1):
        shutil.rmtree(again / "checkpoints" / f"step-{step}", ignore_errors=True)
    (again / "checkpoints" / "latest").write_text(f"step-{SAVED}\n")
    nobody = asking("http://127.0.0.1:9", 1)
    said = run(runner, "again", *ALONE, *STALE, *nobody, "--resume", expect=2)
    assert "http://127.0.0.1:9 has sampled nothing in 2 tries" in said
    assert [path.name for path in (again / "checkpoints").glob("step-*")] == [f"step-{SAVED}"]
    run(runner, "again", *ALONE, *STALE, *served(server[-1]), "--resume")
    assert learnt(runner.metrics("again")) == learnt(runner.metrics("stale"))
    same_weights(runner, "again")


def test_a_server_that_is_killed_and_started_anew_goes_on(runner: Runner, server: list[Server], stale: Path) -> None:
    url = server[-1].url
    port = server[-1].port
    words = [*WORDS, *ALONE, *STALE, *asking(url, 12), f"--output_dir={runner.directory / 'killed'}"]
    process = runner.start_and_hold("killed", 2, *words)
    server[-1].process.send_signal(signal.SIGKILL)
    server[-1].process.communicate(timeout=60)
    runner.let_go("killed")  # it asks in vain until there is another server
    server.append(Server(runner, runner.directory / "local", "--rl", "--batch_size", "8", "--port", str(port)))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert learnt(runner.metrics("killed")) == learnt(runner.metrics("stale"))
    same_weights(runner, "killed")
