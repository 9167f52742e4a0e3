"""Formats of conversation rows: how each is recognised and converted.

`convert` raises ValueError that names the wrong key; the reader adds file and line. All of the assistant's turns are
supervised, unless a turn has the key "loss" (0, 1, true, false) or "weight": 0, or the weight of its tokens in the
loss. Each of the formats may have the columns "system" and "tools", except plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmsuite.contract.specs import DataFormat
from llmsuite.data.keys import LOSS_KEYS, ROW_KEYS
from llmsuite.data.plain_text import is_text_row, text
from llmsuite.data.preference_formats import alpaca_turns, has_keys
from llmsuite.data.rows import Conversation, Message
from llmsuite.data.turns import (
    Row,
    check_order,
    get_text,
    get_texts,
    get_turns,
    parse_message,
    parse_messages,
    parse_sharegpt_message,
    parse_template_kwargs,
    parse_tools,
    with_system,
)

MIN_WEIGHT = 1e-6
MAX_WEIGHT = 1e6
"""Bounds of the weight of a supervised turn: sums of weights are exact enough in float32."""


def paddlenlp(row: Row) -> Conversation:
    """`{"src": "question", "tgt": "answer"}`, or lists of as many questions as answers.

    "label", a list with 0 or 1 for each answer, selects those that are supervised.
    """
    users = get_texts(row, "src")
    answers = get_texts(row, "tgt")
    if not users or len(users) != len(answers):
        raise ValueError(f"'src' has {len(users)} turns and 'tgt' {len(answers)}; every src needs its tgt")
    flags = row.get("label")
    if flags is None:
        flags = [1] * len(answers)
    if not isinstance(flags, list) or len(flags) != len(answers):
        raise ValueError(f"'label' is {flags!r}; a list with 0 or 1 for each of the {len(answers)} 'tgt' is needed")
    supervised = [float(_flag(flag, f"label[{i}]")) for i, flag in enumerate(flags)]
    messages: list[Message] = []
    for question, answer in zip(users, answers):
        messages += [Message("user", question), Message("assistant", answer)]
    return _conversation(row, messages, [flag for own in supervised for flag in (0.0, own)], "src")


def alpaca(row: Row) -> Conversation:
    """`{"instruction", "input", "output"}`: the input follows the instruction on a line of its own, if there is one.

    Optional: "history", a list of earlier [question, answer].
    """
    messages = [*alpaca_turns(row), Message("assistant", get_text(row, "output"))]
    return _conversation(row, messages, [float(message.role == "assistant") for message in messages], "history")


def query_response(row: Row) -> Conversation:
    """`{"query", "response"}`, of ms-swift's data sets. Optional: "history", as in `alpaca`."""
    others = {key: row[key] for key in (*ROW_KEYS, "history") if key in row}
    return alpaca({**others, "instruction": get_text(row, "query"), "output": get_text(row, "response")})


def sharegpt(row: Row) -> Conversation:
    """`{"conversations": [{"from", "value"}]}`.

    The value of a "function_call" is JSON with name and arguments, or a list of such.
    """
    messages = []
    weights = []
    for i, turn in enumerate(get_turns(row, "conversations")):
        where = f"conversations[{i}]"
        messages.append(parse_sharegpt_message(turn, where))
        weights.append(_weight(turn, where, messages[-1].role))
    return _conversation(row, messages, weights, "conversations")


def openai(row: Row) -> Conversation:
    """`{"messages": [{"role", "content"}]}`; the assistant may have "tool_calls".

    Every other key of a turn is for chat templates that know it, such as "name" and "reasoning_content".
    """
    messages = []
    weights = []
    for i, turn in enumerate(get_turns(row, "messages")):
        where = f"messages[{i}]"
        messages.append(parse_message(turn, where))
        weights.append(_weight(turn, where, messages[-1].role))
    return _conversation(row, messages, weights, "messages")


def trl_completion(row: Row) -> Conversation:
    """`{"prompt", "completion"}`, each text or a list of `{"role", "content"}`.

    The completion is one turn of the assistant, and nothing else is supervised. Texts are turns too.
    """
    prompt = parse_messages(row["prompt"], "prompt", "user")
    completion = parse_messages(row["completion"], "completion", "assistant")
    if len(completion) != 1 or completion[0].role != "assistant":
        raise ValueError("'completion' is not one turn of the assistant; with more of them use 'messages'")
    turns = row["prompt"] if isinstance(row["prompt"], list) else []
    for i, message in enumerate(prompt[: len(turns)]):
        given = any(turns[i].get(key) is not None for key in LOSS_KEYS)
        if given and _weight(turns[i], f"prompt[{i}]", message.role):
            raise ValueError(
                f"'prompt[{i}]' is to be supervised, and only the completion is; with more turns use 'messages'"
            )
    weight = 1.0
    if isinstance(row["completion"], list):
        weight = _weight(row["completion"][0], "completion[0]", "assistant")
    return _conversation(row, [*prompt, *completion], [*(0.0 for _ in prompt), weight], "prompt")


def _conversation(row: Row, messages: Sequence[Message], weights: Sequence[float], where: str) -> Conversation:
    """Return the turns, each with its weight in the loss, with the system prompt and the tools of their row. `where`
    names the column of the turns."""
    all_messages = with_system(row, messages)
    num_before = len(all_messages) - len(messages)
    check_order(all_messages, where, num_before)
    all_weights = (*[0.0] * num_before, *weights)
    mask = tuple(weight > 0 for weight in all_weights)
    if all(weight in (0, 1) for weight in all_weights):
        all_weights = ()
    return Conversation(tuple(all_messages), mask, parse_tools(row), parse_template_kwargs(row), all_weights)


def _weight(turn: Row, where: str, role: str) -> float:
    """Return the weight of a turn, of its keys "weight" and "loss"; by default that of an answer is 1."""
    weight = None
    if turn.get("weight") is not None:
        weight = _number(turn["weight"], f"{where}.weight")
    flag = _flag(turn["loss"], f"{where}.loss") if turn.get("loss") is not None else None
    if weight is not None and flag is not None and (weight > 0) != flag:
        raise ValueError(f"{where!r} has a 'weight' and a 'loss' that disagree")
    if role != "assistant":
        if weight or flag:
            raise ValueError(f"{where!r} is to be supervised, but is of {role!r}; only the assistant's turns can be")
        return 0.0
    if weight is not None:
        return weight
    return float(flag is not False)


def _number(value: Any, where: str) -> float:
    """Return a weight. Raises ValueError for anything but a number within the bounds; true and false are 1 and 0."""
    if not isinstance(value, (bool, int, float)) or not (value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT):
        raise ValueError(f"{where!r} is {value!r}; 0 or a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g} is needed")
    return float(value)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise ValueError(f"{where!r} is {value!r}; 0 or 1 is needed")
    return bool(value)


BUILTIN = [
    DataFormat(
        name="openai",
        help="messages of role/content, tool_calls, weight; tools",
        kind="conversation",
        matches=has_keys("messages"),
        convert=openai,
        columns=frozenset({"messages"}),
    ),
    DataFormat(
        name="sharegpt",
        help="conversations of from/value; system, tools",
        kind="conversation",
        matches=has_keys("conversations"),
        convert=sharegpt,
        columns=frozenset({"conversations"}),
    ),
    DataFormat(
        name="alpaca",
        help="instruction, input, output; history, system",
        kind="conversation",
        matches=has_keys("instruction", "output"),
        convert=alpaca,
        columns=frozenset({"instruction", "input", "output", "history"}),
    ),
    DataFormat(
        name="query_response",
        help="query, response; history, system",
        kind="conversation",
        matches=has_keys("query", "response"),
        convert=query_response,
        columns=frozenset({"query", "response", "history"}),
    ),
    DataFormat(
        name="trl_completion",
        help="prompt, completion: text or lists of role/content; tools",
        kind="conversation",
        matches=has_keys("prompt", "completion"),
        convert=trl_completion,
        columns=frozenset({"prompt", "completion"}),
    ),
    DataFormat(
        name="paddlenlp",
        help="src, tgt: text or lists; system, label",
        kind="conversation",
        matches=has_keys("src", "tgt"),
        convert=paddlenlp,
        columns=frozenset({"src", "tgt", "label"}),
    ),
    DataFormat(
        name="text",
        help="text, all of which is supervised, without a chat template",
        kind="conversation",
        matches=is_text_row,
        convert=text,
        columns=frozenset({"text"}),
    ),
]
