"""Keys that the section of a stage may have, and that rules between sections or the planner read.

`isinstance(section, HasSplit)` is true where the section of a stage has such a key; the stage of a plugin declares a
key of that name.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class HasSplit(Protocol):
    """Section of a stage that can take its evaluation data from `data.train`."""

    split: str | None
    """Proportions of the parts; None to use all data for training."""


@runtime_checkable
class HasReference(Protocol):
    """Section of a stage with a reference model."""

    reference: str | None
    """Source of the reference, such as "adapter_off"."""


@runtime_checkable
class HasAdvantage(Protocol):
    """Section of a stage with rollouts that chooses the baseline of a reward."""

    advantage: str
    """"reinforce" where the completions of a prompt are not compared."""


@runtime_checkable
class CorrectsRollouts(Protocol):
    """Section of a stage that can weight stale completions."""

    rollout_correction: str
    """"none" where it does not."""


@runtime_checkable
class HasMean(Protocol):
    """Section of a stage that can average each micro-batch by itself."""

    mean: str
    """"micro_batches" where it does."""


@runtime_checkable
class HasSftMean(Protocol):
    """Section of a stage whose SFT term can average each micro-batch by itself."""

    sft_mean: str
    """"micro_batches" where it does."""


def mean_of_micro_batches(section: object) -> str | None:
    """The key of a section that averages each micro-batch by itself, so that their size changes the loss; None where
    none does."""
    if isinstance(section, HasMean) and section.mean == "micro_batches":
        return "mean"
    if isinstance(section, HasSftMean) and section.sft_mean == "micro_batches":
        return "sft_mean"
    return None


@runtime_checkable
class HasDocumentMask(Protocol):
    """Section of a stage that packs documents."""

    document_mask: bool
    """True where a token attends only to its own document."""
