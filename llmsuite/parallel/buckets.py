"""Gradient buckets: the gradients of several parameters are reduced over ranks in one call.

Every call has a latency however little it sends, and most gradients of a model are small. So gradients that become
ready one after the other are concatenated to one flat tensor, which is reduced while the backward pass continues (Li et
al. 2020, PyTorch Distributed, arXiv 2006.15704). The buckets and the order inside of them are known before the run
(`partition.gradient_buckets`); a gradient that is alone in its bucket is not copied.

Where every backward pass reduce-scatters its gradients over the sharding axis, a bucket is ordered by rank:

    rank 0: shard 0 of a, shard 0 of b | rank 1: shard 1 of a, shard 1 of b | ...
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import paddle

from llmsuite.base.typing import Tensor
from llmsuite.parallel import collective
from llmsuite.parallel.partition import gradient_buckets


class BucketMember(Protocol):
    """A parameter as its bucket uses it; see `sharding.ParameterShard`."""

    name: str
    bucket: Bucket

    @property
    def shard_size(self) -> int:
        """Elements of the shard that a rank of the sharding axis owns."""

    @property
    def is_sent(self) -> bool:
        """True where there is a gradient, and other data ranks to reduce it with."""

    @property
    def sum_size(self) -> int:
        """Elements of the gradient when it is reduced, with the padding of its shards."""

    @property
    def scatter_group(self) -> Any:
        """Ranks that every backward pass reduce-scatters the gradient over."""

    @property
    def sum_group(self) -> Any:
        """Ranks that the gradient is summed over once a step; None when there is one."""

    def as_shards(self, gradient: Tensor) -> Tensor:
        """A flat gradient as [shards, shard size], one row for each rank of the sharding axis."""

    def add_shard(self, own: Tensor) -> None:
        """Accumulate the gradient of one backward pass, or this rank's shard of it."""

    def take_gradient(self) -> Tensor | None:
        """The gradient this rank has accumulated."""

    def drop_gradient(self) -> None:
        """Free the gradient of the model's parameter."""


class Bucket:
    """Gradients of parameters that are reduced over the same ranks, in the same dtype."""

    def __init__(self, shards: Sequence[BucketMember], scatters: ReduceScatterQueue | None = None):
        """
        Args:
            shards: in the order in which their gradients are concatenated.
            scatters: shared with the other buckets of a part of the model.
        """
        self._shards = list(shards)
        self._reduce_scatters = scatters or ReduceScatterQueue()
        self._waiting: dict[BucketMember, Tensor] = {}
        """Flat gradients of a backward pass that wait to be reduce-scattered with the rest of the bucket."""
        self._ready: dict[BucketMember, Tensor | None] = {}
        """Gradients of a step that wait to be all-reduced with the rest of the bucket."""
        self._reducing: dict[BucketMember, Tensor | None] = {}
        """Gradients whose all-reduce has started."""
        self._pending: Any = None
        """Task of that all-reduce."""

    def scatter(self, shard: BucketMember, gradient: Tensor) -> None:
        """Take a flat gradient that a backward pass has made; with the last of the bucket, reduce-scatter them."""
        before = self._waiting.get(shard)
        self._waiting[shard] = gradient if before is None else before + gradient
        if len(self._waiting) == len(self._shards):
            self._scatter()

    def _scatter(self) -> None:
        given = [(shard, self._waiting[shard]) for shard in self._shards if shard in self._waiting]
        self._waiting = {}
        rows = [shard.as_shards(gradient) for shard, gradient in given]
        flat = (rows[0] if len(rows) == 1 else paddle.concat(rows, 1)).flatten()
        self._reduce_scatters.begin(flat, [shard for shard, _ in given])

    def add(self, shard: BucketMember, gradient: Tensor | None) -> None:
        """Take this rank's gradient, None where it has none; with the last of the bucket, start the sum over ranks."""
        assert shard not in self._ready | self._reducing, f"{shard.name}: its last backward pass has ended twice"
        self._ready[shard] = gradient
        if len(self._ready) == len(self._shards):
            self._start_sum()

    def _start_sum(self) -> None:
        given = {shard: gradient for shard in self._shards if (gradient := self._ready[shard]) is not None}
        self._reducing = self._ready
        self._ready = {}
        group = self._shards[0].sum_group
        if group is None or not given:
            return
        if len(given) == 1:
            (flat,) = given.values()
        else:
            flat = paddle.concat([gradient.flatten() for gradient in given.values()])
            views = _split(flat, [gradient.size for gradient in given.values()])
            for (shard, gradient), view in zip(given.items(), views):
                self._reducing[shard] = view.reshape(gradient.shape)
                shard.drop_gradient()
        # started while the backward pass computes the next gradients; buckets fill in the same order on all ranks
        self._pending = collective.start_all_reduce(flat, group)

    def finish(self, shard: BucketMember) -> Tensor | None:
        """The sum over the ranks; None when there is none. Called once a step for every shard of the bucket."""
        if shard not in self._reducing:
            if self._waiting:  # some parameters got no gradient
                self._scatter()
            self._reduce_scatters.settle()
            for other in [other for other in self._shards if other not in self._ready]:
                self.add(other, other.take_gradient())
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._reducing.pop(shard)


@dataclasses.dataclass
class ReduceScatterQueue:
    """Reduce-scatters, one at a time, so that no more than one bucket waits to be freed."""

    _running: Callable[[], None] | None = None

    def begin(self, flat: Tensor, shards: Sequence[BucketMember]) -> None:
        """Start the next one, once the one before is done. `flat` has the gradients of `shards`, ordered by rank."""
        self.settle()
        # over the sharding axis: each of its ranks keeps the sum of its own shard only (ZeRO-2)
        part, pending = collective.start_reduce_scatter(flat, shards[0].scatter_group)

        def settle(read: Tensor = flat) -> None:
            """Wait, then accumulate the shards; `read` keeps the memory that is sent until then."""
            if pending is not None:
                pending.wait()
            for shard, own in zip(shards, _split(part, [shard.shard_size for shard in shards])):
                shard.add_shard(own)

        self._running = settle
        if pending is None:
            self.settle()

    def settle(self) -> None:
        """Wait for the one that is running, and pass each parameter its shard."""
        running = self._running
        self._running = None
        if running is not None:
            running()


def assign_buckets(shards: Sequence[BucketMember], is_expert: Callable[[str], bool], limit: int) -> None:
    """Assign the gradients of a part of the model to buckets.

    Args:
        shards: of the part, in the order of the model.
        is_expert: whether a parameter of this name belongs to routed experts, which have a mesh of their own.
        limit: bytes of a bucket; 0 reduces each gradient alone.
    """
    scatters = ReduceScatterQueue()
    for members in gradient_buckets(shards, lambda shard: is_expert(shard.name), limit):
        bucket = Bucket(members, scatters)
        for shard in members:
            shard.bucket = bucket


def _split(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive views of these sizes, which share the memory."""
    ends = list(itertools.accumulate(sizes))
    return [flat[end - size : end] for size, end in zip(sizes, ends)]
