"""Formats of rows with a prompt: with one desirable or undesirable answer (for KTO), or alone (for generation).

Both build on the formats of `llmsuite.data.conversation_formats`. `convert` raises ValueError that names the wrong key;
the reader adds file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmsuite.contract.specs import DataFormat
from llmsuite.data import conversation_formats
from llmsuite.data.keys import ROW_KEYS
from llmsuite.data.preference_formats import has_keys
from llmsuite.data.rows import Conversation, Message, Prompt, Unpaired
from llmsuite.data.turns import (
    Row,
    check_order,
    get_texts,
    parse_messages,
    parse_template_kwargs,
    parse_tools,
    with_system,
)

_TAGS = ("kto_tag", "label")
_TEXTS = {"true": 1, "false": 0, "1": 1, "0": 0}
"""Values of tags that are text, as in tables; in lower case."""


def trl_unpaired(row: Row) -> Unpaired:
    """`{"prompt", "completion", "label": true}`; prompt and completion are text or lists of `{"role", "content"}`."""
    prompt = parse_messages(row["prompt"], "prompt", "user")
    answer = parse_messages(row["completion"], "completion", "assistant")
    if len(answer) != 1:
        raise ValueError(f"'completion' has {len(answer)} turns; one is needed")
    return _unpaired(row, with_system(row, [*prompt, *answer]), row["label"], "label")


def paddlenlp_unpaired(row: Row) -> Unpaired:
    """`{"src": [...], "tgt": [...], "response": ["answer"], "sort": [1]}`: 1 for a desirable answer, else 0.

    `src` are the user's turns, `tgt` the assistant's answers to all but the last of them.
    """
    responses = get_texts(row, "response")
    tag = row["sort"]
    if len(responses) != 1:
        raise ValueError(f"'response' has {len(responses)} answers; one is needed")
    if not isinstance(tag, list) or len(tag) != 1:
        raise ValueError(f"'sort' is {tag!r}; a list with 1 or 0 is needed")
    return _unpaired(row, [*_paddlenlp_turns(row, (1,)), Message("assistant", responses[0])], tag[0], "sort[0]")


def sharegpt_unpaired(row: Row) -> Unpaired:
    """`{"conversations": [{"from", "value"}], "kto_tag": true}`, or "label"; the last turn is the answer."""
    return _of_conversation(row, conversation_formats.sharegpt)


def openai_unpaired(row: Row) -> Unpaired:
    """`{"messages": [{"role", "content"}], "label": true}`, or "kto_tag"; the last turn is the answer."""
    return _of_conversation(row, conversation_formats.openai)


def alpaca_unpaired(row: Row) -> Unpaired:
    """`{"instruction", "input", "output", "kto_tag": true}`; or "label"."""
    return _of_conversation(row, conversation_formats.alpaca)


def query_response_unpaired(row: Row) -> Unpaired:
    """`{"query", "response", "label": true}`; or "kto_tag"."""
    return _of_conversation(row, conversation_formats.query_response)


def prompt(row: Row) -> Prompt:
    """`{"prompt"}`: text or a list of `{"role", "content"}`."""
    messages = with_system(row, parse_messages(row["prompt"], "prompt", "user"))
    return _prompt(messages, parse_tools(row), _columns(row, ("prompt",)), parse_template_kwargs(row))


def paddlenlp_prompt(row: Row) -> Prompt:
    """`{"src"}`: text, or the user's turns with the answers to all but the last of them in "tgt".

    An answer to the last one is left out.
    """
    messages = _paddlenlp_turns(row, (0, 1))
    answers = get_texts(row, "tgt", allow_missing=True)[len(get_texts(row, "src")) - 1 :]
    answer = None
    if answers:
        answer = Message("assistant", answers[0])
    return _prompt(messages, parse_tools(row), _columns(row, ("src", "tgt"), answer), parse_template_kwargs(row))


def alpaca_prompt(row: Row) -> Prompt:
    """`{"instruction", "input"}`; "history" is optional, "output" is left out."""
    answer = None
    if isinstance(row.get("output"), str):
        answer = Message("assistant", row["output"])
    used = ("instruction", "input", "history", "output")
    return _without_answer(conversation_formats.alpaca({**row, "output": ""}), _columns(row, used, answer))


def sharegpt_prompt(row: Row) -> Prompt:
    """`{"conversations": [{"from", "value"}]}`; an answer at the end is left out."""
    return _prompt_of_turns(row, conversation_formats.sharegpt(row), "conversations")


def openai_prompt(row: Row) -> Prompt:
    """`{"messages": [{"role", "content"}]}`; an answer at the end is left out."""
    return _prompt_of_turns(row, conversation_formats.openai(row), "messages")


def answer_columns(answer: Message) -> dict[str, Any]:
    """Return the columns with a prompt's own answer: "answer", its content, and "answer_turn", the full turn.

    The latter is there only for an answer that calls tools or has thoughts.
    """
    if not (answer.tool_calls or answer.reasoning):
        return {"answer": answer.content}
    return {"answer": answer.content, "answer_turn": answer.as_turn()}


def _columns(row: Row, used: tuple[str, ...], answer: Message | None = None) -> dict[str, Any]:
    """Return the columns of a row that are not used in its prompt, without null ones, and its answer if it has one.

    Args:
        row: the row.
        used: columns that its format uses, besides `ROW_KEYS`.
        answer: the row's own answer.
    """
    found = answer_columns(answer) if answer is not None else {}
    found.update((key, value) for key, value in row.items() if key not in (*used, *ROW_KEYS) and value is not None)
    return found


def _prompt_of_turns(row: Row, conversation: Conversation, key: str) -> Prompt:
    last = conversation.messages[-1]
    answer = last if last.role == "assistant" else None
    return _without_answer(conversation, _columns(row, (key,), answer))


def _of_conversation(row: Row, convert: Callable[[Row], Conversation]) -> Unpaired:
    tags = [tag for tag in _TAGS if tag in row]
    if len(tags) != 1:
        raise ValueError(f"has {' and '.join(tags) or 'neither'} of {', '.join(_TAGS)}; one of them is needed")
    return _unpaired(row, list(convert(row).messages), row[tags[0]], tags[0])


def _unpaired(row: Row, messages: list[Message], tag: Any, where: str) -> Unpaired:
    if isinstance(tag, str):
        tag = _TEXTS.get(tag.lower(), tag)
    if not isinstance(tag, (bool, int)) or tag not in (0, 1):
        raise ValueError(f"{where!r} is {tag!r}; true or false is needed")
    if not messages or messages[-1].role != "assistant":
        raise ValueError("the last turn is not an answer of the assistant")
    prompt_messages = _prompt(messages[:-1]).messages
    return Unpaired(prompt_messages, messages[-1], bool(tag), parse_tools(row), parse_template_kwargs(row))


def _without_answer(conversation: Conversation, columns: Mapping[str, Any]) -> Prompt:
    messages = list(conversation.messages)
    if messages[-1].role == "assistant":
        messages.pop()
    return _prompt(messages, conversation.tools, columns, conversation.template_kwargs)


def _prompt(
    messages: list[Message], tools: str = "", columns: Mapping[str, Any] | None = None, template_kwargs: str = ""
) -> Prompt:
    if not messages or messages[-1].role not in ("user", "tool"):
        raise ValueError("the prompt does not end with a turn of the user")
    if not messages[-1].content.strip():
        raise ValueError("the last turn of the prompt is empty")
    check_order(messages, "prompt")
    return Prompt(tuple(messages), tools, columns or {}, template_kwargs)


def _paddlenlp_turns(row: Row, more: tuple[int, ...]) -> list[Message]:
    """Return the turns up to the last one of the user. `more` lists the allowed surplus of user turns over answers."""
    users = get_texts(row, "src")
    answers = get_texts(row, "tgt", allow_missing=True)
    if len(users) - len(answers) not in more:
        needed = "as many as tgt, or one more"
        if more == (1,):
            needed = "one more than tgt"
        raise ValueError(f"'src' has {len(users)} turns and 'tgt' {len(answers)}; src has {needed}")
    messages: list[Message] = []
    for i, user in enumerate(users):
        messages.append(Message("user", user))
        if i < len(users) - 1:
            messages.append(Message("assistant", answers[i]))
    return with_system(row, messages)


def _with_tag(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: all(key in row for key in keys) and any(tag in row for tag in _TAGS)


def _unpaired_format(convert: Callable[[Row], Any], help: str, matches: Any, *columns: str) -> DataFormat:
    name = convert.__name__
    return DataFormat(
        name=name, help=help, kind="unpaired", matches=matches, convert=convert, columns=frozenset(columns)
    )


def _prompt_format(convert: Callable[[Row], Any], help: str, matches: Any) -> DataFormat:
    """Return a format of prompts, which read all columns: rewards get those that are no part of the prompt."""
    return DataFormat(name=convert.__name__, help=help, kind="prompt", matches=matches, convert=convert)


BUILTIN = [
    _unpaired_format(
        trl_unpaired,
        "prompt, completion, label",
        has_keys("prompt", "completion", "label"),
        "prompt",
        "completion",
        "label",
    ),
    _unpaired_format(
        paddlenlp_unpaired,
        "src, tgt, response, sort",
        has_keys("src", "response", "sort"),
        "src",
        "tgt",
        "response",
        "sort",
    ),
    _unpaired_format(
        sharegpt_unpaired, "conversations of from/value, kto_tag", _with_tag("conversations"), "conversations", *_TAGS
    ),
    _unpaired_format(openai_unpaired, "messages of role/content, label", _with_tag("messages"), "messages", *_TAGS),
    _unpaired_format(
        alpaca_unpaired,
        "instruction, input, output, kto_tag",
        _with_tag("instruction", "output"),
        "instruction",
        "input",
        "output",
        "history",
        *_TAGS,
    ),
    _unpaired_format(
        query_response_unpaired,
        "query, response, label; history, system",
        _with_tag("query", "response"),
        "query",
        "response",
        "history",
        *_TAGS,
    ),
    _prompt_format(prompt, "prompt: text or messages of role/content; tools", has_keys("prompt")),
    _prompt_format(openai_prompt, "messages of role/content; tools", has_keys("messages")),
    _prompt_format(sharegpt_prompt, "conversations of from/value; system, tools", has_keys("conversations")),
    _prompt_format(alpaca_prompt, "instruction, input; history, system", has_keys("instruction")),
    _prompt_format(paddlenlp_prompt, "src: text or list; tgt, system", has_keys("src")),
]
