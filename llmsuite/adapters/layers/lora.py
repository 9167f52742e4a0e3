"""The layers of LoRA: `paddlenlp.peft`'s (3.0.0b4) as llmsuite runs it, and those for routed experts and the embedding.

Unlike paddlenlp's own, a layer here replaces an existing one and keeps its W instead of allocating a second one, and
computes on shards of W under tensor parallelism. Importing this module needs paddlenlp.

Shapes: I inputs and O outputs of a matrix, R rank; E experts; V vocabulary, D hidden; B rows, L length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.adapters.layers.experts import ExpertsAdapter
from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import identity
from llmsuite.models.adapter_method import AdapterConfig
from llmsuite.models.embedding import WithLookup
from llmsuite.models.experts import Counts, GroupedLinear, Local
from llmsuite.models.linear import bias_attr_of
from llmsuite.models.linear_ops import is_low_rank
from llmsuite.models.lora_matmul import Factors, LowRankLayer
from llmsuite.models.quantised import QuantisedMatrix

PaddleNlpLora: Any = import_alone("paddlenlp.peft.lora.lora_layers")[0].LoRALinear
"""paddlenlp's layer, from which ours derives."""


class LoraLinear(Adapter, PaddleNlpLora, LowRankLayer):
    """x W + scale (x A) B with factors A [I, R] and B [R, O] (Hu et al. 2021, arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear, config: AdapterConfig, **options: Any):
        """
        Args:
            linear: the layer it replaces.
            config: rank and scale.
            options: further arguments of paddlenlp's layer.
        """
        num_inputs, num_outputs = linear.weight.shape
        with paddle.LazyGuard():  # its own W takes no memory and no random numbers: `take` replaces it
            PaddleNlpLora.__init__(
                self,
                num_inputs,
                num_outputs,
                r=config.rank,
                lora_alpha=config.alpha,
                rslora=config.rslora,
                lora_plus_scale=config.lora_plus_ratio,
                bias_attr=bias_attr_of(linear),
                **options,
            )
        self.take(linear)

    @property
    def is_enabled(self) -> bool:
        return not self.disable_lora

    @is_enabled.setter
    def is_enabled(self, is_enabled: bool) -> None:
        self.disable_lora = not is_enabled

    def is_low_rank(self) -> bool:
        """True if the layer is plain LoRA with a dense W and no active dropout."""
        has_dropout = self.lora_dropout is not identity and self.training
        is_dense = not isinstance(self.weight, QuantisedMatrix)
        return type(self) is LoraLinear and is_dense and not has_dropout

    def factors(self) -> Factors | None:
        """The factors of the adapter; None where it is disabled or merged."""
        if self.disable_lora or self.merged:
            return None
        return Factors(self.lora_A, self.lora_B, self.scaling)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        if self.low_rank_kernel is not None and is_low_rank(self):
            return self.low_rank_kernel(self, x)
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O], one product after the other."""
        y = self.base(x)
        if self.disable_lora or self.merged:
            return y
        # paddlenlp scales the product [..., O]: one more tensor of that size, and 5% of the time
        return self.reduce_partial_sum(y) + self._update(x)

    def _update(self, x: Tensor) -> Tensor:
        low_rank = self.reduce_partial_sum(self.matmul(self.lora_dropout(x), self.lora_A)) * self.scaling
        return self.matmul(self.between_factors(low_rank), self.lora_B)

    def between_factors(self, low_rank: Tensor) -> Tensor:
        """The input of B, [..., R], from scale x A, [..., R]: that itself, unless a subclass has more."""
        return low_rank


class LoraExperts(ExpertsAdapter):
    """x W + scale (x A) B for each expert, with stacks of factors A [E, I, R] and B [E, R, O]."""

    def __init__(self, stacked: GroupedLinear, config: AdapterConfig):
        """
        Args:
            stacked: the stack that it replaces.
            config: rank and scale.
        """
        super().__init__(stacked)
        self.scaling = config.scale
        _create_parameters(self, config, stacked.weight.shape)

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        low_rank = self.grouped(x, local(self.lora_A), counts) * self.scaling
        return y + self.grouped(self.between_factors(low_rank, counts, local), local(self.lora_B), counts)

    def between_factors(self, low_rank: Tensor, counts: Counts, local: Local) -> Tensor:
        """The input of B, [N, R], from scale x A, [N, R]: that itself, unless a subclass has more.

        Args:
            low_rank: rows, sorted by expert.
            counts: rows of each expert.
            local: maps a stack to this rank's shard of it.
        """
        return low_rank


class LoraEmbedding(Adapter, WithLookup):
    """W[id] + scale A[id] B for the rows of an embedding W [V, D], with factors A [V, R] and B [R, D]. paddlenlp has no
    such layer; the formulas are those of HF PEFT. Ids have no dropout, as there: `lora_dropout` stays the identity."""

    def __init__(self, embedding: nn.Embedding, config: AdapterConfig):
        """
        Args:
            embedding: the layer it replaces.
            config: rank and scale.
        """
        super().__init__()
        self.take(embedding)
        self.scaling = config.scale
        self.is_enabled = True
        _create_parameters(self, config, embedding.weight.shape)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[B, L] to [B, L, D]."""
        y = self.lookup(input_ids, self.weight)
        return self._adapted(y, input_ids) if self.is_enabled else y

    def _adapted(self, y: Tensor, input_ids: Tensor) -> Tensor:
        low_rank = self.lookup(input_ids, self.lora_A) * self.scaling
        return y + self.matmul(self.between_factors(low_rank), self.lora_B)

    def between_factors(self, low_rank: Tensor) -> Tensor:
        """The input of B, [B, L, R], from scale A[id], [B, L, R]: that itself, unless a subclass has more."""
        return low_rank


def _create_parameters(layer: Adapter, config: AdapterConfig, shape: Sequence[int]) -> None:
    """Create the parameters that the method has for a matrix, or a stack of them, of this shape: without values, which
    are read later."""
    *stacked, num_inputs, num_outputs = shape
    faster = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), learning_rate=config.lora_plus_ratio)
    with paddle.LazyGuard():
        for kind, size in config.method.shapes(config.rank, num_inputs, num_outputs).items():
            parameter = layer.create_parameter([*stacked, *size], attr=faster if kind == "lora_B" else None)
            parameter.stop_gradient = not config.method.parameters[kind].is_trained
            setattr(layer, kind, parameter)
