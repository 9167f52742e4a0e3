"""Formats of preference rows: how each is recognised and converted.

`convert` raises ValueError saying which key is wrong; the reader adds file and line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from llmsuite.data.rows import Message, Preference
from llmsuite.data.turns import (
    Row,
    check_order,
    messages_at,
    sharegpt_turn_at,
    text_at,
    texts_at,
    tools_at,
    turns_at,
    with_system,
)
from llmsuite.shown import kind_of_json
from llmsuite.specs import DataFormat

MEDIA = ("images", "videos", "audios")
"""Columns of what is no text, as other suites call them."""


def paddlenlp_preference(row: Row) -> Preference:
    """`{"src": [...], "tgt": [...], "response": [a, b], "sort": [1, 0]}`: the response with the larger sort is better.

    `src` are the user's turns, `tgt` the assistant's answers to all but the last of them; "system" is optional.
    """
    users, answers = texts_at(row, "src"), texts_at(row, "tgt", allow_missing=True)
    responses, order = texts_at(row, "response"), row.get("sort")
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
    turns = turns_at(row, "conversations")
    prompt = [sharegpt_turn_at(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    chosen, rejected = (sharegpt_turn_at(row[key], key) for key in ("chosen", "rejected"))
    return _preference(row, prompt, chosen, rejected)


def alpaca_preference(row: Row) -> Preference:
    """`{"instruction", "input", "chosen", "rejected"}`, two texts as answers; "history" is optional."""
    chosen, rejected = (Message("assistant", text_at(row, key)) for key in ("chosen", "rejected"))
    return _preference(row, alpaca_turns(row), chosen, rejected)


def alpaca_turns(row: Row) -> list[Message]:
    """The turns up to the question: the input follows the instruction on a line of its own, if there is one.

    "history", a list of earlier [question, answer], may be left out. Raises ValueError for anything else.
    """
    question, extra = text_at(row, "instruction"), text_at(row, "input") if row.get("input") is not None else ""
    history = row.get("history") or []  # an empty cell of a table is a text
    if not isinstance(history, list):
        raise ValueError(f"'history' is {kind_of_json(history)}, not a list of [question, answer]")
    turns: list[Message] = []
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"'history[{i}]' is not [question, answer]")
        turns += [Message("user", pair[0]), Message("assistant", pair[1])]
    return [*turns, Message("user", f"{question}\n{extra}" if extra else question)]


def trl_preference(row: Row) -> Preference:
    """`{"prompt", "chosen", "rejected"}`, each text or a list of `{"role", "content"}`.

    Chosen and rejected may be whole conversations, as in HuggingFaceH4/ultrafeedback_binarized: with the prompt in
    front of the answer, or without a key "prompt". Texts without one share their beginning, up to a space: it is the
    prompt ("implicit" with TRL).
    """
    chosen, rejected = (messages_at(row[key], key, "assistant") for key in ("chosen", "rejected"))
    given = row.get("prompt")
    if given is None and isinstance(row["chosen"], str) and isinstance(row["rejected"], str):
        text, better, worse = _shared_text(row["chosen"], row["rejected"])
        return _preference(row, [Message("user", text)], Message("assistant", better), Message("assistant", worse))
    prompt = [] if given is None else messages_at(given, "prompt", "user")
    if given is None or (len(chosen) > 1 and len(rejected) > 1):
        prompt, chosen, rejected = _without_prompt(prompt, chosen, rejected)
    return _one_answer_each(row, prompt, chosen, rejected)


def _without_prompt(
    prompt: list[Message], chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """The turns that two conversations share, and the rest of both. Raises ValueError unless they have the prompt that
    is given."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    before = {message.content.strip() for message in chosen[:shared]}
    if any(message.content.strip() not in before for message in prompt):
        raise ValueError("'prompt' is none of the turns that 'chosen' and 'rejected' share")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """What two texts share, up to a space, and the rest of both. Raises ValueError if that is nothing."""
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
    """`{"chosen", "rejected"}`: texts of whole dialogues, `"\\n\\nHuman: … \\n\\nAssistant: …"`, which share all but
    the last answer, as in Anthropic/hh-rlhf."""
    chosen, rejected = (_dialogue(text_at(row, key), key) for key in ("chosen", "rejected"))
    return _one_answer_each(row, *_without_prompt([], chosen, rejected))


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def _dialogue(text: str, where: str) -> list[Message]:
    """The turns of a text. Raises ValueError for one that begins with anything else."""
    before, *parts = _SPEAKER.split(text)
    if before.strip() or not parts:
        raise ValueError(f"{where!r} does not begin with 'Human:'")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [Message(roles[who], said.strip()) for who, said in zip(parts[::2], parts[1::2])]


def _is_hh_rlhf(row: Row) -> bool:
    return "prompt" not in row and all(
        isinstance(row.get(key), str) and row[key].lstrip("\n").startswith("Human:") for key in ("chosen", "rejected")
    )


def _is_alpaca(row: Row) -> bool:
    return "prompt" not in row and all(key in row for key in ("instruction", "chosen", "rejected"))


def _one_answer_each(
    row: Row, prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]
) -> Preference:
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if len(answer) != 1:
            raise ValueError(f"{key!r} has {len(answer)} turns after the prompt; one is needed")
    return _preference(row, prompt, chosen[0], rejected[0])


def _preference(row: Row, prompt: Sequence[Message], chosen: Message, rejected: Message) -> Preference:
    """A pair of answers to a prompt, with the system and the tools of its row."""
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if answer.role != "assistant":
            raise ValueError(f"{key!r} is said by {answer.role!r}, not by the assistant")
    if not prompt or prompt[-1].role not in ("user", "tool"):
        raise ValueError("the prompt does not end with a turn of the user")
    whole = with_system(row, prompt)
    check_order(whole, "prompt", len(whole) - len(prompt))
    return Preference(tuple(whole), chosen, rejected, tools_at(row))


def has_keys(*keys: str) -> Any:
    """A test whether a row has all of these keys."""
    return lambda row: all(key in row for key in keys)


BUILTIN = [
    DataFormat(
        name="paddlenlp_preference",
        help="src, tgt, response, sort",
        kind="preference",
        matches=has_keys("src", "response", "sort"),
        convert=paddlenlp_preference,
    ),
    DataFormat(
        name="sharegpt_preference",
        help="conversations of from/value, chosen, rejected",
        kind="preference",
        matches=has_keys("conversations", "chosen", "rejected"),
        convert=sharegpt_preference,
    ),
    DataFormat(
        name="hh_rlhf",
        help="chosen, rejected; texts of Human: and Assistant:",
        kind="preference",
        matches=_is_hh_rlhf,
        convert=hh_rlhf,
    ),
    DataFormat(
        name="alpaca_preference",
        help="instruction, input, chosen, rejected; history, system",
        kind="preference",
        matches=_is_alpaca,
        convert=alpaca_preference,
    ),
    DataFormat(
        name="trl_preference",
        help="prompt, chosen, rejected; text or lists of role/content",
        kind="preference",
        matches=has_keys("chosen", "rejected"),
        convert=trl_preference,
    ),
]
