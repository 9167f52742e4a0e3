"""The generalised Jensen-Shannon divergence of a model's distributions over the vocabulary from those of a teacher
(Agarwal et al. 2023, arXiv 2306.13649, eq. 1).

With the distributions q of the teacher, p of the model and their mixture m = beta q + (1 - beta) p it is
beta KL(q || m) + (1 - beta) KL(p || m). Where beta is 0 or 1 that would be 0 everywhere: there the divergence is
KL(q || p) and KL(p || q), which are its limits after a division by beta and by 1 - beta.

Shapes: N tokens, D hidden of the model, E hidden of the teacher, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import paddle
from paddle.autograd import PyLayer

from llmsuite.base.typing import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison with a teacher."""

    teacher: Any
    """A `models.blocks.CausalLM` with the vocabulary of the model; it gets no gradients."""
    beta: float
    """Weight of the teacher in the mixture, from 0 to 1."""
    temperature: float
    """The logits of both models are divided by it."""

    @paddle.no_grad()
    def logits(self, taught: Tensor) -> Tensor:
        """Hidden states of the teacher [N, E] to its logits [N, V] in float32."""
        return self.teacher.logits(taught).astype("float32")


class OverVocabulary:
    """Reductions of numbers that each rank has of its part of the vocabulary; here one rank has all of it."""

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum over the ranks, of any shape."""
        return numbers

    def max(self, numbers: Tensor) -> Tensor:
        """Maximum over the ranks, of any shape."""
        return numbers

    def local(self, tensor: Tensor) -> Tensor:
        """The values of a tensor on this rank."""
        return tensor

    def of_tokens(self, numbers: Tensor) -> Tensor:
        """Numbers [N], the same on every rank, in the form in which other operations take them."""
        return numbers

    def of_vocabulary(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient [N, V], in the form that the logits have."""
        return gradient


def divergence(logits: Tensor, taught: Tensor, comparison: Comparison, ranks: OverVocabulary | None = None) -> Tensor:
    """The divergence of each token, [N] in float32.

    Args:
        logits: of the model, [N, V] float32; they may be cut along the vocabulary.
        taught: of the teacher, likewise.
        comparison: its beta and temperature.
        ranks: reductions over the ranks; None where this one has the full vocabulary.
    """
    found: Tensor = _Divergence.apply(logits, (taught, comparison, ranks or OverVocabulary()))
    return found


class _Divergence(PyLayer):
    """Keeps only the gradient of the logits for the backward pass, which sends nothing. The arguments besides the
    logits come in a tuple, which PyLayer does not look into."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rest: tuple[Tensor, Comparison, OverVocabulary]) -> Tensor:
        taught, comparison, ranks = rest
        temperature = comparison.temperature
        own = ranks.local(logits) / temperature
        other = ranks.local(taught) / temperature
        # the maxima are subtracted, so that no exponential overflows
        maxima = ranks.max(paddle.stack([own.max(-1), other.max(-1)]))  # [2, N]
        own = own - maxima[0].unsqueeze(-1)
        other = other - maxima[1].unsqueeze(-1)
        totals = ranks.sum(paddle.stack([own.exp().sum(-1), other.exp().sum(-1)])).log()  # [2, N]
        log_p = own - totals[0].unsqueeze(-1)
        log_q = other - totals[1].unsqueeze(-1)
        del own, other
        found, gradient = _terms(log_p, log_q, comparison.beta, ranks)
        ctx.ranks = ranks
        ctx.gradient = gradient / temperature
        return ranks.of_tokens(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.ranks.of_vocabulary(ctx.gradient * ctx.ranks.local(gradient).unsqueeze(-1))


def _terms(log_p: Tensor, log_q: Tensor, beta: float, ranks: OverVocabulary) -> tuple[Tensor, Tensor]:
    """The divergence [N], and its gradient with respect to the logits that the log-probabilities are of, [N, V].

    Args:
        log_p: log-probabilities of the model, [N, V].
        log_q: those of the teacher, [N, V].
        beta: weight of the teacher.
        ranks: reductions over the ranks.
    """
    p = log_p.exp()
    q = log_q.exp()
    if beta == 0:
        return ranks.sum((q * (log_q - log_p)).sum(-1)), p - q
    if beta == 1:
        ratio = log_p - log_q
        found = ranks.sum((p * ratio).sum(-1))
        return found, p * (ratio - found.unsqueeze(-1))
    weighted_p = log_p + math.log1p(-beta)
    weighted_q = log_q + math.log(beta)
    # log(exp(a) + exp(b)), of the larger one and the difference
    log_m = paddle.maximum(weighted_p, weighted_q) + paddle.log1p((-(weighted_p - weighted_q).abs()).exp())
    ratio = log_p - log_m
    of_model, of_teacher = ranks.sum(paddle.stack([(p * ratio).sum(-1), (q * (log_q - log_m)).sum(-1)]))
    # the gradient through m cancels but for this term: m sums to 1
    gradient = (1 - beta) * p * (ratio - of_model.unsqueeze(-1))
    return beta * of_teacher + (1 - beta) * of_model, gradient
