"""The traffic of a tensor parallel group: what its ranks send each other during a pass.

Paddle's SPMD rules decide it. Their decisions are written down here for the blocks of `models.anatomy`; tests compare
them with what passes through the communication library, tensor for tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from llmsuite.models.anatomy import Anatomy, GatedMLP, GeluMLP, GroupedQuery, Latent, MoE
from llmsuite.models.reft_shapes import reft_shapes
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.head import makes_logits_again
from llmsuite.planning.layout import Layout


class Send(Protocol):
    """Records a message: operation, shape, reason, how often, bytes of an element if not those of an activation."""

    def __call__(self, operation: str, shape: Sequence[int], why: str, count: int = 1, width: int = 0) -> None: ...


_FIRST_IN_LAYER = (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj")
"""Matrices that multiply what comes into a layer."""


class TensorParallelTraffic:
    """The tensor parallel traffic of one rank, reported to `send` as its passes are walked through."""

    def __init__(self, layout: Layout, anatomy: Anatomy, mesh: Mesh, own_reduce_scatter: bool, send: Send):
        """Takes the arguments of `communication.Traffic`, and what records a message."""
        self._layout, self._anatomy, self._mesh, self._own, self._send = layout, anatomy, mesh, own_reduce_scatter, send
        recipe = layout.plan.recipe
        self._engine, self._adapter_rank = recipe.engine, recipe.lora.rank
        self._pairs, self._is_frozen, self._edit_rank = recipe.lora.num_pairs, recipe.freezes_model, recipe.reft.rank
        self._is_dora = recipe.lora.method == "dora"
        self._compiled = self._engine.mode == "to_static"
        self._fused = recipe.parallel.fuse_projections
        self._sequence_parallel = recipe.parallel.sequence_parallel
        self._is_scored, self._takes_all = layout.plan.stage.head == "score", layout.plan.stage.takes_all

    def forward(self, part: int, batch: MicroBatch, with_adapters: bool = True) -> None:
        """One forward pass of a micro-batch through a part of the model."""
        whole, piece = self._shapes(batch)
        if part == 0:
            self._sum(whole, "embedding: its rows are on different ranks", scatter=self._sequence_parallel)
            if self._layout.adapts_embedding and with_adapters:
                narrow = *whole[:2], self._adapter_rank or 0
                self._sum(narrow, "adapters: embedding", self._sequence_parallel, self._pairs)
                if self._is_dora:
                    self._send("all_reduce", whole[2:], "adapters: lengths of the embedding's columns", width=4)
        for number in self._layout.layers_of(part):
            self._layer_forward(number, batch, whole, piece, with_adapters)
        if self._is_last(part):
            if self._sequence_parallel:
                self._send("all_gather", piece, "last norm: sequences are gathered")
            if not self._is_scored:
                self._losses(batch)

    def backward(self, part: int, batch: MicroBatch) -> None:
        """One backward pass, including the forward passes of recomputed layers."""
        whole, piece = self._shapes(batch)
        if self._is_last(part) and not self._is_scored:
            self._head_backward(batch, whole)
        for number in self._layout.layers_of(part):
            if self._engine.computes_again(number):
                self._layer_forward(number, batch, whole, piece, with_adapters=True, again=True)
            if number in self._layout.intervened and self._sequence_parallel:
                for shape in reft_shapes(self._anatomy.hidden, self._edit_rank or 0).values():
                    self._send("all_reduce", shape, "interventions: gradients, from each rank's tokens")
            if number not in self._layout.unreached:
                self._layer_backward(number, batch, whole, piece)
        if part == 0 and self._sequence_parallel and not self._is_frozen:
            self._send("all_gather", piece, "embedding, backward")
            if self._anatomy.learned_positions:
                self._send("all_gather", (1, *piece[1:]), "positions, backward")
        if part == 0 and self._sequence_parallel and self._layout.adapts_embedding:
            narrow = *piece[:2], self._adapter_rank or 0
            self._send("all_gather", narrow, "adapters, backward: embedding")
            if self._is_dora:
                self._send("all_reduce", piece[2:], "adapters: gradients of magnitudes, from each rank's tokens")

    def _losses(self, batch: MicroBatch) -> None:
        count = 4 if self._layout.plan.profile.entropy else 3
        for tokens in self._chunks(batch):
            self._send("all_reduce", (tokens, 1), "cross-entropy: numbers of each token", count, width=4)

    def _chunks(self, batch: MicroBatch) -> list[int]:
        """How many tokens each chunk of a loss has."""
        size, count = self._engine.loss_chunk_tokens, batch.supervised
        if size is None or size >= count:
            return [count]
        return [min(size, count - first) for first in range(0, count, size)]

    def _head_backward(self, batch: MicroBatch, whole: tuple[int, ...]) -> None:
        chunks, why, adapted = self._chunks(batch), "head, backward: gradient of its input", self._layout.adapted
        if makes_logits_again(self._layout, batch):
            self._losses(batch)
        for tokens in chunks:
            takes_all = self._takes_all and tokens == batch.tokens
            self._send("all_reduce", (tokens, 1), "cross-entropy: numbers of each token", width=4)
            if takes_all:
                self._sum(whole, why, self._sequence_parallel)
            else:
                self._send("all_reduce", (tokens, self._anatomy.hidden), why)
            if "lm_head" in adapted:
                shape = whole[:2] if takes_all else (tokens,)
                self._send("all_reduce", (*shape, self._adapter_rank or 0), "adapters, backward: head", self._pairs)

    def _shapes(self, batch: MicroBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a hidden state between layers: whole, and sharded along the sequence."""
        hidden = self._anatomy.hidden
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
        whole: tuple[int, ...],
        piece: tuple[int, ...],
        with_adapters: bool,
        again: bool = False,
    ) -> None:
        layer, why = self._anatomy.layers[number], "forward: sums after attention and MLP"
        if layer.predicts_further and not again:
            self._sum(whole, "embedding of the next tokens: its rows are on different ranks", self._sequence_parallel)
        if layer.predicts_further and self._sequence_parallel:
            self._send("all_gather", piece, "norm of the layer that predicts further tokens: sequences are gathered")
        if self._sequence_parallel:
            self._send("all_gather", piece, "forward: sequences before attention and MLP", 2)
        # a sum to which a bias is added is not scattered at once
        self._sum(whole, why, self._sequence_parallel and not _output_biased(layer.attention))
        if isinstance(layer.mlp, MoE):
            count = 2 if layer.mlp.shared_width else 1
            self._send("all_reduce", whole, "forward: sums after routed and shared experts", count)
        else:
            self._sum(whole, why, self._sequence_parallel and not _output_biased(layer.mlp))
        for module in self._inside(self._layout.rounded, number, dim=0):
            outputs = self._layout.shapes[f"{module}.weight"][1]
            self._send("all_reduce", (outputs,), "scales of rounded weights that are sharded by inputs", width=4)
        if with_adapters:
            self._adapters_forward(number, batch)

    def _layer_backward(self, number: int, batch: MicroBatch, whole: tuple[int, ...], piece: tuple[int, ...]) -> None:
        layer = self._anatomy.layers[number]
        if self._sequence_parallel:
            self._send("all_gather", piece, "backward of the scatter after attention and MLP", 2)
        if layer.predicts_further and self._sequence_parallel:
            # a frozen embedding has no gradient
            count = 1 if self._is_frozen else 2
            self._send("all_gather", piece, "backward: hidden states and embeddings of further tokens", count)
        again = self._engine.computes_again(number)
        # when only adapters are trained, the input of the first layer has no gradient, unless it is recomputed
        no_gradient = self._is_frozen and not self._layout.adapts_embedding
        if not (number == 0 and no_gradient and not again):
            self._attention_backward(number, batch, whole)
        elif isinstance(layer.attention, Latent):
            self._latent_backward(layer.attention, batch, None)
        self._mlp_backward(number, batch, whole)
        self._adapters_backward(number, batch)

    def _attention_backward(self, number: int, batch: MicroBatch, whole: tuple[int, ...]) -> None:
        why = "backward: gradients of the inputs of sharded matrices"
        what = self._anatomy.layers[number].attention
        if isinstance(what, Latent):
            self._latent_backward(what, batch, whole)
        elif self._adds_locally(number, "self_attn"):
            self._sum(whole, why, self._sequence_parallel)
        else:
            self._send("all_reduce", whole, why, 3)

    def _latent_backward(self, what: Latent, batch: MicroBatch, whole: tuple[int, ...] | None) -> None:
        """`whole` is the shape of the input, if that has a gradient."""
        why = "backward: gradients of compressed queries, keys and values, from each rank's heads"
        if what.q_rank is not None:
            self._send("all_reduce", (batch.rows, batch.length, what.q_rank), why)
        elif whole is not None:
            self._send("all_reduce", whole, why)
        self._send("all_reduce", (batch.rows, batch.length, what.kv_rank), why)
        shape = (batch.rows, batch.length, what.heads // self._mesh.degrees.tp, what.rope)
        self._send("all_gather", shape, "backward: the rotated key that all heads share")

    def _mlp_backward(self, number: int, batch: MicroBatch, whole: tuple[int, ...]) -> None:
        why, what = "backward: gradients of the inputs of sharded matrices", self._anatomy.layers[number].mlp
        if isinstance(what, MoE):
            together = self._layout.multiplies_together and not self._is_adapted(number, "mlp.shared_experts")
            of_shared = (1 if together else 2) if what.shared_width else 0
            self._send("all_reduce", whole, why, 1 + of_shared)
            weights = (batch.rows, batch.length, what.chosen)
            self._send("all_reduce", weights, "backward: weights of experts, of which each rank has some", width=4)
            return
        if self._adds_locally(number, "mlp"):
            self._sum(whole, why, self._sequence_parallel)
        else:
            self._send("all_reduce", whole, why, 1 if isinstance(what, GeluMLP) else 2)

    def _adds_locally(self, number: int, region: str) -> bool:
        """Whether the gradients of the input of attention or MLP are summed on the rank before they are reduced: in
        compiled programs, where projections are fused or one operation, or where there is one, unless gradients of
        adapters, which are not partial, are among them.
        """
        is_one = region == "mlp" and isinstance(self._anatomy.layers[number].mlp, GeluMLP)
        is_one = is_one or self._layout.multiplies_together
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
                if self._is_dora:
                    outputs = self._layout.shapes[f"{module}.weight"][1]
                    self._send("all_reduce", (outputs,), "adapters: lengths of columns sharded by inputs", width=4)

    def _adapters_backward(self, number: int, batch: MicroBatch) -> None:
        if self._adapter_rank is None:
            return
        narrow = batch.rows, batch.length, self._adapter_rank
        for module in self._inside(self._layout.adapted, number, dim=1):
            # a frozen factor behind an input without a gradient needs none
            begins = number == 0 and not self._engine.computes_again(number) and not self._layout.adapts_embedding
            ends = begins and module.endswith(_FIRST_IN_LAYER)
            for _ in range(min(1, self._pairs) if ends else self._pairs):
                self._send("all_reduce", narrow, "adapters, backward: of matrices sharded by outputs")
        for module in self._inside(self._layout.adapted, number, dim=0):
            if self._sequence_parallel and self._ends_region(module):
                piece = batch.rows, batch.length // self._mesh.degrees.tp, self._adapter_rank
                for _ in range(self._pairs):
                    self._send("all_gather", piece, "adapters, backward of the scatter after them")
                if self._is_dora:
                    outputs = self._layout.shapes[f"{module}.weight"][1]
                    self._send("all_reduce", (outputs,), "adapters: gradients of magnitudes, from each rank's tokens")

    def _ends_region(self, module: str) -> bool:
        """Whether sequences are sharded again right after a matrix."""
        return self._layout.shard_plan.is_region(module.rpartition(".")[0])

    def _inside(self, modules: Iterable[str], number: int, dim: int) -> list[str]:
        """The modules of a layer whose weights are sharded along a dim. Routed experts are not: ranks have some."""
        plan = self._layout.shard_plan
        inside = (f"{module}.weight" for module in modules if module.startswith(f"{plan.layers}.{number}."))
        cut = [weight for weight in inside if plan.dim(weight) == dim and not plan.is_expert(weight)]
        return [weight.removesuffix(".weight") for weight in cut]


def _output_biased(part: GroupedQuery | Latent | GatedMLP | GeluMLP | MoE) -> bool:
    """Whether a bias is added to the output of attention or MLP."""
    if isinstance(part, GroupedQuery):
        return part.output_biased
    return isinstance(part, GeluMLP) or (isinstance(part, GatedMLP) and part.biased)
