"""The order in which parallelism meets a model. Read `parallelize`: the sequence matters, and stands nowhere else.

The model comes lazily built, without memory, and holds the layers of this pipeline stage only (`cut.keep_part`). It
leaves as this rank's part of it: called like before, with collectives inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

from llmsuite.devices.ops import Ops, matmul, operand
from llmsuite.models.products import use_products
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.buckets import assign_buckets
from llmsuite.parallel.chunked_loss import chunk_losses
from llmsuite.parallel.experts import share_experts
from llmsuite.parallel.fill import ReadSlice, fill
from llmsuite.parallel.gathering import Zero3Hooks, gather_in_programs
from llmsuite.parallel.interventions import share_interventions
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.overlap import fuse_projections, layers_to_scatter, overlap_sums
from llmsuite.parallel.prefixes import share_prefixes
from llmsuite.parallel.products import RankProducts
from llmsuite.parallel.program.slices import SlicedShard
from llmsuite.parallel.recompute import recompute_attention, recompute_layers
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.static import compile_layers
from llmsuite.parallel.tensor import apply_tensor_parallel, between_layers
from llmsuite.parallel.tied import use_sparse_gradient
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a model is parallelized: the recipe's choices, and what its device and its family add to them."""

    mesh: Mesh
    shard_plan: ShardPlan
    dtype: str
    """Dtype of the parameters."""
    narrow: Collection[str]
    """Names of those that are bfloat16, whatever the dtype of the others."""
    ops: Ops
    """The forms of a device, of which products of distributed tensors are made here."""
    trained: Collection[str]
    """Names of the parameters that an optimizer will get; the others are frozen."""
    is_tied: bool
    """Whether the logits are made with the weight of the embedding."""
    shares_embedding: bool
    """Whether the last pipeline stage needs the embedding too."""
    sequence_parallel: bool
    head_takes_all: bool
    """Whether logits are computed at all positions, not at selected ones."""
    fuse_projections: bool
    """Whether gradients of an input that several matrices have are summed over tp once."""
    sharding_stage: int
    """0 to 3."""
    slices: bool
    """Whether shards are slices along a dim, as programs of whole steps cut; in stage 3 only."""
    bucket_bytes: int
    """Size of a gradient bucket; 0 sends each gradient by itself."""
    overlap: bool
    """Whether the device can send beside a backward pass."""
    adds_sparse_rows: bool
    """Whether the device adds the rows of a sparse gradient to a dense one in place."""
    compile: bool
    """Whether layers run as compiled programs."""
    recompute: Literal["none", "selective", "full"]
    recompute_every: int
    loss_chunk_tokens: int | None
    """Tokens whose logits exist at a time; None for all of a micro-batch."""


def parallelize(model: Any, strategy: Strategy, read: ReadSlice) -> list[ParameterShard]:
    """Turn a lazily built model into this rank's part of it, ready to train.

    Returns:
        What this rank owns of each parameter, frozen ones included, in the order of the model.
    """
    mesh, plan = strategy.mesh, strategy.shard_plan
    shards: list[ParameterShard] = []

    # 1. every parameter gets its values, and is sharded before the next one has memory
    def shard(name: str, parameter: Tensor) -> None:
        shards.append(_shard_parameter(name, parameter, strategy))

    fill(model, plan, mesh, read, strategy.dtype, shard, narrow=strategy.narrow)
    # 2. routed experts exchange tokens with those of other ranks
    share_experts(model, plan, mesh)
    # 3. tensor parallel, and sequence parallel between its regions
    apply_tensor_parallel(model, plan, mesh, strategy.sequence_parallel)
    share_interventions(model, mesh, strategy.sequence_parallel)
    share_prefixes(model, mesh)
    # 4. products in the form of the device, on this rank's parts
    _multiply_as_device(model, strategy)
    # and the gradient of an embedding whose weight has another one, from the head
    if strategy.is_tied and strategy.adds_sparse_rows and mesh.degrees.tp == mesh.degrees.pp == 1:
        use_sparse_gradient(dict(model.named_sublayers())[plan.embedding])
    # 5. gradients that are reduced over data ranks in one call
    assign_buckets(shards, plan.is_expert, strategy.bucket_bytes)
    # 6. sums over tp that overlap with the backward pass, and those that are one
    if mesh.tensor is not None and strategy.overlap:
        alone = layers_to_scatter(model, plan, strategy.head_takes_all) if strategy.sequence_parallel else ()
        overlap_sums(model, plan, mesh, strategy.ops, alone)
    if mesh.tensor is not None and strategy.fuse_projections:
        fuse_projections(model, plan, mesh, strategy.sequence_parallel, strategy.overlap, strategy.ops)
    # 7. layers as programs: what came before is compiled into them, what comes now stands around them
    if strategy.compile:
        compile_layers(model, plan, mesh, between_layers(strategy.sequence_parallel))
    # 8. sharding stage 3 gathers parameters in front of each layer and frees them behind it
    if strategy.sharding_stage == 3:
        Zero3Hooks(model, plan, shards, strategy.is_tied)
    if strategy.slices:
        gather_in_programs(model, plan, strategy.is_tied)
    # 9. recompute, outermost: a layer that is computed again is gathered again
    _recompute(model, strategy)
    # 10. losses in chunks, around what gathers the head
    if strategy.loss_chunk_tokens is not None:
        chunk_losses(model, strategy.loss_chunk_tokens, mesh, shards)
    return shards


def parallelize_without_values(model: Any, strategy: Strategy) -> None:
    """The same for the modules of all pipeline stages, of which each rank makes programs of whole steps: tensor
    parallel, products, sharding and recompute."""
    apply_tensor_parallel(model, strategy.shard_plan, strategy.mesh, strategy.sequence_parallel)
    share_interventions(model, strategy.mesh, strategy.sequence_parallel)
    share_prefixes(model, strategy.mesh)
    _multiply_as_device(model, strategy)
    if strategy.slices:
        gather_in_programs(model, strategy.shard_plan, strategy.is_tied)
    _recompute(model, strategy)


def parallelize_inference(model: Any, plan: ShardPlan, mesh: Mesh, read: ReadSlice, dtype: str) -> None:
    """The same for a model that only answers: values, experts and tensor parallel."""
    fill(model, plan, mesh, read, dtype)
    share_experts(model, plan, mesh)
    apply_tensor_parallel(model, plan, mesh, sequence_parallel=False)
    share_interventions(model, mesh, sequence_parallel=False)


def _multiply_as_device(model: Any, strategy: Strategy) -> None:
    # float32 layers of one input stay apart under tensor parallel: `plan` counts the messages of each
    ops, rounds = strategy.ops, strategy.ops.operand is not operand
    if ops.matmul is not matmul:
        use_products(model, RankProducts(ops, strategy.mesh), together=rounds or strategy.mesh.tensor is None)


def _recompute(model: Any, strategy: Strategy) -> None:
    if strategy.recompute == "full":
        recompute_layers(model, strategy.shard_plan, strategy.recompute_every)
    elif strategy.recompute == "selective":
        recompute_attention(model, strategy.shard_plan)


def _shard_parameter(name: str, parameter: Tensor, strategy: Strategy) -> ParameterShard:
    plan, mesh = strategy.shard_plan, strategy.mesh
    is_shared = strategy.shares_embedding and name == f"{plan.embedding}.weight"
    place = mesh.of_experts if plan.is_expert(name) else mesh
    is_frozen = name not in strategy.trained
    if strategy.slices:
        assert strategy.sharding_stage == 3, "programs share out the state of the optimizer by themselves"
        return SlicedShard(name, parameter, place, plan.dim(name), is_shared, is_frozen)
    return ParameterShard(name, parameter, place, plan.dim(name), strategy.sharding_stage, is_shared, is_frozen)
