"""A checkpoint that several ranks write: each its part, complete when all are done, and whole or not there."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file
from llmsuite.checkpoint import save as save_module
from llmsuite.checkpoint.directory import find_latest, remove_unfinished
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.save import assign_writers, begin
from tests.support import tiny_llama
from tests.support.os_steps import OsSteps
from tests.support.saves_together import RANKS, job_of, save_all, save_rank
from tests.support.tiny_llama import FAMILIES
from tests.support.train_states import load_slots, names


@given(
    sizes=st.lists(st.integers(0, 1000), max_size=40),
    num_ranks=st.integers(1, 9),
    marks=st.lists(st.integers(0, 20), min_size=40, max_size=40),
)
def test_writers_get_about_equal_bytes(sizes: list[int], num_ranks: int, marks: list[int]) -> None:
    by_name = {f"t{i}": size for i, size in enumerate(sizes)}
    ranks = list(range(10, 10 + num_ranks))
    writers = assign_writers(by_name, ranks, {})
    assert writers.keys() == by_name.keys()
    assert list(writers.values()) == sorted(writers.values())  # neighbours the same
    for rank in ranks:
        mine = [size for name, size in by_name.items() if writers[name] == rank]
        assert sum(mine) <= sum(sizes) / num_ranks + max(mine, default=0)
    together = {name: [f"m{mark}"] for name, mark in zip(by_name, marks)}
    writers = assign_writers(by_name, ranks, together)
    for name in by_name:
        assert {writers[other] for other in by_name if together[other] == together[name]} == {writers[name]}


def test_several_ranks_write_the_checkpoint_of_one(tmp_path: Path) -> None:
    calls: dict[int, list[str]] = {}
    save_all(tmp_path, 3, calls)
    assert calls[0] == calls[1] == calls[2]  # all take part in bringing each tensor together, in one order
    path = tmp_path / "step-3"
    assert broken_file(path) is None
    model = open_model(path, FAMILIES)
    for name, value in tiny_llama.values(seed=3).items():
        assert np.array_equal(model.read(name), value)
        assert np.array_equal(load_slots(path)[f"{name}/moment1"], value)
    for stem in ("model", "optimizer"):
        sizes = [file.stat().st_size for file in sorted(path.glob(f"{stem}-*"))]
        assert len(sizes) == RANKS
        assert max(sizes) < 2 * min(sizes)
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == names(path) - {"manifest.json"}
    assert {key.split(":")[1] for key in manifest["tensors"]} == {*model.files.names, *load_slots(path)}


def test_the_lead_rank_waits_for_the_others(tmp_path: Path) -> None:
    begin(job_of(tmp_path, 1, 0))
    save_rank(tmp_path, 1, 1)
    first = threading.Thread(target=save_rank, args=(tmp_path, 1, 0))
    first.start()
    first.join(0.3)
    assert first.is_alive()
    assert not (tmp_path / "step-1").exists()
    save_rank(tmp_path, 1, 2)
    first.join(60)
    assert broken_file(tmp_path / "step-1") is None


def test_an_error_of_one_rank_is_raised_on_the_lead_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, 1)
    begin(job_of(tmp_path, 2, 0))
    (tmp_path / "step-2.tmp/model-00002-of-00003.safetensors").mkdir()  # in the way
    save_rank(tmp_path, 2, 2)
    with pytest.raises(UserError, match=r"step-2: cannot be written: Is a directory"):
        save_rank(tmp_path, 2, 1)
    with pytest.raises(UserError, match=r"rank 1: .*step-2: cannot be written: Is a directory"):
        save_rank(tmp_path, 2, 0)
    assert names(tmp_path) == {"step-1", "latest"}
    save_rank(tmp_path, 2, 1)  # the first one has given it up, and has said why
    assert names(tmp_path) == {"step-1", "latest"}


def test_a_rank_that_never_writes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "STALL_TIMEOUT_SECONDS", 0.2)
    save_all(tmp_path, 1)
    begin(job_of(tmp_path, 2, 0))
    save_rank(tmp_path, 2, 1)
    with pytest.raises(UserError, match=r"ranks 2 have not written their part, and nothing there has grown"):
        save_rank(tmp_path, 2, 0)
    assert names(tmp_path) == {"step-1", "latest"}


@pytest.mark.further
def test_a_save_of_several_ranks_stopped_at_any_step_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    steps = OsSteps()
    save_all(tmp_path / "all", 1)
    with steps.below(tmp_path / "all"):
        save_all(tmp_path / "all", 2)
    total = len(steps.seen)
    seen = set()
    assert sum("rank-0000" in step for step in steps.seen) > 2 * (RANKS - 1)
    save_all(tmp_path / "before", 1)
    for at in range(1, total + 1):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "before", root)
        with steps.below(root, at, kill), pytest.raises(Killed):
            save_all(root, 2)
        remove_unfinished(root)
        found = find_latest(root, pytest.fail)
        assert found is not None
        assert names(root) <= {"step-1", "step-2", "latest", "latest.tmp"}
        seen.add((found.name, (root / "latest").read_text().strip()))
        shutil.rmtree(root)
    assert seen == {("step-1", "step-1"), ("step-2", "step-1"), ("step-2", "step-2")}
