"""Every shape of preference rows: what it becomes, and what is said of a faulty one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.data.preference_formats import (
    BUILTIN,
    alpaca_preference,
    hh_rlhf,
    paddlenlp_preference,
    ranked,
    sharegpt_preference,
    trl_preference,
)
from llmsuite.data.rows import Message, Preference, Ranking
from llmsuite.data.turns import parse_sharegpt_message
from tests.support.fields import fields

SYSTEM = Message("system", "Be brief.")
ASK = Message("user", "Hi?")
SAY = Message("assistant", "Hello.")
AGAIN = Message("user", "And?")


def pair(prompt: tuple[Message, ...], chosen: str = "Good.", rejected: str = "Bad.") -> Preference:
    return Preference(prompt, Message("assistant", chosen), Message("assistant", rejected))


ONE = pair((ASK,))
TWO = pair((ASK, SAY, AGAIN))
SAME = pair((ASK,), "Good.", "Good.")
SKY = pair((Message("user", "The sky is"),), "blue.", "black.")
SKY_TAB = pair((Message("user", "The sky"),), "is blue.", "is\tblack.")
HH = "\n\nHuman: Hi?\n\nAssistant: Hello.\n\nHuman: And?\n\nAssistant:"


def with_system(row: Preference) -> Preference:
    return Preference((SYSTEM, *row.prompt), row.chosen, row.rejected)


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def turns(*messages: Message) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


GOOD = Message("assistant", "Good.")
BAD = Message("assistant", "Bad.")
PADDLENLP = {"src": ["Hi?"], "tgt": [], "response": ["Good.", "Bad."], "sort": [1, 0]}
PADDLENLP_TWO = {"src": ["Hi?", "And?"], "tgt": ["Hello."], "response": ["Good.", "Bad."], "sort": [1, 0]}
SHAREGPT = {"conversations": [human("Hi?")], "chosen": gpt("Good."), "rejected": gpt("Bad.")}
ALPACA = {"instruction": "Hi?", "input": "", "chosen": "Good.", "rejected": "Bad."}
TRL = {"prompt": "Hi?", "chosen": "Good.", "rejected": "Bad."}

ACCEPTED: list[tuple[Callable[[Any], Preference], dict[str, Any], Preference]] = [
    (paddlenlp_preference, PADDLENLP, ONE),
    (paddlenlp_preference, {**PADDLENLP, "response": ["Bad.", "Good."], "sort": [0, 1]}, ONE),
    (paddlenlp_preference, {**PADDLENLP, "sort": [-1.5, -2]}, ONE),
    (paddlenlp_preference, {"src": "Hi?", "response": ["Good.", "Bad."], "sort": [2, 1]}, ONE),
    (paddlenlp_preference, {**PADDLENLP, "system": "Be brief."}, with_system(ONE)),
    (paddlenlp_preference, {**PADDLENLP, "system": ""}, ONE),
    (paddlenlp_preference, PADDLENLP_TWO, TWO),
    (paddlenlp_preference, {**PADDLENLP_TWO, "system": "Be brief.", "extra": 1}, with_system(TWO)),
    (alpaca_preference, ALPACA, ONE),
    (alpaca_preference, {**ALPACA, "input": None, "system": "Be brief."}, with_system(ONE)),
    (alpaca_preference, {**ALPACA, "instruction": "And?", "history": [["Hi?", "Hello."]]}, TWO),
    (
        alpaca_preference,
        {**ALPACA, "input": "You!"},
        pair((Message("user", "Hi?\nYou!"),)),
    ),
    (sharegpt_preference, SHAREGPT, ONE),
    (sharegpt_preference, {**SHAREGPT, "conversations": [human("Hi?"), gpt("Hello."), human("And?")]}, TWO),
    (sharegpt_preference, {**SHAREGPT, "system": "Be brief."}, with_system(ONE)),
    (
        sharegpt_preference,
        {**SHAREGPT, "conversations": [{"from": "system", "value": "Be brief."}, human("Hi?")]},
        with_system(ONE),
    ),
    (
        sharegpt_preference,
        {
            "conversations": [{"from": "user", "value": "Hi?"}],
            "chosen": {"from": "assistant", "value": "Good."},
            "rejected": {"from": "assistant", "value": "Bad."},
        },
        ONE,
    ),
    (
        sharegpt_preference,
        {
            **SHAREGPT,
            "conversations": [
                human("Hi?"),
                {"from": "function_call", "value": '{"name": "now", "arguments": {}}'},
                {"from": "observation", "value": "noon"},
            ],
        },
        pair(
            (
                ASK,
                parse_sharegpt_message({"from": "function_call", "value": '{"name": "now"}'}, "x"),
                Message("tool", "noon"),
            )
        ),
    ),
    (trl_preference, TRL, ONE),
    (trl_preference, {"prompt": turns(ASK), "chosen": turns(GOOD), "rejected": turns(BAD)}, ONE),
    (trl_preference, {"prompt": turns(ASK, SAY, AGAIN), "chosen": "Good.", "rejected": turns(BAD)}, TWO),
    (trl_preference, {"prompt": turns(SYSTEM, ASK), "chosen": turns(GOOD), "rejected": turns(BAD)}, with_system(ONE)),
    # without a prompt, it is what both conversations begin with
    (trl_preference, {"chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD)}, ONE),
    (trl_preference, {"prompt": None, "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD)}, ONE),
    (trl_preference, {"chosen": turns(ASK, SAY, AGAIN, GOOD), "rejected": turns(ASK, SAY, AGAIN, BAD)}, TWO),
    # as in HuggingFaceH4/ultrafeedback_binarized
    (trl_preference, {"prompt": " Hi?", "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD), "score": 1}, ONE),
    (
        trl_preference,
        {"prompt": turns(ASK), "chosen": turns(SYSTEM, ASK, GOOD), "rejected": turns(SYSTEM, ASK, BAD)},
        with_system(ONE),
    ),
    (
        trl_preference,
        {"prompt": "And?", "chosen": turns(ASK, SAY, AGAIN, GOOD), "rejected": turns(ASK, SAY, AGAIN, BAD)},
        TWO,
    ),
    (trl_preference, {"prompt": "Hi?", "chosen": turns(ASK, GOOD), "rejected": turns(ASK, GOOD)}, SAME),
    # TRL's implicit prompts: texts are cut where a word begins
    (trl_preference, {"chosen": "The sky is blue.", "rejected": "The sky is black."}, SKY),
    (trl_preference, {"prompt": None, "chosen": "The sky is blue.", "rejected": "The sky is\tblack."}, SKY_TAB),
    (hh_rlhf, {"chosen": HH + " Good.", "rejected": HH + " Bad.\n"}, TWO),
    (hh_rlhf, {"chosen": "\n\nHuman: Hi?\n\nAssistant: Good.", "rejected": "\n\nHuman: Hi?\n\nAssistant: Bad."}, ONE),
    (
        trl_preference,
        {"chosen": turns(SYSTEM, ASK, GOOD), "rejected": turns(SYSTEM, ASK, GOOD)},  # the answer is never shared
        pair((SYSTEM, ASK), "Good.", "Good."),
    ),
]


@pytest.mark.parametrize(("convert", "row", "expected"), ACCEPTED)
def test_accepted_rows_are_converted(
    convert: Callable[[Any], Preference], row: dict[str, Any], expected: Preference
) -> None:
    assert fields(convert(row)) == fields(expected)


RANKED = {"prompt": "Hi?", "responses": ["Bad.", "Good.", "Fair."], "scores": [1, 3, 2.5]}


def said(row: Ranking, which: Any = "all") -> list[tuple[str, str]]:
    """The chosen and the rejected answer of each pair."""
    return [(found.chosen.content, found.rejected.content) for found in row.pairs(which)]


@pytest.mark.parametrize(
    "row",
    [
        RANKED,
        {**RANKED, "scores": None, "ranks": [3, 1, 2]},
        {**RANKED, "prompt": turns(ASK), "responses": [turns(BAD), turns(GOOD)[0], "Fair."]},
    ],
)
def test_ranked_answers_make_pairs(row: dict[str, Any]) -> None:
    found = ranked(row)
    assert said(found) == [("Good.", "Fair."), ("Good.", "Bad."), ("Fair.", "Bad.")]
    assert said(found, "best") == [("Good.", "Fair."), ("Good.", "Bad.")]
    assert {each.prompt for each in found.pairs("all")} == {(ASK,)}


def test_answers_with_equal_scores_are_not_compared() -> None:
    assert said(ranked({**RANKED, "scores": [2, 2, 1]})) == [("Bad.", "Fair."), ("Good.", "Fair.")]
    assert said(ranked({**RANKED, "scores": [2, 2, 1]}), "best") == [("Bad.", "Fair.")]
    assert said(ranked({**RANKED, "scores": [1, 1, 1]})) == []


@given(scores=st.lists(st.integers(-3, 3) | st.floats(-3, 3), min_size=2, max_size=7))
def test_each_pair_prefers_the_larger_score(scores: list[float]) -> None:
    names = [str(i) for i in range(len(scores))]
    row = ranked({"prompt": "Hi?", "responses": names, "scores": scores})
    expected = {(a, b) for a in names for b in names if scores[int(a)] > scores[int(b)]}
    assert sorted(said(row)) == sorted(expected)
    best = said(row, "best")
    assert len({a for a, _ in best}) <= 1
    assert sorted(b for _, b in best) == sorted(b for b in names if scores[int(b)] < max(scores))
    by_rank = ranked({"prompt": "Hi?", "responses": names, "ranks": [-score for score in scores]})
    assert by_rank == row


REFUSED: list[tuple[Callable[[Any], Preference], dict[str, Any], str]] = [
    (paddlenlp_preference, {**PADDLENLP, "src": ["a", "b"]}, "'src' has 2 turns and 'tgt' 0"),
    (paddlenlp_preference, {**PADDLENLP, "src": []}, "'src' has 0 turns and 'tgt' 0"),
    (paddlenlp_preference, {**PADDLENLP, "tgt": ["a"]}, "'src' has 1 turns and 'tgt' 1"),
    (paddlenlp_preference, {**PADDLENLP, "src": [1]}, "'src' is not text or a list of texts"),
    (paddlenlp_preference, {**PADDLENLP, "src": {"a": 1}}, "'src' is not text or a list of texts"),
    (paddlenlp_preference, {**PADDLENLP, "src": None}, "'src' is not text or a list of texts"),
    (paddlenlp_preference, {**PADDLENLP, "response": ["a"]}, "'response' has 1 answers; two are needed"),
    (paddlenlp_preference, {**PADDLENLP, "response": ["a", "b", "c"]}, "'response' has 3 answers"),
    (paddlenlp_preference, {**PADDLENLP, "response": "ab"}, "'response' has 1 answers"),
    (paddlenlp_preference, {**PADDLENLP, "response": ["a", None]}, "'response' is not text or a list"),
    *(
        (paddlenlp_preference, {**PADDLENLP, "sort": order}, "'sort' is")
        for order in (None, [], [1], [1, 1], [1, 2, 3], 1, "10", ["1", "0"], [1, "0"], [None, 1], [1, float("nan")])
    ),
    (paddlenlp_preference, {**PADDLENLP, "system": 3}, "'system' is an integer, not text"),
    (alpaca_preference, {**ALPACA, "chosen": ["Good."]}, "'chosen' is a list, not text"),
    (alpaca_preference, {**ALPACA, "history": [["Hi?"]]}, "'history[0]' is not [question, answer]"),
    (sharegpt_preference, {**SHAREGPT, "conversations": "Hi?"}, "'conversations' is not a list"),
    (sharegpt_preference, {**SHAREGPT, "conversations": []}, "'conversations' is not a list of turns"),
    (sharegpt_preference, {**SHAREGPT, "conversations": ["Hi?"]}, "'conversations[0]' is not an object with 'from'"),
    (sharegpt_preference, {**SHAREGPT, "conversations": [{"from": "human"}]}, "'conversations[0]' has no key 'value'"),
    (
        sharegpt_preference,
        {**SHAREGPT, "conversations": [human("a"), gpt("b")]},
        "does not end with a turn of the user",
    ),
    (
        sharegpt_preference,
        {**SHAREGPT, "conversations": [human("a"), {"from": "bot", "value": "b"}]},
        "'conversations[1]' has the unknown role 'bot'",
    ),
    *(
        (sharegpt_preference, {**SHAREGPT, "conversations": [{"from": role, "value": "a"}]}, "has the unknown role")
        for role in (None, 3, ["human"], {"a": 1})
    ),
    (
        sharegpt_preference,
        {**SHAREGPT, "conversations": [{"from": "human", "value": 3}]},
        "'conversations[0].value' is an integer, not text",
    ),
    (sharegpt_preference, {**SHAREGPT, "chosen": human("a")}, "'chosen' is a turn of 'user', not of the assistant"),
    (sharegpt_preference, {**SHAREGPT, "rejected": human("a")}, "'rejected' is a turn of 'user'"),
    (sharegpt_preference, {**SHAREGPT, "chosen": "a"}, "'chosen' is not an object with 'from' and 'value'"),
    (sharegpt_preference, {**SHAREGPT, "rejected": [gpt("a")]}, "'rejected' is not an object"),
    (
        sharegpt_preference,
        {**SHAREGPT, "chosen": {"from": "gpt", "value": None}},
        "'chosen.value' is null, not text",
    ),
    (trl_preference, {**TRL, "prompt": 3}, "'prompt' is neither text nor a list of turns"),
    (trl_preference, {**TRL, "prompt": []}, "'prompt' is neither text nor a list of turns"),
    (trl_preference, {**TRL, "chosen": None}, "'chosen' is neither text nor a list of turns"),
    (trl_preference, {**TRL, "chosen": 1.5}, "'chosen' is neither text nor a list of turns"),
    (trl_preference, {**TRL, "chosen": turns(GOOD, GOOD)}, "'chosen' has 2 turns after the prompt; one is needed"),
    (trl_preference, {**TRL, "chosen": turns(ASK)}, "'chosen' is a turn of 'user'"),
    (
        trl_preference,
        {"prompt": "Ho?", "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD)},
        "'prompt' is none of the turns that 'chosen' and 'rejected' share",
    ),
    (
        trl_preference,
        {"prompt": "Hi?", "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD, AGAIN, BAD)},
        "'rejected' has 3 turns after the prompt; one is needed",
    ),
    (trl_preference, {"chosen": "Good.", "rejected": "Bad."}, "do not begin with the same words"),
    (trl_preference, {"chosen": " Good.", "rejected": " Bad."}, "do not begin with the same words"),
    (hh_rlhf, {"chosen": HH + " a", "rejected": "Human: Ho?\n\nAssistant: b"}, "'chosen' has 4 turns after the prompt"),
    (hh_rlhf, {"chosen": HH + " a", "rejected": "Assistant said"}, "'rejected' does not begin with 'Human:'"),
    (hh_rlhf, {"chosen": HH + " a", "rejected": HH + "\n\nHuman: b"}, "'rejected' has 2 turns after the prompt"),
    (trl_preference, {**TRL, "prompt": turns(SAY)}, "prompt does not end with a turn of the user"),
    (trl_preference, {**TRL, "prompt": [{"role": "bot", "content": "a"}]}, "'prompt[0]' has the unknown role 'bot'"),
    (trl_preference, {**TRL, "prompt": [{"role": ["user"], "content": "a"}]}, "has the unknown role ['user']"),
    (
        trl_preference,
        {**TRL, "prompt": [{"role": "user", "content": 1}]},
        "'prompt[0].content' is an integer, not text",
    ),
    (
        trl_preference,
        {"chosen": turns(ASK, GOOD), "rejected": turns(AGAIN, BAD)},
        "'chosen' has 2 turns after the prompt",
    ),
    (trl_preference, {"chosen": turns(ASK, GOOD, GOOD), "rejected": turns(ASK, BAD)}, "'chosen' has 2 turns"),
    (ranked, {**RANKED, "responses": ["a"]}, "'responses' is no list of two answers or more"),
    (ranked, {**RANKED, "responses": "ab"}, "'responses' is no list of two answers or more"),
    (ranked, {**RANKED, "responses": ["a"] * 129}, "'responses' has 129 answers; at most 128 are read"),
    (ranked, {**RANKED, "responses": ["a", "b", 1]}, "'responses[2][0]' is not an object"),
    (ranked, {**RANKED, "responses": ["a", "b", turns(ASK)]}, "'responses[2]' is not one turn of the assistant"),
    (ranked, {**RANKED, "responses": ["a", "b", turns(GOOD, BAD)]}, "'responses[2]' is not one turn of the assistant"),
    (ranked, {**RANKED, "ranks": [1, 2, 3]}, "has scores and ranks of scores, ranks; one of them is needed"),
    (ranked, {**RANKED, "scores": None}, "has neither of scores, ranks; one of them is needed"),
    (ranked, {**RANKED, "scores": [1, 2]}, "'scores' is no list of a number for each of the 3 'responses'"),
    (ranked, {**RANKED, "scores": [1, 2, "3"]}, "'scores' is no list of a number for each of the 3"),
    (ranked, {**RANKED, "scores": [1, 2, True]}, "'scores' is no list of a number for each of the 3"),
    (ranked, {**RANKED, "scores": [1, 2, float("nan")]}, "'scores' is no list of a number for each of the 3"),
    (ranked, {**RANKED, "scores": [1, 2, 10**400]}, "'scores' is no list of a number for each of the 3"),
    (ranked, {**RANKED, "prompt": turns(ASK, GOOD)}, "the prompt does not end with a turn of the user"),
]


@pytest.mark.parametrize(("convert", "row", "message"), REFUSED)
def test_faulty_rows_are_refused(convert: Callable[[Any], Preference], row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        convert(row)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("convert", "row"),
    [(sharegpt_preference, SHAREGPT), (trl_preference, TRL)],
)
@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_a_missing_key_is_a_key_error(convert: Callable[[Any], Preference], row: dict[str, Any], key: str) -> None:
    with pytest.raises(KeyError, match=key):
        convert({k: v for k, v in row.items() if k != key})


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (PADDLENLP, "paddlenlp_preference"),
        (SHAREGPT, "sharegpt_preference"),
        (TRL, "trl_preference"),
        (ALPACA, "alpaca_preference"),
        ({**ALPACA, "output": "Good."}, "alpaca_preference"),
        ({**TRL, **ALPACA}, "trl_preference"),
        ({"chosen": [], "rejected": []}, "trl_preference"),
        ({"chosen": HH, "rejected": HH}, "hh_rlhf"),
        ({"chosen": HH, "rejected": "Bad."}, "trl_preference"),
        ({"prompt": "Hi?", "chosen": HH, "rejected": HH}, "trl_preference"),
        ({**TRL, **PADDLENLP}, "paddlenlp_preference"),
        ({"text": "a"}, None),
        ({"prompt": "a", "chosen": "b"}, None),
        ({}, None),
    ],
)
def test_formats_are_recognised_by_their_keys(row: dict[str, Any], name: str | None) -> None:
    assert next((f.name for f in BUILTIN if f.matches(row)), None) == name
