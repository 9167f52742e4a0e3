"""The shard of a parameter that a rank holds: a slice under tensor and expert parallel, a range of it under sharding.

Plain arithmetic over the mesh, without Paddle: the engine splits by it, and `llmsuite plan` counts by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

from llmsuite.adapters.parameters import shard_dim
from llmsuite.adapters.prefix_shapes import is_shared_by_all_ranks
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.mesh import Mesh

SHARDING_STAGES = {"none": 0, "stage1": 1, "stage2": 2, "stage3": 3}
"""Sharding stage, by the value of `parallel.sharding`."""
OPTIMIZER_SLOTS = {"adamw": ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2"), "sgd": ()}
"""State that Paddle's optimizers keep of each parameter, in float32."""
FIRST_VALUES: Mapping[str, Callable[[TrainSection], float]] = {
    "beta1_pow_acc": lambda train: train.adam_beta1,
    "beta2_pow_acc": lambda train: train.adam_beta2,
}
"""Initial values of the slots with one number for the full parameter, the same on every rank. The other slots start
with zeros."""


def local_slice(name: str, shape: Sequence[int], plan: ShardPlan, mesh: Mesh) -> list[slice]:
    """The slice of a parameter that this rank holds before sharding, one `slice` for each dim.

    Slices of a dim that the ranks do not divide reach beyond it: a vocabulary is padded, see `vocabulary.py`.
    """
    index = [slice(0, size) for size in shape]
    dim = shard_dim(plan, name)
    parts = mesh.degrees.tp
    part = mesh.coordinate["tp"]
    if plan.is_expert(name):
        dim, parts, part = 0, mesh.degrees.ep * parts, mesh.expert_mesh.coordinate["ep"] * parts + part
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


def has_master(dtype: str, is_frozen: bool) -> bool:
    """True where the optimizer updates a float32 copy of a parameter: updates are often smaller than the rounding of 16
    bits."""
    return dtype != "float32" and not is_frozen


def reduce_in_backward(stage: int, num_shards: int, master: bool) -> bool:
    """True where a gradient is taken from the model as soon as a backward pass has made it, to accumulate in
    float32."""
    return master or (stage >= 2 and num_shards > 1)


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
