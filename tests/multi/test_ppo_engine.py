"""PPO on completions that a server draws: policy and critic learn what they would learn alone, also from older ones."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.parity.cases import LIMIT
from tests.support.rollout_servers import ALONE, PIPELINE, asking, completions, served
from tests.support.server import Server

STEPS = 4
SAVED = 2
WORDS = (
    "run", "recipes/llama/ppo.json", "--smoke", f"--train.max_steps={STEPS}", "--train.global_batch_size=8",
    "--train.lr_schedule=constant", "--train.warmup_ratio=0", "--train.optimizer=sgd", "--train.learning_rate=0.2",
    "--ppo.critic.learning_rate=0.05", "--ppo.kl_target=0.01", "--data.max_length=64", "--data.eval=null",
    f"--checkpoint.save_steps={SAVED}", "--checkpoint.keep_last=9", "--rollout.batch_size=8",
)  # fmt: skip
STALE = (
    "--rollout.max_staleness=1", "--rollout.max_logprob_gap=null", "--ppo.rollout_correction=tis",
    "--ppo.correction_cap=1.5",
)  # fmt: skip
EXACT = ("tokens", "supervised_tokens", "reward", "completions/length")
CLOSE = ("grad_norm", "ratio", "critic/loss", "critic/grad_norm", "critic/error", "critic/values", "returns")


def run(runner: Runner, name: str, *words: str, expect: int = 0) -> str:
    return runner.run(*WORDS, *words, f"--output_dir={runner.directory / name}", expect=expect)


@pytest.fixture(scope="module")
def local(runner: Runner) -> Path:
    """A run whose own engine draws."""
    run(runner, "local", *ALONE)
    return runner.directory / "local"


@pytest.fixture(scope="module")
def server(runner: Runner, local: Path) -> Iterator[Server]:
    found = Server(runner, local, "--rl", "--batch_size", "8")
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def stale(runner: Runner, server: Server) -> Path:
    """A run that learns from completions of the weights before."""
    run(runner, "stale", *ALONE, *STALE, *served(server))
    return runner.directory / "stale"


def compare(runner: Runner, expected: str, found: str) -> None:
    for a, b in zip(runner.metrics(expected), runner.metrics(found), strict=True):
        assert {key: a[key] for key in EXACT} == {key: b[key] for key in EXACT}
        assert abs(a["loss"] - b["loss"]) <= LIMIT
        for key in CLOSE:
            assert math.isclose(a[key], b[key], rel_tol=10 * LIMIT, abs_tol=LIMIT), key
        for key in ("kl", "kl/completion"):  # differences of log-probabilities, and at first 0
            assert math.isclose(a[key], b[key], rel_tol=1e-4, abs_tol=1e-5), key


def test_a_server_draws_what_the_run_would_draw_itself(runner: Runner, server: Server, local: Path) -> None:
    run(runner, "remote", *ALONE, *served(server))
    compare(runner, "local", "remote")
    texts = [[row["text"] for row in completions(place)] for place in (local, runner.directory / "remote")]
    assert texts[0] == texts[1]
    assert all(record["critic/grad_norm"] > 1e-3 for record in runner.metrics("remote"))


def test_older_completions_are_weighed_and_judged_by_the_weights_of_the_step(runner: Runner, stale: Path) -> None:
    records = runner.metrics("stale")
    assert [record["staleness"] for record in records] == [0, 1, 1, 1]
    assert records[0]["correction"] == pytest.approx(1, abs=1e-5)
    assert all(abs(record["correction"] - 1) > 1e-4 for record in records[1:])
    # the second step learns from what the initial weights have drawn, which differ in nothing from the reference
    assert records[1]["logprob_gap"] > 1e-4
    assert abs(records[0]["kl/completion"]) < 1e-5 < 1e-3 < abs(records[1]["kl/completion"])
    assert all(record["ratio"] == pytest.approx(1, abs=1e-6) for record in records)


def test_it_is_the_same_in_a_pipeline(runner: Runner, server: Server, stale: Path) -> None:
    run(runner, "pipeline", *PIPELINE, *STALE, *served(server))
    compare(runner, "stale", "pipeline")


def test_a_run_without_its_server_ends_and_is_resumed(runner: Runner, server: Server, stale: Path) -> None:
    again = runner.directory / "again"
    shutil.copytree(stale, again)
    for step in range(SAVED + 1, STEPS + 1):
        shutil.rmtree(again / "checkpoints" / f"step-{step}", ignore_errors=True)
    (again / "checkpoints" / "latest").write_text(f"step-{SAVED}\n")
    said = run(runner, "again", *ALONE, *STALE, *asking("http://127.0.0.1:9", 1), "--resume", expect=2)
    assert "http://127.0.0.1:9 has sampled nothing in 2 tries" in said
    run(runner, "again", *ALONE, *STALE, *served(server), "--resume")
    assert learnt(runner.metrics("again")) == learnt(runner.metrics("stale"))
    for stem in ("model", "optimizer", "critic"):
        expected = runner.weights("stale", STEPS, stem)
        found = runner.weights("again", STEPS, stem)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[key], found[key]) for key in expected), stem
