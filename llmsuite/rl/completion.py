"""A sampled completion: the input of rewards and of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llmsuite.data.rows import Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion of one prompt. Its ids are the sampled ones: text is never tokenized again."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    """The sampled tokens, including the stop token. In an episode, the tokens of all turns, including the observations
    from the environment between them."""
    logprobs: Sequence[float]
    """Log-probabilities of the sampled tokens in the full distribution, with the temperature applied. Tokens of an
    environment have none."""
    finish_reason: Literal["stop", "length"]
    """length: the completion reached the token limit and has no stop token, or an episode ended before its environment
    ended it."""
    text: str
    """The completion without its stop token; for an episode, the last turn."""
    columns: Mapping[str, Any]
    """The other columns of the prompt's row, such as its answer."""
    group: int
    """Index of the prompt in the global batch. The completions of a prompt form a group, which is never split."""
    number: int
    """Index of the completion in its group."""
    prompt: str = ""
    """The prompt as text, as the chat template renders it."""
    sampled_mask: Sequence[bool] = ()
    """For each of `ids` in an episode, True where the model sampled the token; empty where it sampled all of them."""
    turns: Sequence[Message] = ()
    """The turns of an episode after its prompt."""
    episode_scores: Mapping[str, float] | None = None
    """The environment's values summed over all turns: its reward as "score", and the parts of the reward."""
    failure: str = ""
    """The reason for which the environment has no reward; empty otherwise."""

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the model sampled."""
        return len(self.logprobs)

    @property
    def num_turns(self) -> int:
        """The number of turns of the model in an episode."""
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"
