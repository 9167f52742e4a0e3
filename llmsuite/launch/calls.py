"""A flight recorder: the last collective calls of a rank, in a file that the launcher can read while the rank hangs.

Every rank of a group numbers its calls in that group, so `llmsuite.launch.hang` can compare ranks that wait for each
other. Recording a call costs a few microseconds. Communication inside of Paddle's operators, such as the backward pass
of tensor parallel layers, is not recorded.
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

from llmsuite.base.files import os_errors
from llmsuite.base.spans import is_recording, span

ENVIRONMENT = "LLMSUITE_CALLS"
"""Set by the launcher: the directory of the recordings, `N.calls` for rank N."""
_NUM_SLOTS = 1024
_SLOT_BYTES = 256
_HEADER = struct.Struct("<QQ")
_SLOT = struct.Struct("<dI")
_ENDED = struct.Struct("<d")
_HEADER_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one rank."""

    group: str
    """Name of the group, the same on all its ranks."""
    ranks: tuple[int, ...]
    """Ranks of the group."""
    number: int
    """Number of the call within the group, from 1."""
    what: str
    """The operation, such as "all_reduce"."""
    shape: str
    """Shape of the tensor; empty where it differs from rank to rank."""
    dtype: str
    step: int
    """Training step of the call, 0 before the first."""
    where: str
    """File, line and function that made the call."""
    began: float
    """Start in seconds since the epoch."""
    ended: float
    """End in seconds since the epoch; 0 while the call is in progress."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:16]))
        if len(self.ranks) > 16:
            ranks += " …"
        call = " ".join(word for word in (self.what, self.shape, self.dtype) if word)
        return f"{call} (call {self.number} of ranks {ranks}; step {self.step}, {self.where})"


class CallLog:
    """The recording of this rank."""

    def __init__(self, path: Path):
        self._path = path
        with os_errors(path, "set TMPDIR to a disk that has room"), open(path, "w+b") as file:
            # allocated now: on a full disk a write to the mapped memory of a sparse file would be a SIGBUS
            os.posix_fallocate(file.fileno(), 0, _HEADER_BYTES + _NUM_SLOTS * _SLOT_BYTES)
            self._memory = mmap.mmap(file.fileno(), 0)
        self._groups: dict[Any, tuple[int, Any]] = {}
        self._numbers: list[int] = []
        self._events = self._calls = self._step = 0
        self.waited = 0.0
        """Seconds spent in calls."""

    def step(self, number: int) -> None:
        """Record the start of a training step."""
        self._step = number
        self._count_event()

    def begin(self, what: str, group: Any, ranks: Sequence[int] | None, shape: Sequence[Any], dtype: Any) -> int:
        """Record the start of a call. Returns its number, for `end`.

        Args:
            what: the operation.
            group: the same object for all calls of a group; None for all ranks.
            ranks: of the group; required if it is not a group of Paddle's.
            shape: of the tensor; empty if it differs from rank to rank.
            dtype: of the tensor.
        """
        known = self._groups.get(id(group))
        if known is None:
            known = self._register(group, ranks)
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
        self._count_event()
        return self._calls - 1

    def end(self, call: int) -> None:
        """Record the end of a call. May be called by another thread than the one that started it."""
        if call >= self._calls - _NUM_SLOTS:  # otherwise its slot was reused
            _ENDED.pack_into(self._memory, _HEADER_BYTES + call % _NUM_SLOTS * _SLOT_BYTES, time.time())
        self._count_event()

    def _count_event(self) -> None:
        self._events += 1
        _HEADER.pack_into(self._memory, 0, self._events, self._step)

    def _register(self, group: Any, ranks: Sequence[int] | None) -> tuple[int, Any]:
        """Record a group that is used for the first time."""
        if ranks is not None:
            kind = "mesh"
        elif group is None:
            kind = "all"
            ranks = range(int(os.environ["PADDLE_TRAINERS_NUM"]))
        else:
            kind = str(group.id)
            ranks = group.ranks
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
    """Start recording in a rank that a launcher has started, and print stacks on the launcher's SIGUSR1.

    Args:
        own_files: modules to skip when the location of a call is recorded: their callers are recorded instead.
    """
    global _log
    _OWN.update(own_files)
    directory = os.environ.get(ENVIRONMENT)
    if _log is None and directory:
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        _log = CallLog(Path(directory) / f"{os.environ['PADDLE_TRAINER_ID']}.calls")


def step(number: int) -> None:
    """Record the start of a training step."""
    if _log is not None:
        _log.step(number)


def waited() -> float:
    """Seconds this rank has spent in calls so far, waiting and sending; 0 without a recording."""
    return 0.0 if _log is None else _log.waited


class RecordedCall:
    """A context manager: a call in progress. A call that raises stays in progress."""

    __slots__ = ("_began", "_call", "_log")

    def __init__(self, log: CallLog, call: int):
        self._log = log
        self._call = call
        self._began = time.perf_counter()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._log.waited += time.perf_counter() - self._began
            self.end()

    def end(self) -> None:
        """Record the end of a call that another thread makes while this one continues."""
        self._log.end(self._call)


class _Nothing(contextlib.nullcontext[None]):
    def end(self) -> None:
        pass


class _TracedCall:
    """A call that is a span of a trace too."""

    def __init__(self, name: str, call: RecordedCall | _Nothing):
        self._span = span(name)
        self._call = call

    def __enter__(self) -> None:
        self._span.__enter__()
        self._call.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.__exit__(kind, error, trace)
        self._span.__exit__(kind, error, trace)

    def end(self) -> None:
        self._call.end()


_NOTHING = _Nothing()


def recorded(
    what: str, tensor: Any, group: Any, ranks: Sequence[int] | None = None, same: bool = True
) -> RecordedCall | _Nothing | _TracedCall:
    """Record the call that the block makes, also in a trace of this rank, where there is one (`base.spans`).

    Args:
        what: the operation.
        tensor: the tensor that is sent or received.
        group: None for all ranks.
        ranks: of the group, if it is not a group of Paddle's.
        same: the tensors of all ranks have the same shape.
    """
    call: RecordedCall | _Nothing = _NOTHING
    if _log is not None:
        call = RecordedCall(_log, _log.begin(what, group, ranks, tensor.shape if same else (), tensor.dtype))
    return _TracedCall(what, call) if is_recording() else call


# the launcher's side


def progress(path: Path) -> tuple[int, int]:
    """The number of events in a rank, and its training step; 0 and 0 while there is no file."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER.size)
    except OSError:
        return 0, 0
    return _HEADER.unpack(head) if len(head) == _HEADER.size else (0, 0)


def read(path: Path) -> list[Call]:
    """The last calls of a rank, in their order; none while there is no file."""
    try:
        data = path.read_bytes()
        groups = [json.loads(line) for line in path.with_suffix(".groups").read_text().splitlines()]
    except OSError:  # the rank has made no call
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
