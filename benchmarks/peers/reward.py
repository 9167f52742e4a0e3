"""A reward that costs nothing and differs between most completions: of llmsuite and of TRL."""

from __future__ import annotations

from typing import Any


def share(text: str) -> float:
    """Fraction of a text's characters that are an e or a 1."""
    return (text.count("e") + text.count("1")) / max(len(text), 1)


def of_completions(completions: Any) -> list[float]:
    """Of llmsuite."""
    return [share(completion.text) for completion in completions]
