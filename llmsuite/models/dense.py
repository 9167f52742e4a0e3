"""A dense decoder built from its description (`models.shape_spec`), for one card.

Where a description asks for nothing but what `models.blocks` has, the layers are those, so that generation has its
fused kernels. Otherwise they are the layers of this module: they have every switch, and run by their own code
everywhere.
`models.blocks` explains the shapes and the forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.masks import causal_mask, document_mask
from llmsuite.devices.ops import Ops, scored_attention
from llmsuite.models.blocks import (
    ZEROS,
    Attention,
    DecoderLayer,
    GatedMLP,
    GeluMLP,
    LayerCache,
    LayerNorm,
    RMSNorm,
    RotaryLM,
    extend_cache,
    halves,
    linear,
)
from llmsuite.models.decoder_config import DecoderConfig
from llmsuite.models.gated_delta import GatedDeltaAttention
from llmsuite.models.head import head_of
from llmsuite.models.latent_attention import LatentAttention
from llmsuite.models.rotation import positions
from llmsuite.models.shape_spec import GatedDelta, GroupedQuery, Latent, LayerSpec, Norm, ShapeSpec, input_kind
from llmsuite.models.shape_spec import GatedMLP as GatedMLPSpec
from llmsuite.models.shape_spec import GeluMLP as GeluMLPSpec


class OffsetRMSNorm(RMSNorm):
    """RMS norm with the gain 1 + weight, computed in float32."""

    def __init__(self, size: int, eps: float, ops: Ops):
        super().__init__(size, eps, ops)
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        # in 16 bits 1 + weight would lose most digits of the weight
        gain = 1.0 + self.weight.astype("float32")
        return self.norm(x.astype("float32"), gain, self.eps).astype(x.dtype)


class DenseAttention(Attention):
    """Grouped-query attention with every switch of `shape_spec.GroupedQuery`."""

    def __init__(self, config: DecoderConfig, ops: Ops, spec: GroupedQuery, norm: Norm):
        """`norm` is the kind of the norms of queries and keys."""
        super().__init__(config.hidden_size, config.norm_eps, ops, spec)
        self.rounds_activations = False  # scales, caps and norms take queries and keys in full precision
        if spec.needs_scores:
            self.core = _scored_core(spec.heads // spec.kv_heads, spec.score_cap, ops.decoding.heads_first)
        self.sinks: Tensor | None = None
        if spec.sinks:
            self.sinks = self.create_parameter([spec.heads], default_initializer=nn.initializer.Constant(0.0))
        size = spec.head_size
        self.rotates = spec.rotary
        self.rotary_size = size if spec.rotary_size is None else spec.rotary_size
        self.query_scale = 1.0 if spec.scale is None else spec.scale * size**0.5  # the core divides by the root
        self.is_gated = spec.gated
        if spec.gated:
            self.q_proj = linear(config.hidden_size, 2 * spec.heads * size, spec.biased)
        self.norms_at = spec.normed
        if spec.normed:
            q_size = size
            kv_size = size
            if spec.normed == "whole":
                q_size *= spec.heads
                kv_size *= spec.kv_heads
            self.q_norm = make_norm(norm, q_size, config.norm_eps, ops)
            self.k_norm = make_norm(norm, kv_size, config.norm_eps, ops)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        past: LayerCache | None = None,
        of_queries: Sequence[Tensor] = (),
    ) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] to [B, L, D] and the cache, with the arguments of `Attention.forward`: cos and sin are None in a
        model without rotary positions. `of_queries` are cos and sin of queries where they are not those of keys."""
        projections = [self.q_proj, self.k_proj, self.v_proj]
        q, k, v = self.apply_linears(projections, x, None)
        gate = None
        if self.is_gated:
            q, gate = (part.flatten(2) for part in q.reshape([0, 0, -1, 2 * self.head_size]).split(2, -1))
        if self.norms_at == "whole":
            q, k = self._normed(q, k)
        q, k, v = (part.reshape([0, 0, -1, self.head_size]) for part in (q, k, v))
        if self.norms_at == "heads":
            q, k = self._normed(q, k)
        if self.rotates:
            assert cos is not None
            assert sin is not None
            q = self._rotated(q, *(of_queries or (cos, sin)))
            k = self._rotated(k, cos, sin)
        if self.norms_at == "rotated":
            q, k = self._normed(q, k)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        k, v = extend_cache(k, v, past, self.heads_first)
        of_heads = [] if self.sinks is None else [self.sinks]
        out = self.core(q, k, v, mask, *of_heads).reshape([0, 0, -1])
        if gate is not None:
            out = out * F.sigmoid(gate)
        return self.o_proj(out), (k, v)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads [B, L, H, K] with the first `rotary_size` elements of each rotated."""
        rest = None
        if self.rotary_size < self.head_size:
            x, rest = paddle.split(x, [self.rotary_size, self.head_size - self.rotary_size], -1)
        if self.interleaved:
            x = halves(x)
        x = self.rotary(x, cos, sin)
        if rest is None:
            return x
        return paddle.concat([x, rest], -1)


@functools.cache
def _scored_core(group: int, cap: float | None, heads_first: bool) -> Callable[..., Tensor]:
    """`scored_attention` with its first arguments: one object, as layers share a program only if their cores are
    equal."""
    return functools.partial(scored_attention, group, cap, heads_first)


class GeluGatedMLP(GatedMLP):
    """Gated MLP with GELU in its tanh form (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        gate, up = self.apply_linears([self.gate_proj, self.up_proj], x, None)
        return self.down_proj(F.gelu(gate, approximate=True) * up)


class DenseLayer(DecoderLayer):
    """A decoder layer with norms before attention and MLP, after them or both, or one norm that both read, and scaled
    residuals."""

    def __init__(self, config: DecoderConfig, ops: Ops, spec: LayerSpec, kind: int):
        """`kind` is the index of its attention among the kinds of the model (`RotaryLM`); linear attention comes after
        them."""
        norm = functools.partial(make_norm, spec.norm, config.hidden_size, config.norm_eps, ops)
        before: list[nn.Layer | None] = [None, None]
        after: list[nn.Layer | None] = [None, None]
        if spec.norms in ("before", "both"):
            before = [norm(), norm()]
        elif spec.norms == "parallel":
            before = [norm(), None]
        if spec.norms in ("after", "both"):
            after = [norm(), norm()]
        super().__init__(before[0], make_attention(config, ops, spec), before[1], make_mlp(config, ops, spec))
        self.post_self_attn_layernorm, self.post_mlp_layernorm = after
        self.grows = isinstance(spec.attention, GroupedQuery) and spec.attention.growth is not None
        self.is_parallel = spec.norms == "parallel"
        self.residual_scale = spec.residual_scale
        first = 3 * kind
        self.attention_inputs = (first, first + 3)
        self.keeps_state = isinstance(spec.attention, GatedDelta)
        if self.keeps_state:
            self.attention_inputs = (first, first + 1)

    def forward(self, x: Tensor, *inputs: Tensor | None, past: LayerCache | None = None) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] and the outputs of `CausalLM.layer_inputs` to [B, L, D] and the layer's cache."""
        normed = _normed(self.input_layernorm, x)
        given = inputs[slice(*self.attention_inputs)]
        if self.grows:
            attended, present = self.self_attn(normed, *given, past, inputs[3:5])
        else:
            attended, present = self.self_attn(normed, *given, past)
        if self.is_parallel:
            return self._sum(self._sum(x, attended), self.mlp(normed)), present
        x = self._sum(x, _normed(self.post_self_attn_layernorm, attended))
        inner = self.mlp(_normed(self.post_attention_layernorm, x))
        return self._sum(x, _normed(self.post_mlp_layernorm, inner)), present

    def _sum(self, x: Tensor, output: Tensor) -> Tensor:
        if self.residual_scale != 1.0:
            output = output * self.residual_scale
        return x + output


def _normed(norm: nn.Layer | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    return norm(x)


class DenseLM(RotaryLM):
    """A dense decoder whose embedding and logits are plain."""

    def __init__(self, config: DecoderConfig, ops: Ops):
        spec = config.shape_spec()
        assert isinstance(self, Scaled) or not spec.is_scaled, f"{type(config).__name__}.network has to be ScaledLM"
        has_positions = isinstance(self, LearnedPositionsLM)
        assert has_positions == spec.learned_positions, f"{type(config).__name__}.network has to be LearnedPositionsLM"
        ops = with_masks(ops, spec)
        kinds = spec.attention_kinds
        layers = [_make_layer(config, ops, layer, kinds, spec.has_states) for layer in spec.layers]
        norm = make_norm(spec.norm, config.hidden_size, config.norm_eps, ops)
        growth = {layer.attention.growth for layer in spec.layers if isinstance(layer.attention, GroupedQuery)}
        assert len(growth) < 2, "the queries of all layers grow alike"
        super().__init__(config, ops, layers, norm, kinds, next(iter(growth), None), spec.has_states)
        assert self._growth is None or not spec.has_states, "inputs of queries that grow, and of linear attention"


class Scaled(RotaryLM):
    """Factors of the embedding and of the logits, and a cap of the logits: for a decoder that derives from it first."""

    def __init__(self, config: DecoderConfig, ops: Ops, *parts: Any):
        super().__init__(config, ops, *parts)
        spec = config.shape_spec()
        self.embedding_scale = spec.embedding_scale
        self.hidden_scale = 1.0  # a score reads the hidden states as they are
        if head_of(config) == "language_model":
            self.hidden_scale = spec.logit_scale
        self.logit_cap = spec.logit_cap

    def embed(self, input_ids: Tensor, start: int = 0, document_starts: Tensor | None = None) -> Tensor:
        """Scaled rows of the embedding, [B, L, D], in training."""
        return super().embed(input_ids, start, document_starts) * self.embedding_scale

    def embed_at(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Scaled rows of the embedding, [B, L, D], in generation."""
        return super().embed_at(input_ids, positions) * self.embedding_scale

    def final_norm(self, x: Tensor) -> Tensor:
        """Normed hidden states [B, L, D], times the factor of the logits."""
        x = super().final_norm(x)
        if self.hidden_scale == 1.0:
            return x
        return x * self.hidden_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] to logits [..., V]."""
        logits = super().logits(hidden)
        if self.logit_cap is None:
            return logits
        return self.logit_cap * paddle.tanh(logits / self.logit_cap)


class ScaledLM(Scaled, DenseLM):
    """A dense decoder with factors of the embedding and of the logits, and a cap of the logits."""


class LearnedPositionsLM(DenseLM):
    """A dense decoder that adds an embedding of positions to that of tokens, and rotates nothing."""

    def __init__(self, config: DecoderConfig, ops: Ops):
        super().__init__(config, ops)
        self.model.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size, weight_attr=ZEROS)

    def embed(self, input_ids: Tensor, start: int = 0, document_starts: Tensor | None = None) -> Tensor:
        """Input ids [B, L] at the positions from `start`, or from there in their documents, to the input of the first
        layer, [B, L, D]."""
        end = start + input_ids.shape[1]
        # a row of several documents may be longer than any of them
        assert document_starts is not None or end <= self.config.max_position_embeddings, f"no positions up to {end}"
        at = paddle.arange(start, end).unsqueeze(0) if document_starts is None else start + positions(document_starts)
        return self.embed_at(input_ids, at)

    def embed_at(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Input ids [B, L] at the positions [B, L] or [1, L] to the input of the first layer, [B, L, D]."""
        return self.model.embed_tokens(input_ids) + self.model.embed_positions(positions)

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """The mask, with None in the places of cos and sin."""
        return (None, None, *self.masks(start, length, dtype, document_starts))

    def layer_inputs_at(self, positions: Tensor, mask: Any, dtype: Any) -> tuple[Tensor | None, ...]:
        """The mask, with None in the places of cos and sin."""
        return (None, None, mask)


def with_masks(ops: Ops, spec: ShapeSpec) -> Ops:
    """The operations with the masks that the attention of a model takes."""
    if any(layer.needs_scores for layer in spec.layers):
        return dataclasses.replace(ops, causal_mask=causal_mask, document_mask=document_mask)
    return ops


def make_norm(kind: Norm, size: int, eps: float, ops: Ops) -> nn.Layer:
    """A norm over the last dim, of this size."""
    if kind in ("layer", "layer_gain"):
        return LayerNorm(size, eps, bias=kind == "layer")
    return OffsetRMSNorm(size, eps, ops) if kind == "offset_rms" else RMSNorm(size, eps, ops)


def make_attention(
    config: DecoderConfig, ops: Ops, spec: LayerSpec
) -> Attention | LatentAttention | GatedDeltaAttention:
    """The attention of a layer."""
    what = spec.attention
    if isinstance(what, GatedDelta):
        return GatedDeltaAttention(config.hidden_size, config.norm_eps, ops, what)
    if isinstance(what, Latent):
        return LatentAttention(config.hidden_size, ops, what)
    if what.is_plain and not (what.normed and spec.norm == "offset_rms"):
        return Attention(config.hidden_size, config.norm_eps, ops, what)
    return DenseAttention(config, ops, what, spec.norm)


def kind_of(spec: LayerSpec, kinds: Sequence[tuple[int, int | None]]) -> int:
    """The index of a layer's attention among the kinds of the model; linear attention comes after them."""
    what = spec.attention
    if isinstance(what, GatedDelta):
        return len(kinds)
    return kinds.index(input_kind(what))


def make_mlp(config: DecoderConfig, ops: Ops, spec: LayerSpec) -> GatedMLP | GeluMLP:
    """The MLP of a layer."""
    what = spec.mlp
    if isinstance(what, GeluMLPSpec):
        return GeluMLP(config.hidden_size, what.width, what.biased)
    assert isinstance(what, GatedMLPSpec)
    kind = {"silu": GatedMLP, "gelu_tanh": GeluGatedMLP}[what.activation]
    return kind(config.hidden_size, what.width, ops, what.biased)


def _make_layer(
    config: DecoderConfig, ops: Ops, spec: LayerSpec, kinds: tuple[tuple[int, int | None], ...], has_states: bool
) -> DecoderLayer:
    what = spec.attention
    grows = isinstance(what, GroupedQuery) and what.growth is not None
    if not spec.has_plain_residuals or len(kinds) > 1 or grows or has_states:
        return DenseLayer(config, ops, spec, kind_of(spec, kinds))
    norms = [make_norm(spec.norm, config.hidden_size, config.norm_eps, ops) for _ in range(2)]
    return DecoderLayer(norms[0], make_attention(config, ops, spec), norms[1], make_mlp(config, ops, spec))
