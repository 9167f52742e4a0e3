"""What a rank has asked of other ranks lately, kept in a file that the launcher can read while the rank hangs.

Each call over a group has a number in it, counted alike by all its ranks. So two ranks that wait for each other can be
compared: see `llmsuite.launch.hang`. A call costs a few microseconds here. What Paddle's operators send of themselves,
as in the backward pass of tensor parallel layers, is not seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ENVIRONMENT = "LLMSUITE_CALLS"
"""Set by the launcher: the directory of the files, `N.calls` of rank N."""
_NUM_SLOTS, _SLOT_BYTES = 1024, 256
_HEADER, _SLOT, _ENDED = struct.Struct("<QQ"), struct.Struct("<dI"), struct.Struct("<d")
_HEADER_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one rank."""

    group: str
    """Its name, the same on all ranks of it."""
    ranks: tuple[int, ...]
    """Of the group."""
    number: int
    """In the group, from 1."""
    what: str
    """Such as "all_reduce"."""
    shape: str
    """Of what is given or received; empty where it differs from rank to rank."""
    dtype: str
    step: int
    """Training step in which it was made, 0 before the first."""
    where: str
    """File, line and function."""
    began: float
    """Seconds since the epoch."""
    ended: float
    """The same; 0 while it is under way."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:16])) + (" …" if len(self.ranks) > 16 else "")
        call = " ".join(word for word in (self.what, self.shape, self.dtype) if word)
        return f"{call} (call {self.number} of ranks {ranks}; step {self.step}, {self.where})"


class CallLog:
    """The file of this rank."""

    def __init__(self, path: Path):
        self._path = path
        with open(path, "w+b") as file:
            file.truncate(_HEADER_BYTES + _NUM_SLOTS * _SLOT_BYTES)
            self._memory = mmap.mmap(file.fileno(), 0)
        self._groups: dict[Any, tuple[int, Any]] = {}
        self._numbers: list[int] = []
        self._events = self._calls = self._step = 0
        self.waited = 0.0
        """Seconds spent in calls."""

    def step(self, number: int) -> None:
        """A training step begins."""
        self._step = number
        self._happened()

    def begin(self, what: str, group: Any, ranks: Sequence[int] | None, shape: Sequence[Any], dtype: Any) -> int:
        """A call begins. Returns what `end` takes.

        Args:
            what: the operation.
            group: the same object for the calls of a group; None for all ranks.
            ranks: of the group; needed for one that is no group of Paddle's.
            shape: of the tensor; empty where ranks give different ones.
            dtype: of the tensor.
        """
        known = self._groups.get(id(group))
        if known is None:
            known = self._meet(group, ranks)
        place = known[0]
        self._numbers[place] += 1
        frame = sys._getframe(1)
        while frame.f_code.co_filename in _OWN and frame.f_back is not None:
            frame = frame.f_back
        code = frame.f_code
        file = code.co_filename[code.co_filename.rfind("/") + 1 :]
        text = "\t".join(
            (
                str(place), str(self._numbers[place]), what, str(list(shape)) if len(shape) else "",
                str(dtype).removeprefix("paddle."), str(self._step), f"{file}:{frame.f_lineno} {code.co_name}",
            )
        ).encode()[: _SLOT_BYTES - _ENDED.size - _SLOT.size]  # fmt: skip
        at = _HEADER_BYTES + self._calls % _NUM_SLOTS * _SLOT_BYTES
        _ENDED.pack_into(self._memory, at, 0.0)
        _SLOT.pack_into(self._memory, at + _ENDED.size, time.time(), len(text))
        start = at + _ENDED.size + _SLOT.size
        self._memory[start : start + len(text)] = text
        self._calls += 1
        self._happened()
        return self._calls - 1

    def end(self, call: int) -> None:
        """A call is done. May be called by another thread than the one that has begun it."""
        if call >= self._calls - _NUM_SLOTS:  # else its place is taken
            _ENDED.pack_into(self._memory, _HEADER_BYTES + call % _NUM_SLOTS * _SLOT_BYTES, time.time())
        self._happened()

    def _happened(self) -> None:
        self._events += 1
        _HEADER.pack_into(self._memory, 0, self._events, self._step)

    def _meet(self, group: Any, ranks: Sequence[int] | None) -> tuple[int, Any]:
        """A group is used for the first time."""
        kind = "mesh" if ranks is not None else "all" if group is None else str(group.id)
        if ranks is None:
            ranks = range(int(os.environ["PADDLE_TRAINERS_NUM"])) if group is None else group.ranks
        name = f"{kind} of {'-'.join(map(str, ranks))}"
        place = len(self._numbers)
        self._numbers.append(0)
        with open(self._path.with_suffix(".groups"), "a") as file:
            file.write(json.dumps([name, [int(rank) for rank in ranks]]) + "\n")
        self._groups[id(group)] = place, group  # kept, so that no other object gets its id
        return self._groups[id(group)]


_OWN = {__file__}
_log: CallLog | None = None


def start(*own_files: str) -> None:
    """In a rank that a launcher has started: keep a log from now on, and print stacks when the launcher asks.

    Args:
        own_files: modules that are not told as the place of a call; the function that called theirs is.
    """
    global _log
    _OWN.update(own_files)
    if _log is None and (directory := os.environ.get(ENVIRONMENT)):
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        _log = CallLog(Path(directory) / f"{os.environ['PADDLE_TRAINER_ID']}.calls")


def step(number: int) -> None:
    """A training step begins."""
    if _log is not None:
        _log.step(number)


def waited() -> float:
    """Seconds this rank has spent in calls so far, waiting and sending; 0 without a log."""
    return 0.0 if _log is None else _log.waited


class Made:
    """A context: a call that is under way. One that raises stays so."""

    __slots__ = ("_began", "_call", "_log")

    def __init__(self, log: CallLog, call: int):
        self._log, self._call, self._began = log, call, time.perf_counter()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._log.waited += time.perf_counter() - self._began
            self.end()

    def end(self) -> None:
        """For a call that another thread makes, where this one does not wait."""
        self._log.end(self._call)


class _Nothing(contextlib.nullcontext[None]):
    def end(self) -> None:
        pass


_NOTHING = _Nothing()


def made(what: str, tensor: Any, group: Any, ranks: Sequence[int] | None = None, same: bool = True) -> Made | _Nothing:
    """The call that the block makes.

    Args:
        what: the operation.
        tensor: that is given or received.
        group: None for all ranks.
        ranks: of a group that is none of Paddle's.
        same: whether all ranks give a tensor of one shape.
    """
    if _log is None:
        return _NOTHING
    return Made(_log, _log.begin(what, group, ranks, tensor.shape if same else (), tensor.dtype))


# the launcher's side


def progress(path: Path) -> tuple[int, int]:
    """How much has happened in a rank, and the training step it is in; 0 and 0 while there is no file."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER.size)
    except OSError:
        return 0, 0
    return _HEADER.unpack(head) if len(head) == _HEADER.size else (0, 0)


def read(path: Path) -> list[Call]:
    """The last calls of a rank, in the order it made them; none while there is no file."""
    try:
        data = path.read_bytes()
        groups = [json.loads(line) for line in path.with_suffix(".groups").read_text().splitlines()]
    except OSError:  # it has made none
        return []
    found = []
    for at in range(_HEADER_BYTES, len(data) - _SLOT_BYTES + 1, _SLOT_BYTES):
        (ended,) = _ENDED.unpack_from(data, at)
        began, length = _SLOT.unpack_from(data, at + _ENDED.size)
        start = at + _ENDED.size + _SLOT.size
        words = data[start : start + length].decode(errors="replace").split("\t")
        if len(words) == 7:
            place, number, what, shape, dtype, step, where = words
            name, ranks = groups[int(place)]
            found.append(Call(name, tuple(ranks), int(number), what, shape, dtype, int(step), where, began, ended))
    return sorted(found, key=lambda call: call.began)
