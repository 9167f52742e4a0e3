"""The traffic of a tensor parallel group: the messages of its ranks during a pass.

Paddle's SPMD rules decide it. Their decisions are written down here for the blocks of `models.shape_spec`; tests
compare them with the calls of the communication library, tensor for tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from llmsuite.adapters.reft_shapes import reft_shapes
from llmsuite.contract.specs import TeacherProfile
from llmsuite.models.shape_spec import GatedDelta, GatedMLP, GeluMLP, GroupedQuery, Latent, MoE, ShapeSpec
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.head import recomputes_logits
from llmsuite.planning.layout import Layout
from llmsuite.recipe.plans import TrainPlan


class Send(Protocol):
    """Records a message: operation, shape, reason, number of calls, bytes of an element if not those of an
    activation."""

    def __call__(self, operation: str, shape: Sequence[int], why: str, count: int = 1, width: int = 0) -> None: ...


_FIRST_IN_LAYER = (
    *(f".self_attn.{part}_proj" for part in "qkv"),
    *(f".self_attn.in_{part}_proj" for part in ("qkvz", "ba", *"qkvzba")),
)
"""Matrices that multiply the input of a layer."""


class TensorParallelTraffic:
    """The tensor parallel traffic of one rank, reported to `send` pass by pass."""

    def __init__(
        self,
        layout: Layout,
        train_plan: TrainPlan,
        shape_spec: ShapeSpec,
        mesh: Mesh,
        own_reduce_scatter: bool,
        send: Send,
    ):
        """Arguments are those of `communication.Traffic`; `send` records a message."""
        self._layout = layout
        self._shape_spec = shape_spec
        self._mesh = mesh
        self._own = own_reduce_scatter
        self._send = send
        lora = layout.model_plan.lora
        self._engine = layout.parallel_plan.engine
        self._adapter_rank = lora.rank
        self._pairs = lora.adapter_method.num_sums
        self._is_frozen = layout.model_plan.is_frozen
        self._edit_rank = layout.model_plan.reft.rank
        self._sums_norms = lora.adapter_method.sums_norms
        self._compiled = self._engine.mode == "to_static"
        self._fused = layout.parallel_plan.fuses_projections
        self._sequence_parallel = layout.parallel_plan.section.sequence_parallel
        self._is_scored = layout.model_plan.is_scored
        self._takes_all = "all_logits" in train_plan.stage.capabilities
        self._profile = train_plan.profile
        self._uses_entropy = train_plan.profile.entropy
        self._teacher = train_plan.profile.teacher

    def forward(self, part: int, batch: MicroBatch, with_adapters: bool = True, with_losses: bool = True) -> None:
        """One forward pass of a micro-batch through a part of the model."""
        full, shard = self._shapes(batch)
        if part == 0:
            self._sum(full, "embedding: its rows are on different ranks", scatter=self._sequence_parallel)
            if self._layout.adapts_embedding and with_adapters:
                narrow = *full[:2], self._adapter_rank or 0
                self._sum(narrow, "adapters: embedding", self._sequence_parallel, self._pairs)
                if self._sums_norms:
                    self._send("all_reduce", full[2:], "adapters: lengths of the embedding's columns", width=4)
        for number in self._layout.layers_of(part):
            self._layer_forward(number, batch, full, shard, with_adapters)
        if self._is_last(part):
            if self._sequence_parallel:
                self._send("all_gather", shard, "last norm: sequences are gathered")
            if with_losses and not self._is_scored:
                self._losses(batch)

    def backward(self, part: int, batch: MicroBatch) -> None:
        """One backward pass, including the forward passes of recomputed layers."""
        full, shard = self._shapes(batch)
        if self._is_last(part) and not self._is_scored:
            self._head_backward(batch, full)
        for number in self._layout.layers_of(part):
            if self._engine.recomputes_layer(number):
                self._layer_forward(number, batch, full, shard, with_adapters=True, again=True)
            if number in self._layout.intervened and self._sequence_parallel:
                for shape in reft_shapes(self._shape_spec.hidden, self._edit_rank or 0).values():
                    self._send("all_reduce", shape, "interventions: gradients, from each rank's tokens")
            if number not in self._layout.unreached:
                self._layer_backward(number, batch, full, shard)
        if part == 0 and self._sequence_parallel and self._layout.trains_embedding:
            self._send("all_gather", shard, "embedding, backward")
            if self._shape_spec.learned_positions and not self._is_frozen:
                self._send("all_gather", (1, *shard[1:]), "positions, backward")
        if part == 0 and self._sequence_parallel and self._layout.adapts_embedding:
            narrow = *shard[:2], self._adapter_rank or 0
            self._send("all_gather", narrow, "adapters, backward: embedding")
            if self._sums_norms:
                self._send("all_reduce", shard[2:], "adapters: gradients of magnitudes, from each rank's tokens")

    def _losses(self, batch: MicroBatch) -> None:
        count = 4 if self._uses_entropy else 3
        for tokens in self._chunks(batch):
            if self._teacher is not None:
                for shape in _divergence_shapes(tokens, self._teacher):
                    self._send("all_reduce", shape, "divergence: numbers of each token", width=4)
            if self._has_nll:
                self._send("all_reduce", (tokens, 1), "cross-entropy: numbers of each token", count, width=4)

    @property
    def _has_nll(self) -> bool:
        """True where the loss uses negative log-probabilities of targets."""
        return self._teacher is None or self._teacher.with_nll

    def _chunks(self, batch: MicroBatch) -> list[int]:
        """Number of tokens in each chunk of a loss."""
        size = self._engine.loss_chunk_tokens
        count = batch.supervised
        if size is None or size >= count:
            return [count]
        return [min(size, count - first) for first in range(0, count, size)]

    def _head_backward(self, batch: MicroBatch, full: tuple[int, ...]) -> None:
        chunks = self._chunks(batch)
        why = "head, backward: gradient of its input"
        adapted = self._layout.adapted
        if recomputes_logits(self._layout, batch, self._profile.has_several_losses):
            self._losses(batch)
        for tokens in chunks:
            needs_all_logits = self._takes_all and tokens == batch.tokens
            if self._has_nll:
                self._send("all_reduce", (tokens, 1), "cross-entropy: numbers of each token", width=4)
            if needs_all_logits:
                self._sum(full, why, self._sequence_parallel)
            else:
                self._send("all_reduce", (tokens, self._shape_spec.hidden), why)
            if "lm_head" in adapted:
                shape = full[:2] if needs_all_logits else (tokens,)
                self._send("all_reduce", (*shape, self._adapter_rank or 0), "adapters, backward: head", self._pairs)

    def _shapes(self, batch: MicroBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a hidden state between layers: full, and sharded along the sequence."""
        hidden = self._shape_spec.hidden
        return (batch.rows, batch.length, hidden), (batch.rows, batch.length // self._mesh.degrees.tp, hidden)

    def _is_last(self, part: int) -> bool:
        return part == len(self._layout.bounds) - 2

    def _sum(self, shape: Sequence[int], why: str, scatter: bool, count: int = 1) -> None:
        """Partial sums are reduced, and with `scatter` sharded along the sequence."""
        if not scatter:
            self._send("all_reduce", shape, why, count)
        else:
            operation = "reduce_scatter" if self._own else "all_reduce"
            self._send(operation, (shape[1], shape[0], *shape[2:]), why, count)

    def _layer_forward(
        self,
        number: int,
        batch: MicroBatch,
        full: tuple[int, ...],
        shard: tuple[int, ...],
        with_adapters: bool,
        again: bool = False,
    ) -> None:
        layer = self._shape_spec.layers[number]
        why = "forward: sums after attention and MLP"
        if layer.is_mtp and not again:
            self._sum(full, "embedding of the next tokens: its rows are on different ranks", self._sequence_parallel)
        if layer.is_mtp and self._sequence_parallel:
            self._send("all_gather", shard, "norm of the MTP layer: sequences are gathered")
        if self._sequence_parallel:
            self._send("all_gather", shard, "forward: sequences before attention and MLP", 2)
        # a sum to which a bias is added is not scattered in one call
        self._sum(full, why, self._sequence_parallel and not _output_biased(layer.attention))
        if isinstance(layer.mlp, MoE):
            count = 2 if layer.mlp.shared_width else 1
            self._send("all_reduce", full, "forward: sums after routed and shared experts", count)
        else:
            self._sum(full, why, self._sequence_parallel and not _output_biased(layer.mlp))
        for module in self._inside(self._layout.rounded, number, dim=0):
            outputs = self._layout.shapes[f"{module}.weight"][1]
            self._send("all_reduce", (outputs,), "scales of rounded weights that are sharded by inputs", width=4)
        if with_adapters:
            self._adapters_forward(number, batch)

    def _layer_backward(self, number: int, batch: MicroBatch, full: tuple[int, ...], shard: tuple[int, ...]) -> None:
        layer = self._shape_spec.layers[number]
        if self._sequence_parallel:
            self._send("all_gather", shard, "backward of the scatter after attention and MLP", 2)
        if layer.is_mtp and self._sequence_parallel:
            # a frozen embedding has no gradient
            count = 2 if self._layout.trains_embedding else 1
            self._send("all_gather", shard, "backward: hidden states and embeddings of MTP layers", count)
        again = self._engine.recomputes_layer(number)
        # where only later parameters are trained, the input of the first layer has no gradient, unless it is recomputed
        no_gradient = self._is_frozen and not (self._layout.adapts_embedding or self._layout.trains_embedding)
        if not (number == 0 and no_gradient and not again):
            self._attention_backward(number, batch, full)
        elif isinstance(layer.attention, Latent):
            self._latent_backward(layer.attention, batch, None)
        self._mlp_backward(number, batch, full)
        self._adapters_backward(number, batch)

    def _attention_backward(self, number: int, batch: MicroBatch, full: tuple[int, ...]) -> None:
        why = "backward: gradients of the inputs of sharded matrices"
        what = self._shape_spec.layers[number].attention
        if isinstance(what, Latent):
            self._latent_backward(what, batch, full)
        elif self._adds_locally(number, "self_attn"):
            self._sum(full, why, self._sequence_parallel)
        else:
            self._send("all_reduce", full, why, what.num_projections if isinstance(what, GatedDelta) else 3)

    def _latent_backward(self, what: Latent, batch: MicroBatch, full: tuple[int, ...] | None) -> None:
        """`full` is the shape of the input, if it has a gradient."""
        why = "backward: gradients of compressed queries, keys and values, from each rank's heads"
        if what.q_rank is not None:
            self._send("all_reduce", (batch.rows, batch.length, what.q_rank), why)
        elif full is not None:
            self._send("all_reduce", full, why)
        self._send("all_reduce", (batch.rows, batch.length, what.kv_rank), why)
        shape = (batch.rows, batch.length, what.heads // self._mesh.degrees.tp, what.rope)
        self._send("all_gather", shape, "backward: the rotated key that all heads share")

    def _mlp_backward(self, number: int, batch: MicroBatch, full: tuple[int, ...]) -> None:
        why = "backward: gradients of the inputs of sharded matrices"
        what = self._shape_spec.layers[number].mlp
        if isinstance(what, MoE):
            together = self._layout.fuses_projections and not self._is_adapted(number, "mlp.shared_experts")
            count = 1
            if what.shared_width:
                count += 1 if together else 2
            self._send("all_reduce", full, why, count)
            weights = (batch.rows, batch.length, what.chosen)
            self._send("all_reduce", weights, "backward: weights of experts, of which each rank has some", width=4)
            return
        if self._adds_locally(number, "mlp"):
            self._sum(full, why, self._sequence_parallel)
        else:
            self._send("all_reduce", full, why, 1 if isinstance(what, GeluMLP) else 2)

    def _adds_locally(self, number: int, region: str) -> bool:
        """True where the gradients of the input of attention or MLP are summed on the rank before they are reduced: in
        compiled programs, where projections are fused or one operation, or where there is one projection, unless
        gradients of adapters, which are not partial, are among them.
        """
        is_one = region == "mlp" and isinstance(self._shape_spec.layers[number].mlp, GeluMLP)
        is_one = is_one or self._layout.fuses_projections
        return (self._compiled or self._fused or is_one) and not self._is_adapted(number, region)

    def _is_adapted(self, number: int, region: str) -> bool:
        inside = f"{self._layout.shard_plan.layers}.{number}.{region}."
        return any(module.startswith(inside) for module in self._layout.adapted)

    # adapters: products with the first factor have the width of the adapter's rank

    def _adapters_forward(self, number: int, batch: MicroBatch) -> None:
        if self._adapter_rank is not None:
            narrow = batch.rows, batch.length, self._adapter_rank
            for module in self._inside(self._layout.adapted, number, dim=0):
                scatter = self._sequence_parallel and self._ends_region(module)
                for _ in range(self._pairs):
                    self._sum(narrow, "adapters, forward: of matrices sharded by inputs", scatter)
                if self._sums_norms:
                    outputs = self._layout.shapes[f"{module}.weight"][1]
                    self._send("all_reduce", (outputs,), "adapters: lengths of columns sharded by inputs", width=4)

    def _adapters_backward(self, number: int, batch: MicroBatch) -> None:
        if self._adapter_rank is None:
            return
        narrow = batch.rows, batch.length, self._adapter_rank
        for module in self._inside(self._layout.adapted, number, dim=1):
            # a frozen factor after an input without a gradient has none
            begins = number == 0 and not self._engine.recomputes_layer(number) and not self._layout.adapts_embedding
            ends = begins and module.endswith(_FIRST_IN_LAYER)
            for _ in range(min(1, self._pairs) if ends else self._pairs):
                self._send("all_reduce", narrow, "adapters, backward: of matrices sharded by outputs")
        for module in self._inside(self._layout.adapted, number, dim=0):
            if self._sequence_parallel and self._ends_region(module):
                shard = batch.rows, batch.length // self._mesh.degrees.tp, self._adapter_rank
                for _ in range(self._pairs):
                    self._send("all_gather", shard, "adapters, backward of the scatter after them")
                if self._sums_norms:
                    outputs = self._layout.shapes[f"{module}.weight"][1]
                    self._send("all_reduce", (outputs,), "adapters: gradients of magnitudes, from each rank's tokens")

    def _ends_region(self, module: str) -> bool:
        """True where sequences are sharded again right after a matrix."""
        return self._layout.shard_plan.is_tp_region(module.rpartition(".")[0])

    def _inside(self, modules: Iterable[str], number: int, dim: int) -> list[str]:
        """The modules of a layer whose weights are sharded along a dim. Routed experts are not among them: they are
        split over ranks as units."""
        plan = self._layout.shard_plan
        inside = (f"{module}.weight" for module in modules if module.startswith(f"{plan.layers}.{number}."))
        cut = [weight for weight in inside if plan.dim(weight) == dim and not plan.is_expert(weight)]
        return [weight.removesuffix(".weight") for weight in cut]


def _output_biased(part: GroupedQuery | Latent | GatedDelta | GatedMLP | GeluMLP | MoE) -> bool:
    """True where a bias is added to the output of attention or MLP."""
    if isinstance(part, GroupedQuery):
        return part.output_biased
    return isinstance(part, (GatedMLP, GeluMLP)) and part.biased


def _divergence_shapes(tokens: int, teacher: TeacherProfile) -> list[tuple[int, ...]]:
    """Shapes of the numbers of each token that are reduced for a divergence: maxima and sums of exponentials of both
    models, then one divergence, or those of both models from their mixture."""
    both = (2, tokens)
    return [both, both, both if teacher.has_mixture else (tokens,)]
