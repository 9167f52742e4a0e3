"""Parses turns, tool calls and tools: for the rows of all formats, for prompts, and for requests.

A turn has the form of a message of OpenAI's API. The chat template receives all its keys, so nothing of a row is
dropped here; parts that a template leaves out are found when it is rendered. Functions raise ValueError that names the
wrong key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.base.redaction import json_type_name
from llmsuite.base.strict_json import parse_json
from llmsuite.contract.schema.columns import kwargs_fault
from llmsuite.data.keys import LOSS_KEYS, MARGIN, MEDIA, PART_KEYS, TEMPLATE_KWARGS, is_nothing
from llmsuite.data.row_limits import MAX_TOOLS, check_count
from llmsuite.data.rows import REASONING, ROLES, Message, ToolCall

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
"""Types of content parts with text: of OpenAI's chat API, and of its responses API."""

DEVELOPER = "developer"
"""OpenAI's name of the system role since o1. Templates that do not know it receive a turn of the system."""

MAX_MARGIN = 1e6
"""Largest size of a margin between two scores."""


def parse_message(turn: Any, where: str) -> Message:
    """Parse a turn in the form of OpenAI's API.

    It has `{"role", "content"}`, and optionally "name", "tool_calls", "tool_call_id", the keys of `REASONING`, and any
    other that chat templates know.
    """
    if not isinstance(turn, Mapping) or "role" not in turn:
        raise ValueError(f"{where!r} is not an object with 'role' and 'content'{_other_turns(turn, 'role')}")
    role = turn["role"]
    if role not in (*ROLES, DEVELOPER):
        raise ValueError(f"{where!r} has the unknown role {role!r}; known: {', '.join((*ROLES, DEVELOPER))}")
    return _message(turn, "system" if role == DEVELOPER else role, where)


def parse_sharegpt_message(turn: Any, where: str) -> Message:
    """Parse a turn in ShareGPT's form: `{"from", "value"}`.

    The value of a "function_call" is JSON with name and arguments, or a list of such; other keys are as in
    `parse_message`.
    """
    if not isinstance(turn, Mapping) or "from" not in turn:
        raise ValueError(f"{where!r} is not an object with 'from' and 'value'{_other_turns(turn, 'from')}")
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where!r} has the unknown role {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}")
    for key in ("role", "content"):
        if turn.get(key) is not None:
            raise ValueError(f"{where!r} has both 'from' and {key!r}; a turn has one form")
    text = get_text(turn, "value", where)
    role = SHAREGPT_ROLES[speaker]
    fields: dict[str, Any] = {"role": role, "content": text}
    if speaker == "function_call":
        if turn.get("tool_calls"):
            raise ValueError(f"{where!r} is a function_call and has 'tool_calls' too; one of them is needed")
        fields |= {"content": "", "tool_calls": from_json(text, f"{where}.value")}
        if not fields["tool_calls"]:
            raise ValueError(f"'{where}.value' is empty")
    others = {key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}
    calls_key = ""
    if "tool_calls" in fields:
        calls_key = f"{where}.value"
    return _message({**others, **fields}, role, where, calls_key)


def _message(turn: Row, role: str, where: str, calls_key: str = "") -> Message:
    calls_key = calls_key or f"{where}.tool_calls"
    calls: tuple[ToolCall, ...] = ()
    if turn.get("tool_calls"):
        if role != "assistant":
            raise ValueError(f"{calls_key!r} is there, but {role!r} calls no tools")
        calls = parse_tool_calls(turn["tool_calls"], calls_key)
    media = [key for key in MEDIA if not is_nothing(turn.get(key))]
    if media:
        raise ValueError(f"'{where}.{media[0]}' is there, and only text is read; list it in data.ignore_columns")
    if turn.get("function_call"):
        raise ValueError(f"'{where}.function_call' is OpenAI's old form of a call; 'tool_calls' is its form today")
    # a turn that calls a tool may have no content
    has_no_content = bool(calls) and turn.get("content") is None
    content = "" if has_no_content else parse_content(turn, where)
    for key in ("name", "tool_call_id"):
        if turn.get(key) is not None:
            get_text(turn, key, where)
    fields = {key: value for key, value in turn.items() if value is not None and key not in LOSS_KEYS}
    fields["content"] = None if has_no_content else content
    if calls:
        fields["tool_calls"] = _wrapped_calls(turn["tool_calls"])
    elif "tool_calls" in fields:  # an empty list, which some templates take for a call
        del fields["tool_calls"]
    is_plain = fields.keys() == {"role", "content"} and fields["role"] == role and not has_no_content
    reasoning = _reasoning(turn, where)
    if reasoning.strip() and role != "assistant":
        raise ValueError(f"{where!r} of {role!r} has thoughts, and only the assistant's are read")
    raw = "" if is_plain else _as_json(fields, where)
    return Message(role, content, calls, reasoning, raw)


def _reasoning(turn: Row, where: str) -> str:
    """Return the model's thoughts before a turn. Some rows have them under two keys."""
    texts = [get_text(turn, key, where) for key in REASONING if turn.get(key) is not None]
    found = [text for text in texts if text]
    if len(set(found)) > 1:
        raise ValueError(f"{where!r} has different thoughts under several of the keys {', '.join(REASONING)}")
    return found[0] if found else ""


def _as_json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError) as error:  # a table may have dates and bytes
        raise ValueError(f"{where!r} has a value that JSON lacks: {error}") from error


def _other_turns(turn: Any, key: str) -> str:
    """Return advice about turns in the other one of the two forms; "" for others."""
    here, other, there = (
        ("conversations", "role", "messages") if key == "from" else ("messages", "from", "conversations")
    )
    if not isinstance(turn, Mapping) or other not in turn:
        return ""
    return f'; turns with {other!r} are {there}: name all fields in data.columns, such as {{"{there}": "{here}"}}'


def get_turns(row: Row, key: str) -> list[Any]:
    """Return the list of turns of a row."""
    turns = row[key]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key!r} is not a list of turns")
    return turns


def parse_messages(value: Any, where: str, default_role: str) -> list[Message]:
    """Parse a list of `{"role", "content"}`, or a text, which becomes a turn of `default_role`."""
    if isinstance(value, str):
        return [Message(default_role, value)]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where!r} is neither text nor a list of turns")
    return [parse_message(turn, f"{where}[{i}]") for i, turn in enumerate(value)]


def with_system(row: Row, messages: Sequence[Message]) -> list[Message]:
    """Return the turns, after one of the system if the row's column "system" has a text."""
    if row.get("system") is None:
        return list(messages)
    system = Message("system", get_text(row, "system"))
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
    """Raise ValueError unless the roles alternate as in a conversation: answers follow a user or a tool, and so on.

    Args:
        messages: the turns.
        where: name of the list of turns in the row, for the message.
        first: index of the turn with which that list begins.
    """
    before: str | None = None
    for i, message in enumerate(messages):
        if before not in _BEFORE[message.role]:
            place = "at the beginning"
            if before:
                place = f"after one of the {before}"
            raise ValueError(f"the turns are out of order: '{where}[{i - first}]' of the {message.role} is {place}")
        before = message.role


def get_text(row: Row, key: str, where: str = "") -> str:
    """Return the text of a key; `where` is the path of the object in its row."""
    if key not in row:
        raise ValueError(f"{where!r} has no key {key!r}" if where else f"has no key {key!r}")
    value = row[key]
    if not isinstance(value, str):
        place = f"{where}.{key}" if where else key
        raise ValueError(f"{place!r} is {json_type_name(value)}, not text")
    return value


def get_texts(row: Row, key: str, allow_missing: bool = False) -> list[str]:
    """Return the texts of a key that has one or a list of them."""
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


def parse_content(turn: Row, where: str) -> str:
    """Return the content of a turn, which is a text or a list of parts."""
    content = turn.get("content")
    if isinstance(content, list):
        return join_text_parts(content, f"{where}.content")
    return get_text(turn, "content", where)


def join_text_parts(parts: Sequence[Any], where: str) -> str:
    """Join the content parts of a turn, as OpenAI's API has them. Parts that are not text, such as pictures, are
    refused."""
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise ValueError(f"'{where}[{i}]' is {json_type_name(part)}; a part is an object with type and text")
        kind = part.get("type", "text")
        if kind not in TEXT_PARTS:
            raise ValueError(
                f"'{where}[{i}]' is a part of type {str(kind)[:100]!r}; only parts of type 'text' are read"
            )
        for key, value in part.items():
            if key not in PART_KEYS and not is_nothing(value):
                raise ValueError(f"'{where}[{i}].{key}' is there, and only the text of a part is read")
        texts.append(get_text(part, "text", f"{where}[{i}]"))
    return "".join(texts)


def parse_tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    """Parse the tool calls of a turn, in OpenAI's form or a flat one."""
    calls = _as_list(value)
    if not calls:
        raise ValueError(f"{where!r} is empty")
    check_count(calls, MAX_TOOLS, repr(where), "calls")
    found = []
    for call in calls:
        identifier = None
        if isinstance(call, Mapping):
            identifier = call.get("id")
        if identifier is not None and not isinstance(identifier, str):
            raise ValueError(f"{where!r} has a call whose id is {json_type_name(identifier)}, not text")
        if _is_wrapped(call):
            call = call["function"]
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or not call["name"]:
            raise ValueError(f"{where!r} has a call without a name")
        other = next((key for key in ("parameters", "input") if key in call and "arguments" not in call), None)
        if other is not None:
            raise ValueError(f"{where!r} has a call of {call['name']} with {other!r}; 'arguments' is the key")
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = from_json(arguments or "{}", f"arguments of {call['name']} in {where}")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where!r} has a call of {call['name']} whose arguments are no JSON object")
        found.append(ToolCall(call["name"], _as_json(arguments, where), identifier))
    return tuple(found)


def _as_list(calls: Any) -> list[Any]:
    """Return the calls of a turn, which may have a single one without a list."""
    if isinstance(calls, list):
        return calls
    return [calls]


def _is_wrapped(call: Any) -> bool:
    """Return True for a call in OpenAI's form: {"type": "function", "function": {"name", "arguments"}}."""
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _wrapped_calls(value: Any) -> list[dict[str, Any]]:
    """Return the calls of a row in OpenAI's form, which most templates read."""
    calls = _as_list(value)
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


def parse_tools(row: Row) -> str:
    """Return the tools of a row in OpenAI's format as JSON, from any of the known formats; empty for none."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = from_json(tools, "tools") if tools.strip() else None
    if not isinstance(tools, (list, type(None))):
        raise ValueError(f"'tools' is {json_type_name(tools)}, not a list of functions")
    check_count(tools or [], MAX_TOOLS, "'tools'", "functions")
    wrapped = []
    for i, tool in enumerate(tools or []):
        function = None
        if isinstance(tool, Mapping):
            function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"'tools[{i}]' is not a function with a name")
        body = tool if "function" in tool else {"function": tool}
        wrapped.append({"type": "function", **body})
    if wrapped:
        return _as_json(wrapped, "tools")
    return ""


def parse_template_kwargs(row: Row) -> str:
    """Return the variables of the chat template that a row sets, as JSON; empty for none."""
    value = row.get(TEMPLATE_KWARGS)
    if isinstance(value, str):
        value = from_json(value, TEMPLATE_KWARGS) if value.strip() else None
    if not isinstance(value, (Mapping, type(None))):
        raise ValueError(f"{TEMPLATE_KWARGS!r} is {json_type_name(value)}, not an object")
    # a table has null for variables that only other rows set
    given = {key: inner for key, inner in (value or {}).items() if inner is not None}
    fault = kwargs_fault(given)
    if fault is not None:
        raise ValueError(f"'{TEMPLATE_KWARGS}.{fault[0]}' {fault[1]}")
    return _as_json(given, TEMPLATE_KWARGS) if given else ""


def parse_margin(row: Row) -> float:
    """Return the margin of a pair, a number or its text as in tables."""
    value = row[MARGIN]
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= MAX_MARGIN:
        raise ValueError(f"{MARGIN!r} is {value!r}; a number from {-MAX_MARGIN:g} to {MAX_MARGIN:g} is needed")
    return float(number)


def from_json(text: str, where: str) -> Any:
    """Parse a JSON text."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where!r} is not JSON: {error}") from error
