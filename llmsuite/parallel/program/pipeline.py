"""Pipelines inside of whole-step programs: the layers of a part compute on the mesh of its stage's ranks.

Every rank makes the program of the whole model, in the same way, and Paddle leaves each the operations of its own
stage; activations and their gradients are sent where they go to another mesh. So a rank needs the modules of all stages
while a program is made, but memory for its own parameters only.

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

from llmsuite.models import token_values
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective, schedule
from llmsuite.parallel.cut import owner_stage, parts_with
from llmsuite.parallel.program.chunks import by_parts, of_part
from llmsuite.parallel.program.pruning import by_use
from llmsuite.parallel.program.slices import slice_dim
from llmsuite.parallel.schedule import Action, Kind
from llmsuite.parallel.tensor import local_value
from llmsuite.typing import Tensor

TOKEN_VALUES = "token_values"
"""Input of a program with `models.token_values`, [B, L], where its layers ask for them."""
LENGTHS = "row_lengths"
"""The input that says how many tokens of each row are no padding, for gates of experts."""
FIRST_INPUTS = ("input_ids", "document_starts", TOKEN_VALUES, LENGTHS)
"""Inputs of a program that the first stage takes; the last one takes the others."""
SCHEDULES: Mapping[Kind, str] = {"FThenB": "FThenB", "1F1B": "1F1B", "interleaved": "VPP"}
"""Paddle's names."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How the stages of a pipeline share the model: part p of the layers is on stage p % stages."""

    model: Any
    """All modules, parallelized as those of a rank; its parameters have no memory."""
    shard_plan: ShardPlan
    """The family's."""
    bounds: Sequence[int]
    """Bounds of the parts, see `cut.part_bounds`."""
    num_stages: int
    shares_embedding: bool
    """Whether the last stage has a copy of the embedding."""
    schedule: Kind
    stage: int
    """This rank's."""
    num_slices: int = 1
    """How many slices the data ranks have of a parameter that they share out, see `slices`."""
    expert_parts: int = 1
    """How many data ranks share out a stack of routed experts."""
    dtype: str = "float32"
    """The dtype of parameters, but for those that have their own."""

    @property
    def num_chunks(self) -> int:
        """Parts on each stage."""
        return (len(self.bounds) - 1) // self.num_stages

    def configure(self, strategy: Any, num_micro_batches: int) -> None:
        """Let a strategy of Paddle's be this pipeline."""
        pipeline = strategy.pipeline
        pipeline.enable, pipeline.schedule_mode = True, SCHEDULES[self.schedule]
        pipeline.accumulate_steps, pipeline.pp_degree = num_micro_batches, self.num_stages
        pipeline.vpp_degree = self.num_chunks

    def order(self, num_micro_batches: int) -> Sequence[Action] | None:
        """The passes of this stage, as it computes them op by op; None for Paddle's own order, by which stages with
        several chunks send and receive alike."""
        if self.num_chunks > 1:
            return None
        return schedule.order(self.schedule, self.stage, self.num_stages, num_micro_batches)

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """While active, programs that are made have the chunks of this pipeline, and the operations of this stage."""
        chunks = by_parts(self.num_stages) if self.num_chunks > 1 else contextlib.nullcontext()
        with chunks, by_use():
            yield

    def stage_of(self, parameter: str) -> int:
        """The stage that updates a parameter."""
        return owner_stage(parameter, self.shard_plan, self.bounds, self.num_stages)

    def dtype_of(self, name: str, parameter: Tensor) -> Any:
        """The dtype that a parameter has on the ranks of its stage; `model` has no memory for it."""
        return parameter.dtype if self.shard_plan.has_own_dtype(name) else getattr(paddle, self.dtype)

    @functools.cached_property
    def shared_out(self) -> frozenset[str]:
        """Names of the stacks of experts of which each data rank has its own."""
        names = (name for name, _ in self.model.named_parameters()) if self.expert_parts > 1 else ()
        return frozenset(name for name in names if self.shard_plan.is_expert(name))

    def absent(self, name: str, whole: Sequence[int], dtype: Any, tp: int) -> tuple[Tensor, list[Any], int | None]:
        """What stands for a rank's part of a parameter of another stage, its placements over tp, and the dim that the
        data ranks cut it along; `whole` is the shape of the parameter."""
        shape, dim = list(whole), self.shard_plan.dim(name) if tp > 1 else None
        placements = [dist.Replicate() if dim is None else dist.Shard(dim)]
        is_copied = self.shares_embedding and name == f"{self.shard_plan.embedding}.weight"
        is_shared_out = name in self.shared_out
        sliced = None if is_copied or is_shared_out else slice_dim(shape, placements, self.num_slices)
        of_experts = 0 if is_shared_out else None
        for cut, count in ((dim, tp), (sliced, self.num_slices), (of_experts, self.expert_parts)):
            if cut is not None:
                shape[cut] //= count
        return paddle.empty(shape, dtype), placements, sliced

    def from_last(self, told: np.ndarray | None, count: int) -> np.ndarray:
        """The numbers of a step, `count` of them, which the last stage is told, on all stages."""
        value = None if told is None else paddle.to_tensor(told, dtype="float64")
        return np.asarray(collective.from_stage(value, [count], "float64", self.num_stages - 1).numpy())

    @paddle.no_grad()
    def update_copies(self, parameters: Mapping[str, Tensor]) -> None:
        """Give the stages that have a parameter beside the one that updates it the values of that one.

        Args:
            parameters: what this rank keeps of its own, by name.
        """
        ends = collective.mesh().tied_group
        if ends is None:  # a stage in the middle has no copy
            return
        for name, parameter in self.model.named_parameters():
            parts = parts_with(name, self.shard_plan, self.bounds, self.shares_embedding)
            if len(parts) == 1 or parameter.stop_gradient:
                continue
            own, owner = local_value(parameters[name]), self.stage_of(name)
            assert owner == 0, "a tied embedding"
            updated = collective.from_stage(own if self.stage == owner else None, own.shape, own.dtype, owner, ends)
            if self.stage != owner:
                own.copy_(updated, True)


class Beside:
    """What goes beside the activations from part to part of the layers while a program is made; here nothing."""

    def leave(self, x: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
        """Activations [B, L, D] at the end of a part, with what goes beside them, on the mesh of the next part, to
        which `send` sends a tensor."""
        return send(x)

    def arrive(self, x: Tensor) -> Tensor:
        """What came out of `leave` to the activations, at the beginning of the next part."""
        return x


class StagedModel:
    """The model as a loss calls it while a program of a pipeline is made."""

    def __init__(self, pipeline: Pipeline, meshes: Sequence[Any]):
        """`meshes` of the stages, each [data, tp]."""
        self._pipeline, self._model, self._meshes = pipeline, pipeline.model, meshes
        self._beside = Beside()

    def sublayers(self) -> list[Any]:
        """The modules of all stages."""
        return list(self._model.sublayers())

    def named_sublayers(self) -> list[tuple[str, Any]]:
        """The modules of all stages with their names."""
        return list(self._model.named_sublayers())

    @contextlib.contextmanager
    def beside(self, what: Beside) -> Iterator[None]:
        """While active, something goes beside the activations."""
        before, self._beside = self._beside, what
        try:
            yield
        finally:
            self._beside = before

    def hidden_states(self, input_ids: Tensor, document_starts: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """As `CausalLM.hidden_states`, on the mesh of the last stage."""
        modules = dict(self._model.named_sublayers())
        layers = list(modules[self._pipeline.shard_plan.layers])
        starts, keys = document_starts, token_values.current()
        # of a copy, where the last stage is sent the table: Paddle 3.3.1 cannot send what local operations use too
        with self._with_embedding(paddle.assign):
            x = self._model.embed(input_ids, document_starts=document_starts)
        # round the stages, once a chunk
        parts = zip(itertools.cycle(self._meshes), itertools.pairwise(self._pipeline.bounds))
        for part, (mesh, (begin, end)) in enumerate(parts):
            x = self._beside.leave(x, functools.partial(_on, mesh))
            starts, keys = (None if given is None else _on(mesh, given) for given in (starts, keys))
            with of_part(part), token_values.tokens(keys):
                # of a copy: Paddle 3.3.1 cannot send on what a prefix is joined with
                own_starts = None if starts is None else paddle.assign(starts)
                x = self._beside.arrive(x)
                if self._pipeline.num_chunks > 1:
                    # by a single operation of the part, so that its gradient is no sum: one with terms that local
                    # operations make belongs to no chunk (Paddle 3.3.1)
                    x = paddle.assign(x)
                # made anew: a constant belongs to the first mesh that computes with it (Paddle 3.3.1)
                inputs = self._model.layer_inputs(0, x.shape[1], x.dtype, own_starts)
                for layer in layers[begin:end]:
                    x = layer.forward_train(x, *inputs)
        return self._model.final_norm(x), []

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """As `CausalLM.token_nll`."""
        with self._with_embedding(lambda weight: _on(self._meshes[-1], weight)):
            return self._model.token_nll(hidden, targets)

    def scores(self, hidden: Tensor) -> Tensor:
        """As `CausalLM.scores`."""
        return self._model.scores(hidden)

    @contextlib.contextmanager
    def _with_embedding(self, form: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """While active, the weight of the embedding is in another form, where two stages need it."""
        table = dict(self._model.named_sublayers())[self._pipeline.shard_plan.embedding]._parameters
        weight = table["weight"]
        if self._pipeline.shares_embedding:
            table["weight"] = form(weight)
        try:
            yield
        finally:
            table["weight"] = weight


def _on(mesh: Any, x: Tensor) -> Tensor:
    """A tensor on another mesh of the same shape, in the same placements."""
    return x if x.process_mesh == mesh else dist.reshard(x, mesh, x.placements)
