"""How much a row may have. A template renders a conversation once for each turn that is supervised, so that time and
memory grow with the product of both; a stranger's row of 64 MB would take hours."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from llmsuite.data.rows import conversations_of

MOST_COLUMNS = 10_000
MOST_TURNS = 4_096
"""Turns of a conversation. Those of agents have about a thousand."""
MOST_TOOLS = 1_024
"""Tools of a row, and calls of a turn. Each is looked for in the text that a template makes."""
MOST_RENDERED = 1 << 30
"""Characters of a conversation, times its supervised turns: what is rendered of it."""


def check_number(found: Sized, most: int, where: str, what: str) -> None:
    """Raise ValueError for more of something than are read; `where` has them, and `what` they are."""
    if len(found) > most:
        raise ValueError(f"{where} has {len(found):,} {what}; at most {most:,} are read")


def check_conversations(row: Any) -> None:
    """Raise ValueError for a row, of any kind that comes with llmsuite, whose conversations are too long."""
    for conversation in conversations_of(row):
        check_number(conversation.messages, MOST_TURNS, "it", "turns")
        size = sum(len(m.given) or len(m.content) + len(m.reasoning) for m in conversation.messages)
        rendered = (size + len(conversation.tools)) * max(1, sum(conversation.supervised))
        if rendered > MOST_RENDERED:
            raise ValueError(
                f"it has {size:,} characters and {sum(conversation.supervised):,} supervised turns; at most "
                f"{MOST_RENDERED:,} characters are rendered of a row, all before each of them: cut it into several"
            )
