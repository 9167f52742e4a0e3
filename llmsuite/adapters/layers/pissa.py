"""The layers of PiSSA (Meng et al. 2024, arXiv 2404.02948), and of LoRA-GA, which starts from other factors.

Shapes: I inputs and O outputs of a matrix, R rank; E experts; V vocabulary, D hidden.
"""

from __future__ import annotations

import paddle
from paddle import nn

from llmsuite.adapters.layers.lora import LoraEmbedding, LoraExperts, LoraLinear
from llmsuite.base.typing import Tensor
from llmsuite.models.adapter_method import AdapterConfig
from llmsuite.models.experts import Counts, Local


class PissaLinear(LoraLinear):
    """x W + scale (x A) B - scale (x A0) B0, where A and B start as the largest singular vectors of W, and the frozen
    A0 and B0 are these starting values.

    Meng et al. 2024, PiSSA (arXiv 2404.02948), eq. 2 to 5, which subtracts scale A0 B0 from W. Here W is unchanged, so
    that it may be quantised, and a model with its adapters disabled is the base model. paddlenlp's own layer subtracts
    it from W in the first forward pass, and a second time after a reload.
    """

    def __init__(self, linear: nn.Linear, config: AdapterConfig):
        super().__init__(linear, config)
        with paddle.LazyGuard():  # no memory yet: they are computed from W when the weights are loaded
            self.lora_A0 = self.create_parameter([linear.weight.shape[0], config.rank])
            self.lora_B0 = self.create_parameter([config.rank, linear.weight.shape[1]])
        self.lora_A0.stop_gradient = self.lora_B0.stop_gradient = True

    def get_delta_weight(self, *factors: Tensor) -> Tensor:
        """The update of W that a merge adds, [I, O]: scale A B - scale A0 B0."""
        return super().get_delta_weight(*factors) - paddle.matmul(self.lora_A0, self.lora_B0) * self.scaling

    def _update(self, x: Tensor) -> Tensor:
        x = self.lora_dropout(x)
        # two products: to concatenate the pairs of factors, Paddle 3.3.1 would gather sharded ones
        update, start = (
            self.matmul(self.reduce_partial_sum(self.matmul(x, first)) * self.scaling, second)
            for first, second in ((self.lora_A, self.lora_B), (self.lora_A0, self.lora_B0))
        )
        return update - start


class LoraGaLinear(PissaLinear):
    """`PissaLinear` whose factors start as singular vectors of the gradient of W (LoRA-GA, Wang et al. 2024, arXiv
    2407.05000); all are zero until `engine.lora_ga` has computed that gradient.

    paddlenlp's own layer subtracts scale A0 B0 from the parameter W, which changes the base model. It gives B the first
    R vectors and A the next ones, multiplies them by the fourth root of the number of inputs where the paper has that
    of the outputs, and neither runs on a pipeline nor loads its checkpoint without a GPU.
    """


class PissaExperts(LoraExperts):
    """`PissaLinear` for each expert (Meng et al. 2024, PiSSA, arXiv 2404.02948): A and B, and the
    frozen A0 and B0 whose product is subtracted, start as the largest singular vectors of its W."""

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        start = self.grouped(x, local(self.lora_A0), counts) * self.scaling
        return super().adapted(y, x, counts, local) - self.grouped(start, local(self.lora_B0), counts)


class PissaEmbedding(LoraEmbedding):
    """W[id] + scale A[id] B - scale A0[id] B0, where A and B, and the frozen A0 and B0, start as the largest singular
    vectors of W, as in `PissaLinear`."""

    def _adapted(self, y: Tensor, input_ids: Tensor) -> Tensor:
        start = self.matmul(self.lookup(input_ids, self.lora_A0) * self.scaling, self.lora_B0)
        return super()._adapted(y, input_ids) - start
