"""A completion that was drawn for a prompt: what rewards see, and what training learns from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llmsuite.data.rows import Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion of one prompt. Its ids are those that were drawn: they are never made of the text again."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    """The tokens drawn, with the stop token that ended them. In an episode, those of all turns and of what the
    environment said between them."""
    logprobs: Sequence[float]
    """Log-probabilities of the tokens that were drawn, under the distribution they were drawn from: the temperature is
    applied. Those of an environment have none."""
    finish_reason: Literal["stop", "length"]
    """length: it reached the limit of tokens and has no stop token, or an episode ended before its environment said
    so."""
    text: str
    """The completion without its stop token; the last turn of an episode."""
    columns: Mapping[str, Any]
    """The other columns of the prompt's row, such as its answer."""
    group: int
    """Number of the prompt in the global batch. The completions of a prompt are a group, which is never cut."""
    number: int
    """Number of the completion in its group."""
    prompt: str = ""
    """The prompt as text, as the chat template renders it."""
    is_own: Sequence[bool] = ()
    """Whether the model has drawn each of `ids`, for an episode; empty where it has drawn all."""
    turns: Sequence[Message] = ()
    """The turns of an episode behind its prompt."""
    episode_scores: Mapping[str, float] | None = None
    """What the environment gave for all turns together: its reward as "score", and its parts."""
    failure: str = ""
    """Why there is no reward of the environment."""

    @property
    def num_own(self) -> int:
        """Tokens that the model has drawn."""
        return len(self.logprobs)

    @property
    def own(self) -> list[int]:
        """Places in `ids` of the tokens that the model has drawn."""
        return [i for i, mine in enumerate(self.is_own) if mine] if self.is_own else list(range(len(self.ids)))

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"
