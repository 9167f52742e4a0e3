"""The shard of a parameter that a rank holds: a slice under tensor and expert parallel, a range of it under sharding.

Plain arithmetic over the mesh, without Paddle: the engine splits by it, and `llmsuite plan` counts by it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from llmsuite.adapters.parameters import is_prefix, shard_dim
from llmsuite.adapters.prefix_shapes import is_shared_by_all_ranks
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.models.head import EMBEDDINGS
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.mesh import DATA, DP, MODEL, SHARDING, TIED, Mesh

SHARDING_STAGES = {"none": 0, "stage1": 1, "stage2": 2, "stage3": 3}
"""Sharding stage, by the value of `parallel.sharding`."""
_ADAMW = ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2")
OPTIMIZER_SLOTS = {"adamw": _ADAMW, "adamw_8bit": _ADAMW, "sgd": ()}
"""State that optimizers keep of each parameter; the moments have `moment_dtype`, the other slots float32."""
BLOCK_SLOTS = ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment1_absmax", "moment2", "moment2_absmax")
"""State of a parameter whose moments are stored in blocks: int8 codes, and the largest magnitude of each block of the
full parameter; see `block_moments`."""
CODE_OF_ZERO: Mapping[str, int] = {"moment1": -1, "moment2": -128}
"""The code of 0 in these moments; they begin with it, and so does padding."""
UPDATE_CHUNK = 1 << 22
"""Elements that an update without masters computes with at a time; see `direct_update`."""
UPDATE_BYTES = 56
"""Bytes of temporaries for each of them: the gradient, a moment and two terms of it in float64; the parameter, both
moments, their quotient and two terms of it in float32."""
_LEAST_ELEMENTS = 4096
"""Elements of the smallest parameter whose moments are stored in blocks; of a stack, those of a matrix."""
FIRST_VALUES: Mapping[str, Callable[[TrainSection], float]] = {
    "beta1_pow_acc": lambda train: train.adam_beta1,
    "beta2_pow_acc": lambda train: train.adam_beta2,
}
"""Initial values of the slots with one number for the full parameter, the same on every rank. The other slots start
with zeros."""


def has_block_moments(optimizer: str, name: str, shape: Sequence[int]) -> bool:
    """True where an optimizer stores the moments of a parameter of this full shape in blocks of 8 bits.

    Small ones have moments in float32, as in bitsandbytes; so have embeddings, as transformers asks bitsandbytes for.
    """
    if optimizer != "adamw_8bit" or math.prod(shape[-2:]) < _LEAST_ELEMENTS:
        return False
    return name not in EMBEDDINGS and not is_prefix(name)


def optimizer_slots(optimizer: str, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """The slots of a parameter of this full shape."""
    return BLOCK_SLOTS if has_block_moments(optimizer, name, shape) else OPTIMIZER_SLOTS[optimizer]


def local_slice(name: str, shape: Sequence[int], plan: ShardPlan, mesh: Mesh) -> list[slice]:
    """The slice of a parameter that this rank holds before sharding, one `slice` for each dim.

    Slices of a dim that the ranks do not divide reach beyond it: a vocabulary is padded, see `vocabulary.py`.
    """
    index = [slice(0, size) for size in shape]
    dim = shard_dim(plan, name)
    parts = mesh.degrees.tp
    part = mesh.coordinate["tp"]
    if plan.is_expert(name):
        dim = 0
        parts *= mesh.degrees.ep
        part = mesh.expert_part
    if dim is not None and parts > 1:
        size = -(-shape[dim] // parts)
        index[dim] = slice(part * size, (part + 1) * size)
    return index


@dataclasses.dataclass(frozen=True)
class ShardRange:
    """The range of a flattened local value that a rank owns. Ranges are equal; the last ones may be short or empty."""

    num_shards: int
    """Number of ranks that own a shard each."""
    size: int
    """Elements of a shard, with the padding that makes all shards equal."""
    range: slice

    @property
    def num_owned(self) -> int:
        return self.range.stop - self.range.start


def shard_range(size: int, mesh: Mesh, stage: int, is_frozen: bool) -> ShardRange:
    """The range of a flattened parameter that a rank owns.

    Args:
        size: elements that this rank holds before sharding.
        mesh: with this rank's coordinates; for a stack of experts, the expert mesh.
        stage: sharding stage, 0 to 3.
        is_frozen: whether no optimizer gets the parameter; then only stage 3 shards it.
    """
    num_shards = mesh.degrees.sharding if stage == 3 or (stage and not is_frozen) else 1
    each = -(-size // num_shards)
    first = mesh.coordinate["sharding"] * each if stage else 0
    return ShardRange(num_shards, each, slice(min(first, size), min(first + each, size)))


def sharding_stage_of(parameter: str, stage: int) -> int:
    """The sharding stage of a parameter. A parameter that every layer uses is never freed, and its gradient is complete
    only after the last backward pass: more than sharding the optimizer's state gains nothing."""
    return min(stage, 1) if is_shared_by_all_ranks(parameter) else stage


def has_master(dtype: str, is_frozen: bool, keeps_masters: bool = True) -> bool:
    """True where the optimizer updates a float32 copy of a parameter: updates are often smaller than the rounding of 16
    bits.

    Args:
        dtype: of the parameter.
        is_frozen: whether no optimizer gets it.
        keeps_masters: `train.master_weights`.
    """
    return dtype != "float32" and not is_frozen and keeps_masters


def moment_dtype(train: TrainSection) -> str:
    """Dtype of moments that are not stored in blocks. `adamw_8bit` keeps these in float32 also without masters, as
    bitsandbytes does."""
    return "float32" if train.master_weights or train.optimizer == "adamw_8bit" else "bfloat16"


@dataclasses.dataclass(slots=True, eq=False)
class Partition:
    """The part of a parameter that a rank has, from which follows what is stored, reduced and gathered of it."""

    size: int
    """Elements on this rank before sharding over data ranks: of the slice of tensor and expert parallel."""
    stage: int
    """Sharding stage, 0 to 3."""
    num_shards: int
    """Ranks of the sharding axis that own a shard each."""
    shard_size: int
    """Elements of a shard, including padding."""
    num_owned: int
    """Elements that this rank's optimizer updates."""
    has_master: bool
    """True where the optimizer updates a float32 copy."""
    is_tied: bool
    """True where both the first and the last pipeline stage have it (a shared embedding)."""
    is_shared: bool
    """True where all ranks of the model have it, see `is_shared_by_all_ranks`."""

    @property
    def is_stored_sharded(self) -> bool:
        """True where a rank stores its own shard only, and the rest is gathered for each use (stage 3)."""
        return self.stage == 3 and self.num_shards > 1

    @property
    def has_own_copy(self) -> bool:
        """True where the optimizer updates memory of its own, not that of the model."""
        return self.has_master or self.gathers_update

    @property
    def gathers_update(self) -> bool:
        """True where the updated shards of all ranks are gathered after a step (stages 1 and 2)."""
        return self.num_shards > 1 and not self.is_stored_sharded

    @property
    def reduces_each_pass(self) -> bool:
        """True where the gradient is reduced over the sharding axis in every backward pass (stages 2 and 3)."""
        return self.stage >= 2 and self.num_shards > 1

    @property
    def reduce_in_backward(self) -> bool:
        """True where a gradient is taken from the model as soon as a backward pass has made it, to accumulate in
        float32."""
        return self.has_master or self.reduces_each_pass

    @property
    def sum_size(self) -> int:
        """Elements of the gradient when it is reduced, with the padding of its shards."""
        if self.reduces_each_pass:
            return self.num_shards * self.shard_size
        return self.size

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The calls that reduce the gradient over data ranks, in this order."""
        return (SCATTER, SUM_OF_SHARDS) if self.reduces_each_pass else (SUM,)

    @property
    def model_sums(self) -> list[str]:
        """The kinds of groups of `mesh` that the gradient is summed over after the data ranks, in this order: each of
        their ranks has a part of it."""
        found = []
        if self.is_tied:  # those of the lookup and of the logits
            found.append(TIED)
        if self.is_shared and self.num_owned:  # from the layers and heads of each rank
            found.append(MODEL)
        return found


class Reduction(NamedTuple):
    """A call that reduces the gradients of a bucket over data ranks."""

    group: str
    """Kind of the group, of `mesh.GROUP_AXES`; that of the expert mesh for routed experts."""
    operation: Literal["all_reduce", "reduce_scatter"]
    in_each_pass: bool
    """True where every backward pass makes the call; otherwise it is made once a step."""
    of_shards: bool
    """True where it reduces the shards that the ranks own; otherwise whole gradients."""

    def size(self, bucket: Sequence[Partition]) -> int:
        """Elements of the tensor that is reduced."""
        return sum(member.shard_size if self.of_shards else member.sum_size for member in bucket)


SUM = Reduction(DATA, "all_reduce", in_each_pass=False, of_shards=False)
SCATTER = Reduction(SHARDING, "reduce_scatter", in_each_pass=True, of_shards=False)
"""Over the sharding axis: each of its ranks keeps the sum of its own shard only (ZeRO-2)."""
SUM_OF_SHARDS = Reduction(DP, "all_reduce", in_each_pass=False, of_shards=True)


class Sent(Protocol):
    """A parameter whose gradient may be reduced over data ranks."""

    @property
    def name(self) -> str: ...

    @property
    def is_sent(self) -> bool:
        """True where there is a gradient, and other data ranks to reduce it with."""

    @property
    def sum_size(self) -> int:
        """Elements of the gradient when it is reduced, with the padding of its shards."""


SentParameter = TypeVar("SentParameter", bound=Sent)


def gradient_buckets(
    parameters: Sequence[SentParameter], is_expert: Callable[[SentParameter], bool], limit: int
) -> list[list[SentParameter]]:
    """The parameters whose gradients are reduced in one call, see `buckets`.

    Args:
        parameters: of a part of the model, in its order.
        is_expert: returns True for those of routed experts, which have a mesh of their own.
        limit: bytes of a bucket, of gradients in float32; 0 reduces each gradient alone.
    """
    sent = [parameter for parameter in parameters if parameter.is_sent]
    sizes = [((is_expert(p), is_shared_by_all_ranks(p.name)), 4 * p.sum_size) for p in sent]
    found = []
    for chosen in buckets(sizes, limit):
        found.append([sent[i] for i in chosen])
    return found


def buckets(sizes: Sequence[tuple[Hashable, int]], limit: int) -> list[list[int]]:
    """Buckets of gradients that are reduced in one call: consecutive gradients of a kind, as many as fit.

    Args:
        sizes: kind and bytes of the gradients of a part of the model, in its order. Gradients of one kind are reduced
            over the same ranks, in the same dtype.
        limit: bytes of a bucket; a larger gradient has a bucket of its own.

    Returns:
        For each bucket the indices of its gradients, the last ones first, in the order of backward passes.
    """
    found: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for number in reversed(range(len(sizes))):
        kind, size = sizes[number]
        if size > limit:  # smaller gradients before and after it may still share a bucket
            found.append([number])
            continue
        bucket, filled = open_buckets.get(kind, ([], limit))
        if filled + size > limit or not bucket:
            bucket = []
            filled = 0
            found.append(bucket)
        bucket.append(number)
        open_buckets[kind] = bucket, filled + size
    return found
