"""Base class of adapters on routed experts: one adapter for each matrix of a stack.

In PaddleNLP and HF each expert is a separate layer with a separate adapter; here adapters are stacks, as the matrices.

Shapes: E experts, I inputs and O outputs of each one's matrix, R rank, N rows, sorted by expert.
"""

from __future__ import annotations

from paddle import nn

from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import identity
from llmsuite.models.dropout import RowDropout
from llmsuite.models.experts import Counts, GroupedLinear, Local, unsharded


class ExpertsAdapter(Adapter, GroupedLinear):
    """A stack of E frozen matrices W with one adapter per matrix."""

    def __init__(self, stacked: GroupedLinear):
        """
        Args:
            stacked: the stack that it replaces.
        """
        nn.Layer.__init__(self)
        self.weight = stacked.weight
        self.bias = stacked.bias
        self.is_enabled = True
        self.matmul = stacked.matmul
        self.in_program = stacked.in_program
        self.lora_dropout = self.reduce_partial_sum = identity

    def product(self, x: Tensor, counts: Counts, local: Local = unsharded) -> Tensor:
        """Rows [N, I], sorted by expert with `counts` of them each, to [N, O], as `GroupedLinear.product`."""
        y = super().product(x, counts, local)
        if not self.is_enabled:
            return y
        dropout = self.lora_dropout
        adapter_input = dropout(x, counts) if isinstance(dropout, RowDropout) else x
        return self.adapted(y, adapter_input, counts, local)

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        """The outputs [N, O] with the adapter.

        Args:
            y: the outputs without it.
            x: inputs of the adapter, [N, I].
            counts: rows of each expert.
            local: maps a stack to this rank's shard of it.
        """
        raise AssertionError(f"{type(self).__name__} has to define `adapted`")
