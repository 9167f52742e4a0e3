"""The layers of MoRA (Jiang et al. 2024, arXiv 2405.12130).

Shapes: I inputs and O outputs of a matrix, S width of the square matrix; E experts.
"""

from __future__ import annotations

import paddle
from paddle import nn

from llmsuite.adapters.layers.lora import PaddleNlpLora
from llmsuite.adapters.layers.structured import StructuredLinear, WeightShard
from llmsuite.base.typing import Tensor
from llmsuite.contract.hookspecs import AdapterConfig
from llmsuite.models.experts import GroupedLinear
from llmsuite.models.linear import bias_attr_of
from llmsuite.plugins.adapters_extra.layers.structured import StructuredExperts


class MoraLinear(StructuredLinear, PaddleNlpLora):
    """x W + f(x) with one square matrix instead of two factors: as many parameters, but a higher rank (MoRA, Jiang et
    al. 2024, arXiv 2405.12130); f is `mora_update`.

    paddlenlp's own layer merges the transpose of the matrix, multiplies 16-bit inputs by float32 numbers, and does not
    run on several ranks.
    """

    def __init__(self, linear: nn.Linear, config: AdapterConfig):
        """
        Args:
            linear: the layer it replaces.
            config: rank and scale.

        Raises:
            UserError: the rank is too large, see `adapters.mora.square_size`.
        """
        num_inputs, num_outputs = linear.weight.shape
        (shape,) = config.method.shapes(config.rank, num_inputs, num_outputs).values()
        with paddle.LazyGuard():
            PaddleNlpLora.__init__(
                self, num_inputs, num_outputs, r=config.rank, use_mora=True, bias_attr=bias_attr_of(linear)
            )
        square = self.lora_A
        assert square.shape == [*shape]
        del self.lora_A, self.cos, self.sin  # renamed, as `lora_A` is sharded with W and this matrix is not
        self.lora_square = square
        self.part = WeightShard()
        self.is_enabled = True
        self.take(linear)

    def adapter_parameters(self) -> list[Tensor]:
        return [self.lora_square]

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        (square,) = parameters
        return mora_update(x, square, self.out_features)


class MoraExperts(StructuredExperts):
    """MoRA (Jiang et al. 2024, arXiv 2405.12130) for each expert, with square matrices M [E, S, S]."""

    def __init__(self, stacked: GroupedLinear, config: AdapterConfig):
        """
        Args:
            stacked: the stack that it replaces.
            config: rank and scale.

        Raises:
            UserError: the rank is too large, see `adapters.mora.square_size`.
        """
        super().__init__(stacked)
        num_experts, num_inputs, self._num_outputs = stacked.weight.shape
        (shape,) = config.method.shapes(config.rank, num_inputs, self._num_outputs).values()
        with paddle.LazyGuard():
            self.lora_square = self.create_parameter([num_experts, *shape])

    def adapter_parameters(self) -> list[Tensor]:
        return [self.lora_square]

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        (square,) = parameters
        return mora_update(x, square, self._num_outputs)


def mora_update(x: Tensor, square: Tensor, num_outputs: int) -> Tensor:
    """MoRA's update with rotation, [..., O] (Jiang et al. 2024, arXiv 2405.12130, section 4).

    x is split into pieces of S inputs; each is rotated by its index (RoPE) and multiplied by the square matrix, and the
    results are concatenated. As in paddlenlp, a short last piece is filled up with the first inputs, and the outputs
    are repeated where there are more outputs than inputs.

    Args:
        x: [..., I].
        square: M [S, S].
        num_outputs: O.
    """
    size = square.shape[0]
    num_inputs = x.shape[-1]
    if num_inputs % size:
        x = paddle.concat([x, x[..., : size - num_inputs % size]], -1)
    leading = x.shape[:-1]
    half = size // 2
    pieces = x.reshape([*leading, -1, size])
    frequencies = 10000.0 ** (paddle.arange(0, size, 2, dtype="float32") / -size)
    angles = paddle.arange(pieces.shape[-2], dtype="float32").unsqueeze(1) * paddle.concat([frequencies, frequencies])
    turned = paddle.concat([-pieces[..., half:], pieces[..., :half]], -1)
    rotated = pieces * angles.cos().astype(x.dtype) + turned * angles.sin().astype(x.dtype)
    y = paddle.matmul(rotated, square).reshape([*leading, -1])
    repeats = -(-num_outputs // y.shape[-1])
    if repeats > 1:
        y = paddle.concat([y] * repeats, -1)
    return y[..., :num_outputs]
