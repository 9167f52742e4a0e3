"""Limits on the size of a row.

Many templates have to render a conversation once for each supervised turn, so time and memory grow with the product of
length and supervised turns: an untrusted row of 64 MB would take hours.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from llmsuite.data.rows import conversations_of

MAX_COLUMNS = 10_000
MAX_TURNS = 4_096
"""Turns of a conversation. Agent traces have about a thousand."""
MAX_TOOLS = 1_024
"""Tools of a row, and tool calls of a turn. Each is searched for in the rendered text."""
MAX_ANSWERS = 128
"""Ranked answers of a row, which make up to 8,128 pairs."""
MAX_RENDERED_CHARS = 1 << 30
"""Characters of a conversation times its supervised turns: the characters that are rendered in all."""
MAX_RENDERED_TURNS = 1 << 20
"""Turns that are rendered in all for a conversation, by a template that has to render it for each supervised turn:
those of about 1,400 turns, of which half are supervised."""
MAX_UNKNOWN_KEYS = 64
"""Unknown keys of the turns of a conversation. For each the conversation is rendered with and without it."""


def check_count(items: Sized, limit: int, where: str, what: str) -> None:
    """Raise ValueError if there are more than `limit` items.

    Args:
        items: to count.
        limit: the most that are read.
        where: the place that has them, for the message.
        what: a plural noun for them, for the message.
    """
    if len(items) > limit:
        raise ValueError(f"{where} has {len(items):,} {what}; at most {limit:,} are read")


def check_conversations(row: Any) -> None:
    """Raise ValueError for a row, of any kind that comes with llmsuite, whose conversations are too long."""
    for conversation in conversations_of(row):
        check_count(conversation.messages, MAX_TURNS, "it", "turns")
        size = sum(len(m.raw) or len(m.content) + len(m.reasoning) for m in conversation.messages)
        rendered = (size + len(conversation.tools)) * max(1, sum(conversation.supervised))
        if rendered > MAX_RENDERED_CHARS:
            raise ValueError(
                f"it has {size:,} characters and {sum(conversation.supervised):,} supervised turns; at most "
                f"{MAX_RENDERED_CHARS:,} characters are rendered for a row, as each supervised turn is rendered with "
                "all text before it: split it into several rows"
            )
