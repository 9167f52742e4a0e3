"""The turns, calls and tools of a row: one reader for the rows of all formats, for prompts, and for requests.

A turn is read from what OpenAI's API calls a message. Its chat template gets it with all the keys that it has, so that
nothing that a row says is dropped here; what a template leaves out is found when it is rendered. Functions raise
ValueError saying which key is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.data.bounds import MOST_TOOLS, check_number
from llmsuite.data.rows import REASONING, ROLES, Message, ToolCall
from llmsuite.shown import kind_of_json

Row = Mapping[str, Any]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a part of a turn that is text: of chats, and of questions and answers with OpenAI's responses."""

DEVELOPER = "developer"
"""What OpenAI calls the system since o1. A template that knows the role gets it, others get a turn of the system."""

_OF_LOSS = ("weight", "loss")
"""Keys that say whether a turn is supervised, and are nothing that it says."""


def turn_at(turn: Any, where: str) -> Message:
    """A turn in the form of OpenAI's API: `{"role", "content"}`, and with it "name", "tool_calls", "tool_call_id", the
    keys of `REASONING`, and any other that chat templates know."""
    if not isinstance(turn, Mapping) or "role" not in turn:
        raise ValueError(f"{where!r} is not an object with 'role' and 'content'{_other_turns(turn, 'role')}")
    role = turn["role"]
    if role not in (*ROLES, DEVELOPER):
        raise ValueError(f"{where!r} has the unknown role {role!r}; known: {', '.join((*ROLES, DEVELOPER))}")
    return _message(turn, "system" if role == DEVELOPER else role, where)


def sharegpt_turn_at(turn: Any, where: str) -> Message:
    """A turn in ShareGPT's form: `{"from", "value"}`. The value of a "function_call" is JSON with name and arguments,
    or a list of such; other keys are as in `turn_at`."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        raise ValueError(f"{where!r} is not an object with 'from' and 'value'{_other_turns(turn, 'from')}")
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where!r} has the unknown role {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}")
    for key in ("role", "content"):
        if turn.get(key) is not None:
            raise ValueError(f"{where!r} has both 'from' and {key!r}; a turn has one form")
    text = text_at(turn, "value", where)
    role = SHAREGPT_ROLES[speaker]
    said: dict[str, Any] = {"role": role, "content": text}
    if speaker == "function_call":
        if turn.get("tool_calls"):
            raise ValueError(f"{where!r} is a function_call and has 'tool_calls' too; one of them is needed")
        said |= {"content": "", "tool_calls": from_json(text, f"{where}.value")}
        if not said["tool_calls"]:
            raise ValueError(f"'{where}.value' is empty")
    others = {key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}
    return _message({**others, **said}, role, where, calls_are_at=f"{where}.value" if "tool_calls" in said else "")


def _message(turn: Row, role: str, where: str, calls_are_at: str = "") -> Message:
    calls_are_at = calls_are_at or f"{where}.tool_calls"
    calls: tuple[ToolCall, ...] = ()
    if turn.get("tool_calls"):
        if role != "assistant":
            raise ValueError(f"{calls_are_at!r} is there, but {role!r} calls no tools")
        calls = calls_at(turn["tool_calls"], calls_are_at)
    if turn.get("function_call"):
        raise ValueError(f"'{where}.function_call' is OpenAI's old form of a call; 'tool_calls' is its form today")
    # with a call there may be nothing to say
    is_silent = bool(calls) and turn.get("content") is None
    content = "" if is_silent else content_at(turn, where)
    for key in ("name", "tool_call_id"):
        if turn.get(key) is not None:
            text_at(turn, key, where)
    said = {key: value for key, value in turn.items() if value is not None and key not in _OF_LOSS}
    said["content"] = None if is_silent else content
    if calls:
        said["tool_calls"] = _wrapped_calls(turn["tool_calls"])
    elif "tool_calls" in said:  # an empty list, which some templates take for a call
        del said["tool_calls"]
    is_plain = said.keys() == {"role", "content"} and said["role"] == role and not is_silent
    return Message(role, content, calls, _reasoning(turn, where), "" if is_plain else _as_json(said, where))


def _reasoning(turn: Row, where: str) -> str:
    """What a model thought before a turn. Some rows say it under two names."""
    texts = [text_at(turn, key, where) for key in REASONING if turn.get(key) is not None]
    found = [text for text in texts if text]
    if len(set(found)) > 1:
        raise ValueError(f"{where!r} has different thoughts under several of the keys {', '.join(REASONING)}")
    return found[0] if found else ""


def _as_json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError) as error:  # a table may have dates and bytes
        raise ValueError(f"{where!r} has a value that is nothing of JSON: {error}") from error


def _other_turns(turn: Any, key: str) -> str:
    """What to do about turns that the other one of two formats has."""
    here, other, there = (
        ("conversations", "role", "messages") if key == "from" else ("messages", "from", "conversations")
    )
    if not isinstance(turn, Mapping) or other not in turn:
        return ""
    return f'; turns with {other!r} are {there}: name all fields in data.columns, such as {{"{there}": "{here}"}}'


def turns_at(row: Row, key: str) -> list[Any]:
    """The list of turns of a row."""
    turns = row[key]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key!r} is not a list of turns")
    return turns


def messages_at(value: Any, where: str, default_role: str) -> list[Message]:
    """The turns of a list of `{"role", "content"}`, or the one of a text, which `default_role` says."""
    if isinstance(value, str):
        return [Message(default_role, value)]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where!r} is neither text nor a list of turns")
    return [turn_at(turn, f"{where}[{i}]") for i, turn in enumerate(value)]


def with_system(row: Row, messages: Sequence[Message]) -> list[Message]:
    """Turns behind the row's column "system", if it has one that says something."""
    if row.get("system") is None:
        return list(messages)
    system = Message("system", text_at(row, "system"))
    if not system.content:
        return list(messages)
    if messages and messages[0].role == "system":
        if messages[0].content.strip() == system.content.strip():
            return list(messages)
        raise ValueError("there is a column 'system', and the turns begin with another one of the system")
    return [system, *messages]


_BEFORE = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def check_order(messages: Sequence[Message], where: str, first: int = 0) -> None:
    """Raises ValueError unless the roles alternate as in a conversation: answers follow a user or a tool, and so on.

    `where` names the list of the turns, which begins with turn `first` of them.
    """
    before: str | None = None
    for i, message in enumerate(messages):
        if before not in _BEFORE[message.role]:
            place = f"behind one of the {before}" if before else "at the beginning"
            raise ValueError(f"the turns are out of order: '{where}[{i - first}]' of the {message.role} is {place}")
        before = message.role


def text_at(row: Row, key: str, where: str = "") -> str:
    """The text of a key; `where` says what the row is a part of."""
    if key not in row:
        raise ValueError(f"{where!r} has no key {key!r}" if where else f"has no key {key!r}")
    value = row[key]
    if not isinstance(value, str):
        place = f"{where}.{key}" if where else key
        raise ValueError(f"{place!r} is {kind_of_json(value)}, not text")
    return value


def texts_at(row: Row, key: str, allow_missing: bool = False) -> list[str]:
    """The texts of a key that has one or a list of them."""
    value = row.get(key)
    if value is None and allow_missing:
        return []
    if isinstance(value, str):
        return [value]
    if key not in row:
        raise ValueError(f"has no key {key!r}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key!r} is not text or a list of texts")
    return value


def content_at(turn: Row, where: str) -> str:
    """What a turn says: its content, a text or a list of parts."""
    content = turn.get("content")
    return joined(content, f"{where}.content") if isinstance(content, list) else text_at(turn, "content", where)


def joined(parts: Sequence[Any], where: str) -> str:
    """The text of the parts of a turn, as OpenAI's API has them. Parts that are not text, such as pictures, are
    refused."""
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise ValueError(f"'{where}[{i}]' is {kind_of_json(part)}; a part is an object with type and text")
        kind = part.get("type", "text")
        if kind not in TEXT_PARTS:
            raise ValueError(
                f"'{where}[{i}]' is a part of type {str(kind)[:100]!r}; only parts of type 'text' are read"
            )
        texts.append(text_at(part, "text", f"{where}[{i}]"))
    return "".join(texts)


def calls_at(value: Any, where: str) -> tuple[ToolCall, ...]:
    """The calls of a turn, as OpenAI or others write them."""
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise ValueError(f"{where!r} is empty")
    check_number(calls, MOST_TOOLS, repr(where), "calls")
    found = []
    for call in calls:
        identifier = call.get("id") if isinstance(call, Mapping) else None
        if identifier is not None and not isinstance(identifier, str):
            raise ValueError(f"{where!r} has a call whose id is {kind_of_json(identifier)}, not text")
        if _is_wrapped(call):
            call = call["function"]
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or not call["name"]:
            raise ValueError(f"{where!r} has a call without a name")
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = from_json(arguments or "{}", f"arguments of {call['name']} in {where}")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where!r} has a call of {call['name']} whose arguments are no JSON object")
        found.append(ToolCall(call["name"], _as_json(arguments, where), identifier))
    return tuple(found)


def _is_wrapped(call: Any) -> bool:
    """Whether a call is written as OpenAI does: {"type": "function", "function": {"name", "arguments"}}."""
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _wrapped_calls(value: Any) -> list[dict[str, Any]]:
    """Calls as the row has them, in OpenAI's form, which is that of most templates."""
    calls = value if isinstance(value, list) else [value]
    wrapped = []
    for call in calls:
        if _is_wrapped(call):
            plain = {"type": "function", **call}
        else:
            plain = {"type": "function", "function": {key: call[key] for key in call if key != "id"}}
            if call.get("id") is not None:
                plain["id"] = call["id"]
        plain["function"] = {**plain["function"]}
        plain["function"].setdefault("arguments", {})
        wrapped.append({key: inner for key, inner in plain.items() if inner is not None})
    return wrapped


def tools_at(row: Row) -> str:
    """The tools of a row in the format of OpenAI, from any of the known formats: JSON, empty for none."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = from_json(tools, "tools") if tools.strip() else None
    if not isinstance(tools, (list, type(None))):
        raise ValueError(f"'tools' is {kind_of_json(tools)}, not a list of functions")
    check_number(tools or [], MOST_TOOLS, "'tools'", "functions")
    wrapped = []
    for i, tool in enumerate(tools or []):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"'tools[{i}]' is not a function with a name")
        wrapped.append({"type": "function", **tool} if "function" in tool else {"type": "function", "function": tool})
    return _as_json(wrapped, "tools") if wrapped else ""


def from_json(text: str, where: str) -> Any:
    """The value of a text that is JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where!r} is not JSON: {error}") from error
