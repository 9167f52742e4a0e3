"""What a forward pass keeps for its backward pass, in bytes.

Counted by what the operations of `models.blocks`, `models.experts` and `devices.ops` save: products their factors,
norms their input scaled, softmax its output; sums, copies and casts nothing. With plain operations this is what a run
on CPU holds: tests compare it with the allocator's own count. Of fused kernels it is what they are written to keep. Not
counted here are temporaries while a pass runs: see `memory`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from llmsuite.models.anatomy import Anatomy, Gated, GroupedQuery, Latent, LayerAnatomy, MoE

INDEX_BYTES = 8
"""Of an id or a position: int64."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One micro-batch on its way through a rank."""

    rows: int
    length: int
    supervised: int
    """Positions whose logits or scores are made."""
    documents: bool = False
    """Whether rows hold several documents, and layers are told."""
    marked: bool = False
    """Whether padding is marked, for gates or for those who take note of what goes into rounded layers."""
    expert_rows: float | None = None
    """Rows that come to the experts of a rank, a layer, where it is known; None when they are evenly dealt."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclasses.dataclass(frozen=True)
class How:
    """What of a strategy decides what is kept."""

    num_bytes: int
    """Of an activation."""
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    every: int = 1
    fused: frozenset[str] = frozenset()
    """Operations of `devices.ops.Ops` that are one kernel on the device, in layers."""
    fused_outside: frozenset[str] = frozenset()
    """The same in front of the layers and behind them."""
    fuses_alike_only: bool = False
    """Whether kernels take distributed tensors only where all of an operation lie alike: a norm's weight is whole, cut
    sequences and heads are not."""
    adapter_rank: int | None = None
    adapted: frozenset[str] = frozenset()
    """Full names of the modules that have adapters."""
    rounded: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Inputs and outputs, on a rank, of the modules whose weights are rounded, by their full names."""
    rounds_inputs: bool = False
    """Whether their inputs are rounded too."""


def kept_by_layer(anatomy: Anatomy, number: int, batch: Pass, how: How) -> float:
    """Bytes that a layer keeps, its output included, its input not."""
    between = _between(anatomy.hidden, batch, how)
    if how.recompute == "full" and number % how.every == 0:
        return between
    return inside_layer(anatomy, number, batch, how)


def inside_layer(anatomy: Anatomy, number: int, batch: Pass, how: How) -> float:
    """The same of a layer that nothing is computed again of, but its attention where that is selected."""
    layer, between = anatomy.layers[number], _between(anatomy.hidden, batch, how)
    # of a layer with experts no more than attention, with the norm in front, is in a program
    of_mlp = dataclasses.replace(how, fused=how.fused_outside) if isinstance(layer.mlp, MoE) else how
    norms = _norm(layer.norm, anatomy.hidden, batch, how) + _norm(layer.norm, anatomy.hidden, batch, of_mlp)
    inputs = 2 * batch.tokens * anatomy.hidden * how.num_bytes  # of both regions; whole also where sequences are cut
    kept = norms + inputs + attention_kept(layer, batch, how) + mlp_kept(layer, anatomy.hidden, batch, of_mlp)
    return kept + 2 * between + _adapters(number, batch, how) + _rounded(layer, number, batch, how)


def _between(hidden: int, batch: Pass, how: How) -> float:
    """An activation between regions."""
    return batch.tokens * hidden * how.num_bytes / (how.tp if how.sequence_parallel else 1)


def _norm(kind: str, hidden: int, batch: Pass, how: How) -> float:
    """Beside its input, which the residual holds, and its output, which is the input of a region."""
    tokens = batch.tokens / (how.tp if how.sequence_parallel else 1)
    if kind == "layer":
        return tokens * 2 * 4
    if "rms_norm" in how.fused and not (how.fuses_alike_only and how.sequence_parallel):
        return tokens * 4
    wide = 4 * hidden if how.num_bytes < 4 else 0
    return tokens * (hidden * how.num_bytes + wide + 4)


def _normed_heads(size: float, heads: float, batch: Pass, how: How) -> float:
    """Of queries or keys: their output scaled, with what it was before."""
    if "rms_norm" in how.fused and not (how.fuses_alike_only and how.tp > 1):
        return batch.tokens * (size * how.num_bytes + heads * 4)
    return batch.tokens * (2 * size * how.num_bytes + heads * 4 + (4 * size if how.num_bytes < 4 else 0))


def attention_kept(layer: LayerAnatomy, batch: Pass, how: How) -> float:
    """Between the region's input and its output."""
    what, e, tokens = layer.attention, how.num_bytes, batch.tokens
    heads = what.heads / how.tp
    scores = heads * batch.rows * batch.length**2 * e
    again = how.recompute == "selective"
    if isinstance(what, Latent):
        norms = _latent_norm(what.kv_rank, batch, how)
        if what.q_rank is not None:
            norms += _latent_norm(what.q_rank, batch, how)
        rotated = 0 if "rotary" in how.fused else heads * what.rope + what.rope
        queries = heads * (what.nope + what.rope)
        keys = heads * (what.nope + what.rope + what.value)
        return norms + tokens * e * (rotated + queries + keys + heads * what.value) + (0 if again else scores)
    size, kv_heads = what.head_size, what.kv_heads / how.tp
    kept = 0.0
    if what.normed:
        kept += _normed_heads(heads * size, heads, batch, how) + _normed_heads(kv_heads * size, kv_heads, batch, how)
    if what.rotary and "rotary" not in how.fused:
        kept += tokens * e * (heads + kv_heads) * size  # both halves of queries and keys, before
    output = tokens * e * heads * size
    if is_fused(layer, how):
        statistics = 0 if again else heads * tokens * 4
        return kept + tokens * e * (heads + 2 * kv_heads) * size + output + statistics
    if again:
        return kept + tokens * e * (heads + 2 * kv_heads) * size + output
    return kept + tokens * e * 3 * heads * size + output + scores  # keys and values once a query head


def _latent_norm(width: int, batch: Pass, how: How) -> float:
    """Of what is compressed: what goes in, scaled, what comes out. Whole on every rank."""
    if "rms_norm" in how.fused:
        return batch.tokens * (2 * width * how.num_bytes + 4)
    return batch.tokens * (3 * width * how.num_bytes + 4 + (4 * width if how.num_bytes < 4 else 0))


def mlp_kept(layer: LayerAnatomy, hidden: int, batch: Pass, how: How) -> float:
    """Between the region's input and its output."""
    what, e, tokens = layer.mlp, how.num_bytes, batch.tokens
    times = 3 if "swiglu" in how.fused else 4  # gate, up, their product; and of plain ones the gate's activation
    if isinstance(what, Gated):
        return tokens * e * times * what.width / how.tp
    if not isinstance(what, MoE):
        return tokens * e * 2 * what.width / how.tp
    # evenly dealt, a rank has as many rows as tokens x experts of each, its tensor parallel group together
    rows = tokens * what.chosen / how.tp if batch.expert_rows is None else batch.expert_rows
    routed = rows * e * (hidden + times * what.width) + tokens * what.chosen * e * hidden
    shared = tokens * e * times * what.shared_width / how.tp
    # scores; of each choice its number, weight and place among the sorted rows
    gate = tokens * (2 * what.experts * 4 + what.chosen * (3 * INDEX_BYTES + 4))
    if what.normed:
        gate += tokens * (2 * what.chosen + 1) * 4
    return routed + shared + gate


def _adapters(number: int, batch: Pass, how: How) -> float:
    if how.adapter_rank is None:
        return 0.0
    count = sum(f".{number}." in name for name in how.adapted)
    return count * batch.tokens * how.adapter_rank * how.num_bytes


_OWN_INPUT = frozenset(("o_proj", "down_proj", "q_b_proj", "kv_b_proj"))
"""Matrices that no other one shares its input with."""


def _rounded(layer: LayerAnatomy, number: int, batch: Pass, how: How) -> float:
    """Beyond what plain products keep. A product keeps the rounded weight, and as its input the rounded one, of which
    the way back keeps two more tensors of that size; what was rounded is kept no more unless others share it."""
    inside = {name: sizes for name, sizes in how.rounded.items() if f".{number}." in name}
    extra = sum(inputs * outputs for inputs, outputs in inside.values()) * float(how.num_bytes)
    if not how.rounds_inputs:
        return extra
    sharing: dict[str, list[int]] = {}
    for name, (inputs, _) in inside.items():
        owner, _, word = name.rpartition(".")
        extra += 3.0 * batch.tokens * inputs * how.num_bytes
        sharing.setdefault(name if word in _OWN_INPUT else owner, []).append(inputs)
    for name, widths in sharing.items():
        if len(widths) == _num_readers(layer, name):
            extra -= batch.tokens * widths[0] * how.num_bytes
    return extra


def _num_readers(layer: LayerAnatomy, name: str) -> int:
    """How many matrices read an input: that of a matrix of its own, or of a module."""
    word = name.rpartition(".")[2]
    if word in _OWN_INPUT:
        return 1
    if word == "self_attn":
        return 2 if isinstance(layer.attention, Latent) else 3
    if isinstance(layer.mlp, MoE):
        return 3  # with the gate, which is not rounded
    return 2 if isinstance(layer.mlp, Gated) else 1


def kept_in_front(anatomy: Anatomy, batch: Pass, how: How) -> float:
    """By the embedding: the ids, and what the first layer takes. With adapters only, nothing there has a gradient: less
    is kept than `kept_by_layer` says, unless the layer is computed again."""
    if how.adapter_rank is not None and how.recompute != "full":
        return -_norm(anatomy.layers[0].norm, anatomy.hidden, batch, how)
    positions = INDEX_BYTES * batch.length if anatomy.learned_positions else 0
    return batch.tokens * INDEX_BYTES + positions + _between(anatomy.hidden, batch, how)


def kept_for_all_layers(anatomy: Anatomy, batch: Pass, how: How) -> float:
    """The rotation, which every layer of a pass shares, and the mask where attention is to be computed again."""
    attention, outside = anatomy.layers[0].attention, dataclasses.replace(how, fused=how.fused_outside)
    kept = mask_bytes(anatomy.layers[0], batch, outside) if how.recompute != "none" else 0.0
    if how.recompute == "full" and batch.marked and any(isinstance(layer.mlp, MoE) for layer in anatomy.layers):
        kept += 4 * batch.tokens  # which tokens count, for gates
    if batch.documents and is_fused(anatomy.layers[0], outside):  # what each token sees, or where its document ends
        kept += batch.tokens * (3 * INDEX_BYTES if how.fuses_alike_only else 4)
    if isinstance(attention, GroupedQuery) and not attention.rotary:
        return kept
    size = attention.rope if isinstance(attention, Latent) else attention.head_size
    rows = batch.rows if batch.documents else 1
    return kept + rows * batch.length * size * how.num_bytes


def mask_bytes(layer: LayerAnatomy, batch: Pass, how: How) -> float:
    """Of the mask that is added to scores, while a pass of plain attention runs."""
    rows = batch.rows if batch.documents else 1
    return 0.0 if is_fused(layer, how) else rows * batch.length**2 * how.num_bytes


def is_fused(layer: LayerAnatomy, how: How) -> bool:
    """Whether attention makes no scores that lie in memory. Latent attention has no kernel."""
    return "attention" in how.fused and isinstance(layer.attention, GroupedQuery)


def scores_bytes(layer: LayerAnatomy, batch: Pass, how: How) -> float:
    """Of the scores of every pair of tokens."""
    heads = layer.attention.heads / how.tp
    return 0.0 if is_fused(layer, how) else heads * batch.rows * batch.length**2 * how.num_bytes


def kept_behind(anatomy: Anatomy, batch: Pass, how: How, scores: bool) -> float:
    """By the last norm, the head and the loss."""
    norm = _norm(anatomy.norm, anatomy.hidden, batch, dataclasses.replace(how, fused=how.fused_outside))
    picked = batch.supervised * (anatomy.hidden * how.num_bytes + INDEX_BYTES)
    if scores:
        return norm + picked
    # of float32 logits softmax's output, or they themselves; where they are cut: shifted, their exponentials, and which
    # one is the target
    times = 1 if how.tp == 1 else 3
    return norm + picked + batch.supervised * (times * 4 * anatomy.vocabulary / how.tp + 3 * 4)
