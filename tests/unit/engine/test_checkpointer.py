"""When checkpoints are written: one at a time, in order, with every error reported, and the best one kept."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file
from llmsuite.checkpoint import background
from llmsuite.checkpoint.background import Writer, room_for_copy
from llmsuite.checkpoint.directory import Best, list_steps, load_best
from llmsuite.checkpoint.save import GatheredTensor
from llmsuite.contract.schema.recipe import CheckpointSection
from llmsuite.engine import checkpointer
from llmsuite.engine.checkpointer import CheckpointContents, Checkpointer
from tests.support import alone, tiny_llama
from tests.support.tiny_llama import CONFIG, FAMILY
from tests.support.train_states import STATE


def test_one_task_at_a_time_in_order() -> None:
    writer = Writer(in_background=True)
    gate = threading.Event()
    done = []

    def first() -> None:
        gate.wait(60)
        done.append("first")

    writer.start(first)
    writer.check()  # does not wait
    assert done == []
    threading.Timer(0.1, gate.set).start()
    writer.start(lambda: done.append("second"))  # waits for the first
    assert done[0] == "first"
    writer.wait()
    assert done == ["first", "second"]


def test_a_task_that_follows_is_not_waited_for() -> None:
    writer = Writer(in_background=True)
    gate = threading.Event()
    done = []
    writer.start(lambda: done.append(gate.wait(60)))
    writer.follow(lambda: done.append("after"))
    assert done == []
    gate.set()
    writer.wait()
    assert done == [True, "after"]
    writer.follow(lambda: done.append("alone"))
    writer.wait()
    assert done[2:] == ["alone"]


def test_nothing_runs_after_a_task_that_failed() -> None:
    writer = Writer(in_background=True)
    gate = threading.Event()
    done = []

    def fail() -> None:
        gate.wait(60)
        raise UserError("no room")

    writer.start(fail)
    writer.follow(lambda: done.append("after"))
    gate.set()
    with pytest.raises(UserError, match="no room"):
        writer.wait()
    assert done == []
    writer.start(lambda: done.append("later"))
    writer.wait()
    assert done == ["later"]


def test_without_a_task_there_is_no_thread() -> None:
    """So one that has nothing to do takes no part of a core."""

    def writers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "checkpoint writer"]

    writer = Writer(in_background=True)
    gate = threading.Event()
    assert writers() == []
    writer.start(lambda: gate.wait(60) and None)
    assert len(writers()) == 1
    gate.set()
    writer.wait()
    assert writers() == []


@pytest.mark.parametrize("how", ["check", "wait", "start"])
def test_an_error_in_the_background_surfaces_once(how: str) -> None:
    writer = Writer(in_background=True)

    def fail() -> None:
        raise UserError("no room")

    writer.start(fail)
    assert writer._thread is not None
    writer._thread.join()
    with pytest.raises(UserError, match="no room"):
        {"check": writer.check, "wait": writer.wait, "start": lambda: writer.start(lambda: None)}[how]()
    writer.wait()


def test_a_task_in_the_foreground_is_done_on_return() -> None:
    writer = Writer(in_background=False)
    done = []
    writer.start(lambda: done.append(threading.current_thread()))
    assert done == [threading.main_thread()]


class Run:
    """A run that does nothing but save: its parameters are its step."""

    def __init__(self, directory: Path, stopping: tuple[Any, ...] = (), **section: Any):
        self.directory = directory
        self.saved = []
        self.tensors = {name: paddle.to_tensor(value) for name, value in tiny_llama.values().items()}
        settings = CheckpointSection(**{"keep_last": 2, **section})

        def saved(step: int, path: Path) -> None:
            self.saved.append((step, path.name))

        contents = CheckpointContents(FAMILY, CONFIG, None, self._state)
        self.checkpointer = Checkpointer(directory, settings, contents, 1, None, *stopping)
        self.checkpointer.on_saved = saved

    def _state(self) -> Any:
        @dataclasses.dataclass
        class State:
            parameters: list[GatheredTensor]
            optimizer_state: list[GatheredTensor]

        return State(alone.whole(self.tensors), [])

    def save(self, step: int, overlaps: bool = True) -> None:
        self.checkpointer.save(dataclasses.replace(STATE, step=step, samples=step), overlaps)

    def evaluated(self, step: int, **metrics: float) -> None:
        self.checkpointer.evaluated(dataclasses.replace(STATE, step=step, samples=step), metrics)

    def steps(self) -> list[int]:
        self.checkpointer.finish()
        assert all(broken_file(path) is None for _, path in list_steps(self.checkpointer.root))
        return [step for step, _ in list_steps(self.checkpointer.root)]


@pytest.mark.parametrize("in_background", [True, False])
def test_the_saved_values_are_those_at_the_request(tmp_path: Path, in_background: bool) -> None:
    run = Run(tmp_path, async_save=in_background)
    expected = tiny_llama.values()["model.norm.weight"]
    run.save(1)
    for tensor in run.tensors.values():
        tensor.scale_(2.0)  # the next step, while the writer may not have begun
    run.save(2)
    assert run.steps() == [1, 2]
    assert run.saved == [(1, "step-1"), (2, "step-2")]
    from llmsuite.checkpoint.model_dir import open_model

    for step, factor in ((1, 1), (2, 2)):
        read = open_model(tmp_path / f"checkpoints/step-{step}", {"llama": FAMILY}).read("model.norm.weight")
        assert (read == factor * expected).all()


def test_nothing_is_copied_where_nothing_overlaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.save(1)
    monkeypatch.delattr("llmsuite.engine.checkpointer.stage_to_cpu")
    run.save(2, overlaps=False)
    assert run.saved == [(1, "step-1"), (2, "step-2")]
    assert run.steps() == [1, 2]
    with pytest.raises(NameError):
        run.save(3)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(3)
    run.save(3)
    assert run.steps() == [3]
    assert run.saved == [(3, "step-3")]
    again = Run(tmp_path)
    again.checkpointer.resume(3)
    again.save(3)
    assert again.saved == []


def test_an_error_of_the_writer_surfaces_at_the_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    run.save(1)
    assert run.checkpointer._writer._thread is not None
    run.checkpointer._writer._thread.join()
    with pytest.raises(UserError, match=r"step-1: cannot be written: .*nothing was changed"):
        run.checkpointer.check()
    assert run.saved == []


def test_a_run_that_fails_finishes_its_checkpoint_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.checkpointer.abort(UserError("the loss is not finite"))
    assert run.saved == [(1, "step-1")]
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "checkpoints").write_text("in the way")
    run.save(2)
    run.checkpointer.abort(UserError("the loss is not finite"))
    assert "step-2: cannot be written" in capsys.readouterr().out


def test_training_waits_if_a_copy_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpointer, "room_for_copy", lambda num_bytes: False)
    run = Run(tmp_path)
    run.save(1)
    assert run.saved == [(1, "step-1")]
    assert "a copy does not fit into memory" in capsys.readouterr().out


def test_room_is_what_the_machine_has_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    monkeypatch.setattr(background, "Path", lambda name: tmp_path / name.split("/")[-1])
    assert room_for_copy(1024 * 900)
    assert not room_for_copy(1024 * 950)
    (tmp_path / "meminfo").unlink()
    assert room_for_copy(1 << 60)


@pytest.mark.parametrize(("which", "kept"), [("lowest", 3), ("highest", 5)])
def test_the_best_evaluation_stays(tmp_path: Path, which: str, kept: int) -> None:
    run = Run(tmp_path, best_metric="eval/loss", best_is=which)
    values = {1: 0.5, 2: 0.4, 3: 0.2, 4: float("nan"), 5: 0.7, 6: 0.3, 7: 0.25, 8: 0.26}
    for step, value in values.items():
        if step % 2:
            run.save(step)  # the others are saved only where they are best
        run.evaluated(step, loss=value)
    assert load_best(run.checkpointer.root) == Best(kept, "eval/loss", values[kept])
    assert run.steps() == sorted({kept, 5, 7})
    # and after a resume it is still known
    again = Run(tmp_path, best_metric="eval/loss", best_is=which)
    again.checkpointer.resume(7)
    again.evaluated(9, loss=0.3)
    assert again.steps() == sorted({kept, 5, 7})
    assert load_best(run.checkpointer.root) == Best(kept, "eval/loss", values[kept])
    earlier = Run(tmp_path, best_metric="eval/loss", best_is=which)
    earlier.checkpointer.resume(2)  # what was best later is forgotten
    earlier.evaluated(3, loss=0.3)
    earlier.checkpointer.finish()
    assert load_best(run.checkpointer.root) == Best(3, "eval/loss", 0.3)


@pytest.mark.parametrize(("which", "kept"), [("lowest", 1), ("highest", 3)])
def test_the_best_by_the_metric_of_early_stopping_stays(tmp_path: Path, which: str, kept: int) -> None:
    run = Run(tmp_path, ("eval/accuracy", which))
    for step, value in {1: 0.5, 2: 0.6, 3: 0.8, 4: 0.7}.items():
        run.evaluated(step, accuracy=value)
    run.checkpointer.finish()
    best = load_best(run.checkpointer.root)
    assert best is not None
    assert best.step == kept


@pytest.mark.parametrize(("value", "best"), [(0.3, Best(4, "eval/loss", 0.3)), (0.6, Best(2, "eval/loss", 0.5))])
def test_a_best_that_was_not_named_yet_is_named_on_resume(tmp_path: Path, value: float, best: Best) -> None:
    """The run was killed when the checkpoint was on disk and the evaluation recorded."""
    run = Run(tmp_path, best_metric="eval/loss")
    run.evaluated(2, loss=0.5)
    run.save(4)
    assert run.steps() == [2, 4]
    again = Run(tmp_path, best_metric="eval/loss")
    again.checkpointer.resume(4)
    again.checkpointer.restore_best(4, {"eval/loss": value, "eval/accuracy": None})
    again.checkpointer.restore_best(4, {"eval/loss": value})  # as often as it is resumed
    assert load_best(again.checkpointer.root) == best
    again.evaluated(6, loss=0.4)
    assert again.steps() == ([2, 4, 6] if value > 0.4 else [2, 4])


def test_an_unknown_metric_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is 'eval/los'; the evaluation has eval/accuracy, eval/loss"):
        Run(tmp_path, best_metric="eval/los").evaluated(1, loss=0.1, accuracy=1.0)


def test_a_trigger_file_counts_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not run.checkpointer.requested()
    (tmp_path / "save-now").touch()
    assert run.checkpointer.requested()
    assert not run.checkpointer.requested()
    (tmp_path / "save-now").mkdir()
    with pytest.raises(UserError, match="save-now: cannot be removed"):
        run.checkpointer.requested()
