"""Tokens of completions, for tests."""

from __future__ import annotations

from llmsuite.rl.completion import Completion


def sampled_positions(completion: Completion) -> list[int]:
    """Positions in `ids` of the tokens that the model sampled: in an episode others lie between them."""
    if not completion.sampled_mask:
        return list(range(len(completion.ids)))
    return [i for i, is_sampled in enumerate(completion.sampled_mask) if is_sampled]
