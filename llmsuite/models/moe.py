"""Decoders with routed experts, for one card: the gate, experts and shared experts, the layers around them.

Shapes: B batch, L length, D hidden, E routed experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.models.anatomy import ATTENTION_MODULES
from llmsuite.models.blocks import ZEROS, DecoderLayer, LayerCache, RotaryLM, linear
from llmsuite.models.experts import Balance, Experts
from llmsuite.typing import Tensor


class Gate(nn.Layer):
    """The router: which experts a token goes to, and with what weight. Experts are scored by softmax."""

    unstored = ("weight", "e_score_correction_bias")

    def __init__(self, hidden_size: int, num_experts: int, num_chosen: int, is_normed: bool, factor: float = 1.0):
        super().__init__()
        self.num_experts, self.num_chosen = num_experts, num_chosen
        self.is_normed, self.factor = is_normed, factor
        self.balance: Balance | None = None
        self.weight = self.create_parameter([hidden_size, num_experts], attr=ZEROS)
        self.e_score_correction_bias: Tensor | None = None

    def add_bias(self, shape: Sequence[int]) -> None:
        """Give the gate a bias that balances the load by shifting the choice: the trainer updates it, no gradient
        reaches it."""
        attr = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), trainable=False)
        self.e_score_correction_bias = self.create_parameter(list(shape), attr=attr)

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, L, D] to weights, in float32, and numbers of the chosen experts, both [B, L, k].

        `counted` [B, L] is 1 for tokens and 0 for padding, which the balance does not see.
        """
        weights, chosen, scores = self.choose(self.logits(x))
        # a recomputed layer is counted the second time only, when there is a graph
        if self.balance is not None and self.training and paddle.is_grad_enabled():
            weights = self.balance.count(weights, chosen, scores, counted)
        return weights, chosen

    def logits(self, x: Tensor) -> Tensor:
        """x [B, L, D] to a number of each expert, [B, L, E], in float32."""
        return paddle.matmul(x.astype("float32"), self.weight.astype("float32"))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, L, E] to weights and numbers of the chosen experts, both [B, L, k], and the scores of all."""
        scores = self.scores(logits)
        chosen = paddle.topk(self.selection_scores(scores.detach()), self.num_chosen, -1)[1]
        weights = paddle.take_along_axis(scores, chosen, -1)
        if self.is_normed:
            weights = weights / self.total(weights)
        return weights * self.factor, chosen, scores

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [B, L, E] to the scores that the weights are made of."""
        return F.softmax(logits, -1)

    def selection_scores(self, scores: Tensor) -> Tensor:
        """Scores [B, L, E], without a gradient, to those that the choice goes by."""
        bias = self.e_score_correction_bias
        return scores if bias is None else scores + bias.astype("float32")

    def total(self, weights: Tensor) -> Tensor:
        """What the weights of a token [B, L, k] are divided by where they are normed, [B, L, 1]."""
        return weights.sum(-1, keepdim=True)


class MoE(nn.Layer):
    """Mixture of experts: routed ones, and shared ones that every token goes through, if there are any."""

    def __init__(self, gate: Gate, experts: Experts, shared_experts: nn.Layer | None = None):
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """[B, L, D] to [B, L, D]; `counted` as in `Gate.forward`."""
        routed = self.experts(x, *self.gate(x, counted))
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


class DenseLayer(DecoderLayer):
    """A layer without experts, in a model that has some in others."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, *counted: Any, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """As `DecoderLayer.forward`; a layer without experts ignores `counted`."""
        return super().forward(x, cos, sin, mask, past)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, *counted: Any) -> Tensor:
        """`forward` without the cache."""
        return self(x, cos, sin, mask, *counted)[0]


class MoELayer(DecoderLayer):
    """A layer whose MLP is a `MoE`, or takes the same."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, *counted: Any, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """As `DecoderLayer.forward`; `counted` as in `Gate.forward`."""
        attended, present = self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        return self.mlp_block(x + attended, cos, sin, mask, *counted), present

    def forward_train(self, x: Tensor, *context: Any) -> Tensor:
        """`forward` without the cache."""
        return self(x, *context)[0]

    # `forward_train` in two halves, of which the first can be compiled: see `anatomy.ATTENTION_MODULES`

    def attention_block(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, counted: Tensor | None = None
    ) -> Tensor:
        """[B, L, D] to [B, L, D], by the modules in `attention_modules`."""
        return x + self.self_attn(self.input_layernorm(x), cos, sin, mask)[0]

    attention_modules = ATTENTION_MODULES

    def mlp_block(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, counted: Tensor | None = None
    ) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        return x + self.mlp(self.post_attention_layernorm(x), counted)


class MTPLayer(MoELayer):
    """A layer that predicts the token after the next one, from hidden states and the embedding of the next token
    (DeepSeek-V3, arXiv 2412.19437, eq. 21 to 23). Embedding and output projection are those of the model."""

    predicts_further = True

    def __init__(
        self,
        first_norm: nn.Layer,
        attention: nn.Layer,
        second_norm: nn.Layer,
        mlp: nn.Layer,
        size: int,
        norm: Callable[[], nn.Layer],
    ):
        """`norm` makes a norm of the hidden size, `size`."""
        super().__init__(first_norm, attention, second_norm, mlp)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = linear(2 * size, size)
        self.shared_head = nn.Layer()
        self.shared_head.norm = norm()

    def forward(self, x: Tensor, embedded: Tensor, *context: Any) -> Tensor:  # type: ignore[override]
        """Hidden states and embeddings of the tokens behind them, both [B, L, D], and what `CausalLM.layer_inputs`
        returns, to normed hidden states [B, L, D] that predict the tokens behind those."""
        # in the order of the published weights; eq. 21 has it the other way round
        joined = self.eh_proj(paddle.concat([self.enorm(embedded), self.hnorm(x)], -1))
        block = self.forward_block if self.training else super().forward
        return self.shared_head.norm(block(joined, *context)[0])

    def forward_block(self, x: Tensor, *context: Any) -> tuple[Tensor, Any]:
        """In training, what is behind the joined inputs [B, L, D]: it can be compiled as another layer is."""
        return super().forward(x, *context)

    def forward_train(self, x: Tensor, *context: Any) -> Tensor:
        """`forward`, as training calls a layer."""
        return self(x, *context)


class MoELM(RotaryLM):
    """A decoder whose layers are `MoELayer` and `DenseLayer`."""

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Rotation, mask, and which tokens count; programs of whole steps know that by themselves."""
        if not paddle.in_dynamic_mode():
            return (*super().layer_inputs(start, length, dtype, document_starts), None)
        counted = None if document_starts is None else (document_starts >= 0).astype("float32")
        if document_starts is not None:
            # marked padding would have positions beyond the row
            document_starts = document_starts.clip(min=0) if bool((document_starts > 0).any()) else None
        return (*super().layer_inputs(start, length, dtype, document_starts), counted)
