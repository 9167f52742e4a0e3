"""The description of a decoder: the sizes of its parts, and the choices in which architectures differ.

`llmsuite plan` derives from it the FLOPs, memory and messages of each layer. For a dense decoder
(`decoder_config.DecoderConfig.shape_spec`) it is all there is: `models.dense` builds the layers from it, and
`dense_names` the names of the parameters. Imports no Paddle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """Grouped-query attention: `blocks.Attention` and `dense.DenseAttention`."""

    heads: int
    kv_heads: int
    head_size: int
    rotary: bool = True
    """False where queries and keys are not rotated: attention without positions."""
    rotation: int = 0
    """Index of the rotary table among those of the config (`DecoderConfig.rotations`)."""
    rotary_size: int | None = None
    """Number of the first elements of a head that are rotated; None for all."""
    interleaved: bool = False
    """True where the elements that are rotated together are neighbours, not halves of the head."""
    normed: Literal["heads", "rotated", "whole"] | None = None
    """Norms of queries and keys. heads: of each head, before the rotation. rotated: of each head, after it. whole: of
    all heads together, before it. None: there are none."""
    biased: bool = False
    """True where queries, keys and values have biases."""
    output_biased: bool = False
    """True where the output has a bias."""
    window: int | None = None
    """Size of the attention window in tokens; None for full causal attention."""
    scale: float | None = None
    """Factor of the scores; None for 1 / sqrt(head_size)."""
    growth: tuple[float, int] | None = None
    """(b, N) where queries at position p are multiplied by 1 + b ln(1 + floor(p / N)), as in Llama 4; None for no such
    factor."""
    score_cap: float | None = None
    """C where scores s become C tanh(s / C), before the mask; None for plain scores."""
    gated: bool = False
    """True where the output of each head is multiplied by the sigmoid of a gate; its matrix is joined to that of the
    queries, head by head."""
    sinks: bool = False
    """True where each head has a trained score, its sink, of which the denominator of the softmax has one more term
    (Xiao et al. 2023, arXiv 2309.17453, section 3.3; gpt-oss, arXiv 2508.10925)."""

    @property
    def is_plain(self) -> bool:
        """True if `blocks.Attention` computes it."""
        changed = (self.rotary_size, self.scale, self.score_cap, self.growth)
        has_more = self.gated or self.sinks
        return self.rotary and self.normed in (None, "heads") and set(changed) == {None} and not has_more

    @property
    def needs_scores(self) -> bool:
        """True where the plain form computes it, from all scores: no kernel of attention has a cap or sinks."""
        return self.score_cap is not None or self.sinks

    @property
    def rounds(self) -> bool:
        """True where a device may round queries, keys and values: nothing but the rotation comes after them."""
        return self.is_plain and not self.biased and self.normed is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """DeepSeek's multi-head latent attention (`latent_attention.LatentAttention`)."""

    heads: int
    q_rank: int | None
    """Width that queries are compressed to; None for no compression."""
    kv_rank: int
    """Width that keys and values are compressed to."""
    nope: int
    """Size of the part of a query and key head without rotary positions."""
    rope: int
    """Size of the part with rotary positions."""
    value: int
    """Size of a value head."""
    score_factor: float = 1.0
    """Factor of the scores, in addition to 1 / sqrt(nope + rope)."""

    @property
    def width(self) -> int:
        """Head size of the attention kernel: smaller queries, keys or values are padded with zeros."""
        return max(self.nope + self.rope, self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Linear attention by the gated delta rule (`gated_delta.GatedDeltaAttention`): its cache is a state without
    positions."""

    key_heads: int
    """Heads of queries and keys."""
    heads: int
    """Heads of values: consecutive ones share a head of queries and keys."""
    key_size: int
    """Size of a head of queries and keys."""
    head_size: int
    """Size of a head of values."""
    taps: int
    """Tokens that the short convolution of queries, keys and values reads, with the token itself."""
    joined: bool
    """True where the first matrices are joined, by heads of keys: in one of queries, keys, values and gates, and in one
    of step sizes and decays."""
    chunk: ClassVar[int] = 64
    """Tokens of a chunk: inside of one the rule is a triangular system, from one to the next a recurrence."""

    @property
    def num_projections(self) -> int:
        """Number of the first matrices."""
        return 2 if self.joined else 6

    @property
    def group(self) -> int:
        """Number of heads of values that share a head of queries and keys."""
        return self.heads // self.key_heads

    @property
    def key_width(self) -> int:
        """Size of all heads of keys."""
        return self.key_heads * self.key_size

    @property
    def width(self) -> int:
        """Size of all heads of values."""
        return self.heads * self.head_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """Size of `blocks.GatedMLP`."""

    width: int
    biased: bool = False
    """True where its matrices have biases."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Function of the gate; gelu_tanh is GELU in its tanh form."""

    @property
    def rounds(self) -> bool:
        """True where a device may round what is between its products."""
        return not self.biased and self.activation == "silu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeluMLP:
    """Size of an MLP of two matrices with a GELU in its tanh form between them."""

    width: int
    biased: bool = True
    """True where its matrices have biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """Sizes of routed experts, and of shared experts, which are one gated MLP."""

    experts: int
    chosen: int
    """Number of routed experts of a token."""
    width: int
    """Width of a routed expert."""
    shared_width: int
    """Total width of all shared experts; 0 for none."""
    shared_gated: bool = False
    """True where the output of the shared experts has a weight for each token (`moe.GatedSharedMoE`)."""
    normed: bool = False
    """True where the weights of a token's experts are normalized to add up to 1."""
    least_total: float | None = None
    """Smallest divisor of that normalisation; None for no limit."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the logits of a token to the scores of its experts."""
    choice_biased: bool = False
    """True where experts are chosen with a bias for balance (`moe.Gate.e_score_correction_bias`)."""
    bias_is_row: bool = False
    """True where this bias has the shape [1, E], False for [E]."""
    groups: int = 1
    """Number of equal groups that the experts are in."""
    chosen_groups: int = 1
    """Number of groups that the experts of a token can be in."""
    factor: float = 1.0
    """Factor of the weights of a token's experts."""
    gate_biased: bool = False
    """True where the logits of the experts have trained biases."""
    biased: bool = False
    """True where the matrices of routed experts have biases."""
    clamp: tuple[float, float] | None = None
    """Slope and limit where routed experts have the clamped SwiGLU of `devices.ops.clamped_swiglu`; None for SwiGLU."""


def input_kind(what: GroupedQuery | Latent) -> tuple[int, int | None]:
    """The (rotation, window) of an attention, by which its inputs are chosen."""
    return (what.rotation, what.window) if isinstance(what, GroupedQuery) else (0, None)


LAYER_NORMS = frozenset(
    {"input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"}
)
"""Names of the norms of a layer over the width of the model: before attention and MLP, and after them."""
ATTENTION_MODULES = ("input_layernorm", "self_attn")
"""Modules of the first half of a layer with experts, up to the residual after attention: the half that `to_static`
compiles. The second half cannot be compiled, as its routing depends on values."""


Norm = Literal["rms", "offset_rms", "layer", "layer_gain"]
"""Kind of a norm; offset_rms is RMSNorm with the gain 1 + weight, layer_gain LayerNorm without a bias."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A decoder layer: attention and MLP, each around a residual."""

    attention: GroupedQuery | Latent | GatedDelta
    mlp: GatedMLP | GeluMLP | MoE
    norm: Norm = "rms"
    norms: Literal["before", "after", "both", "parallel"] = "before"
    """Place of the norms: before attention and MLP, after them, or both. parallel: there is one norm, whose output both
    read."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP."""
    is_mtp: bool = False
    """True where it is a `moe.MTPLayer`: it takes the embedding of the next token too, and its output is normed."""

    @property
    def window(self) -> int | None:
        """Size of its attention window in tokens; None for full causal attention."""
        return self.attention.window if isinstance(self.attention, GroupedQuery) else None

    def compiles(self, parameter: str) -> bool:
        """True if `to_static` compiles the module of this layer that has a parameter with this full name."""
        return not isinstance(self.mlp, MoE) or any(f".{module}." in parameter for module in ATTENTION_MODULES)

    @property
    def num_norms(self) -> int:
        """Number of norms of the residual stream."""
        return {"both": 4, "parallel": 1}.get(self.norms, 2)

    @property
    def needs_scores(self) -> bool:
        """True where the plain form computes its attention, see `GroupedQuery.needs_scores`."""
        return isinstance(self.attention, GroupedQuery) and self.attention.needs_scores

    @property
    def has_plain_residuals(self) -> bool:
        """True if `blocks.DecoderLayer` computes it from its parts: with norms before them, and plain sums."""
        return self.norms == "before" and self.residual_scale == 1.0

    @property
    def is_plain(self) -> bool:
        """True if the layer has no parts that the fused decoding kernel lacks; see `ShapeSpec.is_plain`."""
        attention = self.attention
        mlp = self.mlp
        has_plain_mlp = isinstance(mlp, GatedMLP) and mlp.rounds
        is_grouped = isinstance(attention, GroupedQuery) and attention.is_plain and not attention.output_biased
        return self.norm == "rms" and self.has_plain_residuals and is_grouped and has_plain_mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeSpec:
    """Sizes of a decoder."""

    hidden: int
    vocabulary: int
    layers: Sequence[LayerSpec]
    norm: Norm = "rms"
    learned_positions: bool = False
    """True where positions are learned embeddings, not rotary."""
    embedding_scale: float = 1.0
    """Factor of the embedding."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_cap: float | None = None
    """C where logits z become C tanh(z / C); None for plain logits."""

    @property
    def has_states(self) -> bool:
        """True where some layers have linear attention, whose input is the positions of the tokens."""
        return any(isinstance(layer.attention, GatedDelta) for layer in self.layers)

    @property
    def attention_kinds(self) -> tuple[tuple[int, int | None], ...]:
        """The different (rotation, window) of the layers without linear attention, in order: the model makes the inputs
        of each kind once."""
        attentions = [layer.attention for layer in self.layers]
        return tuple(dict.fromkeys(input_kind(what) for what in attentions if not isinstance(what, GatedDelta)))

    @property
    def is_scaled(self) -> bool:
        """True where the embedding or the logits are not those of `blocks.CausalLM`."""
        return (self.embedding_scale, self.logit_scale, self.logit_cap) != (1.0, 1.0, None)

    @property
    def is_plain(self) -> bool:
        """True if all layers are those of `models.blocks` with no biases but those of queries, keys and values: one
        fused kernel can decode a token with such a model (`inference.plain_decoder.unsupported_reason`)."""
        is_whole = self.norm == "rms" and not (self.learned_positions or self.is_scaled)
        return is_whole and len(self.attention_kinds) == 1 and all(layer.is_plain for layer in self.layers)
