"""Gradients on their way to other ranks, those of several parameters in one call.

A call takes its time however little it carries, and of a model's gradients most are small. So those that become ready
one after the other are laid side by side into one flat tensor, which is added up at once while the backward pass goes
on (Li et al. 2020, PyTorch Distributed, arXiv 2006.15704). Who is in a bucket with whom is known before the run
(`partition.buckets`), and in which order they lie there; a gradient by itself is not copied.

Where every backward pass cuts its gradients over the sharding axis, a bucket has the pieces of one rank side by side:

    rank 0: piece 0 of a, piece 0 of b | rank 1: piece 1 of a, piece 1 of b | ...
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import paddle

from llmsuite.parallel import collective
from llmsuite.parallel.partition import buckets
from llmsuite.typing import Tensor


class BucketMember(Protocol):
    """What a bucket asks of a parameter; `sharding.ParameterShard` has it."""

    name: str
    part_size: int
    """Elements of the part that a rank of the sharding axis owns."""
    bucket: Bucket

    @property
    def is_sent(self) -> bool:
        """Whether there is a gradient, and other ranks to add it up with."""

    @property
    def sum_bytes(self) -> int:
        """Bytes of the gradient as it is added up, in float32."""

    @property
    def scatter_group(self) -> Any:
        """Ranks that a gradient is cut over as a pass has made it."""

    @property
    def sum_group(self) -> Any:
        """Ranks that it is added up over once a step; None when there is one."""

    def in_parts(self, gradient: Tensor) -> Tensor:
        """A flat gradient as [parts, part size], one row for each rank of the sharding axis."""

    def add_part(self, own: Tensor) -> None:
        """Take what a pass has made of the gradient, of a cut one the own part."""

    def take_gradient(self) -> Tensor | None:
        """What this rank has collected, or what its backward passes have left."""

    def drop_gradient(self) -> None:
        """Free the gradient of the model's parameter."""


class Bucket:
    """Gradients of parameters that are added up over the same ranks, in the same dtype."""

    def __init__(self, shards: Sequence[BucketMember], scatters: ReduceScatterQueue | None = None):
        """
        Args:
            shards: in the order in which they lie side by side.
            scatters: shared with other buckets that are cut over the sharding axis.
        """
        self._shards, self._reduce_scatters = list(shards), scatters or ReduceScatterQueue()
        self._waiting: dict[BucketMember, Tensor] = {}
        """What passes have made for the own parts, until all have come."""
        self._ready: dict[BucketMember, Tensor | None] = {}
        """What is to be added up once a step, until all have come."""
        self._on_its_way: dict[BucketMember, Tensor | None] = {}
        self._arrival: Any = None

    def scatter(self, shard: BucketMember, gradient: Tensor) -> None:
        """Take a flat gradient that a backward pass has made; with the last one, add them up into the own parts."""
        before = self._waiting.get(shard)
        self._waiting[shard] = gradient if before is None else before + gradient
        if len(self._waiting) == len(self._shards):
            self._scatter()

    def _scatter(self) -> None:
        given = [(shard, self._waiting[shard]) for shard in self._shards if shard in self._waiting]
        self._waiting = {}
        rows = [shard.in_parts(gradient) for shard, gradient in given]
        flat = (rows[0] if len(rows) == 1 else paddle.concat(rows, 1)).flatten()
        self._reduce_scatters.begin(flat, [shard for shard, _ in given])

    def add(self, shard: BucketMember, gradient: Tensor | None) -> None:
        """Take what this rank adds to a sum over ranks, None where it has nothing; with the last one, it sets out."""
        assert shard not in self._ready | self._on_its_way, f"{shard.name}: its last backward pass has ended twice"
        self._ready[shard] = gradient
        if len(self._ready) == len(self._shards):
            self._begin()

    def _begin(self) -> None:
        given = {shard: gradient for shard in self._shards if (gradient := self._ready[shard]) is not None}
        self._on_its_way, self._ready = self._ready, {}
        group = self._shards[0].sum_group
        if group is None or not given:
            return
        if len(given) == 1:
            (flat,) = given.values()
        else:
            flat = paddle.concat([gradient.flatten() for gradient in given.values()])
            pieces = _side_by_side(flat, [gradient.size for gradient in given.values()])
            for (shard, gradient), piece in zip(given.items(), pieces):
                self._on_its_way[shard] = piece.reshape(gradient.shape)
                shard.drop_gradient()
        self._arrival = collective.begin_sum(flat, group)

    def finish(self, shard: BucketMember) -> Tensor | None:
        """The sum over the ranks; None when there is none. Each is asked for once a step, all before the next one."""
        if shard not in self._on_its_way:
            if self._waiting:  # of some there was none
                self._scatter()
            self._reduce_scatters.settle()
            for other in [other for other in self._shards if other not in self._ready]:
                self.add(other, other.take_gradient())
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
        return self._on_its_way.pop(shard)


@dataclasses.dataclass
class ReduceScatterQueue:
    """What is being added up into own parts: one at a time, so no more than one bucket waits to be freed."""

    _under_way: Callable[[], None] | None = None

    def begin(self, flat: Tensor, shards: Sequence[BucketMember]) -> None:
        """`flat` has the gradients of `shards`, rank by rank."""
        self.settle()
        part, arrival = collective.begin_reduce_scatter(flat, shards[0].scatter_group)

        def settle(read: Tensor = flat) -> None:
            """`read` may not be freed before."""
            if arrival is not None:
                arrival.wait()
            for shard, own in zip(shards, _side_by_side(part, [shard.part_size for shard in shards])):
                shard.add_part(own)

        self._under_way = settle
        if arrival is None:
            self.settle()

    def settle(self) -> None:
        """Wait for it, and hand each piece to its parameter."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way()


def assign_buckets(shards: Sequence[BucketMember], is_expert: Callable[[str], bool], limit: int) -> None:
    """Let parameters of a part of the model share their calls.

    Args:
        shards: of the part, in the order of the model.
        is_expert: tells by its name whether a parameter is that of experts, whose mesh is another.
        limit: bytes of a bucket; 0 leaves each by itself.
    """
    learnt = [shard for shard in shards if shard.is_sent]
    scatters = ReduceScatterQueue()
    for chosen in buckets([(is_expert(shard.name), shard.sum_bytes) for shard in learnt], limit):
        bucket = Bucket([learnt[i] for i in chosen], scatters)
        for i in chosen:
            learnt[i].bucket = bucket


def _side_by_side(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Parts of so many elements, which share the memory."""
    ends = list(itertools.accumulate(sizes))
    return [flat[end - size : end] for size, end in zip(sizes, ends)]
