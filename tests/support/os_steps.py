"""Every step a program asks of the operating system below one directory, counted, so that a test can stop it at each.

As a program, it writes a directory and dies at one of these steps: `python -m tests.support.os_steps ROOT STEP`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmsuite.base.files import committed_checkpoint, write_text_atomic

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.fsync")


class OsSteps:
    """Calls `action` just before step number `at`, from 1. `seen` lists what was done, as event and path."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._root = ""
        self._at = 0
        self._action = _nothing
        self._active = False
        sys.addaudithook(self._hook)  # there is no way to take it out again: it does nothing while not active

    @contextlib.contextmanager
    def below(self, root: Path, at: int = 0, action: Callable[[], None] | None = None) -> Iterator[None]:
        """Count what happens inside the block."""
        self.seen = []
        self._root = str(root)
        self._at = at
        self._action = action or _nothing
        fsync = os.fsync

        def audited_fsync(descriptor: int) -> None:
            sys.audit("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        os.fsync = audited_fsync
        self._active = True
        try:
            yield
        finally:
            os.fsync = fsync
            self._active = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active or event not in _EVENTS:
            return
        if isinstance(arguments[0], int):  # rmtree goes by descriptors: such a name is relative to one
            path = f"descriptor {arguments[0]}"
        else:
            path = os.fsdecode(arguments[0])
            if os.path.isabs(path) and not path.startswith(self._root):
                return
        self.seen.append(f"{event} {path}")
        if len(self.seen) == self._at:
            self._action()


def _nothing() -> None:
    pass


def write(root: Path, text: str) -> None:
    """What is tested: a directory with two files, and a file that names it."""
    with committed_checkpoint(root / "step-1", {"format": 1}, is_created=False) as directory:
        (directory / "first").write_text(text)
        (directory / "second").write_text(text * 2)
    write_text_atomic(root / "latest", text)


if __name__ == "__main__":
    with OsSteps().below(Path(sys.argv[1]), int(sys.argv[2]), lambda: os._exit(9)):
        write(Path(sys.argv[1]), "new")
