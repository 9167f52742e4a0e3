"""The communication of a training step: every collective and message of a rank, on every axis of the mesh."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import math
from collections.abc import Iterable, Sequence

from llmsuite.adapters.lora import SECOND_FACTOR
from llmsuite.adapters.parameters import parameter_of
from llmsuite.contract.specs import PrePass, StageProfile
from llmsuite.models.shape_spec import LAYER_NORMS, MoE, ShapeSpec
from llmsuite.parallel import edges, ledger_entries
from llmsuite.parallel.mesh import DATA, EXPERT, MODEL, RUN, SHARDING, TENSOR, TIED, Mesh
from llmsuite.parallel.zero3_units import gather_units
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes
from llmsuite.planning.teacher import Teacher
from llmsuite.planning.tp_traffic import TensorParallelTraffic
from llmsuite.recipe.plans import DataPlan, TrainPlan

PIPELINE = "pp"


@dataclasses.dataclass(frozen=True)
class Message:
    """A tensor that a rank passes to a collective, or sends."""

    axis: str
    operation: str
    shape: tuple[int, ...]
    num_bytes: int
    """Bytes of an element."""
    why: str
    is_expert: bool = False
    """True where the group belongs to the expert mesh."""
    is_exact: bool = True
    """False for tokens sent to experts: their number depends on their values."""

    @property
    def total_bytes(self) -> int:
        return math.prod(self.shape) * self.num_bytes


Counts = dict[Message, int]
"""Number of times that each message is sent."""


_WHY_SENT: dict[edges.Content, str] = {
    "header": "shapes and dtype of the next messages",
    "document_starts": "document starts",
    "activations": "activations to the next part",
    "gradients": "gradients to the previous part",
}


_WHY_SUMMED = {
    TIED: "gradient of the embedding, of first and last stage",
    MODEL: "gradients of the prefix's network, of all layers and heads",
}


class Traffic:
    """The messages of one rank in a training step, including pre-passes."""

    def __init__(
        self,
        layout: Layout,
        train_plan: TrainPlan,
        shape_spec: ShapeSpec,
        mesh: Mesh,
        batches: Sequence[MicroBatch],
        prepasses: Sequence[Sequence[MicroBatch]],
        own_reduce_scatter: bool,
    ):
        """
        Args:
            layout: of the run.
            train_plan: of the run.
            shape_spec: of its model.
            mesh: with the coordinates of the rank.
            batches: its micro-batches.
            prepasses: the micro-batches of each of `model_prepasses`.
            own_reduce_scatter: whether the collective library has a reduce-scatter; over Gloo it is an all-reduce.
        """
        self._layout = layout
        self._shape_spec = shape_spec
        self._mesh = mesh
        self._batches = batches
        self._own = own_reduce_scatter
        self._train_plan = train_plan
        self._engine = layout.parallel_plan.engine
        self._parameters = layout.parameters(mesh)
        self._width = element_bytes(layout.parallel_plan)
        self._compiled = self._engine.mode == "to_static"
        self._sequence_parallel = layout.parallel_plan.section.sequence_parallel
        self.counts: Counts = {}
        self._times = 1
        stage = mesh.coordinate["pp"]
        degrees = mesh.degrees
        tensor = TensorParallelTraffic(
            layout, train_plan, shape_spec, mesh, own_reduce_scatter, functools.partial(self._add, TENSOR)
        )
        teacher = None
        if train_plan.teacher is not None and degrees.tp > 1 and stage == degrees.pp - 1:
            teacher = Teacher(layout, train_plan)
        for batch, self._times in collections.Counter(batches).items():
            if teacher is not None:
                teacher.send(batch, own_reduce_scatter, functools.partial(self._add, TENSOR))
            for part in layout.parts_of(stage):
                if degrees.tp > 1:
                    tensor.forward(part, batch)
                    tensor.backward(part, batch)
                if degrees.ep > 1:
                    self._experts(part, batch, with_backward=True)
                if degrees.pp > 1:
                    self._edges(part, batch, with_backward=True)
        self._times = 1
        self._headers(len(batches))
        for prepass, passes in zip(model_prepasses(train_plan.profile), prepasses, strict=True):
            for batch, self._times in collections.Counter(passes).items():
                for part in layout.parts_of(stage):
                    if degrees.tp > 1:
                        tensor.forward(part, batch, prepass.with_adapters)
                    if degrees.ep > 1:
                        self._experts(part, batch, with_backward=False)
                    if degrees.pp > 1:
                        self._edges(part, batch, with_backward=False)
            self._times = 1
            self._headers(len(passes))
        if layout.sharding == 3:
            self._times = len(batches)
            self._gathers(with_backward=True)
            self._times = sum(map(len, prepasses))
            self._gathers(with_backward=False)
        self._times = 1
        self._gradients()
        self._small()

    def _add(
        self,
        axis: str,
        operation: str,
        shape: Iterable[int],
        why: str,
        count: int = 1,
        width: int = 0,
        experts: bool = False,
    ) -> None:
        message = Message(axis, operation, tuple(shape), width or self._width, why, experts)
        if count:
            self.counts[message] = self.counts.get(message, 0) + count * self._times

    # experts

    def _experts(self, part: int, batch: MicroBatch, with_backward: bool) -> None:
        mesh = self._mesh
        for number in self._layout.layers_of(part):
            what = self._shape_spec.layers[number].mlp
            if not isinstance(what, MoE):
                continue
            again = with_backward and self._engine.recomputes_layer(number)
            times = 2 if again else 1
            slots = what.experts // mesh.degrees.tp
            self._add(EXPERT, "all_gather", (slots,), "rows of each rank for each expert", times, 8, True)
            # dispatch and combine, forward and backward, with an even load
            ep = mesh.degrees.ep
            exchanges = 2 * times + 2 * with_backward
            rows = round(batch.tokens * what.chosen / mesh.degrees.tp / ep)
            why = "tokens to the ranks of their experts, and back"
            if self._own:
                self._exchange("all_to_all", rows * ep, why, exchanges)
            else:
                self._exchange("send", rows, why, exchanges * (ep - 1))
            if with_backward and self._drops_rows(number):
                why = "keys of tokens, for dropout"
                if self._own:
                    self._exchange("all_to_all", rows * ep, why, times, (1, 4))
                else:
                    self._exchange("send", rows, why, times * (ep - 1), (1, 4))

    def _drops_rows(self, number: int) -> bool:
        """True where adapters of the routed experts of a layer have dropout."""
        layout = self._layout
        inside = f"{self._layout.shard_plan.layers}.{number}."
        adapted = (f"{module}.weight" for module in layout.adapted if module.startswith(inside))
        return layout.model_plan.lora.dropout > 0 and any(layout.shard_plan.is_expert(name) for name in adapted)

    def _exchange(self, operation: str, rows: int, why: str, count: int, size: tuple[int, int] | None = None) -> None:
        """Add an exchange of rows. `size` has the elements of a row, and their bytes; by default those of hidden
        states."""
        width, num_bytes = size or (self._shape_spec.hidden, self._width)
        message = Message(EXPERT, operation, (rows, width), num_bytes, why, True, False)
        self.counts[message] = self.counts.get(message, 0) + count * self._times

    # stage 3

    def _gathers(self, with_backward: bool) -> None:
        why = "parameters are gathered, forward and backward"
        layout = self._layout
        num_parts = len(layout.bounds) - 1
        for part in layout.parts_of(self._mesh.coordinate["pp"]):
            inside = {parameter.name: parameter for parameter in self._parameters if parameter.part == part}
            for unit in gather_units(layout.shard_plan, list(inside), layout.tied):
                times = unit.num_runs(part, num_parts, layout.num_mtp_layers)
                if not times:
                    continue
                for held in (inside[name] for name in unit.parameters if inside[name].is_stored_sharded):
                    count = unit.num_gathers(held.name, times, held.is_trained, with_backward)
                    self._add(SHARDING, "all_gather", (held.shard_size,), why, count, held.num_bytes, held.is_expert)

    # pipeline

    def _edges(self, part: int, batch: MicroBatch, with_backward: bool) -> None:
        """Activations to the next part, gradients to the previous one."""
        num_parts = len(self._layout.bounds) - 1
        length = batch.length // (self._mesh.degrees.tp if self._sequence_parallel else 1)
        shape = (batch.rows, length, self._shape_spec.hidden)
        documents_length = 0
        if batch.documents or batch.has_token_metadata:
            documents_length = batch.length
        for forward in (True, False) if with_backward else (True,):
            if edges.target(part, num_parts, forward) is None:
                continue
            for message in edges.messages(forward, shape, documents_length, with_header=False):
                width = 8 if message.is_int64 else self._width
                self._add(PIPELINE, "send", message.shape, _WHY_SENT[message.content], width=width)

    def _headers(self, num_micro_batches: int) -> None:
        """The headers of the activations in the passes over a global batch."""
        num_parts = len(self._layout.bounds) - 1
        for part in self._layout.parts_of(self._mesh.coordinate["pp"]):
            to = edges.target(part, num_parts, forward=True)
            if to is None:
                continue
            sent = [number for number in range(num_micro_batches) if edges.has_header(to, num_parts, number)]
            shape = (edges.HEADER_LENGTH,)
            self._add(PIPELINE, "send", shape, _WHY_SENT["header"], len(sent), width=8)

    # once a step

    def _gradients(self) -> None:
        for parameter in self._parameters:
            if not parameter.is_trained:
                continue
            if parameter.has_gradient:
                self._gradient(parameter)
            if parameter.gathers_update:
                why = "updated parameters, from the ranks that own the shards"
                self._add(
                    SHARDING, "all_gather", (parameter.shard_size,), why, 1, parameter.num_bytes, parameter.is_expert
                )
        for bucket in self._layout.buckets(self._mesh):
            self._bucket(bucket)

    def _gradient(self, parameter: LocalParameter) -> None:
        """The reductions of a single gradient, outside of buckets."""
        width = parameter.gradient_width
        degrees = self._mesh.degrees
        if degrees.tp > 1 and self._is_partial(parameter):
            why = "gradients of norms, from each rank's tokens or heads"
            inside = self._compiled and self._is_compiled(parameter)
            # Paddle sums a partial gradient before it passes an addition: that of 1 + weight
            is_offset = self._shape_spec.norm == "offset_rms" and parameter.name.endswith("norm.weight")
            times = 1
            if parameter.reduce_in_backward or inside or is_offset:
                times = len(self._batches)
            self._add(TENSOR, "all_reduce", parameter.local_shape, why, times, width)
        for kind in parameter.model_sums:
            if kind != MODEL or self._mesh.group_size(MODEL) > 1:
                self._add(kind, "all_reduce", parameter.owned_shape, _WHY_SUMMED[kind], 1, width)

    def _bucket(self, bucket: Sequence[LocalParameter]) -> None:
        """The reductions of a bucket of gradients over data ranks."""
        first = bucket[0]
        mesh = self._mesh.expert_mesh if first.is_expert else self._mesh
        width = first.gradient_width
        for reduction in first.reductions:
            if mesh.group_size(reduction.group) == 1:
                continue
            operation: str = reduction.operation
            if operation == "reduce_scatter" and not self._own:
                operation = "all_reduce"
            shape: tuple[int, ...] = (reduction.size(bucket),)
            why = "gradients"
            count = 1
            if reduction.in_each_pass:
                why = "gradients, in each backward pass"
                count = len(self._batches)
            elif len(bucket) == 1 and not reduction.of_shards:
                shape = first.local_shape  # a gradient that is alone is not copied
            self._add(reduction.group, operation, shape, why, count, width, first.is_expert)

    def _is_compiled(self, parameter: LocalParameter) -> bool:
        """True where the module of a parameter is compiled."""
        return parameter.layer is not None and self._shape_spec.layers[parameter.layer].compiles(parameter.name)

    def _is_partial(self, parameter: LocalParameter) -> bool:
        """True where each rank has the gradient of its own tokens or heads only, and Paddle leaves a partial sum."""
        module = parameter.name.rpartition(".")[0]
        of_heads = module.endswith((".q_norm", ".k_norm"))
        between = (
            module.rpartition(".")[2] in LAYER_NORMS
            or self._layout.shard_plan.is_last_norm(module)
            or any(fnmatch.fnmatchcase(module, pattern) for pattern in self._layout.shard_plan.mtp_inputs)
        )
        own = parameter_of(parameter.name)
        if own is not None and own.partial_gradient == "shard":
            return self._layout.shard_plan.dim(f"{module}.weight") is not None or (self._sequence_parallel and between)
        second = own is not None and own.partial_gradient == "tokens"
        second = second and self._layout.shard_plan.dim(f"{module}.weight") == 0
        second = second and self._layout.shard_plan.is_tp_region(module.rpartition(".")[0])
        second = second or parameter.name == f"{self._layout.shard_plan.embedding}.{SECOND_FACTOR}"
        return of_heads or (self._sequence_parallel and (between or second))

    def _small(self) -> None:
        """Messages of a few numbers: the loss ledger, the norm of the gradients, loads of experts."""
        degrees = self._mesh.degrees
        profile = self._train_plan.profile
        if degrees.num_ranks == 1:
            return
        sums = 1 + len(profile.sums)  # the loss, and the stage's metrics
        for call in ledger_entries.ledger_calls(self._mesh, sums):
            self._add(call.group, "all_reduce", (call.num_numbers,), call.why, width=8)
        known = sum(len(prepass.sums) for prepass in profile.prepasses)
        if known and self._mesh.loads_data:
            self._add(self._mesh.loaders, "all_reduce", (2 * known,), "sums of the pre-passes", width=8)
        self._add(RUN, "all_reduce", (1,), "norm of the gradients", width=8)
        optimizer = self._train_plan.section.optimizer
        blocks = sum(held.exchanged_blocks(optimizer) for held in self._parameters)
        for group, count in ((DATA, degrees.num_data_ranks), (TENSOR, degrees.tp)):
            if blocks and count > 1:
                self._add(group, "all_reduce", (2 * blocks,), "scales of 8-bit moments", width=4)
        if self._layout.rounded and self._layout.model_plan.qat.activation_bits is not None:
            self._add(RUN, "all_reduce", (len(self._layout.rounded),), "largest inputs of quantised layers", width=8)
        moe_layers = [layer.mlp for layer in self._shape_spec.layers if isinstance(layer.mlp, MoE)]
        if not moe_layers:
            return
        if self._train_plan.section.expert_bias_rate:
            for held in self._parameters:
                if self._layout.shard_plan.is_gate_bias(held.name) and held.is_stored_sharded:
                    why = "biases of experts, which are moved"
                    self._add(SHARDING, "all_gather", (held.shard_size,), why, 1, held.num_bytes, held.is_expert)
        parts = self._layout.parts_of(self._mesh.coordinate["pp"])
        here = sum(isinstance(self._shape_spec.layers[i].mlp, MoE) for p in parts for i in self._layout.layers_of(p))
        if here and degrees.num_data_ranks > 1:
            self._add(DATA, "all_reduce", (here, moe_layers[0].experts), "loads of experts", width=4)
        self._add(RUN, "all_reduce", (3,), "loads of experts", width=8)
        if self._train_plan.section.expert_balance_loss:
            self._add(RUN, "all_reduce", (2,), "weight of the balance loss", width=8)


def model_prepasses(profile: StageProfile) -> list[PrePass]:
    """The pre-passes that run the model."""
    return [prepass for prepass in profile.prepasses if prepass.kind != "batch"]


def full_prepasses(profile: StageProfile, data_plan: DataPlan, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    """The micro-batches of each pre-pass, with rows as long as those of the step. Their padding is not marked."""
    has_documents = data_plan.section.packing != "none"

    def full_batch(prepass: PrePass, batch: MicroBatch) -> MicroBatch:
        return dataclasses.replace(
            batch,
            rows=prepass.rows * batch.rows,
            supervised=prepass.rows * batch.supervised,
            documents=has_documents,
            has_token_metadata=False,
        )

    found = []
    for prepass in model_prepasses(profile):
        found.append([full_batch(prepass, batch) for batch in batches])
    return found
