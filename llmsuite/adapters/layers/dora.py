"""The layers of DoRA (Liu et al. 2024, arXiv 2402.09353), which paddlenlp does not have.

Shapes: I inputs and O outputs of a matrix; E experts; V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.adapters.layers.lora import LoraEmbedding, LoraExperts, LoraLinear
from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import identity
from llmsuite.models.adapter_method import AdapterConfig
from llmsuite.models.experts import Counts, Local, grouped_scale
from llmsuite.models.linear import add_bias
from llmsuite.models.quantised import QuantisedMatrix


class DoraLinear(LoraLinear):
    """(m / |V|) x V with V = W + scale A B: the norms m [O] of the columns are trained apart from their directions.

    Liu et al. 2024, DoRA (arXiv 2402.09353), eq. 5; |V|, the norm of each column, has no gradient (section 4.3).
    paddlenlp has no such layer.
    """

    def __init__(self, linear: nn.Linear, config: AdapterConfig):
        super().__init__(linear, config)
        self.reduce_column_norms: Callable[[Tensor], Tensor] = identity
        """Reduction over ranks of the squared column norms, where W is sharded along its inputs."""
        with paddle.LazyGuard():  # no memory yet: it is set to |W| when the weights are loaded
            self.lora_magnitude = self.create_parameter([linear.weight.shape[1]])

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        if self.disable_lora or self.merged:
            return self.base(x)
        with paddle.no_grad():
            adapted_weight = (self.dense_weight(x.dtype) + self.get_delta_weight()).astype("float32")
            # summed in float32; the epsilon is for the zero columns that pad a vocabulary
            length = (self.reduce_column_norms(adapted_weight.square().sum(0)) + 1e-12).sqrt().astype(x.dtype)
        length = length.detach()  # `no_grad` has no effect while a static program is traced
        y = self.reduce_partial_sum(self.weight_product(x)) + self._update(x)
        y = y * (self.lora_magnitude / length)
        return add_bias(y, self.bias)

    def merge(self) -> None:
        raise AssertionError("merged where weights are read, see `llmsuite.checkpoint.convert.adapter`")


class DoraExperts(LoraExperts):
    """`DoraLinear` for each expert, with lengths m [E, O] (Liu et al. 2024, DoRA, arXiv 2402.09353, eq. 5)."""

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        y = super().adapted(y, x, counts, local)
        return grouped_scale(y, local(self.lora_magnitude) / self._lengths(counts, local, y.dtype), counts)

    @paddle.no_grad()
    def _lengths(self, counts: Counts, local: Local, dtype: Any) -> Tensor:
        """|V|, the norms of the columns of each expert's W + scale A B, [E, O]; 1 for experts without rows, whose W is
        not dequantised. To save memory one W + scale A B exists at a time; a static program, which does not know which
        experts have rows, computes all in one call."""
        first = local(self.lora_A)
        second = local(self.lora_B)
        if not isinstance(counts, Sequence):
            stack = (local(self.weight) + paddle.matmul(first, second) * self.scaling).astype("float32")
            # `no_grad` has no effect while a static program is traced
            return paddle.sqrt(stack.square().sum(1) + 1e-12).astype(dtype).detach()
        norms = []
        for number, count in enumerate(counts):
            if not count:
                norms.append(paddle.ones([second.shape[-1]], dtype))
                continue
            is_quantised = isinstance(self.weight, QuantisedMatrix)
            matrix = self.weight.one(number, dtype) if is_quantised else local(self.weight)[number]
            wide = matrix + paddle.matmul(first[number], second[number]) * self.scaling
            norms.append((wide.astype("float32").square().sum(0) + 1e-12).sqrt().astype(dtype))
        return paddle.stack(norms)


class DoraEmbedding(LoraEmbedding):
    """(m / |V|) V[id] with V = W + scale A B, and m [D] the lengths of its columns: PEFT's `DoraEmbeddingLayer`, which
    is DoRA (Liu et al. 2024, arXiv 2402.09353) with the vocabulary as inputs. |V| has no gradient."""

    def __init__(self, embedding: nn.Embedding, config: AdapterConfig):
        super().__init__(embedding, config)
        self.reduce_column_norms: Callable[[Tensor], Tensor] = identity
        """Reduction over ranks of the squared column norms, where the vocabulary is sharded."""

    def _adapted(self, y: Tensor, input_ids: Tensor) -> Tensor:
        with paddle.no_grad():
            update = paddle.matmul(self.lora_A, self.lora_B) * self.scaling
            squares = (self.weight + update).astype("float32").square().sum(0)
            # float32 sum; the epsilon keeps the norm of a zero column, and the division by it, finite
            length = (self.reduce_column_norms(squares) + 1e-12).sqrt().astype(y.dtype)
        length = length.detach()  # `no_grad` has no effect while a static program is traced
        return super()._adapted(y, input_ids) * (self.lora_magnitude / length)
