"""The Llama decoder for one card: no degree, no rank, no mesh.

Shapes: B batch, L length, D hidden, H query heads, J key-value heads, K head size, V vocabulary.
A cache is one (keys, values) pair a layer, each [B, S, J, K], and is replaced, never written in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

from llmsuite.devices.ops import Ops, cross_entropy
from llmsuite.models.llama.config import LlamaConfig

Tensor = Any
LayerCache = tuple[Tensor, Tensor]


class RMSNorm(nn.Layer):
    """Root mean square norm with a gain, over the last dim."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__()
        self.eps, self.norm = config.rms_norm_eps, ops.rms_norm
        self.weight = self.create_parameter([config.hidden_size], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


class Attention(nn.Layer):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__()
        self.head_size, self.ops = config.head_size, ops
        width, kv_width = (n * config.head_size for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = _linear(config.hidden_size, width)
        self.k_proj = _linear(config.hidden_size, kv_width)
        self.v_proj = _linear(config.hidden_size, kv_width)
        self.o_proj = _linear(width, config.hidden_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        heads = [0, 0, -1, self.head_size]
        q = self.ops.rotary(self.q_proj(x).reshape(heads), cos, sin)
        k = self.ops.rotary(self.k_proj(x).reshape(heads), cos, sin)
        v = self.v_proj(x).reshape(heads)
        if past is not None:
            k, v = paddle.concat([past[0], k], 1), paddle.concat([past[1], v], 1)
        out = self.ops.attention(q, k, v, mask)
        return self.o_proj(out.reshape([0, 0, -1])), (k, v)


class MLP(nn.Layer):
    """Gated MLP with SwiGLU."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__()
        self.swiglu = ops.swiglu
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Layer):
    """Pre-norm attention and MLP, each around a residual."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__()
        self.input_layernorm = RMSNorm(config, ops)
        self.self_attn = Attention(config, ops)
        self.post_attention_layernorm = RMSNorm(config, ops)
        self.mlp = MLP(config, ops)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        attended, present = self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), present

    def states(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """`forward` without the cache: `recompute` takes functions with one output tensor only."""
        return self(x, cos, sin, mask)[0]


class Decoder(nn.Layer):
    """Embedding, layers, last norm: the part HF calls `model`."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, weight_attr=_ZEROS)
        self.layers = nn.LayerList([DecoderLayer(config, ops) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config, ops)


class Llama(nn.Layer):
    """A causal language model. Parameters start at zero (norms at one): `engine.init` or a checkpoint fills them."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__()
        self.config, self.ops = config, ops
        self.recompute = False
        self.cross_entropy = cross_entropy
        self.model = Decoder(config, ops)
        self.lm_head = None if config.tie_word_embeddings else _linear(config.hidden_size, config.vocab_size)
        self._angles = np.asarray(config.rope_frequencies(), dtype="float64")

    def hidden_states(
        self, input_ids: Tensor, cache: list[LayerCache] | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Input ids [B, L] to normed hidden states [B, L, D] and the cache for the next call.

        Positions go on from the cache. Sequences start at position 0 and are padded on the right, so that no
        token sees padding and none needs a mask of its own.
        """
        x, present = self.decode(self.embed(input_ids), cache)
        return self.finish(x), present

    def embed(self, input_ids: Tensor) -> Tensor:
        """Input ids [B, L] to what the first layer takes, [B, L, D]."""
        return self.model.embed_tokens(input_ids)

    def finish(self, x: Tensor) -> Tensor:
        """What the last layer gives to normed hidden states, [B, L, D]."""
        return self.model.norm(x)

    def decode(self, x: Tensor, cache: list[LayerCache] | None = None) -> tuple[Tensor, list[LayerCache]]:
        """Through the layers that are here, [B, L, D] to [B, L, D]; and the cache for the next call."""
        length, past_length = x.shape[1], cache[0][0].shape[1] if cache else 0
        cos, sin = self._rotation(past_length, length, x.dtype)
        mask = self.ops.causal_mask(length, past_length + length, x.dtype)
        present = []
        for i, layer in enumerate(self.model.layers):
            if self.recompute and self.training:
                x = paddle.distributed.fleet.utils.recompute(layer.states, x, cos, sin, mask)
            elif self.training:
                x = layer.states(x, cos, sin, mask)
            else:
                x, kv = layer(x, cos, sin, mask, cache[i] if cache else None)
                present.append(kv)
        return x, present

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] to logits [..., V]."""
        if self.lm_head is None:
            return paddle.matmul(hidden, self.model.embed_tokens.weight, transpose_y=True)
        return self.lm_head(hidden)

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Hidden states [N, D] and target ids [N] to the negative log-probability of each target, [N] in float32."""
        return self.cross_entropy(self.logits(hidden).astype("float32"), targets)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, L, V] of every position."""
        return self.logits(self.hidden_states(input_ids)[0])

    def _rotation(self, start: int, length: int, dtype: Any) -> tuple[Tensor, Tensor]:
        """cos and sin [1, L, 1, K / 2] of the positions from `start`; angles in float64, as positions get large."""
        angles = np.outer(np.arange(start, start + length), self._angles)[None, :, None, :]
        return tuple(paddle.to_tensor(f(angles).astype("float32")).astype(dtype) for f in (np.cos, np.sin))


_ZEROS = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0))


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, weight_attr=_ZEROS, bias_attr=False)
