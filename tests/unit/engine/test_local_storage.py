"""Machines that share no directory are noticed, and bring the parts of a checkpoint together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import ELSEWHERE, NOT_FETCHED, broken_file
from llmsuite.checkpoint.local_storage import LocalStorage
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.engine import fetching, local_storage
from llmsuite.engine.fetching import (
    NeedsTensor,
    fetch_missing,
    fetched_checkpoint,
    find_on_local_storage,
    readable_path,
)
from llmsuite.engine.local_storage import find_local_storage
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from tests.support import many
from tests.support.saves_apart import RANKS, roots_of, save_apart
from tests.support.train_states import names

DEGREES = Degrees(1, 3, 1, 1)


def on_every_rank(root: Path, work: Callable[[Path, LocalStorage], Any]) -> list[Any]:
    """Call `work` with checkpoints and machine of each rank; returns what it gives, by rank."""

    def enter(mesh: Mesh) -> Any:
        machine = int(mesh.rank in RANKS[1])
        group = mesh.group_of([of[0] for of in RANKS])
        return work(roots_of(root)[machine], LocalStorage(machine, RANKS, None, group))

    return many.run(DEGREES, enter, backend="NCCL")


def everything(file: str, tensor: str) -> bool:
    return True


def fetch(root: Path, step: int, needs: NeedsTensor = everything) -> list[str | None]:
    return on_every_rank(root, lambda at, disk: fetch_missing(at / f"step-{step}", disk, needs, is_needed=False))


def find(at: Path, disk: LocalStorage) -> Path | None:
    return find_on_local_storage(at, disk, everything)


def share(root: Path, step: int) -> None:
    """Let both machines have all files, as after they were copied by hand."""
    first, second = (part / f"step-{step}" for part in roots_of(root))
    for here, there in ((first, second), (second, first)):
        for name in names(there) - names(here):
            shutil.copyfile(there / name, here / name)
    for path in (first, second):
        (path / ELSEWHERE).unlink()


def damage(file: Path) -> None:
    first, *rest = file.read_bytes()
    file.write_bytes(bytes([first ^ 1, *rest]))


def assert_whole(root: Path, step: int) -> None:
    """What the ranks of both machines read is all of it."""
    first, second = (readable_path(part / f"step-{step}") for part in roots_of(root))
    for path in (first, second):
        assert broken_file(path) is None
        assert not (path / NOT_FETCHED).exists() or json.loads((path / NOT_FETCHED).read_text()) == []
    assert names(first) - {NOT_FETCHED} == names(second) - {NOT_FETCHED}
    for name in names(first) - {NOT_FETCHED}:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_each_machine_gets_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_CHUNK", 1000)  # so that a file takes many messages
    assert save_apart(roots_of(tmp_path), 1) == [None, None]
    before = [names(root / "step-1") for root in roots_of(tmp_path)]
    (roots_of(tmp_path)[1] / "step-1.fetched").mkdir()  # of a run that was killed
    assert fetch(tmp_path, 1) == [None] * 3
    assert_whole(tmp_path, 1)
    assert [names(root / "step-1") for root in roots_of(tmp_path)] == before

    def read(at: Path, disk: LocalStorage) -> Path:
        with fetched_checkpoint(at / "step-1", disk) as place:
            assert place.name == "step-1.fetched"
            return place

    assert not any(place.exists() for place in on_every_rank(tmp_path, read)), "it is removed when all have read it"
    share(tmp_path, 1)
    assert fetch(tmp_path, 1) == [None] * 3
    assert [readable_path(root / "step-1").name for root in roots_of(tmp_path)] == ["step-1"] * 2, "nothing is lacking"


def test_a_machine_gets_no_tensor_that_its_ranks_do_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the rank of machine 1 reads one tensor of the model, and those of machine 0 the optimizer."""
    assert save_apart(roots_of(tmp_path), 1) == [None, None]
    first, second = (root / "step-1" for root in roots_of(tmp_path))
    lying = [name.partition(":") for name in json.loads((first / "manifest.json").read_text())["tensors"]]
    apart = sorted(tensor for file, _, tensor in lying if file.startswith("model") and not (second / file).exists())
    wanted, *others = apart
    assert others

    def needs(file: str, tensor: str) -> bool:
        return tensor == wanted if collective.rank() == 2 else file.startswith("optimizer")

    assert fetch(tmp_path, 1, needs) == [None] * 3
    at_first, at_second = (readable_path(path) for path in (first, second))
    files = TensorFiles(at_second, "model")
    assert files.read(wanted).tobytes() == TensorFiles(first, "model").read(wanted).tobytes()
    for hole in others:
        assert files.spec(hole).shape, "headers are there"
        with pytest.raises(AssertionError, match="that it did not fetch"):
            files.read(hole)
    optimizer = TensorFiles(at_first, "optimizer")
    for path in optimizer.paths:
        here = next(root / path.name for root in (first, second) if (root / path.name).exists())
        assert path.read_bytes() == here.read_bytes()
    assert "MB of it from each other, what their ranks read of the" in capsys.readouterr().out
    holes = json.loads((at_second / NOT_FETCHED).read_text())
    assert {name.partition(":")[2] for name in holes if name.startswith("model")} == {*others}


def test_a_run_killed_in_its_first_commit_starts_again(tmp_path: Path) -> None:
    first, second = roots_of(tmp_path)
    assert save_apart((first, second), 1) == [None, None]
    shutil.rmtree(first / "step-1")  # machine 1 alone had committed it
    for root in (first, second):
        (root / "latest").unlink()
    assert on_every_rank(tmp_path, find) == [None] * 3
    (second / "latest").write_text("step-1\n")  # it was complete, and the disk of machine 0 is lost
    with pytest.raises(UserError, match=r"no machine has config.json; rank 0 wrote it on machine 0"):
        on_every_rank(tmp_path, find)


@pytest.mark.parametrize("machine", [0, 1])
def test_a_machine_with_a_new_disk_gets_everything(tmp_path: Path, machine: int) -> None:
    assert save_apart(roots_of(tmp_path), 1) == [None, None]
    share(tmp_path, 1)
    shutil.rmtree(roots_of(tmp_path)[machine])
    assert fetch(tmp_path, 1) == [None] * 3
    assert_whole(tmp_path, 1)


@pytest.mark.parametrize("name", ["manifest.json", "model-00003-of-00003.safetensors", "config.json"])
def test_a_damaged_file_is_fetched(tmp_path: Path, name: str) -> None:
    assert save_apart(roots_of(tmp_path), 1) == [None, None]
    share(tmp_path, 1)
    file = roots_of(tmp_path)[1] / "step-1" / name
    damage(file)
    assert fetch(tmp_path, 1) == [None] * 3
    assert_whole(tmp_path, 1)


def test_a_file_that_no_machine_has_is_named(tmp_path: Path) -> None:
    assert save_apart(roots_of(tmp_path), 1) == [None, None]
    file = roots_of(tmp_path)[1] / "step-1" / "optimizer-00003-of-00003.safetensors"
    damage(file)
    before = [names(root / "step-1") for root in roots_of(tmp_path)]
    for reason in fetch(tmp_path, 1):
        assert reason is not None
        assert "no machine has optimizer-00003-of-00003.safetensors; rank 2 wrote it on machine 1" in reason
        assert f"machine 1: {file} does not have the sha256" in reason
    with pytest.raises(UserError, match="step-1: no machine has optimizer-00003"):
        on_every_rank(tmp_path, lambda at, disk: fetch_missing(at / "step-1", disk, everything))
    assert [names(root / "step-1") for root in roots_of(tmp_path)] == before


def test_the_newest_checkpoint_that_the_machines_have_together_is_used(tmp_path: Path) -> None:
    assert on_every_rank(tmp_path, find) == [None] * 3
    for step in (1, 2):
        assert save_apart(roots_of(tmp_path), step) == [None, None]
    shutil.rmtree(roots_of(tmp_path)[0] / "step-2")  # machine 1 alone had committed it
    (roots_of(tmp_path)[1] / "step-3.tmp").mkdir()
    found = on_every_rank(tmp_path, find)
    assert found == [roots_of(tmp_path)[machine] / "step-1" for machine in (0, 0, 1)]
    assert_whole(tmp_path, 1)
    assert not (roots_of(tmp_path)[1] / "step-3.tmp").exists()
    for root in roots_of(tmp_path):
        shutil.rmtree(root / "step-1")
    with pytest.raises(
        UserError, match=r"no complete checkpoint; the newest is incomplete: no machine has config.json"
    ):
        on_every_rank(tmp_path, find)


def test_parts_of_two_attempts_at_a_step_are_not_one(tmp_path: Path) -> None:
    assert save_apart(roots_of(tmp_path), 1) == [None, None]
    assert save_apart(roots_of(tmp_path / "other"), 2) == [None, None]
    for root in (tmp_path, tmp_path / "other"):  # with the same step, and other values
        assert save_apart(roots_of(root), 3) == [None, None]
    file = roots_of(tmp_path)[1] / "step-3"
    shutil.rmtree(file)
    shutil.copytree(roots_of(tmp_path / "other")[1] / "step-2", file)
    assert json.loads((file / "manifest.json").read_text())["step"] == 2
    assert on_every_rank(tmp_path, find)[0] == roots_of(tmp_path)[0] / "step-1"
    # where one of the attempts is whole, that is the one
    shutil.copytree(roots_of(tmp_path / "other")[0] / "step-2", file, dirs_exist_ok=True)
    (file / ELSEWHERE).unlink()
    assert fetch(tmp_path, 3) == [None] * 3
    assert_whole(tmp_path, 3)
    at_first = readable_path(roots_of(tmp_path)[0] / "step-3")
    assert json.loads((at_first / "manifest.json").read_text())["step"] == 2


def seen_as(monkeypatch: pytest.MonkeyPatch, directories: list[Path]) -> list[LocalStorage | None]:
    """What `find_local_storage` says on three machines with these directories."""
    monkeypatch.setattr(local_storage, "_VISIBLE_SECONDS", 0.0)
    monkeypatch.setattr(local_storage, "_connect_leaders", lambda machine, ranks: None)
    monkeypatch.setattr(collective, "local_rank", lambda: 0)
    return many.run(DEGREES, lambda mesh: find_local_storage(directories[mesh.rank], 3))


def test_a_shared_directory_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_as(monkeypatch, [tmp_path / "a"] * 3) == [None] * 3
    assert names(tmp_path / "a") == set()
    assert find_local_storage(tmp_path / "of one machine", 1) is None


def test_own_directories_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_as(monkeypatch, [tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert [disk and (disk.machine, [list(of) for of in disk.ranks]) for disk in found] == [
        (machine, [[0], [1], [2]]) for machine in range(3)
    ]
    assert names(tmp_path / "b") == set()


def test_a_directory_that_some_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="machine 0 sees that of 0; machine 1 sees that of 1, 2; machine 2 sees"):
        seen_as(monkeypatch, [tmp_path / "a", tmp_path / "b", tmp_path / "b"])


def test_a_machine_that_cannot_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"machine 1: .*file: cannot be written to: File exists"):
        seen_as(monkeypatch, [tmp_path / "a", tmp_path / "file", tmp_path / "c"])
