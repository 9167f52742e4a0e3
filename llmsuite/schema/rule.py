"""A rule: a combination of recipe keys that cannot run, the reason, and the message about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

Violation = tuple[str, str]
"""(key, message): a key that breaks a rule, and what to do about it."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination that is refused."""

    combination: str
    reason: str
    example: tuple[str, ...]
    """Overrides that make recipes/llama/dpo.json break the rule; none when no override does."""
    check: Callable[[Any], Iterator[Violation]]
