"""The order in which parallelism is applied to a model. Read `parallelize`: the order matters, and is defined here
only.

The model is lazily built, without memory, and has the layers of this pipeline stage only (`pipeline_split.keep_part`).
Afterwards it is this rank's part of the model, called as before, with collectives inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

from llmsuite.adapters.lora import FIRST_FACTOR
from llmsuite.adapters.parameters import shard_dim
from llmsuite.adapters.shared_first import first_of
from llmsuite.base.typing import ReadSlice, Tensor
from llmsuite.devices.ops import Ops
from llmsuite.models.linear_ops import use_linear_ops
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.buckets import assign_buckets
from llmsuite.parallel.experts import apply_expert_parallel
from llmsuite.parallel.interventions import parallelize_interventions
from llmsuite.parallel.linear_ops import TensorParallelLinearOps
from llmsuite.parallel.materialize import materialize
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.overlap import fuse_projections, layers_to_scatter, overlap_sums
from llmsuite.parallel.prefixes import parallelize_prefixes
from llmsuite.parallel.program.slices import SlicedShard
from llmsuite.parallel.recompute import recompute_attention, recompute_layers
from llmsuite.parallel.sharding import ParameterShard, ShardOptions
from llmsuite.parallel.static import compile_layers
from llmsuite.parallel.tensor import apply_tensor_parallel, between_layers
from llmsuite.parallel.tied import use_sparse_gradient
from llmsuite.parallel.zero3 import Zero3Hooks, hook_program_gathering


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Settings by which a model is parallelized: the recipe's choices, completed by its device and its family."""

    mesh: Mesh
    shard_plan: ShardPlan
    dtype: str
    """Dtype of the parameters."""
    bf16_frozen: Collection[str]
    """Names of the frozen parameters that are bfloat16, whatever the dtype of the others."""
    ops: Ops
    """The device's implementations, used here for products of distributed tensors."""
    trained: Collection[str]
    """Names of the parameters that an optimizer will get; the others are frozen."""
    master_weights: bool
    """True where the optimizer updates float32 copies of 16-bit parameters."""
    shares_first_factors: bool
    """True where the adapters of matrices with one input share a factor."""
    is_tied: bool
    """True where the logits are made with the weight of the embedding."""
    shares_embedding: bool
    """True where the last pipeline stage needs the embedding too."""
    sequence_parallel: bool
    head_needs_all_logits: bool
    """True where logits are computed at all positions, not at selected ones."""
    fuse_projections: bool
    """True where the gradients of an input that several matrices share are summed over tp in one call."""
    sharding_stage: int
    """0 to 3."""
    slices: bool
    """True where shards are slices along a dim, as step programs cut them; in stage 3 only."""
    bucket_bytes: int
    """Size of a gradient bucket; 0 sends each gradient alone."""
    overlap: bool
    """True where the device can communicate during a backward pass."""
    adds_sparse_gradients: bool
    """True where the device adds the rows of a sparse gradient to a dense one in place."""
    compile: bool
    """True where layers run as compiled programs."""
    recompute: Literal["none", "selective", "full"]
    recompute_every: int


def parallelize(model: Any, strategy: Strategy, read: ReadSlice | None) -> list[ParameterShard]:
    """Turn a lazily built model into this rank's part of it, ready to train. `read` as for `materialize`.

    Returns:
        This rank's shard of each parameter, frozen ones included, in the order of the model.
    """
    mesh = strategy.mesh
    plan = strategy.shard_plan
    shards: list[ParameterShard] = []

    # 1. every parameter gets its values, and is sharded before the next one has memory
    def shard(name: str, parameter: Tensor) -> None:
        shards.append(_shard_parameter(name, parameter, strategy))

    materialize(model, plan, mesh, read, strategy.dtype, shard, bf16_frozen=strategy.bf16_frozen)
    # 2. routed experts exchange tokens with those of other ranks
    apply_expert_parallel(model, plan, mesh)
    # 3. tensor parallel, and sequence parallel between its regions
    apply_tensor_parallel(model, plan, mesh, strategy.sequence_parallel)
    parallelize_interventions(model, mesh, strategy.sequence_parallel)
    parallelize_prefixes(model, mesh)
    # 4. the device's implementation of products, on this rank's shards
    _use_device_matmul(model, strategy)
    # and a sparse gradient for an embedding whose weight has a dense one from the head
    if strategy.is_tied and strategy.adds_sparse_gradients and mesh.degrees.tp == mesh.degrees.pp == 1:
        use_sparse_gradient(model, plan.embedding)
    # 5. gradients that are reduced over data ranks in one call
    assign_buckets(shards, plan.is_expert, strategy.bucket_bytes)
    # 6. all-reduces over tp that overlap with the backward pass, and projections that share one
    if mesh.tensor is not None and strategy.overlap:
        alone = layers_to_scatter(model, plan, strategy.head_needs_all_logits) if strategy.sequence_parallel else ()
        overlap_sums(model, plan, mesh, strategy.ops.matmuls, alone)
    if mesh.tensor is not None and strategy.fuse_projections:
        fuse_projections(model, plan, mesh, strategy.sequence_parallel, strategy.overlap, strategy.ops.matmuls)
    # 7. layers as programs: the changes before are compiled into them, the changes after are made around them
    if strategy.compile:
        compile_layers(model, plan, mesh, between_layers(strategy.sequence_parallel))
    # 8. sharding stage 3 gathers parameters before each layer and frees them after it
    if strategy.sharding_stage == 3:
        Zero3Hooks(model, plan, shards, strategy.is_tied, ahead=strategy.overlap)
    if strategy.slices:
        hook_program_gathering(model, plan, strategy.is_tied)
    # 9. recompute, outermost: a layer that is computed again is gathered again
    _recompute(model, strategy)
    return shards


def parallelize_without_values(model: Any, strategy: Strategy) -> None:
    """Parallelize the modules of all pipeline stages, from which each rank builds step programs: tensor parallel,
    products, sharding and recompute."""
    apply_tensor_parallel(model, strategy.shard_plan, strategy.mesh, strategy.sequence_parallel)
    parallelize_interventions(model, strategy.mesh, strategy.sequence_parallel)
    parallelize_prefixes(model, strategy.mesh)
    _use_device_matmul(model, strategy)
    if strategy.slices:
        hook_program_gathering(model, strategy.shard_plan, strategy.is_tied)
    _recompute(model, strategy)


def parallelize_inference(model: Any, plan: ShardPlan, mesh: Mesh, read: ReadSlice | None, dtype: str) -> None:
    """Parallelize a model for inference: values, experts and tensor parallel. `read` as for `materialize`."""
    materialize(model, plan, mesh, read, dtype)
    apply_expert_parallel(model, plan, mesh)
    apply_tensor_parallel(model, plan, mesh, sequence_parallel=False)
    parallelize_interventions(model, mesh, sequence_parallel=False)


def _use_device_matmul(model: Any, strategy: Strategy) -> None:
    # float32 layers of one input stay separate under tensor parallel: `plan` counts the messages of each
    ops = strategy.ops
    if ops.matmuls.has_device_matmul:
        together = ops.matmuls.rounds_inputs or strategy.mesh.tensor is None
        use_linear_ops(model, TensorParallelLinearOps(ops, strategy.mesh), together=together)


def _recompute(model: Any, strategy: Strategy) -> None:
    if strategy.recompute == "full":
        recompute_layers(model, strategy.shard_plan, strategy.recompute_every)
    elif strategy.recompute == "selective":
        recompute_attention(model, strategy.shard_plan)


def _shared_as(name: str) -> str:
    """The name that the copies of a shared factor A have; empty for other parameters."""
    module, _, kind = name.rpartition(".")
    return f"{first_of(module)}.{kind}" if kind == FIRST_FACTOR else ""


def _shard_parameter(name: str, parameter: Tensor, strategy: Strategy) -> ParameterShard:
    plan = strategy.shard_plan
    mesh = strategy.mesh
    options = ShardOptions(
        is_tied=strategy.shares_embedding and name == f"{plan.embedding}.weight",
        is_frozen=name not in strategy.trained,
        keeps_master=strategy.master_weights,
        shared_as=_shared_as(name) if strategy.shares_first_factors else "",
    )
    own_mesh = mesh.expert_mesh if plan.is_expert(name) else mesh
    if strategy.slices:
        assert strategy.sharding_stage == 3, "programs shard the state of the optimizer themselves"
        return SlicedShard(name, parameter, own_mesh, shard_dim(plan, name), options)
    return ParameterShard(name, parameter, own_mesh, shard_dim(plan, name), strategy.sharding_stage, options)
