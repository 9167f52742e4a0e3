"""The command `llmsuite checkpoints list|verify|prune RUN`: list, verify or delete the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file
from llmsuite.contract.registry import Registry

_MIN_KEPT = 2


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "action",
        type=Literal["list", "verify", "prune"],
        help="list: steps, sizes, missing files; verify: every byte against the manifest; prune: delete the oldest",
    )
    parser.add_argument("run", type=str, help="directory of a run; with verify, any directory with a manifest.json too")
    parser.add_argument(
        "--keep", type=PositiveInt | None, default=None, help="with prune: number of checkpoints to keep"
    )
    parser.add_argument("--force", action="store_true", help="with prune: allow --keep below 2")


def run(args: Any, registry: Registry) -> int:
    path = Path(args.run)
    if args.action != "prune" and (args.keep or args.force):
        raise UserError(f"checkpoints {args.action}: --keep and --force belong to prune")
    if args.action == "list":
        return _list(path)
    if args.action == "verify":
        return _verify(path)
    return _prune(path, args.keep, args.force)


def _list(path: Path) -> int:
    from llmsuite.base.files import broken_file
    from llmsuite.checkpoint.directory import load_best, read_latest

    root = path / "checkpoints"
    best = load_best(path / "checkpoints")
    latest = read_latest(root)
    for step, directory in _steps(path):
        size = sum(file.stat().st_size for file in directory.rglob("*") if is_file(file))
        fault = broken_file(directory, check_hashes=False, here_only=True)
        notes = ["latest"] if directory.name == latest else []
        if best is not None and best.step == step:
            notes.append(f"best ({best.metric} {best.value:.4g})")
        state = f"torn: {fault}" if fault else _completeness(directory)
        print("  ".join([f"step {step:>8}", f"{size / 1e6:>10,.1f} MB", state, *notes]))
    return 0


def _completeness(directory: Path) -> str:
    """The words for a checkpoint whose files on this machine are all intact."""
    from llmsuite.base.files import remote_files

    elsewhere = remote_files(directory)
    machines = ", ".join(sorted({str(place["machine"]) for place in elsewhere.values()}))
    if elsewhere:
        return f"complete here, {len(elsewhere)} files are on machine {machines}"
    return "complete"


def _verify(path: Path) -> int:
    from llmsuite.base.files import MANIFEST, broken_file, damaged_tensors
    from llmsuite.base.progress import track

    found = [path] if is_file(path / MANIFEST) else [directory for _, directory in _steps(path)]
    damaged = 0
    for directory in track(found, "verifying"):
        fault = broken_file(directory, here_only=True)
        print(f"{directory}: {fault or _completeness(directory)}", flush=True)
        if fault:
            damaged += 1
            for name in damaged_tensors(directory):
                print(f"    damaged: {name}")
    return 1 if damaged else 0


def _prune(path: Path, keep: int | None, force: bool) -> int:
    from llmsuite.base.locks import lock_directory
    from llmsuite.checkpoint.directory import prune

    if keep is None:
        raise UserError("checkpoints prune: give the number of checkpoints to keep, such as --keep 2")
    if keep < _MIN_KEPT and not force:
        raise UserError(f"--keep {keep}: the newest may be the one a crash damages; keep {_MIN_KEPT}, or add --force")
    list(_steps(path))
    with lock_directory(path):  # raises while a run trains there
        for directory in prune(path / "checkpoints", keep, print):
            print(f"deleted {directory}")
    return 0


def _steps(path: Path) -> Iterator[tuple[int, Path]]:
    from llmsuite.checkpoint.directory import list_steps

    found = list_steps(path / "checkpoints")
    if not found:
        raise UserError(f"{path}: has no checkpoints; name the directory of a run")
    yield from found
