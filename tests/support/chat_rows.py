"""Fifty rows of conversations, of all kinds that chat templates treat differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.paths import DATA

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_SYSTEM = {"role": "system", "content": "Be brief."}
_ASKED = ("What is 2 + 2?", "And 3 + 3?", "And 4 + 4?")
_ANSWERS = ("It is four.", "It is six.", "It is eight.")
_THOUGHTS = ("Two and two.", "Three and three:\nsix.", "Doubling four.")
CALL = {"id": "abc123XYZ", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
_RESULT = {"role": "tool", "tool_call_id": "abc123XYZ", "name": "weather", "content": '{"sky": "clear"}'}


def _talk(count: int, thoughts: str) -> list[dict[str, Any]]:
    """Turns of a conversation with `count` answers; `thoughts`: none, last, all, or written into the content."""
    turns: list[dict[str, Any]] = []
    for i in range(count):
        answer: dict[str, Any] = {"role": "assistant", "content": _ANSWERS[i]}
        if thoughts == "all" or (thoughts == "last" and i == count - 1):
            answer["reasoning_content"] = _THOUGHTS[i]
        elif thoughts == "content":
            answer["content"] = f"<think>\n{_THOUGHTS[i]}\n</think>\n\n{_ANSWERS[i]}"
        turns += [{"role": "user", "content": _ASKED[i]}, answer]
    return turns


def _with_tools(thoughts: bool, is_second: bool) -> list[dict[str, Any]]:
    """Turns in which the assistant calls a tool, after another answer if `is_second`."""
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer: dict[str, Any] = {"role": "assistant", "content": "Clear."}
    if thoughts:
        call["reasoning_content"] = "I look."
        answer["reasoning_content"] = "It says clear."
    before = _talk(1, "none") if is_second else []
    return [*before, {"role": "user", "content": "And in Rome?"}, call, _RESULT, answer]


def rows() -> list[dict[str, Any]]:
    """Fifty rows in the format of OpenAI's API."""
    found: list[dict[str, Any]] = []
    for system in ([], [_SYSTEM]):
        for count in (1, 2, 3):
            for thoughts in ("none", "last", "all", "content"):
                found.append({"messages": [*system, *_talk(count, thoughts)]})
            found.append({"messages": [*system, *_talk(count, "none")], "tools": TOOLS})
        for thoughts in (False, True):
            for is_second in (False, True):
                found.append({"messages": [*system, *_with_tools(thoughts, is_second)], "tools": TOOLS})
        for count in (1, 2):
            for is_thinking in (False, True):
                kwargs = {"enable_thinking": is_thinking}
                thoughts = "last" if is_thinking else "none"
                found.append({"messages": [*system, *_talk(count, thoughts)], "chat_template_kwargs": kwargs})
        kwargs = {"reasoning_effort": "high"}
        found += [
            {"messages": [*system, *_talk(1, "last")], "chat_template_kwargs": kwargs},
            {"messages": [*system, *_talk(1, "none")], "chat_template_kwargs": kwargs},
        ]
    return found


_DEEPSEEK = [
    "User",
    "Assistant",
    "end▁of▁sentence",
    "tool▁calls▁begin",
    "tool▁calls▁end",
    "tool▁call▁begin",
    "tool▁call▁end",
    "tool▁sep",
    "tool▁outputs▁begin",
    "tool▁outputs▁end",
    "tool▁output▁begin",
    "tool▁output▁end",
]
_MISTRAL = ["INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "SYSTEM_PROMPT"]
_OTHERS = [
    "im_start",
    "im_end",
    "start_header_id",
    "end_header_id",
    "eot_id",
    "eom_id",
    "python_tag",
    "system",
    "user",
    "assistant",
    "observation",
    "start",
    "channel",
    "message",
    "constrain",
    "end",
    "return",
    "call",
]
SPECIAL = (
    "<s>",
    "</s>",
    "[gMASK]",
    "<sop>",
    "[TOOL_CALLS]",
    *(f"<\uff5c{name}\uff5c>" for name in _DEEPSEEK),
    *(f"[{slash}{name}]" for name in _MISTRAL for slash in ("", "/")),
    *(f"<|{name}|>" for name in _OTHERS),
)
"""Special tokens of the published templates."""
OTHERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of theirs that are added, and not special."""


def write_tokenizer(directory: Path) -> Path:
    """Write a tokenizer with the tokens of all published templates: the bundled one with more added tokens."""
    content = json.loads((DATA / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    known = {entry["content"] for entry in content["added_tokens"]}
    number = 1 + max([*content["model"]["vocab"].values(), *(entry["id"] for entry in content["added_tokens"])])
    for token in (*SPECIAL, *OTHERS):
        if token in known:
            continue
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": number, "content": token, **flags, "special": token in SPECIAL})
        number += 1
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
