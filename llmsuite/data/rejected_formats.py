"""Formats of pairs of ms-swift: a conversation that ends with the chosen answer, and the rejected answer of its row.

`convert` raises ValueError that names the wrong key; the reader adds file and line.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmsuite.contract.specs import DataFormat
from llmsuite.data.conversation_formats import openai, query_response
from llmsuite.data.preference_formats import has_keys
from llmsuite.data.rows import Conversation, Message, Preference
from llmsuite.data.turns import Row, get_turns, parse_message, parse_messages, parse_tools

_ANSWER = "rejected_response"
_CONVERSATION = "rejected_messages"
_TOOLS = "rejected_tools"


def messages_preference(row: Row) -> Preference:
    """`{"messages": [{"role", "content"}], "rejected_response": "answer"}`; the last turn is the chosen answer.

    The rejected answer is a text or a list of one turn. Or it is the last turn of "rejected_messages", a conversation
    that is the same up to it. "rejected_tools" are its tools: ms-swift gives "tools" to "messages" and to
    "rejected_response", and not to "rejected_messages".
    """
    return _pair(row, openai(row), "messages")


def query_response_preference(row: Row) -> Preference:
    """`{"query", "response", "rejected_response"}`; "history" is optional, and the rest is as in
    `messages_preference`."""
    return _pair(row, query_response(row), "response")


def _pair(row: Row, conversation: Conversation, where: str) -> Preference:
    """Return the answer of a conversation with the rejected one of its row. `where` names the column of the former."""
    prompt, chosen = _last_round(conversation.messages, where)
    given = [key for key in (_ANSWER, _CONVERSATION) if row.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"has {' and '.join(given) or 'neither'} of {_ANSWER}, {_CONVERSATION}; one of them is needed")
    tools = conversation.tools
    rejected_tools = parse_tools({"tools": row.get(_TOOLS)})
    if given == [_CONVERSATION]:
        turns = get_turns(row, _CONVERSATION)
        messages = [parse_message(turn, f"{_CONVERSATION}[{i}]") for i, turn in enumerate(turns)]
        rejected_prompt, rejected = _last_round(messages, _CONVERSATION)
        if rejected_prompt != prompt:
            raise ValueError(f"{where!r} and {_CONVERSATION!r} differ in more than their last turn")
    else:
        answers = parse_messages(row[_ANSWER], _ANSWER, "assistant")
        if len(answers) != 1:
            raise ValueError(f"{_ANSWER!r} has {len(answers)} turns; one is needed")
        rejected = answers[0]
        rejected_tools = rejected_tools or tools
    if rejected.role != "assistant":
        raise ValueError(f"the rejected answer is a turn of {rejected.role!r}, not of the assistant")
    if rejected_tools != tools:
        raise ValueError(f"'tools' and {_TOOLS!r} differ; both answers have the same tools")
    return Preference(prompt, chosen, rejected, tools, conversation.template_kwargs)


def _last_round(messages: Sequence[Message], where: str) -> tuple[tuple[Message, ...], Message]:
    """Return the turns up to the last one of the user, and the one after it. Raises ValueError if there are more."""
    roles = [message.role for message in messages]
    if "user" not in roles:
        raise ValueError(f"{where!r} has no turn of the user")
    length = len(roles) - roles[::-1].index("user")
    if len(messages) != length + 1:
        raise ValueError(
            f"{where!r} has {len(messages) - length} turns after the last one of the user; one answer is needed"
        )
    return tuple(messages[:length]), messages[length]


def _has_rejected(row: Row) -> bool:
    return _ANSWER in row or _CONVERSATION in row


BUILTIN = [
    DataFormat(
        name="messages_preference",
        help="messages of role/content, rejected_response or rejected_messages; tools",
        kind="preference",
        matches=lambda row: "messages" in row and _has_rejected(row),
        convert=messages_preference,
        columns=frozenset({"messages", _ANSWER, _CONVERSATION, _TOOLS}),
    ),
    DataFormat(
        name="query_response_preference",
        help="query, response, rejected_response; history, system",
        kind="preference",
        matches=has_keys("query", "response", _ANSWER),
        convert=query_response_preference,
        columns=frozenset({"query", "response", "history", _ANSWER, _CONVERSATION, _TOOLS}),
    ),
]
