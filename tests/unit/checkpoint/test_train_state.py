"""Checkpoints of a run: equal after loading, kept by number, and found whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import backup_path, broken_file
from llmsuite.checkpoint.directory import find_latest, list_steps, remove_unfinished
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.save import CheckpointJob
from llmsuite.checkpoint.save import save as save_job
from llmsuite.checkpoint.train_state import TrainState, load_state
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.parallel.optimizer import Optimizer
from tests.support import alone, tiny_llama
from tests.support.fill import fill_parameters
from tests.support.os_steps import OsSteps
from tests.support.tiny_llama import CONFIG, FAMILIES, FAMILY, TOKENIZER
from tests.support.train_states import STATE, damage, load_slots, names, quick_save


def optimizer_of(model: Any, name: str, total_steps: int = 4) -> Optimizer:
    decay = 0.1 if name == "adamw" else 0.0
    train = TrainSection(
        max_steps=total_steps,
        global_batch_size=1,
        micro_batch_size=1,
        learning_rate=0.05,
        optimizer=name,  # type: ignore[arg-type]
        weight_decay=decay,
        warmup_ratio=0.25,
    )
    return alone.optimizer(dict(model.named_parameters()), train, total_steps)


def train(model: Any, optimizer: Optimizer, first: int, last: int) -> list[float]:
    """Steps `first` to `last`; returns their losses. The batch depends on the step alone."""
    losses = []
    for step in range(first, last + 1):
        ids = np.random.Generator(np.random.Philox(step)).integers(0, CONFIG.vocab_size, (3, 9))
        logits = model(paddle.to_tensor(ids[:, :-1]))
        loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(ids[:, 1:]))
        loss.backward()
        optimizer.finish_gradients(1.0)
        optimizer.step(step)
        losses.append(float(loss))
    return losses


def snapshot(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[Any, bytes]]:
    return {name: (value.shape, value.tobytes()) for name, value in arrays.items()}


def values_of(model: Any) -> dict[str, tuple[Any, bytes]]:
    return snapshot({name: parameter.numpy() for name, parameter in model.named_parameters()})


def slots_of(optimizer: Optimizer) -> dict[str, tuple[Any, bytes]]:
    return snapshot(alone.state(optimizer))


def save(root: Path, model: Any, optimizer: Optimizer, state: TrainState = STATE, keep_last: int = 2) -> Path:
    parameters = alone.whole(dict(model.named_parameters()))
    slots = alone.whole_state(optimizer)
    path = save_job(CheckpointJob(root, state, FAMILY, CONFIG, parameters, slots, TOKENIZER, keep_last))
    assert path is not None
    return path


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_after_loading_are_those_of_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    model = tiny_llama.model()
    optimizer = optimizer_of(model, name)
    train(model, optimizer, 1, 2)
    path = save(tmp_path, model, optimizer)
    at_save = values_of(model)
    slots_at_save = slots_of(optimizer)
    losses = train(model, optimizer, 3, 4)
    expected = values_of(model)
    expected_slots = slots_of(optimizer)
    assert at_save != expected

    fresh = tiny_llama.model(seed=1)
    again = optimizer_of(fresh, name)
    fill_parameters(fresh, open_model(path, FAMILIES))
    alone.load_state(again, load_slots(path))
    assert values_of(fresh) == at_save
    assert slots_of(again) == slots_at_save
    assert len(slots_at_save) == (4 * len(at_save) if name == "adamw" else 0)
    assert load_state(path) == STATE
    assert train(fresh, again, 3, 4) == losses
    assert values_of(fresh) == expected
    assert slots_of(again) == expected_slots


def test_forgetting_the_optimizer_would_be_noticed(tmp_path: Path) -> None:
    model = tiny_llama.model()
    optimizer = optimizer_of(model, "adamw")
    train(model, optimizer, 1, 2)
    path = save(tmp_path, model, optimizer)
    losses = train(model, optimizer, 3, 4)
    fresh = tiny_llama.model(seed=1)
    fill_parameters(fresh, open_model(path, FAMILIES))
    assert train(fresh, optimizer_of(fresh, "adamw"), 3, 4) != losses


def test_a_checkpoint_is_a_model_directory_with_training_state(tmp_path: Path) -> None:
    path = quick_save(tmp_path, 3, dtype="bfloat16")
    assert path == tmp_path / "step-3"
    model = open_model(path, FAMILIES)
    for name, value in tiny_llama.values(dtype="bfloat16").items():
        read = model.read(name)
        assert read.dtype.name == "bfloat16"
        assert np.ascontiguousarray(read).tobytes() == value.tobytes()
        assert load_slots(path)[f"{name}/moment1"].dtype == np.float32
    assert (path / "tokenizer.json").is_file()
    assert set(json.loads((path / "manifest.json").read_text())["files"]) == names(path) - {"manifest.json"}


def test_the_last_checkpoints_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    for step in (2, 4, 10, 100):  # as numbers, not as texts: "10" < "2"
        quick_save(tmp_path, step, keep_last=3)
        assert (tmp_path / "latest").read_text() == f"step-{step}\n"
    assert names(tmp_path) == {"step-4", "step-10", "step-100", "latest"}


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    quick_save(tmp_path, 5)
    quick_save(tmp_path, 5, seed=1)
    assert names(tmp_path) == {"step-5", "latest"}
    norm = open_model(tmp_path / "step-5", FAMILIES).read("model.norm.weight")
    assert np.array_equal(norm, tiny_llama.values(seed=1)["model.norm.weight"])


def test_a_damaged_newest_checkpoint_is_reported_and_skipped(tmp_path: Path) -> None:
    reported: list[str] = []
    assert find_latest(tmp_path / "absent", reported.append) is None
    for step in (1, 2, 3):
        quick_save(tmp_path, step, keep_last=3)
    (tmp_path / "step-4").mkdir()  # no manifest: never committed
    (tmp_path / "step-5.tmp").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-6").write_text("a file")
    damage(tmp_path / "step-3")
    assert find_latest(tmp_path, reported.append) == tmp_path / "step-2"
    assert len(reported) == 2
    assert f"{tmp_path / 'step-4'} is damaged and passed over" in reported[0]
    assert f"{tmp_path / 'step-3'} is damaged and passed over" in reported[1]
    assert "sha256" in reported[1]
    damage(tmp_path / "step-2")
    damage(tmp_path / "step-1")
    assert find_latest(tmp_path, reported.append) is None


def test_damaged_later_checkpoints_do_not_displace_the_new_one(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        quick_save(tmp_path, step, keep_last=3)
    damage(tmp_path / "step-10")
    damage(tmp_path / "step-15")
    assert find_latest(tmp_path, lambda text: None) == tmp_path / "step-5"
    quick_save(tmp_path, 6)
    assert {"step-5", "step-6"} < names(tmp_path)
    assert find_latest(tmp_path, lambda text: None) == tmp_path / "step-6"


def test_remove_unfinished_deletes_partial_and_restores_replaced_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        quick_save(tmp_path, step, keep_last=3)
    (tmp_path / "step-2").rename(backup_path(tmp_path / "step-2"))  # killed between the two renames
    shutil.copytree(backup_path(tmp_path / "step-2"), tmp_path / "step-2.tmp")
    shutil.copytree(tmp_path / "step-3", backup_path(tmp_path / "step-3"))  # killed before the old one was deleted
    (backup_path(tmp_path / "step-3") / "state.json").unlink()
    (tmp_path / "step-4.tmp").mkdir()
    remove_unfinished(tmp_path)
    assert names(tmp_path) == {"step-1", "step-2", "step-3", "latest"}
    assert find_latest(tmp_path, lambda text: None) == tmp_path / "step-3"
    assert (tmp_path / "step-2" / "state.json").exists()
    remove_unfinished(tmp_path / "absent")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = quick_save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 2, "cursor": 3}))
    with pytest.raises(UserError, match=r"step-1: is of another checkpoint format; this llmsuite reads format 1"):
        load_state(path)


@pytest.mark.further
def test_a_save_stopped_at_any_step_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    def start(root: Path) -> None:
        quick_save(root, 1)
        quick_save(root, 2)

    steps = OsSteps()
    start(tmp_path / "all")
    with steps.below(tmp_path / "all"):
        quick_save(tmp_path / "all", 3)
    total = len(steps.seen)
    seen = set()
    assert total > 40
    for at in range(1, total + 1):
        root = tmp_path / str(at)
        start(root)
        with steps.below(root, at, kill), pytest.raises(Killed):
            quick_save(root, 3)
        torn = [path for _, path in list_steps(root) if broken_file(path) is not None]
        assert torn == []  # also of what was being deleted
        remove_unfinished(root)
        assert not list(root.glob("step-*.*"))
        found = find_latest(root, pytest.fail)
        latest = (root / "latest").read_text().strip()
        assert found is not None
        assert broken_file(root / latest) is None
        seen.add((found.name, latest))
        shutil.rmtree(root)
    assert seen == {("step-2", "step-2"), ("step-3", "step-2"), ("step-3", "step-3")}


def test_a_disk_that_fills_up_leaves_the_older_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_save(tmp_path, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"step-2: cannot be written: No space left on device; nothing was changed"):
        quick_save(tmp_path, 2)
    assert names(tmp_path) == {"step-1", "latest"}
    assert find_latest(tmp_path, pytest.fail) == tmp_path / "step-1"
