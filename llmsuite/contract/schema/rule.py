"""Rules: combinations of recipe keys that are rejected, each with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

Violation = tuple[str, str]
"""(key, message): a key that violates a rule, and what is wrong and how to fix it."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination of keys that is rejected."""

    combination: str
    """The combination in Markdown, for docs/reference/rules.md."""
    reason: str
    example: tuple[str, ...]
    """Overrides with which recipes/llama/dpo.json violates the rule; empty if no override can."""
    check: Callable[[Any], Iterator[Violation]]
    """Yields the violations of a section, or of a `RuleContext` for rules between sections."""
