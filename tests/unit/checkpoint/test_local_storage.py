"""A checkpoint of two machines that share no directory: here two directories, and threads in place of ranks."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import threading
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import ELSEWHERE, broken_file, damaged_tensors
from llmsuite.checkpoint.directory import find_latest, find_model, prune, remove_unfinished
from llmsuite.checkpoint.local_storage import LocalStorage, joined_directory
from llmsuite.launch.leaders import accept, connect, listen
from tests.support.os_steps import OsSteps
from tests.support.saves_apart import disks, roots_of, save_apart
from tests.support.saves_together import save_all
from tests.support.train_states import names


def test_joined_parts_equal_the_checkpoint_of_one_disk(tmp_path: Path) -> None:
    roots = roots_of(tmp_path)
    of = disks()
    for step in (1, 2, 3):
        save_all(tmp_path / "one", step)
        assert save_apart(roots, step, of=of) == [None, None]
    for root in roots:
        assert names(root) == {"step-2", "step-3", "latest"}
        assert (root / "latest").read_text() == "step-3\n"
    one = tmp_path / "one/step-3"
    parts = [root / "step-3" for root in roots]
    assert names(parts[0]) & names(parts[1]) == {"manifest.json", ELSEWHERE}
    assert (names(parts[0]) | names(parts[1])) - {ELSEWHERE} == names(one)
    for part in parts:
        for name in names(part) - {ELSEWHERE}:
            assert (part / name).read_bytes() == (one / name).read_bytes()
    places = json.loads((parts[1] / ELSEWHERE).read_text())["files"]
    assert places["state.json"] == {"machine": 0, "rank": 0}
    assert places["model-00002-of-00003.safetensors"] == {"machine": 0, "rank": 1}
    for part in parts:  # whoever puts them into one directory has a checkpoint of one disk
        shutil.copytree(part, tmp_path / "together", dirs_exist_ok=True)
    assert broken_file(tmp_path / "together") is None


def test_a_part_is_never_taken_for_a_complete_checkpoint(tmp_path: Path) -> None:
    roots = roots_of(tmp_path)
    said = list[str]()
    assert save_apart(roots, 1) == [None, None]
    part = roots[0] / "step-1"
    why = "rank 2 wrote model-00003-of-00003.safetensors on machine 1; combine them with `llmsuite merge`"
    assert why in (broken_file(part) or "")
    assert broken_file(part, here_only=True) is None
    assert damaged_tensors(part) == []
    assert find_latest(roots[0], said.append) is None
    assert why in said[0]
    with pytest.raises(UserError, match="on machine 1; combine them"):
        find_model(part)
    file = part / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "model-00001-of-00003.safetensors does not have the sha256" in (broken_file(part, here_only=True) or "")
    assert len(damaged_tensors(part)) == 1


def test_parts_are_not_pruned(tmp_path: Path) -> None:
    roots = roots_of(tmp_path)
    of = disks()
    for step in (1, 2):
        assert save_apart(roots, step, of=of) == [None, None]
    for root in roots:
        with pytest.raises(UserError, match="which would keep incomplete checkpoints"):
            prune(root, 1, pytest.fail)
        assert names(root) == {"step-1", "step-2", "latest"}


@pytest.mark.parametrize("machine", [0, 1])
def test_an_error_of_one_machine_fails_all_machines(tmp_path: Path, machine: int) -> None:
    roots = roots_of(tmp_path)
    assert save_apart(roots, 1) == [None, None]
    in_the_way = roots[machine] / f"step-2.tmp/optimizer-0000{1 + 2 * machine}-of-00003.safetensors"
    errors = save_apart(roots, 2, in_the_way.mkdir)
    assert "cannot be written: Is a directory" in str(errors[machine])
    other = str(errors[1 - machine])
    assert other.startswith(f"machine {machine}: ")
    assert "cannot be written: Is a directory" in other
    for root in roots:
        assert names(root) == {"step-1", "latest"}


class Killed(BaseException):
    """What a machine ends by in these tests."""


@pytest.mark.parametrize("machine", [0, 1])
def test_a_machine_killed_at_any_step_leaves_a_complete_checkpoint(tmp_path: Path, machine: int) -> None:
    steps = OsSteps()
    save_apart(roots_of(tmp_path / "all"), 1)
    with steps.below(roots_of(tmp_path / "all")[machine]):
        save_apart(roots_of(tmp_path / "all"), 2)
    begun = next(at for at, step in enumerate(steps.seen) if "open" in step and ".safetensors" in step)
    described = next(at for at, step in enumerate(steps.seen) if "manifest.json" in step)
    seen = set()
    save_apart(roots_of(tmp_path / "before"), 1)
    # while tensors are written, one step is like the next
    for at in (*range(begun + 1, described, 12), *range(described - 2, len(steps.seen) + 1)):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "before", root)
        of = disks()

        def kill(of: dict[int, LocalStorage] = of) -> None:
            if threading.current_thread() is not threading.main_thread():  # rank 1 is killed with its machine
                leaders = of[2 * machine].leaders
                assert leaders is not None
                leaders.close()
            raise Killed

        with steps.below(roots_of(root)[machine], at, kill):
            try:
                errors = save_apart(roots_of(root), 2, of=of)
            except Killed:  # rank 1
                errors = []
        # TypeError: what CPython 3.11 says of a connection that is closed while it is read from
        assert all(isinstance(error, Killed | UserError | TypeError | None) for error in errors)
        for part in roots_of(root):
            remove_unfinished(part)
        with joined_directory(list(map(_run, roots_of(root))), root / "together") as found:
            assert broken_file(found) is None
            newest = json.loads((found / "manifest.json").read_text())["step"]
        here = [(part / "step-2").is_dir() for part in roots_of(root)]
        assert here[1] or not here[0]  # machine 0 is the last one
        assert newest == 1 + all(here)
        assert not here[1] or here[0] or (roots_of(root)[1] / "step-1").is_dir()
        seen.add((newest, *here))
        shutil.rmtree(root)
    assert seen == {(1, False, False), (1, False, True), (2, True, True)}


def _run(checkpoints: Path) -> Path:
    """A run's directory with these checkpoints."""
    run = checkpoints.with_name(f"run {checkpoints.name}")
    run.mkdir(exist_ok=True)
    if not (run / "checkpoints").exists():
        (run / "checkpoints").symlink_to(checkpoints)
    return run


def test_parts_of_two_attempts_are_not_one_checkpoint(tmp_path: Path) -> None:
    save_apart(roots_of(tmp_path / "a"), 1)
    save_apart(roots_of(tmp_path / "b"), 2)
    parts = [tmp_path / "a/0/step-1", tmp_path / "b/1/step-2"]
    with pytest.raises(UserError, match=r"b/1/step-2: is no part of the same checkpoint as .*a/0/step-1"):
        joined_directory(parts, tmp_path / "out").__enter__()
    with pytest.raises(UserError, match=r"none of the directories has model-00003.*; rank 2 wrote it on machine 1"):
        joined_directory(parts[:1], tmp_path / "out").__enter__()
    with pytest.raises(UserError, match=r"has no manifest.json"):
        joined_directory([tmp_path], tmp_path / "out").__enter__()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UserError, match=r"out: is in the way"):
        joined_directory([root / "step-1" for root in roots_of(tmp_path / "a")], tmp_path / "out").__enter__()
    assert names(tmp_path / "out") == {"mine"}


def test_leaders_connect_and_notice_lost_peers() -> None:
    listener = listen("127.0.0.1", b"key", 2)
    port = listener.address[1]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(accept, listener, 2)
        with pytest.raises(UserError, match=r"machine 2 cannot connect to rank 0 at 127.0.0.1"):
            connect("127.0.0.1", port, b"another", 2)
        others = [connect("127.0.0.1", port, b"key", machine) for machine in (2, 1)]
        leaders = first.result(60)
    assert leaders.machines == [1, 2]
    leaders.send(2, {"for": 2})
    assert others[0].receive(0) == {"for": 2}
    others[1].send(0, {"from": 1})
    assert leaders.receive(1) == {"from": 1}
    others[1].close()
    with pytest.raises(UserError, match="the first rank of machine 1 is lost"):
        leaders.receive(1)
    leaders.close()
    with pytest.raises(UserError, match="the first rank of machine 0 is lost"):
        others[0].receive(0)
