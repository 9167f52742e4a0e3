"""Numbers of each token that are computed from logits: losses, entropies and greedy matches.

A model owns one `LogitOps`, and calls it with its logits. Where ranks have parts of the vocabulary the engine gives the
model another one (`parallel.tensor.VocabularyParallelLogitOps`).

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from llmsuite.base.typing import Tensor
from llmsuite.devices import ops as plain
from llmsuite.devices.ops import Ops
from llmsuite.models.divergence import Comparison, divergence


class LogitOps:
    """Operations on logits [N, V] float32 and targets [N], on one card."""

    def __init__(self, ops: Ops):
        """`ops` of the device."""
        self.ops = ops

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, [N]; it may overwrite the logits."""
        return self.ops.cross_entropy(logits, targets)

    def nll_of_head(self, model: Any, hidden: Tensor, targets: Tensor) -> Tensor | None:
        """`cross_entropy` of the logits of a model, [N] from hidden states [N, D], in one operation with their product;
        None where there is no such operation for them."""
        return None

    def nll_and_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Negative log-probability of each target, and the entropy of its distribution in nats: [N] each."""
        return plain.nll_and_entropy(logits, targets)

    def is_greedy_match(self, logits: Tensor, targets: Tensor) -> Tensor:
        """1 where the target has the largest logit, the first one of equal ones, else 0: [N] in float32."""
        return plain.is_greedy_match(logits, targets)

    def divergence(self, logits: Tensor, taught: Tensor, comparison: Comparison) -> Tensor:
        """Divergence of each distribution from that of a teacher, [N]; `taught` has the teacher's logits, [N, V]."""
        return divergence(logits, taught, comparison)
