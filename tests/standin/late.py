"""Groups of ranks whose calls return at once, as those of GPUs do, over the Gloo groups of CPU processes.

What a call will write holds nothing that can be used until the call is waited for: NaN, or a number out of any range.
What it sends is read late: whoever has changed it by then has sent NaN, or is told so when he waits. A channel of two
ranks opens when both use it for the first time, and until then neither goes on. Tensors have to be contiguous, as
`CheckTensorContiguous` of Paddle 3.3.1's ProcessGroupNCCL has it.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from llmsuite.base.typing import Tensor
from llmsuite.parallel import collective

LATENESS = 0.002
"""Seconds that a call takes that nobody waits for at once."""
PATIENCE = 90.0
"""Seconds after which a call that nobody answers is an error."""
_UNKNOWN = 77  # in place of integers: no shape, no count, no code
_groups: dict[Any, LateGroup] = {}


def install() -> None:
    """Let `dist.new_group` make them from now on."""
    if not hasattr(dist.new_group, "makes_late_groups"):
        make = dist.new_group

        def new_group(*args: Any, **kwargs: Any) -> Group:
            return late(make(*args, **kwargs))

        new_group.makes_late_groups = True  # type: ignore[attr-defined]
        dist.new_group = new_group


def late(group: Group) -> Group:
    """A group of the same ranks whose calls are late."""
    own = group.process_group
    if own is None or isinstance(own, LateGroup):
        return group
    if own not in _groups:
        _groups[own] = LateGroup(group)
    _groups[own].is_open = False
    return Group(group.rank, group.id, group.ranks, _groups[own], group.name)  # type: ignore[arg-type]


class Task:
    """A call that goes on beside the process that has made it."""

    def __init__(self, name: str, outputs: Sequence[tuple[Tensor, Tensor]], sent: Tensor | None, is_late: bool):
        """`outputs`: what the call writes, each with the tensor that it gets its value from; `sent`: what it sends,
        where that is another tensor."""
        self.name = name
        self.is_late = is_late
        self._outputs = outputs
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.on_wait: Callable[[], None] = lambda: None
        self._sent = None if sent is None else weakref.ref(sent)
        self._copy = None if sent is None else sent.detach().clone()

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, in the thread of the group."""
        try:
            if self.is_late:
                time.sleep(LATENESS)
            work()
        except BaseException as error:
            self.error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Whether it is over; what it has written may be used once it was waited for."""
        return self._done.is_set()

    def wait(self) -> None:
        """Let its outputs have their values."""
        self.on_wait()
        if not self._done.wait(PATIENCE):
            raise TimeoutError(f"{self.name}: nobody has answered for {PATIENCE:.0f} s")
        if self.error is not None:
            raise self.error
        if self._sent is not None:
            sent = self._sent()
            copy = self._copy
            assert sent is not None, f"{self.name}: the memory that is sent was freed before the end"
            assert copy is not None
            assert same(sent, copy), f"{self.name}: what is sent was written to before the end"
        outputs = self._outputs
        self._outputs = ()
        with paddle.no_grad():
            for output, value in outputs:
                output.copy_(value, True)


class LateGroup:
    """As much of Paddle's `ProcessGroup` as the engine uses."""

    def __init__(self, group: Group):
        self._group = group
        self._gloo = group.process_group
        self.is_open = False
        """Whether both ranks of a pair have used it."""
        self.not_waited_for: set[Task] = set()
        """Sends that nobody has waited for, of which Paddle's group keeps a record each."""
        self._jobs: queue.Queue[tuple[Task, Callable[[], None]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def name(self) -> str:
        return "STANDIN"

    def rank(self) -> int:
        return self._group.rank

    def all_reduce(self, tensor: Tensor, op: Any, sync_op: bool) -> Task:
        value = _taken(tensor)
        return self._begin("all_reduce", sync_op, lambda: self._reduce(value, op), [(tensor, value)])

    def _reduce(self, value: Tensor, op: Any) -> None:
        """All-reduce in place. Gloo adds up float16 wrongly (Paddle 3.3.1): sums of small numbers become infinite."""
        wide = value.astype("float32") if value.dtype == paddle.float16 else value
        self._gloo.all_reduce(wide, op, True).wait()
        if wide is not value:
            value.copy_(wide.astype(value.dtype), True)

    def reduce_scatter_tensor(self, out: Tensor, tensor: Tensor, op: Any, sync_op: bool) -> Task:
        _check(out, tensor)
        size = out.shape[0]
        value = tensor.detach().clone()
        part = paddle.empty_like(out)
        assert tensor.shape[0] == size * self._group.nranks

        def work() -> None:
            self._reduce(value, op)
            part.copy_(value[self._group.rank * size : (self._group.rank + 1) * size], True)

        return self._begin("reduce_scatter", sync_op, work, [(out, part)], tensor)

    def all_gather(self, outs: list[Tensor], tensor: Tensor, sync_op: bool) -> Task:
        _check(tensor, *outs)
        value = tensor.detach().clone()
        parts = [paddle.empty_like(out) for out in outs]
        return self._begin(
            "all_gather", sync_op, lambda: self._gloo.all_gather(parts, value, True).wait(), [*zip(outs, parts)], tensor
        )

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor, sync_op: bool) -> Task:
        _check(tensor, out)
        assert out.shape == [self._group.nranks * tensor.shape[0], *tensor.shape[1:]]
        value = tensor.detach().clone()
        found = paddle.empty_like(out)

        def work() -> None:
            parts = [paddle.empty_like(value) for _ in range(self._group.nranks)]
            self._gloo.all_gather(parts, value, True).wait()
            found.copy_(paddle.concat(parts), True)

        return self._begin("all_gather", sync_op, work, [(out, found)], tensor)

    def broadcast(self, tensor: Tensor, source: int, sync_op: bool) -> Task:
        value = _taken(tensor)
        return self._begin(
            "broadcast", sync_op, lambda: self._gloo.broadcast(value, source, True).wait(), [(tensor, value)]
        )

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], sync_op: bool
    ) -> Task:
        _check(out, tensor)
        assert [sum(received), sum(sent)] == [out.shape[0], tensor.shape[0]]
        value = tensor.detach().clone()
        rows = paddle.empty_like(out)
        over_gloo = Group(self._group.rank, self._group.id, self._group.ranks, self._gloo, self._group.name)

        def work() -> None:
            rows.copy_(collective._all_to_all(value, sent, received, over_gloo), True)

        return self._begin("all_to_all", sync_op, work, [(out, rows)], tensor)

    def send(self, tensor: Tensor, peer: int, sync_op: bool) -> Task:
        _check(tensor)
        self._open(peer)
        before = tensor.detach().clone()

        def work() -> None:
            value = before if same(tensor, before) else _nothing_like(before)
            self._gloo.send(value, peer, True).wait()

        task = self._begin("send", sync_op, work, [])
        self.not_waited_for.add(task)
        task.on_wait = lambda: self.not_waited_for.discard(task)
        return task

    def recv(self, tensor: Tensor, peer: int, sync_op: bool) -> Task:
        _check(tensor)
        self._open(peer)
        value = paddle.empty_like(tensor)
        return self._begin("receive", sync_op, lambda: self._gloo.recv(value, peer, True).wait(), [(tensor, value)])

    def _open(self, peer: int) -> None:
        """Wait until the other rank uses the channel too."""
        if self.is_open:
            return
        self.is_open = True
        sign = paddle.zeros([1])

        def work() -> None:
            for sends in (self._group.rank < peer, self._group.rank > peer):
                (self._gloo.send if sends else self._gloo.recv)(sign, peer, True).wait()

        self._begin(f"opening the channel between the ranks {self._group.ranks}", True, work, []).wait()

    def _begin(
        self, name: str, sync_op: bool, work: Callable[[], None], outputs: Sequence[tuple[Tensor, Tensor]],
        sent: Tensor | None = None,
    ) -> Task:  # fmt: skip
        with paddle.no_grad():
            for output, _ in outputs:
                output.copy_(_nothing_like(output), True)
            task = Task(name, outputs, sent, not sync_op)
        self._jobs.put((task, work))
        return task

    def _work(self) -> None:
        paddle.set_device("cpu")
        with paddle.no_grad():
            while True:
                task, work = self._jobs.get()
                task.run(work)
                del task, work


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.is_contiguous(), f"a tensor of shape {tensor.shape} with strides {tensor.strides} is sent"


def _taken(tensor: Tensor) -> Tensor:
    """A copy of what a call both sends and writes."""
    _check(tensor)
    return tensor.detach().clone()


def _nothing_like(tensor: Tensor) -> Tensor:
    is_float = tensor.dtype in (paddle.float32, paddle.float64, paddle.bfloat16, paddle.float16)
    return paddle.full_like(tensor, float("nan") if is_float else _UNKNOWN)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return a.shape == b.shape and bool(a.numpy().tobytes() == b.numpy().tobytes())
