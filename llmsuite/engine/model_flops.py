"""Model FLOPs of a step: those that the model and the loss need, for MFU (model FLOPs utilization).

The same formula as in `llmsuite plan`, with the true lengths of documents in place of full rows, and without what an
implementation computes again (recompute): Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from llmsuite.engine.batch import Batch
from llmsuite.models.shape_spec import ShapeSpec
from llmsuite.planning.communication import model_prepasses
from llmsuite.planning.cost import attention_width, logit_flops, prefix_flops, token_weights
from llmsuite.planning.layout import Layout
from llmsuite.recipe.critic import critic_plans
from llmsuite.recipe.plans import ModelPlan, ParallelPlan, TrainPlan


@dataclasses.dataclass
class StepWork:
    """Sizes of the micro-batches that a rank has taken in a step."""

    document_lengths: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Tokens of each document without padding, by micro-batch: a token attends to those of its own document."""
    num_supervised: int = 0
    """Tokens whose logits or scores are computed."""

    def add(self, batch: Batch) -> None:
        """Add a micro-batch. One without "input_ids", of a stage of a plugin, has no tokens."""
        if "input_ids" in batch:
            self.document_lengths.append(document_lengths(batch))
            self.num_supervised += batch["num_supervised"]


def document_lengths(batch: Batch) -> np.ndarray:
    """Return the number of tokens of each document in a batch, [N], without padding."""
    num_rows, length = batch["input_ids"].shape
    # rows without "lengths" are all full, up to padding to a multiple
    lengths = batch.get("lengths", np.full([num_rows], min(length, batch["num_tokens"] // num_rows)))
    if "document_starts" not in batch:
        return np.asarray(lengths)
    starts = batch["document_starts"]
    is_token = np.arange(length) < np.asarray(lengths)[:, None]
    # the tokens of a document follow each other, and have one start in their row
    numbers = (starts + np.arange(num_rows)[:, None] * (length + 1))[is_token]
    ends = np.flatnonzero(np.diff(numbers)) + 1
    return np.diff([0, *ends, numbers.size])


@dataclasses.dataclass(frozen=True)
class _DecoderFlops:
    """FLOPs of a forward pass of a decoder, over all ranks."""

    of_token: float
    """FLOPs of its layers for each token."""
    of_square: Mapping[int | None, float]
    """FLOPs of attention for the square of the length of each document, by the window of the layers."""
    of_logits: float
    """FLOPs of the logits of a token; 0 for a head of scores."""
    prefix: int = 0
    """Tokens before each document that attention computes with (prefix tuning)."""
    of_prefix: float = 0.0
    """FLOPs of the network that makes the prefix, for each micro-batch."""

    @classmethod
    def from_shape(cls, shape: ShapeSpec, has_logits: bool, prefix: int = 0, of_prefix: float = 0.0) -> _DecoderFlops:
        of_square: dict[int | None, float] = {}
        for layer in shape.layers:
            of_square[layer.window] = of_square.get(layer.window, 0.0) + attention_width(layer)
        return cls(
            of_token=sum(2.0 * token_weights(layer, shape.hidden) for layer in shape.layers),
            of_square=of_square,
            of_logits=logit_flops(shape) if has_logits else 0.0,
            prefix=prefix,
            of_prefix=of_prefix * len(shape.layers),
        )

    def layers(self, work: StepWork) -> float:
        """FLOPs of the layers."""
        flops = len(work.document_lengths) * self.of_prefix
        for tokens in work.document_lengths:
            flops += self.of_token * float(tokens.sum())
            lengths = tokens.astype("float64") + self.prefix
            for window, each in self.of_square.items():
                squares = lengths**2
                if window is not None:
                    squares = squares - np.maximum(lengths - window, 0.0) ** 2
                flops += each * float(squares.sum())
        return flops

    def logits(self, work: StepWork) -> float:
        """FLOPs of the logits."""
        return self.of_logits * work.num_supervised


@dataclasses.dataclass(frozen=True)
class _Passes:
    """A decoder, and how often its forward FLOPs are needed; a backward pass needs them twice."""

    decoder: _DecoderFlops
    layers: float
    logits: float


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs of a run: of its model, and of a teacher and a critic where there are any. Completions that are
    sampled are not counted."""

    passes: Sequence[_Passes]

    @classmethod
    def from_plans(cls, model_plan: ModelPlan, parallel_plan: ParallelPlan, train_plan: TrainPlan) -> ModelFlops | None:
        """Derive the formula from the plans of a run; None where a family has no shape spec."""
        teacher = train_plan.teacher
        families = [model_plan.family, *([] if teacher is None else [teacher.family])]
        if any(family.shape_spec is None for family in families):
            return None
        layout = Layout(model_plan, parallel_plan)
        shape_of = model_plan.family.shape_spec
        assert shape_of is not None
        decoder = _DecoderFlops.from_shape(
            shape_of(model_plan.config),
            not model_plan.is_scored,
            model_plan.prefix.tokens or 0,
            prefix_flops(layout),
        )
        forward = 1 + sum(prepass.rows for prepass in model_prepasses(train_plan.profile))
        # of a frozen model, a backward pass computes the gradients of activations only
        backward = 1 if model_plan.is_frozen else 2
        head = 1 if model_plan.is_frozen and layout.trains_head else 0
        passes = [_Passes(decoder, forward + backward, forward + backward + head)]
        if teacher is not None:
            assert teacher.family.shape_spec is not None
            taught = _DecoderFlops.from_shape(teacher.family.shape_spec(teacher.config), True)
            passes.append(_Passes(taught, forward, forward))
        critic = critic_plans(model_plan, parallel_plan, train_plan)
        if critic is not None:
            found = cls.from_plans(critic.model, critic.parallel, critic.train)
            assert found is not None, "it is of the family of the model"
            passes += found.passes
        return cls(passes)

    def of(self, work: StepWork) -> float:
        """FLOPs of a step for the micro-batches of a rank, as if it computed them alone."""
        return sum(
            passes.layers * passes.decoder.layers(work) + passes.logits * passes.decoder.logits(work)
            for passes in self.passes
        )
