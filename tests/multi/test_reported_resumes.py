"""Resumes that went wrong in other suites, by their public reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.multi.conftest import Runner, learnt
from tests.support.interrupted_runs import SMALL

ONE = ("--launch.num_devices=1", "--parallel={}")
CONSTANT = ("--train.lr_schedule=constant", "--train.min_lr_ratio=0", "--train.warmup_ratio=0")
WORDS = (*ONE, *SMALL, *CONSTANT, "--data.eval=null", "--checkpoint.save_steps=1")


def trained(runner: Runner, name: str, *words: str) -> list[dict[str, float]]:
    runner.run(*runner.smoke(name, *WORDS, *words))
    return learnt(runner.metrics(name))


@pytest.mark.parametrize("saved", [2, 4], ids=["first epoch", "second epoch"])
@pytest.mark.parametrize("length", [("--train.num_epochs=3", "--train.max_steps=null"), ("--train.max_steps=6",)])
def test_a_resume_at_the_end_of_an_epoch_begins_the_next(runner: Runner, saved: int, length: Sequence[str]) -> None:
    """verl-project/verl#7401: the resumed run skipped an epoch and ended with exit code 0."""
    rows = runner.few_rows(16)  # two steps an epoch
    name = f"{saved}-{len(length)}"
    whole = trained(runner, f"whole-{name}", rows, *length)
    assert [record["step"] for record in whole] == [1, 2, 3, 4, 5, 6]
    assert [record["epoch"] for record in whole] == [0.5, 1, 1.5, 2, 2.5, 3]
    assert len({record["loss"] for record in whole}) == 6
    trained(runner, name, rows, f"--train.max_steps={saved}")
    assert trained(runner, name, rows, *length, "--resume") == whole


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 1), (2, 0)])
def test_a_resume_with_other_workers_reads_the_same_samples(runner: Runner, before: int, after: int) -> None:
    """Other suites keep a position for each worker of their data loader, and lose or repeat samples."""
    rows = runner.few_rows(20)  # epochs end within steps
    name = f"workers-{before}-{after}"
    whole = trained(runner, f"whole-{name}", rows, "--train.max_steps=6", f"--data.num_workers={before}")
    trained(runner, name, rows, "--train.max_steps=3", f"--data.num_workers={before}")
    assert trained(runner, name, rows, "--train.max_steps=6", f"--data.num_workers={after}", "--resume") == whole


def test_changed_data_is_refused_with_what_changed(runner: Runner) -> None:
    """Other suites skip as many batches of the new file as the run has taken of the old one."""
    paths = {}
    for name, count in (("train", 16), ("math", 9), ("chat", 10), ("mixed", 8)):
        source = runner.few_rows(count).partition("=")[2]
        paths[name] = runner.directory / f"{name}.jsonl"
        with open(source, encoding="utf-8") as rows:
            paths[name].write_text(rows.read())
    words = [word for word in WORDS if word != "--data.eval=null"]
    words += [f"--data.train={paths['train']}", f'--data.mix={{"{paths["mixed"]}": 1.0}}', "--train.max_steps=2"]
    words += [f'--data.eval={{"math": "{paths["math"]}", "chat": "{paths["chat"]}"}}']
    runner.run(*runner.smoke("changed", *words))
    assert "nothing to do" in runner.run(*runner.smoke("changed", *words), "--resume")
    keys = {"train": "data.train", "mixed": "data.mix", "math": "data.eval.math", "chat": "data.eval.chat"}
    for name, path in paths.items():
        before = path.read_text()
        path.write_text("".join(before.splitlines(keepends=True)[:-1]))
        output = runner.run(*runner.smoke("changed", *words), "--resume", expect=2)
        found = f"was written by a run that differs in the content of {keys[name]} {path}; resume it with"
        assert found in output
        path.write_text(before)
    assert "nothing to do" in runner.run(*runner.smoke("changed", *words), "--resume")
