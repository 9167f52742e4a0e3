"""Pipelines inside of step programs: the layers of a part compute on the mesh of its stage's ranks.

Every rank builds the program of the full model, in the same way, and Paddle keeps on each rank the operations of its
own stage; activations and their gradients are sent where they move to another mesh. So a rank needs the modules of all
stages while a program is built, but memory for its own parameters only.

Shapes: B sequences, L length, D hidden, N tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from llmsuite.adapters.parameters import shard_dim
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.models import token_context
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective, schedule
from llmsuite.parallel.pipeline_split import owner_stage, parts_with
from llmsuite.parallel.program.chunks import chunk_by_part, of_part
from llmsuite.parallel.program.pruning import prune_by_use
from llmsuite.parallel.program.slices import slice_dim
from llmsuite.parallel.schedule import Action, Kind
from llmsuite.parallel.tensor import local_value, placement

TOKEN_VALUES = "token_values"
"""Input of a program with `models.token_context`, [B, L], where its layers need it."""
LENGTHS = "row_lengths"
"""Input with the number of tokens of each row without padding, for gates of experts."""
FIRST_INPUTS = ("input_ids", "document_starts", TOKEN_VALUES, LENGTHS)
"""Inputs of a program for the first stage; the other inputs are for the last stage."""
SCHEDULES: Mapping[Kind, str] = {"FThenB": "FThenB", "1F1B": "1F1B", "interleaved": "VPP"}
"""Paddle's names of the schedules."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Split of the model over the stages of a pipeline: part p of the layers is on stage p % stages."""

    model: Any
    """All modules, parallelized for this rank; its parameters have no memory."""
    shard_plan: ShardPlan
    """The family's shard plan."""
    bounds: Sequence[int]
    """Bounds of the parts, see `pipeline_split.part_bounds`."""
    num_stages: int
    shares_embedding: bool
    """True where the last stage has a copy of the embedding."""
    schedule: Kind
    stage: int
    """Stage of this rank."""
    num_slices: int = 1
    """Number of slices of a parameter that is sharded over the data ranks, see `slices`."""
    ep_size: int = 1
    """Number of data ranks that a stack of routed experts is split over."""
    dtype: str = "float32"
    """Dtype of parameters, except those that have their own."""

    @property
    def num_chunks(self) -> int:
        """Number of parts on each stage."""
        return (len(self.bounds) - 1) // self.num_stages

    def configure(self, strategy: Any, num_micro_batches: int) -> None:
        """Set up a Paddle strategy for this pipeline."""
        pipeline = strategy.pipeline
        pipeline.enable = True
        pipeline.schedule_mode = SCHEDULES[self.schedule]
        pipeline.accumulate_steps = num_micro_batches
        pipeline.pp_degree = self.num_stages
        pipeline.vpp_degree = self.num_chunks

    def order(self, num_micro_batches: int) -> Sequence[Action] | None:
        """The passes of this stage, in the order of eager mode; None for Paddle's own order, in which the sends and
        receives of stages with several chunks match."""
        if self.num_chunks > 1:
            return None
        return schedule.order(self.schedule, self.stage, self.num_stages, num_micro_batches)

    @contextlib.contextmanager
    def build_context(self) -> Iterator[None]:
        """While active, programs that are being built have the chunks of this pipeline, and the operations of this
        stage."""
        chunks = chunk_by_part(self.num_stages) if self.num_chunks > 1 else contextlib.nullcontext()
        with chunks, prune_by_use():
            yield

    def stage_of(self, parameter: str) -> int:
        """The stage that updates a parameter."""
        return owner_stage(parameter, self.shard_plan, self.bounds, self.num_stages)

    def dtype_of(self, name: str, parameter: Tensor) -> Any:
        """Dtype of a parameter on the ranks of its stage; in `model` it has no memory."""
        return parameter.dtype if self.shard_plan.has_own_dtype(name) else getattr(paddle, self.dtype)

    @functools.cached_property
    def expert_parallel(self) -> frozenset[str]:
        """Names of the stacks of experts where each data rank has its own."""
        names = (name for name, _ in self.model.named_parameters()) if self.ep_size > 1 else ()
        return frozenset(name for name in names if self.shard_plan.is_expert(name))

    def placeholder(
        self, name: str, full_shape: Sequence[int], dtype: Any, tp: int
    ) -> tuple[Tensor, list[Any], int | None]:
        """A placeholder for a rank's part of a parameter of another stage, its placements over tp, and the dim that the
        data ranks cut it along."""
        shape = list(full_shape)
        dim = shard_dim(self.shard_plan, name) if tp > 1 else None
        placements = [placement(dim)]
        is_copied = self.shares_embedding and name == f"{self.shard_plan.embedding}.weight"
        is_expert_parallel = name in self.expert_parallel
        sliced = None if is_copied or is_expert_parallel else slice_dim(shape, placements, self.num_slices)
        expert_dim = 0 if is_expert_parallel else None
        for cut, count in ((dim, tp), (sliced, self.num_slices), (expert_dim, self.ep_size)):
            if cut is not None:
                shape[cut] //= count
        return paddle.empty(shape, dtype), placements, sliced

    def broadcast_from_last(self, outputs: np.ndarray | None, count: int) -> np.ndarray:
        """Broadcast the `count` numbers of a step, which the last stage has, to all stages."""
        # float64, as the sums over micro-batches were made in it
        value = None if outputs is None else tensor_of(outputs, dtype="float64")
        return array_of(collective.broadcast_from_stage(value, [count], "float64", self.num_stages - 1))

    @paddle.no_grad()
    def update_copies(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy updated parameters from the stage that updates them to the other stages that have them.

        Args:
            parameters: this rank's stored parameters, by name.
        """
        ends = collective.mesh().tied_group
        if ends is None:  # a stage in the middle has no copy
            return
        for name, parameter in self.model.named_parameters():
            parts = parts_with(name, self.shard_plan, self.bounds, self.shares_embedding)
            if len(parts) == 1 or parameter.stop_gradient:
                continue
            own = local_value(parameters[name])
            owner = self.stage_of(name)
            assert owner == 0, "a tied embedding"
            # a broadcast between first and last stage, not a sum of gradients: the last one has no optimizer state of
            # it
            updated = collective.broadcast_from_stage(
                own if self.stage == owner else None, own.shape, own.dtype, owner, ends
            )
            if self.stage != owner:
                own.copy_(updated, False)


class SideOutputs:
    """Tensors that are sent with the activations from part to part while a program is built; here none."""

    def pack(self, x: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
        """Send activations [B, L, D] and the side outputs to the mesh of the next part, with `send` for each tensor."""
        return send(x)

    def unpack(self, x: Tensor) -> Tensor:
        """The activations from the result of `pack`, at the start of the next part."""
        return x


class StagedModel:
    """The model that a loss calls while a program of a pipeline is built."""

    training = True

    def __init__(self, pipeline: Pipeline, meshes: Sequence[Any]):
        """`meshes` of the stages, each [data, tp]."""
        self._pipeline = pipeline
        self._model = pipeline.model
        self._meshes = meshes
        self._side_outputs = SideOutputs()

    def sublayers(self) -> list[Any]:
        """The modules of all stages."""
        return list(self._model.sublayers())

    def named_sublayers(self) -> list[tuple[str, Any]]:
        """The modules of all stages with their names."""
        return list(self._model.named_sublayers())

    @contextlib.contextmanager
    def with_side_outputs(self, side_outputs: SideOutputs) -> Iterator[None]:
        """While active, side outputs are sent with the activations."""
        before = self._side_outputs
        self._side_outputs = side_outputs
        try:
            yield
        finally:
            self._side_outputs = before

    def hidden_states(self, input_ids: Tensor, document_starts: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """Hidden states [B, L, D] on the mesh of the last stage, and no caches."""
        modules = dict(self._model.named_sublayers())
        layers = list(modules[self._pipeline.shard_plan.layers])
        starts = document_starts
        keys = token_context.current()
        # a copy, where the table is sent to the last stage: Paddle 3.3.1 cannot send a tensor that local operations use
        with self._with_embedding(paddle.assign):
            x = self._model.input_form.embed(self._model, input_ids, 0, document_starts)
        # through all stages, once for each chunk
        parts = zip(itertools.cycle(self._meshes), itertools.pairwise(self._pipeline.bounds))
        for part, (mesh, (begin, end)) in enumerate(parts):
            x = self._side_outputs.pack(x, functools.partial(_on, mesh))
            starts, keys = (None if given is None else _on(mesh, given) for given in (starts, keys))
            with of_part(part), token_context.tokens(keys):
                # a copy: Paddle 3.3.1 cannot send a tensor that a prefix is concatenated with
                own_starts = None if starts is None else paddle.assign(starts)
                x = self._side_outputs.unpack(x)
                if self._pipeline.num_chunks > 1:
                    # used by a single operation of the part, so that its gradient is no sum: a sum with terms from
                    # local operations belongs to no chunk (Paddle 3.3.1)
                    x = paddle.assign(x)
                # made again for each part: a constant belongs to the first mesh that computes with it (Paddle 3.3.1)
                inputs = self._model.input_form.layer_inputs(self._model, 0, x.shape[1], x.dtype, own_starts)
                for layer in layers[begin:end]:
                    x = layer.forward_train(x, *inputs)
        return self._model.final_norm(x), []

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, [N]."""
        with self._with_embedding(lambda weight: _on(self._meshes[-1], weight)):
            return self._model.token_nll(hidden, targets)

    def scores(self, hidden: Tensor) -> Tensor:
        """Outputs of a score head, [N]."""
        return self._model.scores(hidden)

    @contextlib.contextmanager
    def _with_embedding(self, form: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """While active, the weight of the embedding is replaced by `form` of it, where two stages need it."""
        table = dict(self._model.named_sublayers())[self._pipeline.shard_plan.embedding]._parameters
        weight = table["weight"]
        if self._pipeline.shares_embedding:
            table["weight"] = form(weight)
        try:
            yield
        finally:
            table["weight"] = weight


def _on(mesh: Any, x: Tensor) -> Tensor:
    """The tensor on another mesh of the same shape, in the same placements."""
    return x if x.process_mesh == mesh else dist.reshard(x, mesh, x.placements)
