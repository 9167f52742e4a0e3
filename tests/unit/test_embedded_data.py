"""The rows and the tokenizer under data/: current, consistent, and fit for what the examples do with them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.paths import DATA

SPLITS = ("train", "eval")

Row = dict[str, Any]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DATA / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DATA)  # as when it is run
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def preference() -> ModuleType:
    return load_script("make_preference")


@pytest.fixture
def make_tokenizer() -> ModuleType:
    return load_script("make_tokenizer")


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    def read(split: str) -> list[Row]:
        text = (DATA / "preference" / f"{split}.jsonl").read_text(encoding="ascii")
        return [json.loads(line) for line in text.splitlines()]

    return {split: read(split) for split in SPLITS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DATA / "tokenizer" / "tokenizer.json"))


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    text = (DATA / "tokenizer" / "tokenizer_config.json").read_text(encoding="ascii")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@pytest.mark.parametrize(
    "name",
    ["make_preference", "make_tokenizer", "make_sft", "make_unpaired", "make_pretrain", "make_digits", "make_games"],
)
def test_files_are_current(name: str) -> None:
    assert load_script(name).main(["--check"]) == 0


def test_check_notices_missing_and_changed_files(
    preference: ModuleType, make_tokenizer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in this order: the others are made from the rows
    for script in (preference, make_tokenizer, load_script("make_sft"), load_script("make_unpaired")):
        monkeypatch.setattr(script, "HERE", tmp_path)
        assert script.main(["--check"]) == 1
        assert script.main([]) == 0
        assert script.main(["--check"]) == 0
        for path in script.files():
            original = path.read_bytes()
            path.write_bytes(original + b"\n")
            assert script.main(["--check"]) == 1
            path.write_bytes(original)


def test_the_splits_have_their_sizes(rows: dict[str, list[Row]]) -> None:
    assert {split: len(rows[split]) for split in SPLITS} == {"train": 280, "eval": 48}
    assert set(Counter(row["task"] for row in rows["train"]).values()) == {35}
    assert set(Counter(row["task"] for row in rows["eval"]).values()) == {6}
    assert sum((DATA / "preference" / f"{split}.jsonl").stat().st_size for split in SPLITS) < 150_000
    assert (DATA / "tokenizer" / "tokenizer.json").stat().st_size < 60_000


def test_rows_have_the_shape_of_conversational_preferences(rows: dict[str, list[Row]]) -> None:
    for row in rows["train"] + rows["eval"]:
        assert list(row) == ["prompt", "chosen", "rejected", "task", "answer"]
        for key, role in (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant")):
            (message,) = row[key]
            assert message["role"] == role
            assert message["content"].strip()
            assert not re.search(r"[{}]", message["content"]), "a template was not filled"


def test_no_prompt_occurs_twice(rows: dict[str, list[Row]]) -> None:
    prompts = Counter(row["prompt"][0]["content"] for row in rows["train"] + rows["eval"])
    assert max(prompts.values()) == 1


def test_chosen_is_right_and_rejected_is_wrong(preference: ModuleType, rows: dict[str, list[Row]]) -> None:
    for row in rows["train"] + rows["eval"]:
        chosen = row["chosen"][0]["content"]
        rejected = row["rejected"][0]["content"]
        assert chosen == row["answer"]
        assert preference.is_right(row, chosen), row
        assert not preference.is_right(row, rejected), row
        assert chosen != rejected


@pytest.mark.parametrize("split", SPLITS)
def test_conversations_ask_every_question_once_and_give_the_chosen_answer(
    rows: dict[str, list[Row]], split: str
) -> None:
    asked = []
    for line in (DATA / "sft" / f"{split}.jsonl").read_text(encoding="ascii").splitlines():
        messages = [m for m in json.loads(line)["messages"] if m["role"] != "system"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        texts = [m["content"] for m in messages]
        asked += list(zip(texts[::2], texts[1::2]))
    assert sorted(asked) == sorted((row["prompt"][0]["content"], row["answer"]) for row in rows[split])


@pytest.mark.parametrize("split", SPLITS)
def test_half_of_the_rejected_answers_fail_in_form_only(rows: dict[str, list[Row]], split: str) -> None:
    def has_right_value(row: Row) -> bool:
        return re.search(rf"\b{re.escape(row['answer'])}\b", row["rejected"][0]["content"]) is not None

    assert sum(map(has_right_value, rows[split])) == len(rows[split]) / 2


@pytest.mark.parametrize("split", SPLITS)
def test_yes_and_no_are_balanced(rows: dict[str, list[Row]], split: str) -> None:
    answers = Counter(row["answer"] for row in rows[split] if row["task"] == "compare")
    assert set(answers) == {"yes", "no"}
    assert abs(answers["yes"] - answers["no"]) <= 1


@pytest.mark.parametrize(
    ("text", "right"),
    [("Paris", True), (" paris.\n", True), ("Paris..", False), ("It is Paris", False), ("", False)],
)
def test_answers_are_recognised_as_right(preference: ModuleType, text: str, right: bool) -> None:
    assert preference.is_right({"answer": "Paris"}, text) is right


def test_answers_agree_with_an_independent_reading_of_the_question(rows: dict[str, list[Row]]) -> None:
    for row in rows["train"] + rows["eval"]:
        question = row["prompt"][0]["content"]
        numbers = [int(digits) for digits in re.findall(r"\d+", question)]
        quoted = re.findall(r'"(.+?)"', question)
        expected = row["answer"]
        match row["task"]:
            case "sum":
                expected = str(sum(numbers))
            case "difference":
                expected = str(max(numbers) - min(numbers))
            case "compare":
                a, b = numbers
                expected = "yes" if (a > b if "greater" in question else a < b) else "no"
            case "letters":
                expected = str(len(quoted[0]))
            case "sort":
                given = re.search(r": (\w+, \w+, \w+)\.", question)
                assert given is not None
                expected = ", ".join(sorted(given[1].split(", ")))
            case "last_word":
                expected = quoted[0].split()[-1]
        assert row["answer"] == expected, row


def test_the_vocabulary_has_its_size(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 512
    assert [tokenizer.id_to_token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.encode("<|im_start|>assistant\n").tokens[:2] == ["<|im_start|>", "assistant"]
    assert len(tokenizer.encode("2024").ids) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "What is 7 + 5? Reply with the number only.",
        " two  spaces,\ttab,\r\nline ",
        "don't .",
        "\u4f60\u597d\uff0c\u4e16\u754c",
        "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "e\u0301 \u00e9 \u0663\u0664 \u00bd \x00\x7f",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_config_names_tokens_of_the_vocabulary(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    ids = {role: tokenizer.token_to_id(config[f"{role}_token"]) for role in ("bos", "eos", "pad", "unk")}
    assert ids == {"bos": 1, "eos": 2, "pad": 0, "unk": 0}


def test_chat_template_is_chatml(config: dict[str, Any]) -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(messages=messages) == turns
    assert template.render(messages=messages, add_generation_prompt=True) == turns + "<|im_start|>assistant\n"


def test_every_row_fits_the_model(tokenizer: Tokenizer, config: dict[str, Any], rows: dict[str, list[Row]]) -> None:
    for row in rows["train"] + rows["eval"]:
        for answer in ("chosen", "rejected"):
            turns = row["prompt"] + row[answer]
            text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
            assert len(tokenizer.encode(text).ids) <= config["model_max_length"]
