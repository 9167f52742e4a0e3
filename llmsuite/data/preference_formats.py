"""Formats of preference rows: how each is recognised and converted.

`convert` raises ValueError that names the wrong key; the reader adds file and line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from llmsuite.base.redaction import json_type_name
from llmsuite.contract.specs import DataFormat
from llmsuite.data.row_limits import MAX_ANSWERS, check_count
from llmsuite.data.rows import Message, Preference, Ranking
from llmsuite.data.turns import (
    Row,
    check_order,
    get_text,
    get_texts,
    get_turns,
    parse_messages,
    parse_sharegpt_message,
    parse_template_kwargs,
    parse_tools,
    with_system,
)


def paddlenlp_preference(row: Row) -> Preference:
    """`{"src": [...], "tgt": [...], "response": [a, b], "sort": [1, 0]}`: the response with the larger sort is better.

    `src` are the user's turns, `tgt` the assistant's answers to all but the last of them; "system" is optional.
    """
    users = get_texts(row, "src")
    answers = get_texts(row, "tgt", allow_missing=True)
    responses = get_texts(row, "response")
    order = row.get("sort")
    if len(users) != len(answers) + 1:
        raise ValueError(f"'src' has {len(users)} turns and 'tgt' {len(answers)}; src has one more than tgt")
    if len(responses) != 2:
        raise ValueError(f"'response' has {len(responses)} answers; two are needed")
    if not isinstance(order, list) or len(order) != 2 or not _differ(*order):
        raise ValueError(f"'sort' is {order!r}; two different numbers are needed, the larger for the better answer")
    prompt: list[Message] = []
    for i, user in enumerate(users):
        prompt.append(Message("user", user))
        if i < len(answers):
            prompt.append(Message("assistant", answers[i]))
    better = 0 if order[0] > order[1] else 1
    chosen, rejected = (Message("assistant", responses[i]) for i in (better, 1 - better))
    return _preference(row, prompt, chosen, rejected)


def _differ(a: Any, b: Any) -> bool:
    return isinstance(a, (int, float)) and isinstance(b, (int, float)) and (a < b or a > b)  # NaN is neither


def sharegpt_preference(row: Row) -> Preference:
    """`{"conversations": [{"from", "value"}], "chosen": {"from", "value"}, "rejected": {...}}`.

    "system" and "tools" are optional, as in all of these formats.
    """
    turns = get_turns(row, "conversations")
    prompt = [parse_sharegpt_message(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    chosen, rejected = (parse_sharegpt_message(row[key], key) for key in ("chosen", "rejected"))
    return _preference(row, prompt, chosen, rejected)


def alpaca_preference(row: Row) -> Preference:
    """`{"instruction", "input", "chosen", "rejected"}`, two texts as answers; "history" is optional."""
    chosen, rejected = (Message("assistant", get_text(row, key)) for key in ("chosen", "rejected"))
    return _preference(row, alpaca_turns(row), chosen, rejected)


def alpaca_turns(row: Row) -> list[Message]:
    """The turns up to the question: the input follows the instruction on a line of its own, if there is one.

    "history", a list of earlier [question, answer], may be left out. Raises ValueError for anything else.
    """
    question = get_text(row, "instruction")
    extra = ""
    if row.get("input") is not None:
        extra = get_text(row, "input")
    history = row.get("history") or []  # an empty cell of a table is a text
    if not isinstance(history, list):
        raise ValueError(f"'history' is {json_type_name(history)}, not a list of [question, answer]")
    turns: list[Message] = []
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"'history[{i}]' is not [question, answer]")
        turns += [Message("user", pair[0]), Message("assistant", pair[1])]
    return [*turns, Message("user", f"{question}\n{extra}" if extra else question)]


def trl_preference(row: Row) -> Preference:
    """`{"prompt", "chosen", "rejected"}`, each text or a list of `{"role", "content"}`.

    Chosen and rejected may be full conversations, as in HuggingFaceH4/ultrafeedback_binarized: with the prompt in
    front of the answer, or without a key "prompt". Texts without one share their beginning, up to a space: it is the
    prompt ("implicit" with TRL).
    """
    chosen, rejected = (parse_messages(row[key], key, "assistant") for key in ("chosen", "rejected"))
    given = row.get("prompt")
    if given is None and isinstance(row["chosen"], str) and isinstance(row["rejected"], str):
        text, better, worse = _shared_text(row["chosen"], row["rejected"])
        return _preference(row, [Message("user", text)], Message("assistant", better), Message("assistant", worse))
    prompt = [] if given is None else parse_messages(given, "prompt", "user")
    if given is None or (len(chosen) > 1 and len(rejected) > 1):
        prompt, chosen, rejected = _without_prompt(prompt, chosen, rejected)
    return _one_answer_each(row, prompt, chosen, rejected)


def _without_prompt(
    prompt: list[Message], chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the turns that two conversations share, and the rest of both.

    Raises:
        ValueError: they do not contain the prompt.
    """
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    before = {message.content.strip() for message in chosen[:shared]}
    if any(message.content.strip() not in before for message in prompt):
        raise ValueError("'prompt' is none of the turns that 'chosen' and 'rejected' share")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the common prefix of two texts, up to a space, and the rest of both. Raises ValueError if it is empty."""
    length = len(os.path.commonprefix([chosen, rejected]))
    while length and not chosen[length - 1].isspace():
        length -= 1
    if not chosen[:length].strip():
        raise ValueError(
            "there is no 'prompt', and 'chosen' and 'rejected' do not begin with the same words; where another column "
            "is the prompt, name all three in data.columns"
        )
    return chosen[:length].rstrip(), chosen[length:], rejected[length:]


def hh_rlhf(row: Row) -> Preference:
    """`{"chosen", "rejected"}`: texts of full dialogues, `"\\n\\nHuman: … \\n\\nAssistant: …"`, which share all but
    the last answer, as in Anthropic/hh-rlhf."""
    chosen, rejected = (_dialogue(get_text(row, key), key) for key in ("chosen", "rejected"))
    return _one_answer_each(row, *_without_prompt([], chosen, rejected))


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def _dialogue(text: str, where: str) -> list[Message]:
    """Split a dialogue into its turns. Raises ValueError unless it begins with one."""
    before, *parts = _SPEAKER.split(text)
    if before.strip() or not parts:
        raise ValueError(f"{where!r} does not begin with 'Human:'")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Message(roles[speaker], content.strip()) for speaker, content in zip(parts[::2], parts[1::2])]


def _is_hh_rlhf(row: Row) -> bool:
    return "prompt" not in row and all(
        isinstance(row.get(key), str) and row[key].lstrip("\n").startswith("Human:") for key in ("chosen", "rejected")
    )


def _is_alpaca(row: Row) -> bool:
    return "prompt" not in row and all(key in row for key in ("instruction", "chosen", "rejected"))


def _is_ranked(row: Row) -> bool:
    return "prompt" in row and "responses" in row and ("scores" in row or "ranks" in row)


def _one_answer_each(
    row: Row, prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]
) -> Preference:
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if len(answer) != 1:
            raise ValueError(f"{key!r} has {len(answer)} turns after the prompt; one is needed")
    return _preference(row, prompt, chosen[0], rejected[0])


def _preference(row: Row, prompt: Sequence[Message], chosen: Message, rejected: Message) -> Preference:
    """Return a pair of answers to a prompt, with the system prompt and the tools of its row."""
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if answer.role != "assistant":
            raise ValueError(f"{key!r} is a turn of {answer.role!r}, not of the assistant")
    return Preference(_prompt(row, prompt), chosen, rejected, parse_tools(row), parse_template_kwargs(row))


def _prompt(row: Row, prompt: Sequence[Message]) -> tuple[Message, ...]:
    """Return the turns of a prompt with the system prompt of its row. Raises ValueError unless an answer may follow."""
    if not prompt or prompt[-1].role not in ("user", "tool"):
        raise ValueError("the prompt does not end with a turn of the user")
    all_messages = with_system(row, prompt)
    check_order(all_messages, "prompt", len(all_messages) - len(prompt))
    return tuple(all_messages)


def ranked(row: Row) -> Ranking:
    """`{"prompt", "responses": [a, b, c], "scores": [7, 9, 2]}`: a larger score is better; or "ranks", 1 for the best.

    The prompt is a text or turns, a response a text or a turn. Answers with equal scores are not compared.
    """
    prompt = parse_messages(row["prompt"], "prompt", "user")
    responses = row["responses"]
    if not isinstance(responses, list) or len(responses) < 2:
        raise ValueError("'responses' is no list of two answers or more")
    check_count(responses, MAX_ANSWERS, "'responses'", "answers")
    answers = []
    for i, response in enumerate(responses):
        turn = response if isinstance(response, (str, list)) else [response]
        messages = parse_messages(turn, f"responses[{i}]", "assistant")
        if len(messages) != 1 or messages[0].role != "assistant":
            raise ValueError(f"'responses[{i}]' is not one turn of the assistant")
        answers.append(messages[0])
    keys = [key for key in ("scores", "ranks") if row.get(key) is not None]
    if len(keys) != 1:
        raise ValueError(f"has {' and '.join(keys) or 'neither'} of scores, ranks; one of them is needed")
    values = row[keys[0]]
    if not isinstance(values, list) or len(values) != len(answers) or not all(map(_is_finite, values)):
        raise ValueError(f"{keys[0]!r} is no list of a number for each of the {len(answers)} 'responses'")
    sign = 1 if keys[0] == "scores" else -1
    all_messages = _prompt(row, prompt)
    scores = tuple(sign * float(value) for value in values)
    return Ranking(all_messages, tuple(answers), scores, parse_tools(row), parse_template_kwargs(row))


def _is_finite(value: Any) -> bool:
    """Return True for a number that float64 has."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def has_keys(*keys: str) -> Any:
    """Return a test that is true for rows with all of these keys."""
    return lambda row: all(key in row for key in keys)


BUILTIN = [
    DataFormat(
        name="paddlenlp_preference",
        help="src, tgt, response, sort",
        kind="preference",
        matches=has_keys("src", "response", "sort"),
        convert=paddlenlp_preference,
        columns=frozenset({"src", "tgt", "response", "sort"}),
    ),
    DataFormat(
        name="sharegpt_preference",
        help="conversations of from/value, chosen, rejected",
        kind="preference",
        matches=has_keys("conversations", "chosen", "rejected"),
        convert=sharegpt_preference,
        columns=frozenset({"conversations", "chosen", "rejected"}),
    ),
    DataFormat(
        name="hh_rlhf",
        help="chosen, rejected; texts of Human: and Assistant:",
        kind="preference",
        matches=_is_hh_rlhf,
        convert=hh_rlhf,
        columns=frozenset({"chosen", "rejected"}),
    ),
    DataFormat(
        name="alpaca_preference",
        help="instruction, input, chosen, rejected; history, system",
        kind="preference",
        matches=_is_alpaca,
        convert=alpaca_preference,
        columns=frozenset({"instruction", "input", "history", "chosen", "rejected"}),
    ),
    DataFormat(
        name="trl_preference",
        help="prompt, chosen, rejected; text or lists of role/content",
        kind="preference",
        matches=has_keys("chosen", "rejected"),
        convert=trl_preference,
        columns=frozenset({"prompt", "chosen", "rejected"}),
    ),
    DataFormat(
        name="ranked",
        help="prompt, responses, scores or ranks",
        kind="preference",
        matches=_is_ranked,
        convert=ranked,
        columns=frozenset({"prompt", "responses", "scores", "ranks"}),
    ),
]
