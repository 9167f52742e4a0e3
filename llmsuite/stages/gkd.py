"""Generalised knowledge distillation (Agarwal et al. 2023, arXiv 2306.13649): docs/guide/distillation.md.

rows -> token ids with a loss mask on the assistant's turns, as in `sft` -> hidden states of the teacher and of the
model -> divergence of the model's distribution over the vocabulary from that of the teacher, at each supervised token.

Shapes: N tokens with a weight above 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle

from llmsuite.base.typing import Tensor
from llmsuite.engine.batch import flat_targets, tensor, total
from llmsuite.engine.stage import Batch, LossTerms, Stage, StageContext
from llmsuite.models.divergence import Comparison
from llmsuite.stages.gkd_section import GkdSection
from llmsuite.stages.language_model import WeightedTokens, hidden_at_positions
from llmsuite.stages.sft import SftStage


class GkdStage(SftStage):
    """Trains on the distributions of a teacher at the tokens of the assistant's turns. Rows, samples and batches are
    those of `sft`."""

    truncate_key = "gkd.truncate"
    batch_layout = Stage.batch_layout  # a teacher runs in no step program

    def __init__(self, section: GkdSection, context: StageContext):
        super().__init__(section, context)
        self._mtp_weight = 0.0  # a teacher has no MTP layers: refused before the run
        self._profile = section.profile()
        self._beta = section.beta
        self._temperature = section.temperature
        self._sft_weight = section.sft_weight
        self._comparison: Comparison | None = None
        """With the teacher; None on ranks without the last layers."""

    def before_training(self, model: Any, samples: Iterable[WeightedTokens]) -> None:
        """Load the teacher, on the ranks that compute the loss."""
        if model.is_last:
            self._comparison = Comparison(self.context.teacher(), self._beta, self._temperature)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the supervised tokens, each with the weight of its turn."""
        taught = self._taught(batch)  # before the model's own activations need memory
        hidden = hidden_at_positions(model, batch)  # [N, D]
        weights = tensor(batch, "weights")
        weight = total(batch, "weight")
        if not self._sft_weight:
            divergence = model.token_divergence(hidden, taught, self._comparison)
            return LossTerms((divergence * weights).sum(), weight, self._profile.checked({}))
        divergence, nll = model.token_divergence_and_nll(hidden, taught, flat_targets(batch), self._comparison)
        compared = (divergence * weights).sum()
        own = (nll * weights).sum()
        sums = {"divergence": (compared.detach(), weight), "nll": (own.detach(), weight)}
        return LossTerms(compared + self._sft_weight * own, weight, self._profile.checked(sums))

    @paddle.no_grad()
    def _taught(self, batch: Batch) -> Tensor | None:
        """Hidden states of the teacher at the positions of a batch, [N, E]; None on ranks without the last layers."""
        if self._comparison is None:
            return None
        return hidden_at_positions(self._comparison.teacher, batch)
