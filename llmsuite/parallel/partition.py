"""Which part of a parameter a rank has: under tensor and expert parallel a slice, under sharding a piece of that.

Plain arithmetic over the mesh: the engine cuts by it, and `llmsuite plan` counts by it, without Paddle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.mesh import Mesh

SHARDING_STAGES = {"none": 0, "stage1": 1, "stage2": 2, "stage3": 3}
"""By the value of `parallel.sharding`."""
OPTIMIZER_SLOTS = {"adamw": ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2"), "sgd": ()}
"""What Paddle's optimizers keep of a parameter, in float32."""


def local_slice(name: str, shape: Sequence[int], plan: ShardPlan, mesh: Mesh) -> list[slice]:
    """The part of a whole parameter that this rank holds when sharding does not cut it, one slice a dim."""
    index = [slice(0, size) for size in shape]
    dim, parts, part = plan.dim(name), mesh.degrees.tp, mesh.coordinate["tp"]
    if plan.is_expert(name):
        dim, parts, part = 0, mesh.degrees.ep * parts, mesh.of_experts.coordinate["ep"] * parts + part
    if dim is not None and parts > 1:
        size = shape[dim] // parts
        index[dim] = slice(part * size, (part + 1) * size)
    return index


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a rank owns of a flattened local value: equal pieces, the last ones may be short or empty."""

    parts: int
    """Ranks that have a piece each."""
    size: int
    """Of a piece, with the padding that makes all of them equal."""
    range: slice

    @property
    def num_owned(self) -> int:
        return self.range.stop - self.range.start


def piece_of(size: int, mesh: Mesh, stage: int, is_frozen: bool) -> Piece:
    """The piece of a rank.

    Args:
        size: elements of what lies on this rank without sharding.
        mesh: this rank's place; of a stack of experts, in the mesh of experts.
        stage: of sharding, 0 to 3.
        is_frozen: whether no optimizer gets the parameter. It is cut itself then, in stage 3, or not at all.
    """
    parts = mesh.degrees.sharding if stage == 3 or (stage and not is_frozen) else 1
    each = -(-size // parts)
    first = mesh.coordinate["sharding"] * each if stage else 0
    return Piece(parts, each, slice(min(first, size), min(first + each, size)))


def has_master(dtype: str, is_frozen: bool) -> bool:
    """Whether the optimizer updates a float32 copy of a parameter."""
    return dtype != "float32" and not is_frozen


def reduce_in_backward(stage: int, parts: int, master: bool) -> bool:
    """Whether a gradient is taken from the model as soon as a backward pass has made it, and added up in float32."""
    return master or (stage >= 2 and parts > 1)


def buckets(sizes: Sequence[tuple[Hashable, int]], limit: int) -> list[list[int]]:
    """Which gradients are added up over ranks in one call: of a kind, one behind the other, as many as fit.

    Args:
        sizes: of the parameters of a part of the model, in its order: a kind and bytes. Only what is of one kind is
            added up over the same ranks, in the same dtype.
        limit: bytes of a bucket; what is larger is by itself.

    Returns:
        Numbers of parameters, the last ones first, as backward passes come to them.
    """
    found: list[list[int]] = []
    open_ones: dict[Hashable, tuple[list[int], int]] = {}
    for number in reversed(range(len(sizes))):
        kind, size = sizes[number]
        if size > limit:  # the small ones on both sides of it may still be together
            found.append([number])
            continue
        bucket, filled = open_ones.get(kind, ([], limit))
        if filled + size > limit or not bucket:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(number)
        open_ones[kind] = bucket, filled + size
    return found
