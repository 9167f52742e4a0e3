"""Bad steps are skipped, rolled back or end the run, and a resumed run decides as one without interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.engine.guard import LEAST, WINDOW, Guard, LossSpike, NonFiniteLoss
from llmsuite.engine.trainer import run
from llmsuite.observe.events import read_events
from llmsuite.observe.runs import read_run
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.sft import SftStage
from tests.support.paths import ROOT

BATCH = 4
STEPS = 8
SAVED = 4
BAD = 6


# decisions


def test_without_a_factor_nothing_is_a_spike() -> None:
    guard = Guard()
    for step, norm in enumerate([1.0] * 20 + [1e9], 1):
        assert guard.decide(step, 1.0, norm) == "accept"
    assert guard.norms == []


def test_a_spike_is_detected_by_the_median_of_the_last_steps() -> None:
    guard = Guard(spike_factor=4.0)
    for step in range(1, LEAST):
        assert guard.decide(step, 1.0, 100.0 if step == 2 else 1.0) == "accept"  # too few to know
    assert guard.decide(LEAST, 1.0, 50.0) == "accept"
    assert guard.decide(LEAST + 1, 1.0, 4.1) == "skip"
    assert guard.decide(LEAST + 2, 1.0, 3.9) == "accept"
    assert guard.bad_steps == 0
    for step in range(LEAST + 3, 60):
        guard.decide(step, 1.0, 2.0)
    assert guard.norms == [2.0] * WINDOW
    assert guard.decide(60, 1.0, 7.9) == "accept"


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("answer", ["skip", "roll_back"])
def test_a_step_that_is_not_finite_follows_the_policy(loss: float, answer: Any) -> None:
    guard = Guard(on_nonfinite=answer)
    assert guard.decide(1, loss, 1.0) == answer
    assert guard.decide(2, 1.0, loss) == answer
    with pytest.raises(NonFiniteLoss, match=r"^step 3: loss is .*; nothing was updated\. Enough\. Lower"):
        Guard().decide(3, loss, 1.0, note=" Enough.")


def test_too_many_bad_steps_end_the_run() -> None:
    guard = Guard(on_nonfinite="skip", max_bad_steps=2)
    for step in (1, 2):
        guard.decide(step, math.nan, 1.0)
    with pytest.raises(NonFiniteLoss, match=r"happened 3 times, more than train\.max_bad_steps"):
        guard.decide(3, math.nan, 1.0)
    spiky = Guard(spike_factor=2.0, on_spike="skip", max_bad_steps=1, norms=[1.0] * LEAST)
    spiky.decide(9, 1.0, 5.0)
    with pytest.raises(LossSpike, match=r"gradient norm 5 is 5 times the usual 1"):
        spiky.decide(10, 1.0, 5.0)


def test_repeated_steps_do_not_count_as_progress() -> None:
    """Else a run that comes to the same spike again and again would never end."""
    guard = Guard(on_nonfinite="roll_back", max_bad_steps=3)

    def train() -> None:
        step = 0
        for _ in range(1000):
            step += 1
            if guard.decide(step, math.nan if step == 5 else 1.0, 1.0) == "roll_back":
                step = 0

    with pytest.raises(NonFiniteLoss):
        train()
    assert guard.bad_steps == 4


@given(st.lists(st.floats(0.1, 1e3) | st.just(math.nan), max_size=60), st.integers(0, 60))
def test_the_saved_state_is_enough_to_resume(norms: list[float], cut: int) -> None:
    def judge(guard: Guard, first: int, part: list[float]) -> list[str]:
        return [guard.decide(step, 1.0, norm) for step, norm in enumerate(part, first)]

    whole, first = (Guard("skip", "roll_back", 3.0, 1000) for _ in range(2))
    decided = judge(whole, 1, norms)
    judge(first, 1, norms[:cut])
    assert judge(dataclasses.replace(first), 1 + len(norms[:cut]), norms[cut:]) == decided[cut:]


# runs

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs on one rank, with a step a batch; the loss of batch BAD is multiplied by `factor`."""
    root = tmp_path_factory.mktemp("runs")
    loss = SftStage.loss

    def go(
        name: str, *words: str, factor: float = 1.0, bad: str = "", resume: bool = False, save_steps: int = SAVED
    ) -> Path:
        directory = root / name
        seen: list[str] = []

        def spoilt(self: Any, model: Any, batch: Any) -> Any:
            terms = loss(self, model, batch)
            seen.append(hashlib.sha256(np.asarray(batch["input_ids"]).tobytes()).hexdigest())
            return dataclasses.replace(terms, total=terms.total * factor) if seen[-1] == bad else terms

        common = (
            f"--train.max_steps={STEPS}", "--data.eval=null", "--parallel={}", "--launch.num_devices=1",
            f"--train.global_batch_size={BATCH}", f"--train.micro_batch_size={BATCH}", f"--output_dir={directory}",
            f"--checkpoint.save_steps={save_steps}", "--checkpoint.keep_last=9", "--train.learning_rate=1e-3",
        )  # fmt: skip
        plan = plan_run(ROOT / "recipes" / "llama" / "sft.json", [*common, *words], registry, smoke=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SftStage, "loss", spoilt)
            assert run(plan, registry, resume) == 0
        (directory / "batches.json").write_text(json.dumps(seen))
        return directory

    return go


@pytest.fixture(scope="module")
def bad(train: Train) -> str:
    """The batch of step BAD."""
    batches = json.loads((train("clean") / "batches.json").read_text())
    assert len(set(batches)) == STEPS
    return str(batches[BAD - 1])


def tensors(directory: Path, step: int = STEPS) -> dict[str, bytes]:
    files = sorted((directory / "checkpoints" / f"step-{step}").glob("*.safetensors"))
    return {k: v.tobytes() for file in files for k, v in safetensors.numpy.load_file(file).items()}


def state(directory: Path, step: int = STEPS) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "checkpoints" / f"step-{step}" / "state.json").read_text())
    return found


def cut_off(directory: Path, name: str, **changes: Any) -> Path:
    """A copy of a run as it was after its first checkpoint, whose state is changed."""
    copy = directory.with_name(name)
    shutil.copytree(directory, copy)
    for step in range(SAVED + 1, STEPS + 1):
        shutil.rmtree(copy / "checkpoints" / f"step-{step}", ignore_errors=True)
    (copy / "checkpoints" / "latest").write_text(f"step-{SAVED}\n")
    kept = copy / "checkpoints" / f"step-{SAVED}"
    text = json.dumps({**state(copy, SAVED), **changes})
    (kept / "state.json").write_text(text)
    manifest = json.loads((kept / "manifest.json").read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"]["state.json"] = {**manifest["files"]["state.json"], "size": len(text), "sha256": digest}
    (kept / "manifest.json").write_text(json.dumps(manifest))
    return copy


def test_a_bad_step_stops_the_run(train: Train, bad: str) -> None:
    with pytest.raises(NonFiniteLoss, match=f"^step {BAD}: loss is nan"):
        train("stop", factor=math.nan, bad=bad)


def test_a_bad_step_is_skipped(train: Train, bad: str) -> None:
    words = ("--train.on_nonfinite=skip", "--train.max_bad_steps=1")
    directory = train("skip", *words, factor=math.nan, bad=bad)
    records = {record["step"]: record for record in read_run(directory).steps}
    assert [step for step, record in records.items() if record.get("skipped")] == [BAD]
    assert "loss" not in records[BAD]
    assert state(directory)["samples"] == STEPS * BATCH
    assert [e["step"] for e in read_events(directory) if e["event"] == "skipped"] == [BAD]
    again = cut_off(directory, "skip-again")
    train("skip-again", *words, factor=math.nan, bad=bad, resume=True)
    assert tensors(again) == tensors(directory)
    assert state(again) == state(directory)


def test_a_bad_step_is_rolled_back_and_its_samples_are_skipped(train: Train, bad: str) -> None:
    words = ("--train.on_nonfinite=roll_back",)
    directory = train("back", *words, factor=math.nan, bad=bad)
    assert [record["step"] for record in read_run(directory).steps] == list(range(1, STEPS + 1))
    events = [(e["event"], e.get("step"), e.get("to")) for e in read_events(directory)]
    assert ("skipped", BAD, None) in events
    assert ("rolled back", BAD, SAVED) in events
    taken = BAD + STEPS - SAVED
    assert (state(directory)["step"], state(directory)["samples"]) == (STEPS, taken * BATCH)
    assert len(json.loads((directory / "batches.json").read_text())) == taken

    # the result equals that of a run that is resumed from the checkpoint with these samples
    other = cut_off(directory, "moved", samples=BAD * BATCH)
    train("moved", resume=True)
    assert tensors(other) == tensors(directory)
    # killed before the next checkpoint, it reaches the bad step again, and decides the same
    again = cut_off(directory, "back-again")
    train("back-again", *words, factor=math.nan, bad=bad, resume=True)
    assert tensors(again) == tensors(directory)
    assert state(again) == state(directory)


def test_a_roll_back_without_a_checkpoint_is_refused(train: Train, bad: str) -> None:
    with pytest.raises(UserError, match="there is no checkpoint yet"):
        train("too early", "--train.on_nonfinite=roll_back", factor=math.nan, bad=bad, save_steps=BAD + 1)


def test_spikes_are_remembered_with_the_checkpoint(train: Train, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmsuite.engine.guard.LEAST", 3)
    words = ("--train.spike_factor=20", "--train.on_spike=roll_back", "--train.max_bad_steps=2")
    directory = train("spike", *words, factor=1e4, bad=bad)
    assert [e["step"] for e in read_events(directory) if e["event"] == "rolled back"] == [BAD]
    assert len(state(directory, SAVED)["norms"]) == SAVED
    assert len(state(directory)["norms"]) == STEPS
    again = cut_off(directory, "spike-again")
    train("spike-again", *words, factor=1e4, bad=bad, resume=True)
    assert tensors(again) == tensors(directory)
    assert state(again) == state(directory)


def test_a_policy_needs_what_it_uses(problems: Callable[..., list[Any]]) -> None:
    (problem,) = problems({"train.on_spike": "stop"})
    assert "has no effect while spike_factor is null" in problem.message
    (problem,) = problems({"train.on_nonfinite": "roll_back"})
    assert (problem.key, "set checkpoint.save_steps" in problem.message) == ("train.on_nonfinite", True)
