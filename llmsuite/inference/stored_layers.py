"""Layers whose matrices are stored in 16, 8 or 4 bits, see `llmsuite.inference.stored`.

Shapes: I inputs and O outputs of a matrix, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import paddle
from paddle import nn

from llmsuite.devices.decoder_weights import StoredMatrix
from llmsuite.errors import UserError
from llmsuite.models.experts import Counts
from llmsuite.typing import Tensor


class StoredLinear(nn.Layer):
    """A linear layer whose matrix is stored."""

    def __init__(
        self,
        matrix: StoredMatrix,
        bias: Tensor | None,
        product: Callable[[Tensor, StoredMatrix], Tensor],
        name: str = "",
    ):
        """
        Args:
            matrix: [I, O].
            bias: [O], or none.
            product: that of the device, which rounds inputs to bfloat16.
            name: of the layer, for messages; "" where no code but llmsuite's computes with it.
        """
        super().__init__()
        self.matrix, self.bias, self._product, self._name = matrix, bias, product, name

    @property
    def weight(self) -> Tensor:
        """There is none. Raises UserError: code of an author's, which does not call the layer, asks for it."""
        assert self._name, "a matrix that only llmsuite computes with"
        raise _unreadable(self._name)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        y = self._product(x, self.matrix)
        return y if self.bias is None else y + self.bias


class StoredStack:
    """The same matrix of every expert, stored."""

    def __init__(self, stack: StoredMatrix, product: Callable[[Tensor, StoredMatrix, Tensor], Tensor]):
        """
        Args:
            stack: of matrices [I, O].
            product: that of the device for stacks.
        """
        self.shape = [stack.bytes.shape[0], stack.num_inputs, stack.num_outputs]
        self.matrix, self._product = stack, product

    def __getitem__(self, index: object) -> Tensor:
        """There are no values. Raises UserError: code of an author's asks for them."""
        raise _unreadable("a stack of experts")

    def grouped_product(self, x: Tensor, counts: Counts) -> Tensor:
        """Consecutive rows of x [N, I], so many `counts` for each expert, to [N, O]."""
        if isinstance(counts, Sequence):
            counts = paddle.to_tensor(counts, "int64", place=paddle.CPUPlace())
        return self._product(x, self.matrix, counts)


class StoredEmbedding(nn.Layer):
    """An embedding whose words are the outputs of a stored matrix [D, V]."""

    def __init__(self, matrix: StoredMatrix, outputs: Callable[[Tensor, StoredMatrix], Tensor]):
        super().__init__()
        self.matrix, self._outputs = matrix, outputs

    @property
    def weight(self) -> Tensor:
        """As `StoredLinear.weight`."""
        raise _unreadable("model.embed_tokens")

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [...] to [..., D]."""
        return self._outputs(ids, self.matrix)


def _unreadable(name: str) -> UserError:
    return UserError(
        f"--precision: the code of this model family reads the matrix of {name} itself, and a matrix that is stored "
        "in this precision can only be multiplied with, by calling its layer; use fp32, or let the module that has it "
        "name it in its attribute `unstored`"
    )
