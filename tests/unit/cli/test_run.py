"""Settings of `llmsuite run` before Paddle is imported, and its records of the end of a run."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from llmsuite.base.errors import Problem
from llmsuite.base.locks import lock_directory
from llmsuite.cli import run as run_command
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.devices import start
from llmsuite.devices.gpu import GpuBackend
from llmsuite.launch.ends import INTERRUPTED, REFUSED
from llmsuite.launch.hang import STALLED
from llmsuite.observe.events import add_event, read_events
from llmsuite.recipe.resolve import RunPlan

FLAGS = GpuBackend.deterministic_flags


class Started(Exception):
    """In place of Paddle's import."""


@pytest.mark.parametrize(
    ("given", "worker", "expected"),
    [
        ("false", False, {"FLAGS_cudnn_deterministic": "0", "FLAGS_embedding_deterministic": None}),
        ("true", False, FLAGS),
        ("true", True, FLAGS),  # also where another launcher has started the rank
    ],
)
def test_deterministic_kernels_are_chosen_before_paddle_reads_its_flags(
    write_recipe: Callable[..., Path],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    worker: bool,
    expected: dict[str, str | None],
) -> None:
    monkeypatch.setenv("FLAGS_cudnn_deterministic", "0")  # which the shell has exported
    monkeypatch.setenv("FLAGS_embedding_deterministic", "")  # so that it is restored
    monkeypatch.delenv("FLAGS_embedding_deterministic")
    if worker:
        monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    found: dict[str, str | None] = {}

    def started(*arguments: object, **options: object) -> None:
        found.update({name: os.environ.get(name) for name in expected})
        raise Started

    monkeypatch.setattr(start, "start_paddle", started)
    monkeypatch.setattr(run_command, "_check", lambda *arguments: None)
    words = ["--device=gpu", f"--engine.deterministic={given}"]
    args = types.SimpleNamespace(recipe=str(write_recipe()), overrides=words, smoke=False, resume=False)
    with pytest.raises(Started):
        run_command.run(args, registry)
    assert found == expected


def test_a_device_that_cannot_repeat_itself_is_refused(
    plan: Callable[..., RunPlan], problems: Callable[..., list[Problem]]
) -> None:
    for device in ("cpu", "gpu"):
        assert plan({"device": device, "engine.deterministic": True}).recipe.engine.deterministic
    (found,) = problems({"device": "xpu", "engine.deterministic": True})
    assert found.key == "engine.deterministic"
    assert found.message == "xpu cannot be made deterministic to the last bit; set it to false"


@pytest.mark.parametrize(
    ("before", "during", "code", "noted"),
    [
        (["started", "ended"], [], REFUSED, []),  # resumed with another recipe
        (["started", "ended"], [], 1, []),
        (["started", "ended"], [], STALLED, []),
        (["started", "ended"], ["resumed"], 1, ["failed"]),
        (["started", "ended"], ["resumed"], REFUSED, ["failed"]),
        (["started", "ended"], ["restarting"], 1, ["failed"]),  # else it would look as if it was running
        (["started", "stopped"], [], REFUSED, []),
        (["started", "stopped"], [], 1, ["failed"]),
        (["started", "saved"], [], STALLED, ["hung"]),
        (["started", "failed"], [], 1, []),
        ([], [], REFUSED, []),
        ([], [], 1, ["failed"]),  # a rank that dies while it imports
        ([], ["started"], REFUSED, ["failed"]),
        ([], ["started", "failed"], 1, []),
        ([], ["started", "ended"], 1, ["failed"]),
        ([], ["started"], INTERRUPTED, ["stopped"]),  # a second signal ends it immediately
        ([], ["started", "saved"], INTERRUPTED, ["stopped"]),
        ([], ["started", "stopped"], INTERRUPTED, []),
        ([], ["started", "ended"], INTERRUPTED, []),
        ([], [], INTERRUPTED, []),
        (["started"], [], INTERRUPTED, []),
        ([], ["started", "ended"], 0, []),
    ],
)
def test_an_end_is_noted_of_an_attempt_that_began(
    tmp_path: Path, before: list[str], during: list[str], code: int, noted: list[str]
) -> None:
    for name in [*before, *during]:
        add_event(tmp_path, name)
    is_ended = [*during][-1:] == ["ended"] and code == INTERRUPTED
    assert run_command._note_end(tmp_path, code, len(before), has_rank_0=True) == (0 if is_ended else code)
    assert [event["event"] for event in read_events(tmp_path)] == [*before, *during, *noted]


@pytest.mark.parametrize("recorded", [[], ["failed"]])
def test_a_lost_rank_is_recorded_after_the_effect_on_rank_0(tmp_path: Path, recorded: list[str]) -> None:
    for name in ["started", *recorded]:
        add_event(tmp_path, name)
    lost = "rank 1 was killed by SIGKILL"
    assert run_command._note_end(tmp_path, 1, has_rank_0=True, lost=lost) == 1
    assert len(read_events(tmp_path)) == 2 + len(recorded)
    last = read_events(tmp_path)[-1]
    assert (last["event"], last["error"], last["exit_code"]) == ("failed", lost, 1)


def test_an_end_before_the_beginning_is_noted_by_the_machine_of_rank_0_alone(tmp_path: Path) -> None:
    run_command._note_end(tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()
    run_command._note_end(tmp_path / "run", 1, has_rank_0=True)
    assert [event["event"] for event in read_events(tmp_path / "run")] == ["failed"]


def test_the_run_of_another_process_is_not_called_failed(tmp_path: Path) -> None:
    add_event(tmp_path, "started")
    with lock_directory(tmp_path):
        run_command._note_end(tmp_path, 1, num_before=1, has_rank_0=True)
    assert [event["event"] for event in read_events(tmp_path)] == ["started"]


def test_a_run_for_one_machine_is_not_started_on_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(words: list[str]) -> str:
        assert main(words) == 2
        return capsys.readouterr().err

    words = ["run", "recipes/llama/smollm2-sft.json", f"--output_dir={tmp_path / 'run'}", "--data.train=nowhere.jsonl"]
    srun = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for name, value in srun.items():
        monkeypatch.setenv(name, value)
    error = "is 1, and Slurm has started this on 2 machines; set --launch.nnodes=2, or set --launch.node_rank=0"
    assert error in error_of(words)
    assert "nowhere.jsonl is not a file" in error_of([*words, "--launch.node_rank=0"]), "the next check runs"
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    assert "has started 4 processes on this machine; start one" in error_of(words)
