"""From preference rows to batches: what is masked, what is supervised, what is dropped, which position says what."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Message, Preference, Ranking
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.pairs import Pair, Pairs
from tests.support import dpo_case

START = 1  # of data/tokenizer
EOS = 2
PAD = 0


@pytest.fixture(scope="module")
def stage() -> DpoStage:
    return dpo_case.stage()


def row(prompt: str = "What is 1 + 1?", chosen: str = "2", rejected: str = "3") -> Preference:
    return Preference((Message("user", prompt),), Message("assistant", chosen), Message("assistant", rejected))


def text(stage: DpoStage, ids: list[int]) -> str:
    return str(stage.context.tokenizer._fast.decode(ids, skip_special_tokens=False))


def drops(stage: DpoStage, *rows: Preference) -> dict[str, int]:
    made, counts = dpo_case.pairs(stage, rows)
    assert len(made) + sum(counts.dropped.values()) == len(rows)
    return counts.dropped


# one row


def test_an_eval_prompt_has_the_prompt_and_the_chosen_answer(stage: DpoStage) -> None:
    (pairs, _) = dpo_case.pairs(stage, [row(), row("And 1 + 2?", "3", "4")])
    prompts = [question for pair in pairs for question in stage.eval_prompts(pair)]
    assert [list(question.prompt) for question in prompts] == [pair.prompt for pair in pairs]
    assert [text(stage, list(question.answer)) for question in prompts] == ["2<|im_end|>", "3<|im_end|>"]
    assert stage.eval_prompts(Pairs(tuple(pairs))) == prompts, "packed"


def test_prompt_and_answers_are_what_the_template_writes(stage: DpoStage) -> None:
    conversation = (
        Message("system", "Be brief."),
        Message("user", "What is 1 + 1?"),
        Message("assistant", "2"),
        Message("user", "And twice that?"),
    )
    ((pair,), _) = dpo_case.pairs(
        stage, [Preference(conversation, row(chosen="4").chosen, row(rejected="It is 4, of course.").rejected)]
    )
    assert text(stage, pair.prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nAnd twice that?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text(stage, pair.chosen) == "4<|im_end|>"
    assert text(stage, pair.rejected) == "It is 4, of course.<|im_end|>"


def ranking(*answers: str, scores: tuple[float, ...] = (3, 2, 1)) -> Ranking:
    return Ranking(row().prompt, tuple(Message("assistant", answer) for answer in answers), scores)


def test_ranked_answers_are_pairs_that_are_counted(stage: DpoStage) -> None:
    rows = [row(), ranking("a", "b", "c"), ranking("a", "b", " a "), ranking("a", "b", "c", scores=(1, 1, 1))]
    pairs, counts = dpo_case.pairs(stage, rows)
    answers = [(text(stage, pair.chosen).strip()[0], text(stage, pair.rejected).strip()[0]) for pair in pairs]
    assert answers == [("2", "3"), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b"), ("b", "a")]
    assert counts.dropped == {"with ranked answers that make no pair": 1}
    assert counts.sample_rows == [0, 1, 1, 1, 2, 2]
    assert counts.of_ranked() == (
        "2 rows with ranked answers make 5 pairs; pairs that are left out: 1 with chosen equal to rejected"
    )


def test_the_best_answer_alone_may_be_chosen(stage: DpoStage) -> None:
    data = dataclasses.replace(stage.context.data, ranked_pairs="best")
    made = DpoStage(stage.section, dataclasses.replace(stage.context, data=data))
    pairs, counts = dpo_case.pairs(made, [ranking("a", "b", "c")])
    assert [(text(stage, pair.chosen)[0], text(stage, pair.rejected)[0]) for pair in pairs] == [("a", "b"), ("a", "c")]
    assert counts.num_pairs == 2


def test_every_embedded_row(stage: DpoStage) -> None:
    rows = dpo_case.rows(280)
    pairs, counts = dpo_case.pairs(stage, rows)
    assert len(pairs) == 280
    assert counts.dropped == {}
    for source, pair in zip(rows, pairs):
        # the header of each turn once: user and, opened for the answer, assistant
        assert pair.prompt.count(START) == 2
        assert text(stage, pair.prompt).count("<|im_start|>assistant\n") == 1
        assert text(stage, pair.prompt).endswith("<|im_start|>assistant\n")
        for answer, content in ((pair.chosen, source.chosen), (pair.rejected, source.rejected)):
            assert START not in answer
            # the end is supervised, once, and nothing after it
            assert answer.count(EOS) == 1
            assert answer[-1] == EOS
            assert text(stage, answer[:-1]) == content.content


@pytest.mark.parametrize("template", ["tokenizer", "chatml", "llama3", "plain"])
def test_each_template_opens_and_ends_once(template: str) -> None:
    stage = dpo_case.stage(chat_template=template)
    ((pair,), _) = dpo_case.pairs(stage, [row()])
    # chatml opens each of two turns; llama3 writes the bos token, which is the same one here; plain writes none
    assert pair.prompt.count(START) == {"tokenizer": 2, "chatml": 2, "llama3": 1, "plain": 0}[template]
    assert pair.prompt[0] == START or template == "plain"
    for answer in (pair.chosen, pair.rejected):
        assert answer.count(EOS) == 1
        assert answer[-1] == EOS
        assert START not in answer
    # the eos token of this tokenizer does not close a turn of llama3, so it is supervised after the token that does
    assert text(stage, pair.chosen) == ("2<|eot_id|><|im_end|>" if template == "llama3" else "2<|im_end|>")


# rows that train nothing


def test_reasons_to_drop_a_row(stage: DpoStage) -> None:
    assert drops(stage, row()) == {}
    assert drops(stage, row(rejected="2")) == {"with chosen equal to rejected": 1}
    assert drops(stage, row(rejected=" 2\n")) == {"with chosen equal to rejected": 1}
    assert drops(stage, row(chosen=""), row(rejected=" \n")) == {"with an empty answer": 2}
    inside = "with the end-of-sequence token inside an answer"
    assert drops(stage, row(chosen="2<|im_end|>3"), row(rejected="<|im_end|>")) == {inside: 2}
    assert drops(stage, row(rejected="2"), row(), row(rejected="")) == {
        "with chosen equal to rejected": 1,
        "with an empty answer": 1,
    }


def test_a_prompt_of_no_tokens_is_dropped(stage: DpoStage, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(stage, "_template", ChatTemplate(bare, {}, "bare"))
    assert drops(stage, row(), row(prompt="")) == {"with a prompt of no tokens (nothing would predict the answer)": 1}


def test_answers_that_are_the_same_tokens_are_dropped(stage: DpoStage, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = stage.context.tokenizer
    encode = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: encode([text.lower() for text in texts]))
    dropped = drops(stage, row(chosen="Paris", rejected="PARIS"), row(chosen="Paris", rejected="Rome"))
    assert dropped == {"with chosen equal to rejected": 1}


def test_pairs_that_are_too_long_are_dropped(stage: DpoStage) -> None:
    long_rejected = row(rejected="not two but three")
    ((pair,), _) = dpo_case.pairs(stage, [long_rejected])
    prompt = len(pair.prompt)
    longest = len(pair.rejected)
    assert len(pair.chosen) < longest
    for max_length in (prompt + longest, prompt + longest + 1):
        assert drops(dpo_case.stage(max_length=max_length), long_rejected) == {}
    too_long = f"longer than data.max_length {prompt + longest - 1} (the end of an answer would be cut off)"
    assert drops(dpo_case.stage(max_length=prompt + longest - 1), long_rejected) == {too_long: 1}
    # either answer may be the longer one
    swapped = row(chosen="not two but three", rejected="2")
    assert drops(dpo_case.stage(max_length=prompt + longest - 1), swapped) == {too_long: 1}
    masked = f"with a prompt of {prompt} tokens or more (all masked)"
    assert drops(dpo_case.stage(max_length=prompt), long_rejected) == {masked: 1}


def write(path: Path, *rows: Preference) -> Path:
    lines = ({"prompt": r.prompt[0].content, "chosen": r.chosen.content, "rejected": r.rejected.content} for r in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_file_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    stage = dpo_case.stage(max_length=40)
    path = write(tmp_path / "bad.jsonl", row(rejected="2"), row(chosen=""), row(prompt="why? " * 40))
    with pytest.raises(UserError) as caught:
        stage.reader.read(path)
    assert str(caught.value) == (
        f"{path}: none of its 3 rows can train anything: 1 with a prompt of 40 tokens or more (all masked); "
        "1 with an empty answer; 1 with chosen equal to rejected"
    )


def test_dropped_rows_are_reported_and_the_others_used(tmp_path: Path) -> None:
    reported: list[str] = []
    stage = dpo_case.stage(report=reported.append)
    path = write(tmp_path / "some.jsonl", row(rejected="2"), row(chosen="4"), row(rejected=""))
    (pair,) = stage.reader.read(path)
    assert text(stage, pair.chosen) == "4<|im_end|>"
    dropped = "dropped: 1 with an empty answer; 1 with chosen equal to rejected"
    assert reported == [f"{path}: 1 of 3 rows are used; {dropped}"]


# batches

tokens = st.integers(3, 511)
answers = st.lists(tokens, max_size=6).map(lambda ids: [*ids, EOS])
some_pairs = st.lists(
    st.builds(Pair, st.lists(tokens, min_size=1, max_size=7), answers, answers), min_size=1, max_size=5
)


@given(some_pairs)
def test_every_position_predicts_its_target_from_its_context(stage: DpoStage, pairs: list[Pair]) -> None:
    batch = stage.collate(pairs)
    input_ids = batch["input_ids"]
    found: list[tuple[int, list[int], int]] = []
    for position, target, owner in zip(batch["positions"], batch["targets"], batch["owners"]):
        sequence, column = divmod(int(position), input_ids.shape[1])
        assert sequence == owner
        found.append((sequence, input_ids[sequence, : column + 1].tolist(), int(target)))

    expected = []
    sequences = [(pair.prompt, pair.chosen) for pair in pairs] + [(pair.prompt, pair.rejected) for pair in pairs]
    for sequence, (prompt, answer) in enumerate(sequences):
        expected += [(sequence, prompt + answer[:i], token) for i, token in enumerate(answer)]
    assert found == expected

    lengths = [len(prompt) + len(answer) for prompt, answer in sequences]
    assert input_ids.shape == (len(sequences), max(lengths) - 1)
    for ids, length in zip(input_ids, lengths):
        assert (ids[length - 1 :] == PAD).all()
    assert batch["num_tokens"] == sum(lengths)
    assert batch["num_supervised"] == len(expected)
    assert input_ids.dtype == batch["targets"].dtype == np.int64


def test_both_answers_see_the_same_prompt(stage: DpoStage) -> None:
    pairs, _ = dpo_case.pairs(stage, dpo_case.rows(6))
    input_ids: Any = stage.collate(pairs)["input_ids"]
    for i, pair in enumerate(pairs):
        for ids in (input_ids[i], input_ids[len(pairs) + i]):
            assert ids[: len(pair.prompt)].tolist() == pair.prompt
