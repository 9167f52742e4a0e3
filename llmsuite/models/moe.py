"""Decoders with routed experts (mixture of experts), for one card: gate, experts, shared experts and their layers.

Shapes: B batch, L length, D hidden, E routed experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of
from llmsuite.models.blocks import ZEROS, DecoderLayer, GatedMLP, LayerCache, LayerExecution, RotaryLM, linear
from llmsuite.models.experts import Experts, LoadBalance
from llmsuite.models.shape_spec import ATTENTION_MODULES
from llmsuite.models.shape_spec import MoE as MoESpec


class Routing:
    """The choice of experts by a gate, and the record of its load, in eager passes. A program has another one."""

    def run(self, gate: Gate, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and indices of the chosen experts, with the arguments and the result of `Gate.forward`."""
        weights, chosen, scores = gate.choose(gate.logits(x))
        # of the two passes of a recomputed layer only the second one, which has a graph, is recorded
        if gate.balance is not None and gate.training and paddle.is_grad_enabled():
            weights = gate.balance.record(weights, chosen, scores, token_mask)
        return weights, chosen


class Gate(nn.Layer):
    """The router: it chooses the experts of each token and their weights, as its description says."""

    never_packed = ("weight", "e_score_correction_bias")

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__()
        self.spec = spec
        self.num_experts = spec.experts
        self.num_chosen = spec.chosen
        self.balance: LoadBalance | None = None
        self.routing = Routing()
        self.weight = self.create_parameter([hidden_size, spec.experts], attr=ZEROS)
        self.bias: Tensor | None = self.create_parameter([spec.experts], attr=ZEROS) if spec.gate_biased else None
        self.e_score_correction_bias: Tensor | None = None
        if spec.choice_biased:
            # it balances the load by shifting the choice of experts: the trainer updates it, and it has no gradient
            # (auxiliary-loss-free balancing, DeepSeek-V3, arXiv 2412.19437, section 2.1.2)
            attr = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), trainable=False)
            shape = [1, spec.experts] if spec.bias_is_row else [spec.experts]
            self.e_score_correction_bias = self.create_parameter(shape, attr=attr)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, L, D] to weights, in float32, and indices of the chosen experts, both [B, L, k].

        `token_mask` [B, L] is 1 for tokens and 0 for padding, which the load balance ignores.
        """
        return self.routing.run(self, x, token_mask)

    def logits(self, x: Tensor) -> Tensor:
        """x [B, L, D] to a logit of each expert, [B, L, E], in float32 whatever the precision."""
        logits = paddle.matmul(x.astype("float32"), self.weight.astype("float32"))
        return logits if self.bias is None else logits + self.bias.astype("float32")

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, L, E] to weights and indices of the chosen experts, both [B, L, k], and the scores of all."""
        scores = self.scores(logits)
        chosen = paddle.topk(self.selection_scores(scores.detach()), self.num_chosen, -1)[1]
        weights = paddle.take_along_axis(scores, chosen, -1)
        if self.spec.normed:
            weights = weights / self.total(weights)
        return weights * self.spec.factor, chosen, scores

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [B, L, E] to scores [B, L, E], from which the weights are taken."""
        return F.sigmoid(logits) if self.spec.scores == "sigmoid" else F.softmax(logits, -1)

    def selection_scores(self, scores: Tensor) -> Tensor:
        """Scores [B, L, E], without a gradient, to those whose top k are chosen: experts outside the best groups get
        far lower ones than all others."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias.astype("float32")
        if self.spec.groups == 1:
            return scores
        groups = scores.reshape([0, 0, self.spec.groups, self.num_experts // self.spec.groups])
        num_best = 1 if self.e_score_correction_bias is None else 2
        best = paddle.topk(groups, num_best, -1)[0].sum(-1)
        outside = 1.0 - _among_best(best, self.spec.chosen_groups)
        return (groups - outside.unsqueeze(-1) * 1e9).reshape([0, 0, self.num_experts])

    def total(self, weights: Tensor) -> Tensor:
        """Divisor [B, L, 1] that normalises the weights of a token [B, L, k]."""
        total = weights.sum(-1, keepdim=True)
        if self.spec.scores == "sigmoid":
            total = total + 1e-20  # all of them can be zero; as in DeepSeek-V3's published code
        return total if self.spec.least_total is None else total.clip(min=self.spec.least_total)


def _among_best(values: Tensor, count: int) -> Tensor:
    """1 for the `count` largest of the last dim, 0 for the others."""
    return F.one_hot(paddle.topk(values, count, -1)[1], values.shape[-1]).sum(-2)


class MoE(nn.Layer):
    """Mixture of routed experts and, if there are any, shared experts that process every token."""

    def __init__(self, gate: Gate, experts: Experts, shared_experts: nn.Layer | None = None):
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """[B, L, D] to [B, L, D]; `token_mask` as in `Gate.forward`."""
        routed = self.experts(x, *self.gate(x, token_mask))
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


class GatedSharedMoE(nn.Layer):
    """Routed experts, and a shared expert whose output has a weight for each token."""

    never_packed = ("shared_expert_gate",)

    def __init__(self, gate: Gate, experts: Experts, shared_expert: GatedMLP, hidden_size: int):
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_expert = shared_expert
        self.shared_expert_gate = linear(hidden_size, 1)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """[B, L, D] to [B, L, D]; `token_mask` as in `Gate.forward`."""
        routed = self.experts(x, *self.gate(x, token_mask))
        return routed + F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class MoELayer(DecoderLayer):
    """A layer whose MLP is a `MoE`, or has the same signature."""

    def __init__(
        self,
        first_norm: nn.Layer,
        attention: nn.Layer,
        second_norm: nn.Layer,
        mlp: nn.Layer,
        residual_scale: float = 1.0,
    ):
        """`residual_scale` is a factor of the outputs of attention and MLP."""
        super().__init__(first_norm, attention, second_norm, mlp)
        self.residual_scale = residual_scale
        self.num_inputs = 3
        """Number of the inputs of all attentions among the outputs of `CausalLM.layer_inputs`: three of each kind; the
        token mask of `Gate.forward`, if there is one, follows them."""

    def forward(self, x: Tensor, *inputs: Any, past: LayerCache | None = None) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] and the outputs of `CausalLM.layer_inputs` to [B, L, D] and the layer's cache."""
        attended, present = self.self_attn(self.input_layernorm(x), *inputs[slice(*self.attention_inputs)], past)
        return self.mlp_block(self._sum(x, attended), *inputs), present

    # `train_block` in two halves; only the first one can be compiled (`shape_spec.ATTENTION_MODULES`)

    def attention_block(self, x: Tensor, *inputs: Any) -> Tensor:
        """The first half, [B, L, D] to [B, L, D]: the modules in `attention_modules`."""
        return self._sum(x, self.self_attn(self.input_layernorm(x), *inputs[slice(*self.attention_inputs)])[0])

    attention_modules = ATTENTION_MODULES

    def mlp_block(self, x: Tensor, *inputs: Any) -> Tensor:
        """The second half, [B, L, D] to [B, L, D]: norm, gate and experts."""
        return self._sum(x, self.mlp(self.post_attention_layernorm(x), *inputs[self.num_inputs :]))

    def _sum(self, x: Tensor, output: Tensor) -> Tensor:
        if self.residual_scale != 1.0:
            output = output * self.residual_scale
        return x + output


class MTPLayer(MoELayer):
    """A layer that predicts the token after the next one, from hidden states and the embedding of the next token
    (DeepSeek-V3, arXiv 2412.19437, eq. 21 to 23). Embedding and output projection are those of the model."""

    is_mtp = True

    def __init__(
        self,
        first_norm: nn.Layer,
        attention: nn.Layer,
        second_norm: nn.Layer,
        mlp: nn.Layer,
        size: int,
        norm: Callable[[], nn.Layer],
    ):
        """`norm` creates a norm of the hidden size, `size`."""
        super().__init__(first_norm, attention, second_norm, mlp)
        self.enorm = norm()
        self.hnorm = norm()
        self.eh_proj = linear(2 * size, size)
        self.block_execution = LayerExecution()
        self.shared_head = nn.Layer()
        self.shared_head.norm = norm()

    def forward(self, x: Tensor, embedded: Tensor, *context: Any) -> Tensor:  # type: ignore[override]
        """Normed hidden states [B, L, D] that predict the token after the next one.

        Args:
            x: hidden states [B, L, D].
            embedded: embeddings [B, L, D] of the tokens that follow.
            context: outputs of `CausalLM.layer_inputs`.
        """
        # in the order of the published weights; eq. 21 has it the other way round
        joined = self.eh_proj(paddle.concat([self.enorm(embedded), self.hnorm(x)], -1))
        execution = self.block_execution if self.training else LayerExecution()
        return self.shared_head.norm(execution.run(self.decoder_block, joined, *context))

    def decoder_block(self, x: Tensor, *context: Any) -> Tensor:
        """The decoder layer on the joined inputs [B, L, D]: it can be compiled as any other layer."""
        return super().forward(x, *context)[0]

    def train_block(self, x: Tensor, *context: Any) -> Tensor:
        """`forward`, whose output needs no cache removed."""
        output: Tensor = self(x, *context)
        return output


class MoELM(RotaryLM):
    """A decoder some of whose layers are `MoELayer`."""

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Rotation, attention mask and token mask; programs of full steps get the token mask in another way."""
        if not paddle.in_dynamic_mode():
            return (*super().layer_inputs(start, length, dtype, document_starts), None)
        token_mask = None if document_starts is None else (document_starts >= 0).astype("float32")
        if document_starts is not None:
            # marked padding would have positions beyond the row
            document_starts = document_starts.clip(min=0) if array_of((document_starts > 0).any()) else None
        return (*super().layer_inputs(start, length, dtype, document_starts), token_mask)
