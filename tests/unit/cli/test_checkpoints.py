"""`llmsuite checkpoints`: what is there, what is damaged, and what goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.locks import lock_directory
from llmsuite.checkpoint.directory import Best, find_latest, find_model, load_best, save_best
from llmsuite.cli.main import main
from tests.support.train_states import damage, names, quick_save

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints 1 to 5; the second is the best, 3 has lost a file, a byte of 4 has changed."""
    root = tmp_path / "checkpoints"
    for step in range(1, 6):
        quick_save(root, step, keep_last=9)
    save_best(root, Best(2, "eval/loss", 0.25))
    (root / "step-3/state.json").unlink()
    damage(root / "step-4")
    return tmp_path


def test_list_shows_size_state_and_role(run: Path, capsys: Capsys) -> None:
    assert main(["checkpoints", "list", str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines] == ["1", "2", "3", "4", "5"]
    assert [line[4] for line in lines] == [
        "complete",
        "complete",
        "torn:",
        "complete",
        "complete",
    ]  # no hashes: 4 passes
    assert lines[1][5:] == ["best", "(eval/loss", "0.25)"]
    assert lines[2][5:] == [str(run / "checkpoints/step-3/state.json"), "is", "missing"]
    assert lines[4][5:] == ["latest"]


def test_verify_finds_the_byte_and_names_the_tensor(run: Path, capsys: Capsys) -> None:
    assert main(["checkpoints", "verify", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("complete") for line in lines if "step-" in line] == [True, True, False, False, True]
    (tensor,) = [line for line in lines if "damaged:" in line]
    assert tensor.strip() == "damaged: optimizer-00001-of-00001.safetensors:lm_head.weight/moment1"
    assert main(["checkpoints", "verify", str(run / "checkpoints/step-5")]) == 0
    shutil.rmtree(run / "checkpoints/step-3")
    shutil.rmtree(run / "checkpoints/step-4")
    assert main(["checkpoints", "verify", str(run)]) == 0


def test_prune_keeps_intact_checkpoints_the_best_and_the_latest(run: Path, capsys: Capsys) -> None:
    root = run / "checkpoints"
    assert main(["checkpoints", "prune", str(run), "--keep", "2"]) == 0
    # 5 and 2 are intact; 3 and 4 are not, and 1 is older
    assert names(root) == {"step-2", "step-5", "latest", "best"}
    out = capsys.readouterr().out
    assert "step-4 is damaged" in out
    assert out.count("deleted") == 3
    assert find_latest(root, pytest.fail) == root / "step-5"


def test_prune_never_takes_the_last_ones(run: Path, capsys: Capsys) -> None:
    words = ["checkpoints", "prune", str(run)]
    assert main(words) == 2
    assert "--keep 2" in capsys.readouterr().err
    assert main([*words, "--keep", "1"]) == 2
    assert "or add --force" in capsys.readouterr().err
    assert len(names(run / "checkpoints")) == 7
    with lock_directory(run):
        assert main([*words, "--keep", "2"]) == 2
    assert "another run is writing there" in capsys.readouterr().err
    assert main([*words, "--keep", "1", "--force"]) == 0
    assert names(run / "checkpoints") == {"step-2", "step-5", "latest", "best"}


def test_a_directory_without_checkpoints(tmp_path: Path, capsys: Capsys) -> None:
    for action in ("list", "verify", "prune"):
        keep = ["--keep", "2"] if action == "prune" else []
        assert main(["checkpoints", action, str(tmp_path), *keep]) == 2
        assert "has no checkpoints" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["checkpoints", "list", str(tmp_path), "--keep", "2"]) == 2


def test_the_best_one_stays_until_another_is(tmp_path: Path) -> None:
    for step in range(1, 7):
        quick_save(tmp_path, step)
        if step in (2, 5):
            save_best(tmp_path, Best(step, "eval/loss", 1 / step))
    assert names(tmp_path) == {"step-5", "step-6", "latest", "best"}
    quick_save(tmp_path, 7)
    quick_save(tmp_path, 8)
    assert names(tmp_path) == {"step-5", "step-7", "step-8", "latest", "best"}
    assert load_best(tmp_path) == Best(5, "eval/loss", 0.2)
    shutil.rmtree(tmp_path / "step-5")
    assert load_best(tmp_path) is None


def test_a_run_stands_for_its_newest_intact_checkpoint(run: Path) -> None:
    root = run / "checkpoints"
    assert find_model(run) == root / "step-5"
    (root / "step-5/state.json").unlink()
    assert find_model(run) == root / "step-4"  # hashes are checked where it matters, on resuming
    assert find_model(root / "step-3") == root / "step-3"
    for step in (1, 2, 4):
        (root / f"step-{step}/manifest.json").unlink()
    with pytest.raises(UserError, match="none of its checkpoints is complete"):
        find_model(run)
