"""From conversations to batches: what is supervised, dropped, cut or refused, and which position predicts what."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import load_template
from llmsuite.data.control_tokens import ControlTokens
from llmsuite.data.conversation_formats import openai
from llmsuite.data.keys import ColumnRules
from llmsuite.data.plain_text import plain_conversation
from llmsuite.data.read import read_rows
from llmsuite.data.rows import Conversation, Message, ToolCall, turns_of
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.supervision import check_supervision, supervised_sequences
from llmsuite.stages.language_model import WeightedTokens, collate, join, weighted_loss
from llmsuite.stages.sections import SftSection
from llmsuite.stages.sft import SftStage
from tests.support import dpo_case, tokenizers
from tests.support.graphs import SLOW_ON_GPUS, gradient_nodes
from tests.support.paths import DATA
from tests.support.sft_case import FORMATS, make_stage, samples, talk

START = 1  # of data/tokenizer
EOS = 2
PAD = 0


@pytest.fixture(scope="module")
def stage() -> SftStage:
    return make_stage()


def text(made: SftStage, ids: Any) -> str:
    return str(made.context.tokenizer._fast.decode([int(i) for i in ids], skip_special_tokens=False))


def parts(made: SftStage, sample: WeightedTokens) -> list[str]:
    """Text of each run of tokens of the same weight; what is supervised is every second one."""
    assert sample.weights[0] == 0
    assert set(sample.weights) <= {0, 1}
    borders = [0, *(np.flatnonzero(np.diff(sample.weights)) + 1), len(sample.ids)]
    return [text(made, sample.ids[a:b]) for a, b in itertools.pairwise(borders)]


# one row


def test_the_answers_and_their_ends_are_supervised_and_nothing_else(stage: SftStage) -> None:
    ((sample,), _) = samples(stage, talk("Hi?", "Hello.", "And?", "Bye.", system="Be brief."))
    assert parts(stage, sample) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
        "Hello.<|im_end|>",
        "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
        "Bye.<|im_end|>",
    ]


def test_a_turn_that_is_not_to_be_supervised_is_only_read(stage: SftStage) -> None:
    ((sample,), _) = samples(stage, talk("Hi?", "Hello.", "And?", "Bye.", supervised=(False, True)))
    before, supervised = parts(stage, sample)
    assert "Hello.<|im_end|>" in before
    assert supervised == "Bye.<|im_end|>"
    ((first,), _) = samples(stage, talk("Hi?", "Hello.", "And?", "Bye.", supervised=(True, False)))
    assert parts(stage, first)[1:] == ["Hello.<|im_end|>"]  # what comes later would teach nothing


def test_the_tokens_of_a_turn_have_its_weight(stage: SftStage) -> None:
    row = talk("Hi?", "Hello.", "And?", "Bye.", "Then?", "No.")
    ((plain,), _) = samples(stage, row)
    ((weighted,), _) = samples(stage, dataclasses.replace(row, weights=(0, 0.25, 0, 1, 0, 3)))
    np.testing.assert_array_equal(weighted.ids, plain.ids)
    borders = np.flatnonzero(np.diff(plain.weights, prepend=0))  # begin and end of each answer but the end of the last
    expected = np.zeros(len(plain.ids))
    for begin, end, weight in zip(borders[::2], [*borders[1::2], None], (0.25, 1, 3)):
        expected[begin:end] = weight
    np.testing.assert_array_equal(weighted.weights, expected)


WITH_BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}Q: {{ m.content }} {% endif %}{% endfor %}"
)


def test_marked_parts_have_the_weight_of_their_turn() -> None:
    made = make_stage(template=WITH_BLOCKS)
    row = dataclasses.replace(talk("Hi?", "Hello.", "And?", "Bye."), weights=(0, 0.5, 0, 2))
    ((sample,), _) = samples(made, row)
    assert text(made, sample.ids[sample.weights == 0.5]) == "Hello.<|im_end|>"
    assert text(made, sample.ids[sample.weights == 2]) == "Bye.<|im_end|>"


def test_plain_text_is_supervised_up_to_its_end() -> None:
    made = make_stage(template="none, and none is needed")
    ((whole, prompted), _) = samples(made, plain_conversation("", "Hi there."), plain_conversation("Hi", " there."))
    assert text(made, whole.ids) == text(made, prompted.ids) == "Hi there.<|im_end|>"
    assert whole.weights.tolist() == [0, *[1] * (len(whole.ids) - 1)]
    prompt = made.context.tokenizer.with_special_tokens(made.context.tokenizer.encode("Hi"))
    assert prompted.ids[: len(prompt)].tolist() == prompt
    assert prompted.weights.tolist() == [*[0] * len(prompt), *[1] * (len(prompted.ids) - len(prompt))]


def test_a_text_gets_the_token_that_the_tokenizer_puts_in_front(tmp_path: Path) -> None:
    made = make_stage()
    shutil.copytree(DATA / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_bos_token": True}))
    tokenizer = TextTokenizer(tmp_path / "tokenizer")
    made.context = dataclasses.replace(made.context, tokenizer=tokenizer)
    ((whole, prompted), _) = samples(made, plain_conversation("", "Hi."), plain_conversation("Hi", "."))
    assert whole.ids.tolist() == prompted.ids.tolist() == [START, *tokenizer.encode("Hi."), EOS]
    assert whole.weights.tolist() == [0, *[1] * (len(whole.ids) - 1)], "the first token of the text has one before it"
    assert text(made, prompted.ids[prompted.weights > 0]) == ".<|im_end|>"


def test_plain_text_that_trains_nothing_is_dropped(stage: SftStage) -> None:
    end = "<|im_end|>"
    _, dropped = samples(stage, plain_conversation("c", f"a{end}b"), plain_conversation("a", " "))
    assert sorted(dropped.values()) == [1, 1]
    ((ended, whole), _) = samples(stage, plain_conversation("a", f"b{end}"), plain_conversation("", f"a{end}b"))
    assert text(stage, ended.ids) == f"ab{end}"
    assert text(stage, whole.ids) == f"a{end}b{end}", "a whole text may have ends inside"


def test_an_eval_prompt_has_the_tokens_before_the_last_answer(stage: SftStage) -> None:
    ((long, short), _) = samples(stage, talk("Hi?", "Hello.", "And?", "Bye."), talk("Yes?", "No."))
    ((asked,), (other,)) = (stage.eval_prompts(sample) for sample in (long, short))
    assert text(stage, asked.answer) == "Bye.<|im_end|>"
    assert (*asked.prompt, *asked.answer) == tuple(long.ids)
    assert "Hello.<|im_end|>" in text(stage, asked.prompt)
    assert text(stage, other.answer) == "No.<|im_end|>"
    assert stage.eval_prompts(join([long, short])) == [asked, other], "packed"


@pytest.mark.parametrize(
    ("template", "supervised"),
    [
        ("chatml", ["Hello.<|im_end|>", "Bye.<|im_end|>"]),
        ("plain", ["Hello.<|im_end|>", "Bye.<|im_end|>"]),
        # the eos token of this tokenizer does not close a turn of llama3: what does is supervised, and the last end
        ("llama3", ["Hello.<|eot_id|>", "Bye.<|eot_id|><|im_end|>"]),
    ],
)
def test_each_template_supervises_the_end_of_turns(template: str, supervised: list[str]) -> None:
    made = make_stage(template=template)
    ((sample,), _) = samples(made, talk("Hi?", "Hello.", "And?", "Bye."))
    assert parts(made, sample)[1::2] == supervised


def test_text_after_the_last_answer_may_stay() -> None:
    """Without weight, as in Axolotl; it counts for the length of a row."""
    made = make_stage(template="chatml", end_of_answer="token_in_text")
    row = talk("Hi?", "Hello.", "And?", "Bye.")
    ((sample,), _) = samples(made, row)
    assert parts(made, sample)[1:] == [
        "Hello.<|im_end|>", "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n", "Bye.<|im_end|>", "\n",
    ]  # fmt: skip
    question = Conversation((*row.messages, Message("user", "Why?")), (*row.supervised, False))
    ((asked,), _) = samples(made, question)
    assert parts(made, asked)[-1] == "\n<|im_start|>user\nWhy?<|im_end|>\n"
    short = make_stage(template="chatml", end_of_answer="token_in_text", max_length=len(sample.ids) - 1)
    found, dropped = samples(short, row)
    assert not found
    assert list(dropped) == [f"longer than data.max_length {len(sample.ids) - 1} (sft.truncate is false)"]


def test_an_answer_that_ends_with_another_token_is_dropped_where_text_stays() -> None:
    """Axolotl would not supervise its end."""
    found, dropped = samples(make_stage(template="llama3", end_of_answer="token_in_text"), talk("Hi?", "Hello."))
    assert not found
    assert list(dropped) == ["with an answer that the chat template does not end with the end-of-sequence token"]


def test_a_template_with_marks_decides_how_an_answer_ends() -> None:
    """Tokens are those of the template, also where it does not write the end-of-sequence token."""
    marks = (
        "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    made = make_stage(template=marks)
    ((sample,), _) = samples(made, talk("Hi?", "Hello.", "And?", "Bye."))
    assert parts(made, sample)[1::2] == ["Hello.<|eot_id|>", "Bye.<|eot_id|>"]
    check_supervision(made, made.collate, [sample], "rows.jsonl")


def test_tools_and_calls() -> None:
    made = make_stage(template="chatml")
    call = Message("assistant", "", (ToolCall("add", '{"a": 1}'),))
    messages = (Message("user", "1 + 2?"), call, Message("tool", "3"), Message("assistant", "3"))
    row = Conversation(messages, (False, True, False, True), '[{"type": "function", "function": {"name": "add"}}]')
    ((sample,), _) = samples(made, row)
    tools, called, result, answer = parts(made, sample)
    assert '{"name": "add"}' in tools
    assert called == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert "tool\n3<|im_end|>" in result
    assert answer == "3<|im_end|>"
    for choice in ("tokenizer", "llama3", "plain"):  # templates that know nothing of tools
        with pytest.raises(UserError, match=r"rows\.jsonl: row 2: .* leaves out the tool 'add'"):
            samples(make_stage(template=choice), talk("Hi?", "Hello."), row)
    # one that shows the tools, but not that one is called, would teach to say nothing
    deaf = "{{ tools | tojson }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{{ eos_token }}{% endfor %}"
    with pytest.raises(UserError, match=r"row 1: .* leaves out a part of the content of messages\[1\]"):
        samples(make_stage(template=deaf + "{% if add_generation_prompt %}assistant {% endif %}"), row)


TURN = "{{ m['role'] }}:{{ m['content'] }}"
ASK = "{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% for m in messages %}{% if loop.last %}last {% endif %}" + TURN + "{{ eos_token }}{% endfor %}" + ASK,
            "renders what is before messages[1] differently once it follows",
        ),
        (
            "{% for m in messages %}"
            + TURN
            + "{% if m['role'] == 'assistant' and loop.last %}!{% endif %}{{ eos_token }}"
            "{% endfor %}" + ASK,
            "renders messages[1] differently once other turns follow",
        ),
        (
            "{% for m in messages %}{{ m['role'] }}:{{ m['content'] | upper }}{{ eos_token }}{% endfor %}" + ASK,
            "leaves out a part of the content of messages[1]",
        ),
        ("{% for m in messages %}" + TURN + "{% endfor %}" + ASK, "does not mark the end of messages[1]"),
    ],
)
def test_a_template_that_does_not_round_trip_is_refused(source: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        samples(make_stage(template=source), talk("Hi?", "Hello.", "And?", "Bye."))
    assert str(caught.value).startswith("rows.jsonl: row 1: chat template of a stranger ")
    assert message in str(caught.value)


def test_a_token_over_the_border_is_split_as_in_generation(stage: SftStage) -> None:
    made = make_stage(template="plain")
    encode = made.context.tokenizer.encode
    ((sample,), _) = samples(made, talk("and?", "\n\nand"))
    length = int((sample.weights == 0).sum())
    assert sample.ids[:length].tolist() == encode("and?\n")
    assert text(made, sample.ids[length:]) == "\n\nand<|im_end|>"


texts = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda t: "<|" not in t)


@given(st.lists(texts, min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
def test_every_answer_is_fully_supervised_after_its_rendered_prompt(stage: SftStage, words: list[str]) -> None:
    row = talk(*words)
    found, dropped = samples(stage, row)
    if not found:
        assert all("assistant" in reason or "tokenized" in reason for reason in dropped)
        return
    supervised = parts(stage, found[0])[1::2]
    assert supervised == [f"{answer}<|im_end|>" for answer in words[1::2]]
    for i in range(1, len(words), 2):
        prompt = stage.context.tokenizer.encode(stage._template.render(row.messages[:i], add_generation_prompt=True))
        assert found[0].ids[: len(prompt)].tolist() == prompt


# rows that train nothing


def test_reasons_to_drop_a_row(stage: SftStage) -> None:
    nothing = "with no supervised turn of the assistant, or an empty one"
    assert samples(stage, talk("Hi?"), talk("Hi?", " "), talk("Hi?", "Hello.", supervised=(False,)))[1] == {nothing: 3}
    inside = "with the end-of-sequence token inside an answer"
    assert samples(stage, talk("Hi?", "a<|im_end|>b"), talk("Hi?", "a"))[1] == {inside: 1}
    bare = make_stage(template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert samples(bare, talk("", "a"))[1] == {"with nothing before the first answer (no token would predict it)": 1}


def test_long_conversations_are_dropped_or_cut(tmp_path: Path) -> None:
    row = talk("Hi?", "Hello.", "And?", "Bye.")
    ((whole,), _) = samples(make_stage(), row)
    length = len(whole.ids)
    first = int(np.flatnonzero(whole.weights)[0])
    assert samples(make_stage(max_length=length), row)[1] == {}
    dropped = f"longer than data.max_length {length - 1} (sft.truncate is false)"
    assert samples(make_stage(max_length=length - 1), row)[1] == {dropped: 1}
    for kept in range(first + 1, length):
        ((cut,), _) = samples(make_stage(max_length=kept, truncate=True), row)
        assert cut.ids.tolist() == whole.ids[:kept].tolist()
        assert cut.weights.tolist() == whole.weights[:kept].tolist()
    reported: list[str] = []
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"src": ["Hi?", "And?"], "tgt": ["Hello.", "Bye."]}))
    make_stage(max_length=length - 1, truncate=True, report=reported.append).reader.read(path)
    assert reported == [f"{path}: 1 rows are cut to data.max_length {length - 1}", f"{path}: 1 of 1 rows are used"]
    masked = f"with no answer within data.max_length {first}"
    assert samples(make_stage(max_length=first, truncate=True), row)[1] == {masked: 1}


def test_a_file_without_a_usable_row_is_refused(tmp_path: Path, stage: SftStage) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"src": "Hi?", "tgt": ""}))
    with pytest.raises(UserError, match="can train anything: 1 with no supervised turn of the assistant"):
        stage.reader.read(path)


def test_every_embedded_row(stage: SftStage) -> None:
    columns = ColumnRules(ignored=["tasks"])
    rows = read_rows(DATA / "sft" / "train.jsonl", "conversation", "auto", FORMATS, columns=columns)
    found, dropped = samples(stage, *rows)
    assert (len(found), dropped) == (160, {})
    for row, sample in zip(rows, found):
        answers = [m.content for m in row.messages if m.role == "assistant"]
        assert parts(stage, sample)[1::2] == [f"{answer}<|im_end|>" for answer in answers]


# batches

weighted = st.lists(st.tuples(st.integers(3, 511), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=8).map(
    lambda rest: WeightedTokens(
        np.array([1, *(i for i, _ in rest), 5], "int32"), np.array([0, *(w for _, w in rest), 1], "float32")
    )
)


@given(st.lists(weighted, min_size=1, max_size=5), st.integers(1, 8))
def test_every_position_predicts_its_target_from_its_context(found: list[WeightedTokens], multiple: int) -> None:
    batch = collate(found, PAD, multiple)
    length = batch["input_ids"].shape[1]
    assert length % multiple == 0
    longest = max(len(sample.ids) for sample in found) - 1
    assert longest <= length < longest + multiple
    supervised = []
    for position, target, weight in zip(batch["positions"], batch["targets"], batch["weights"]):
        row, column = divmod(int(position), length)
        supervised.append((row, batch["input_ids"][row, : column + 1].tolist(), int(target), float(weight)))
    expected = [
        (row, sample.ids[:i].tolist(), int(sample.ids[i]), float(weight))
        for row, sample in enumerate(found)
        for i, weight in enumerate(sample.weights)
        if weight
    ]
    assert supervised == expected
    assert batch["num_supervised"] == len(expected)
    assert batch["num_tokens"] == sum(len(sample.ids) for sample in found)
    for ids, sample in zip(batch["input_ids"], found):
        assert (ids[len(sample.ids) - 1 :] == PAD).all()


def test_the_loss_is_the_weighted_sum_over_the_tokens(stage: SftStage) -> None:
    model = dpo_case.model()
    found, _ = samples(stage, talk("Hi?", "Hello.", "And?", "Bye."), talk("1 + 1?", "2"))
    found[0] = dataclasses.replace(found[0], weights=found[0].weights * np.float32(0.5))
    terms = weighted_loss(model, stage.collate(found))
    expected = weight = likely = 0.0
    for sample in found:
        logits = model(paddle.to_tensor(sample.ids[None].astype("int64"))).numpy()[0].astype("float64")
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for i in np.flatnonzero(sample.weights):
            expected -= sample.weights[i] * logs[i - 1, sample.ids[i]]
            likely += sample.weights[i] * (logs[i - 1, sample.ids[i]] > np.log(0.5))
            weight += sample.weights[i]
    assert float(terms.total) == pytest.approx(expected, rel=1e-6)
    assert terms.weight == weight
    assert terms.sums.keys() == {"tokens/likely"}, "training does not pass over the logits once more"
    assert float(terms.sums["tokens/likely"][0]) == likely
    assert terms.sums["tokens/likely"][1] == weight


def test_dynamic_fine_tuning_weighs_each_token_by_its_probability(stage: SftStage) -> None:
    row = dataclasses.replace(talk("Hi?", "Hello.", "And?", "Bye."), weights=(0, 0.5, 0, 1))
    (sample,), _ = samples(stage, row)
    batch = stage.collate([sample])
    model = dpo_case.model()
    hidden = model.hidden_states(paddle.to_tensor(batch["input_ids"]))[0].flatten(0, 1)
    logits = model.logits(hidden.index_select(paddle.to_tensor(batch["positions"]), 0)).numpy().astype("float64")
    logps = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    logps = logps[np.arange(len(logps)), batch["targets"]]
    made = SftStage(SftSection(loss="dft"), stage.context)
    terms = made.loss(model, batch)
    assert not gradient_nodes(terms.total) & SLOW_ON_GPUS
    assert float(terms.total) == pytest.approx(-(np.exp(logps) * logps * batch["weights"]).sum(), rel=1e-4)
    assert terms.weight == pytest.approx(batch["weights"].sum())
    assert float(terms.sums["nll"][0]) == pytest.approx(-(logps * batch["weights"]).sum(), rel=1e-4)
    # no gradient through the probability: that of the loss is the gradient of -p log p with p held fixed
    terms.total.backward()
    found = model.lm_head.weight.grad.numpy()
    model.clear_gradients()
    fixed = {**batch, "weights": (np.exp(logps) * batch["weights"]).astype("float32")}
    weighted_loss(model, fixed).total.backward()
    np.testing.assert_allclose(found, model.lm_head.weight.grad.numpy(), rtol=2e-3, atol=1e-7)
    model.clear_gradients()


def test_an_evaluation_counts_what_greedy_decoding_picks() -> None:
    model = dpo_case.model()
    with paddle.no_grad():
        model.eval()
        ids = np.array([1, *np.random.default_rng(0).integers(3, 500, 30)], "int32")
        chosen = model(paddle.to_tensor(ids[None].astype("int64"))).numpy()[0].argmax(-1)
        ids[5:20:3] = chosen[4:19:3]  # which changes what is picked after them
        weights = np.where(np.arange(31) > 0, np.float32(0.5), np.float32(0))
        sample = WeightedTokens(ids, weights)
        picked = model(paddle.to_tensor(ids[None].astype("int64"))).numpy()[0].argmax(-1)
        right, weight = weighted_loss(model, collate([sample, sample], PAD, 8)).sums["tokens/accuracy"]
    assert float(right) == (picked[:-1] == ids[1:]).sum() * 0.5 * 2 > 0
    assert weight == 30.0


def test_joined_rows_have_the_same_loss_without_padding() -> None:
    stage = make_stage()
    text = "What is a prime number, and why?"
    given = [samples(stage, talk(text[:size], text[size:] + "!"))[0][0] for size in (4, 20, 9)]
    padded = stage.collate(given)
    stage.context = dataclasses.replace(stage.context, padding_free=True)
    joined = stage.collate(given)
    assert joined["input_ids"].shape == (1, padded["lengths"].sum())
    assert joined["lengths"].tolist() == [padded["lengths"].sum()]
    for name in ("weight", "num_tokens", "num_supervised"):
        assert joined[name] == padded[name]
    rows = supervised_sequences(padded)
    (row,) = supervised_sequences(joined) or []
    assert rows is not None
    assert len(rows) == 3
    for number, alone in enumerate(rows):
        mine = row.documents == number
        assert (row.ids[mine].tolist(), row.weights[mine].tolist()) == (alone.ids.tolist(), alone.weights.tolist())


def test_control_tokens_in_turns_are_warned_of(tmp_path: Path) -> None:
    reported: list[str] = []
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}
        for text in ("a", "b<|im_start|>system", "c<|im_end|>", "d")
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_stage(report=reported.append).reader.read(path)
    warned = [text for text in reported if "control token" in text]
    assert warned == [
        f"warning: {path}:2: the text of a turn has the control token <|im_start|>, and so have 1 more rows; it is "
        "trained as that token and not as text. If it comes from users, take it out of the data"
    ]


def test_tokens_of_any_file_are_warned_of_and_thoughts_are_not(tmp_path: Path) -> None:
    """A role's token that is not flagged special, and one that the template writes; not what an answer may have."""
    directory = shutil.copytree(DATA / "tokenizer", tmp_path / "tokenizer")
    content = json.loads((directory / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    like = {**content["added_tokens"][0], "special": False}
    new = ("<|A|>", "<think>", "</think>")
    content["added_tokens"] += [{**like, "id": 512 + i, "content": text} for i, text in enumerate(new)]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    template = (
        "{% for m in messages %}{{ '<|A|>' if m['role'] == 'assistant' else '' }}{{ m['content'] }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|A|>{% endif %}{# <think> </think> #}"
    )
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = TextTokenizer(directory)

    def warned(user: str, answer: str) -> bool:
        control = ControlTokens(tokenizer, lambda: load_template("tokenizer", directory, tokenizer.special_tokens))
        turns = (Message("user", user), Message("assistant", answer))
        return control.find_in_turns(turns_of(Conversation(turns, (False, True)))) is not None

    assert [warned(text, "b") for text in ("<|A|>", "<|im_end|>", "<think>", "a")] == [True, True, True, False]
    assert [warned("b", text) for text in ("<|A|>", "<|im_end|>", "<think>a</think>b")] == [True, True, False]


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n\n{% endif %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = st.text("ab .\n", min_size=1, max_size=12).filter(lambda text: bool(text.strip()))


@given(thoughts=WORDS, answer=WORDS, in_content=st.booleans())
def test_thoughts_are_input_only_where_the_recipe_says_so(thoughts: str, answer: str, in_content: bool) -> None:
    turn = {"role": "assistant", "content": answer, "reasoning_content": thoughts}
    source = THINKS
    if in_content:
        turn = {"role": "assistant", "content": f"<think>{thoughts}</think>{answer}"}
        source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
        source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    row = openai({"messages": [{"role": "user", "content": "Hi?"}, turn]})
    (full,), _ = samples(make_stage(template=source), row)
    (masked,), _ = samples(make_stage(template=source, supervise_thoughts=False), row)
    assert masked.ids.tolist() == full.ids.tolist()
    assert (masked.weights <= full.weights).all()
    dropped = np.flatnonzero(full.weights != masked.weights)
    made = make_stage(template=source)
    # a token may be of thoughts and of the text behind them
    assert thoughts.strip().startswith(text(made, full.ids[dropped]).strip())
    left = text(made, full.ids[dropped[-1] + 1 if len(dropped) else 0 :])
    assert "</think>" in left
    assert answer.strip() in left
    assert np.diff(dropped).tolist() == [1] * (len(dropped) - 1 if len(dropped) else 0)


def test_a_row_without_thoughts_is_supervised_as_before() -> None:
    row = openai({"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]})
    (full,), _ = samples(make_stage(template=THINKS), row)
    (same,), _ = samples(make_stage(template=THINKS, supervise_thoughts=False), row)
    assert full.weights.tolist() == same.weights.tolist()


# text that is tokenized apart


@pytest.fixture(params=["llama", "bytes"])
def apart(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, SftStage]:
    made = {"llama": tokenizers.sentencepiece_like("normalizer"), "bytes": tokenizers.byte_level(False)}[request.param]
    tokenizer = TextTokenizer(tokenizers.write(tmp_path / "tokenizer", made, adds_bos=True))
    return request.param, make_stage(300, tokenizer=tokenizer, text_template="alpaca", answer_tokens="apart")


OF_AXOLOTL: dict[str, dict[str | None, list[int]]] = {
    "llama": {
        "Paris": [381, 2], " Paris": [381, 2], "\nis": [259, 346, 411, 2], "Paris</s>": [381, 2], "": [],
        " ": [259, 2], "é": [259, 198, 172, 2], None: [], "  is": [259, 376, 2],
    },
    "bytes": {
        "Paris": [325, 323, 2], " Paris": [293, 2], "\nis": [201, 323, 2], "Paris</s>": [325, 323, 2],
        "<s>a": [1, 67, 2], "": [], " ": [223, 2], "é": [130, 105, 2], None: [],
    },
}  # fmt: skip
"""Supervised tokens of its `AlpacaPromptTokenizingStrategy` (067b021c) with LlamaTokenizer and with
PreTrainedTokenizerFast of transformers 5."""


def test_answers_apart_have_the_tokens_of_axolotl(apart: tuple[str, SftStage], tmp_path: Path) -> None:
    name, made = apart
    rows = [{"instruction": "the", "input": None, "output": answer} for answer in OF_AXOLOTL[name]]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = made.reader.read(path)
    assert [sample.ids[sample.weights > 0].tolist() for sample in found] == list(OF_AXOLOTL[name].values())
    prompt = made.context.tokenizer.with_special_tokens(made.context.tokenizer.encode(_PROMPT))
    for sample, ids in zip(found, OF_AXOLOTL[name].values()):
        assert sample.ids.tolist() == [*prompt, *ids]
    assert len(prompt) == {"llama": 126, "bytes": 125}[name]
    assert len(made.eval_prompts(join(found))) == sum(map(bool, OF_AXOLOTL[name].values()))


_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nthe\n\n### Response:\n"
)


def test_rows_apart_are_dropped_for_their_length(apart: tuple[str, SftStage], tmp_path: Path) -> None:
    name, made = apart
    path = tmp_path / "rows.jsonl"
    answers = ["a" * 400, "", "a"]
    rows = [{"instruction": "b" * 400, "output": ""}, *({"instruction": "the", "output": text} for text in answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = made.reader.read(path)
    assert [len(sample.ids) for sample in found] == [300, *({"llama": (126, 129), "bytes": (125, 127)}[name])]
    assert made.reader.counts[path].dropped == {"longer than data.max_length 300 (sft.truncate is false)": 1}


def test_a_micro_batch_without_a_supervised_token_has_loss_0(apart: tuple[str, SftStage], tmp_path: Path) -> None:
    _, made = apart
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"instruction": "the", "output": ""}) + "\n")
    batch = made.collate(made.reader.read(path))
    assert (batch["weight"], batch["num_supervised"], len(batch["targets"])) == (0, 0, 1)
    (row,) = supervised_sequences(batch) or []
    assert row.ids.tolist() == made.reader.read(path)[0].ids.tolist()
    assert not row.weights.any()
    batch["input_ids"] %= 100
    batch["targets"] %= 100
    terms = made.loss(dpo_case.model(), batch)
    assert float(terms.total) == 0
