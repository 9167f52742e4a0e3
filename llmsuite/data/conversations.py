"""Formats of conversation rows. See `llmsuite.data.formats`.

All of the assistant's turns are supervised, unless a turn has the key "weight" or "loss" (0, 1, true, false).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.data.formats import (
    SHAREGPT_ROLES,
    Row,
    alpaca_turns,
    check_order,
    content_at,
    has_keys,
    messages_at,
    name_at,
    text_at,
    texts_at,
)
from llmsuite.data.rows import ROLES, Conversation, Message, ToolCall
from llmsuite.shown import kind_of_json
from llmsuite.specs import DataFormat


def paddlenlp(row: Row) -> Conversation:
    """`{"src": "question", "tgt": "answer"}`, or lists of as many questions as answers; "system" is optional.

    "label", a list with 0 or 1 for each answer, selects those that are supervised.
    """
    users, answers = texts_at(row, "src"), texts_at(row, "tgt")
    if not users or len(users) != len(answers):
        raise ValueError(f"'src' has {len(users)} turns and 'tgt' {len(answers)}; every src needs its tgt")
    flags = row.get("label")
    if flags is None:
        flags = [1] * len(answers)
    if not isinstance(flags, list) or len(flags) != len(answers):
        raise ValueError(f"'label' is {flags!r}; a list with 0 or 1 for each of the {len(answers)} 'tgt' is needed")
    supervised = [_flag(flag, f"label[{i}]") for i, flag in enumerate(flags)]
    return _rounds(_system(row), list(zip(users, answers)), supervised)


def alpaca(row: Row) -> Conversation:
    """`{"instruction", "input", "output"}`: the input follows the instruction on a line of its own, if there is one.

    Optional: "system", and "history", a list of earlier [question, answer].
    """
    messages = [*alpaca_turns(row), Message("assistant", text_at(row, "output"))]
    return Conversation(tuple(messages), tuple(message.role == "assistant" for message in messages))


def sharegpt(row: Row) -> Conversation:
    """`{"conversations": [{"from", "value"}]}`; "system" and "tools" are optional.

    The value of a "function_call" is JSON with name and arguments, or a list of such.
    """
    turns = _list(row, "conversations")
    messages = _system(row)
    supervised = [False] * len(messages)
    for i, turn in enumerate(turns):
        where = f"conversations[{i}]"
        speaker = _known(turn, where, "from", SHAREGPT_ROLES)
        text = text_at(turn, "value", where)
        if turn["from"] == "function_call":
            message = Message("assistant", "", calls_at(_json(text, f"{where}.value"), f"{where}.value"))
        else:
            message = Message(SHAREGPT_ROLES[speaker], text)
        messages.append(message)
        supervised.append(_is_supervised(turn, where, message.role))
    check_order(messages, "conversations", len(messages) - len(turns))
    return Conversation(tuple(messages), tuple(supervised), tools_at(row))


def openai(row: Row) -> Conversation:
    """`{"messages": [{"role", "content"}]}`; the assistant may have "tool_calls", and the row "tools".

    The "name" of a turn is for chat templates that show it.
    """
    messages, supervised = [], []
    for i, turn in enumerate(_list(row, "messages")):
        where = f"messages[{i}]"
        role = _known(turn, where, "role", ROLES)
        calls: tuple[ToolCall, ...] = ()
        if turn.get("tool_calls"):
            if role != "assistant":
                raise ValueError(f"'{where}.tool_calls' is there, but {role!r} calls no tools")
            calls = calls_at(turn["tool_calls"], f"{where}.tool_calls")
        # with a call there may be nothing to say
        content = "" if calls and turn.get("content") is None else content_at(turn, where)
        messages.append(Message(role, content, calls, name_at(turn, where)))
        supervised.append(_is_supervised(turn, where, role))
    check_order(messages, "messages")
    return Conversation(tuple(messages), tuple(supervised), tools_at(row))


def trl_completion(row: Row) -> Conversation:
    """`{"prompt", "completion"}`, each text or a list of `{"role", "content"}`; "tools" is optional.

    The completion is one turn of the assistant, and nothing else is supervised. Texts are turns too.
    """
    prompt = messages_at(row["prompt"], "prompt", "user")
    completion = messages_at(row["completion"], "completion", "assistant")
    if len(completion) != 1 or completion[0].role != "assistant":
        raise ValueError("'completion' is not one turn of the assistant; with more of them use 'messages'")
    messages = (*prompt, *completion)
    check_order(messages, "prompt")
    return Conversation(messages, (*(False for _ in prompt), True), tools_at(row))


def _rounds(messages: list[Message], rounds: Sequence[tuple[str, str]], flags: Sequence[bool]) -> Conversation:
    supervised = [False] * len(messages)
    for (question, answer), flag in zip(rounds, flags):
        messages += [Message("user", question), Message("assistant", answer)]
        supervised += [False, flag]
    return Conversation(tuple(messages), tuple(supervised))


def _system(row: Row) -> list[Message]:
    return [Message("system", text_at(row, "system"))] if row.get("system") else []


def _list(row: Row, key: str) -> list[Any]:
    turns = row[key]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key!r} is not a list of turns")
    return turns


def _known(turn: Any, where: str, key: str, known: Any) -> str:
    if not isinstance(turn, Mapping) or key not in turn:
        raise ValueError(f"{where!r} is not an object with {key!r}{_other_turns(turn, key)}")
    speaker = turn[key]
    if not isinstance(speaker, str) or speaker not in known:
        raise ValueError(f"{where!r} has the unknown role {speaker!r}; known: {', '.join(known)}")
    return speaker


def _other_turns(turn: Any, key: str) -> str:
    """What to do about turns that the other one of two formats has."""
    here, other, there = (
        ("conversations", "role", "messages") if key == "from" else ("messages", "from", "conversations")
    )
    if not isinstance(turn, Mapping) or other not in turn:
        return ""
    return f'; turns with {other!r} are {there}: name all fields in data.columns, such as {{"{there}": "{here}"}}'


def _is_supervised(turn: Row, where: str, role: str) -> bool:
    flags = {_flag(turn[key], f"{where}.{key}") for key in ("weight", "loss") if turn.get(key) is not None}
    if len(flags) == 2:
        raise ValueError(f"{where!r} has a 'weight' and a 'loss' that disagree")
    if role != "assistant" and True in flags:
        raise ValueError(f"{where!r} is to be supervised, but said by {role!r}; only the assistant's turns are")
    return role == "assistant" and False not in flags


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise ValueError(f"{where!r} is {value!r}; 0 or 1 is needed")
    return bool(value)


def calls_at(value: Any, where: str) -> tuple[ToolCall, ...]:
    """The calls of a turn, as OpenAI or others write them. Raises ValueError for anything else."""
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise ValueError(f"{where!r} is empty")
    found = []
    for call in calls:
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):  # as OpenAI wraps it
            call = call["function"]
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or not call["name"]:
            raise ValueError(f"{where!r} has a call without a name")
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments or "{}", f"arguments of {call['name']} in {where}")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where!r} has a call of {call['name']} whose arguments are no JSON object")
        found.append(ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)))
    return tuple(found)


def tools_at(row: Row) -> str:
    """The tools of a row in the format of OpenAI, from any of the known formats."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if not isinstance(tools, (list, type(None))):
        raise ValueError(f"'tools' is {kind_of_json(tools)}, not a list of functions")
    wrapped = []
    for i, tool in enumerate(tools or []):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"'tools[{i}]' is not a function with a name")
        wrapped.append({"type": "function", "function": function})
    return json.dumps(wrapped, ensure_ascii=False) if wrapped else ""


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where!r} is not JSON: {error}") from error


BUILTIN = [
    DataFormat(
        name="openai",
        help="messages of role/content, tool_calls, weight; tools",
        kind="conversation",
        matches=has_keys("messages"),
        convert=openai,
    ),
    DataFormat(
        name="sharegpt",
        help="conversations of from/value; system, tools",
        kind="conversation",
        matches=has_keys("conversations"),
        convert=sharegpt,
    ),
    DataFormat(
        name="alpaca",
        help="instruction, input, output; history, system",
        kind="conversation",
        matches=has_keys("instruction", "output"),
        convert=alpaca,
    ),
    DataFormat(
        name="trl_completion",
        help="prompt, completion: text or lists of role/content; tools",
        kind="conversation",
        matches=has_keys("prompt", "completion"),
        convert=trl_completion,
    ),
    DataFormat(
        name="paddlenlp",
        help="src, tgt: text or lists; system, label",
        kind="conversation",
        matches=has_keys("src", "tgt"),
        convert=paddlenlp,
    ),
]
