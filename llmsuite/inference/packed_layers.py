"""Layers with packed matrices of 16, 8 or 4 bits, see `llmsuite.inference.pack_model`.

Shapes: I inputs and O outputs of a matrix, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.decoding_ops import PackedWeight
from llmsuite.devices.tensors import tensor_of
from llmsuite.models.blocks import TiedHead
from llmsuite.models.experts import Counts
from llmsuite.models.quantised import GroupedMatrix


class PackedLinear(nn.Layer):
    """A linear layer with a packed matrix."""

    def __init__(
        self,
        matrix: PackedWeight,
        bias: Tensor | None,
        matmul: Callable[[Tensor, PackedWeight], Tensor],
        name: str = "",
    ):
        """
        Args:
            matrix: [I, O].
            bias: [O], or none.
            matmul: the device's matmul, which rounds inputs to bfloat16.
            name: of the layer, for messages; "" where only llmsuite's code uses it.
        """
        super().__init__()
        self.matrix = matrix
        self.bias = bias
        self._matmul = matmul
        self._name = name

    @property
    def weight(self) -> Tensor:
        """Not available. Raises UserError, because third-party code reads the matrix instead of calling the layer."""
        assert self._name, "a matrix that only llmsuite's code uses"
        raise _unreadable(self._name)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        y = self._matmul(x, self.matrix)
        return y if self.bias is None else y + self.bias


class PackedTiedHead(TiedHead):
    """A tied head with the packed matrix of the embedding."""

    def __init__(self, layer: PackedLinear):
        """`layer` maps hidden states to logits."""
        super().__init__()
        self.layer = layer

    def __call__(self, hidden: Tensor, embedding: Any) -> Tensor:
        logits: Tensor = self.layer(hidden)
        return logits


class PackedExperts(GroupedMatrix):
    """A packed stack of the same matrix of every expert."""

    def __init__(self, stack: PackedWeight, matmul: Callable[[Tensor, PackedWeight, Tensor], Tensor]):
        """
        Args:
            stack: of matrices [I, O].
            matmul: the device's grouped matmul.
        """
        self.shape = [stack.bytes.shape[0], stack.num_inputs, stack.num_outputs]
        self.matrix = stack
        self._matmul = matmul

    def __getitem__(self, index: object) -> Tensor:
        """Not available. Raises UserError, because third-party code reads the values."""
        raise _unreadable("a stack of experts")

    def grouped_product(self, x: Tensor, counts: Counts) -> Tensor:
        """Rows of x [N, I], sorted by expert with `counts` rows of each, to [N, O]."""
        if isinstance(counts, Sequence):
            counts = tensor_of(counts, "int64", paddle.CPUPlace())
        return self._matmul(x, self.matrix, counts)


class PackedEmbedding(nn.Layer):
    """An embedding whose rows are the outputs of a packed matrix [D, V]."""

    def __init__(self, matrix: PackedWeight, lookup: Callable[[Tensor, PackedWeight], Tensor]):
        super().__init__()
        self.matrix = matrix
        self._lookup = lookup

    @property
    def weight(self) -> Tensor:
        """Not available. Raises UserError, because third-party code reads the matrix."""
        raise _unreadable("model.embed_tokens")

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [...] to [..., D]."""
        return self._lookup(ids, self.matrix)


def _unreadable(name: str) -> UserError:
    return UserError(
        f"--precision: the code of this model family reads the matrix of {name} itself, and a matrix in this precision "
        "can only be multiplied with, by calling its layer; use fp32, or let its module name it in its attribute "
        "`never_packed`"
    )
