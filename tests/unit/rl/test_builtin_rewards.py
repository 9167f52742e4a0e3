"""Rewards that come with llmsuite: what they give, and the keys they need."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.section import unused_keys
from llmsuite.rl import reward_sections
from tests.support.reward_case import Making, completion, section


def test_exact_format_and_length(make: Making) -> None:
    own = {
        "exact": reward_sections.ExactSection(),
        "format": reward_sections.FormatSection(pattern="<a>.*</a>"),
        "length": reward_sections.LengthSection(target=4),
    }
    rewards = make({"exact": 1.0, "format": 0.5, "length": 0.25}, own)
    assert rewards.names == ("exact", "format", "length")
    texts = [" 4\n", "4", "<a>1\n2</a>", "no <a>4</a>", "1 2 3 4 5 6 7 8 9"]
    completions = [completion(text, number) for number, text in enumerate(texts)]
    completions[1] = dataclasses.replace(completions[1], finish_reason="length")
    found = rewards.score(completions)
    assert found[:, 0].tolist() == [1, 0, 0, 0, 0]
    assert found[:, 1].tolist() == [0, 0, 1, 0, 0]
    assert found[:, 2].tolist() == [-0.5, -0.5, -0.25, -0.25, -1.0]
    assert rewards.total(found).tolist() == [0.875, -0.125, 0.4375, -0.0625, -0.25]
    rewards.check(found)


def test_only_longer_completions_are_penalised(make: Making) -> None:
    rewards = make({"length": 1.0}, {"length": reward_sections.LengthSection(target=4, only_longer=True)})
    assert rewards.score([completion("1"), completion("1 2 3 4 5")]).tolist() == [[0.0], [-0.5]]


def test_math_compares_values_not_texts(make: Making) -> None:
    rewards = make({"math": 1.0})
    columns = {"answer": r"$\frac{1}{2}$"}
    texts = ["so it is $0.5$", r"\boxed{\frac{2}{4}}", "it is $0.4$", "no idea"]
    found = rewards.score([completion(text, columns=columns) for text in texts])
    assert found.ravel().tolist() == [1, 1, 0, 0]
    assert rewards.score([completion("it is 4")]).tolist() == [[1.0]]
    columns = {"answer": r"\frac{1}{3}"}
    assert rewards.score([completion(r"$\frac{2}{6}$", columns=columns)]).tolist() == [[1.0]]
    assert np.isnan(rewards.score([completion("4", columns={"answer": "whatever you like"})])).all()
    assert "is not a mathematical expression" in rewards.first_failure


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("(1, 2)", ["(1,2)", r"so it is \boxed{(1, 2)}"], ["2", "it is 2", r"\boxed{(2,1)}"]),
        ("2x", ["2x", "it is $x + x$"], ["2", r"\boxed{2}"]),
        ("2^{10}", [r"\boxed{1024}", "it is 1024"], ["2", "it is 2"]),
        ("(x-1)(x+1)", ["x^2-1", r"\boxed{x^2-1}"], ["1"]),
        ("[1, 2)", ["[1,2)"], ["[1,2]", "2"]),
        ("5 cm", ["5", r"\boxed{5\text{ cm}}"], ["6"]),
        ("48/2 = 24 in May, 48+24 = 72 in all\n#### 72", ["72", "so #### 72"], ["24"]),
    ],
)
def test_math_parses_a_bare_answer_fully(make: Making, answer: str, right: list[str], wrong: list[str]) -> None:
    found = make({"math": 1.0}).score([completion(text, columns={"answer": answer}) for text in [*right, *wrong]])
    assert found.ravel().tolist() == [1.0] * len(right) + [0.0] * len(wrong)


def test_a_missing_package_is_named(make: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('none here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="pip install 'math-verify<"):
        make({"math": 1.0}).score([completion("4")])


def test_a_row_without_the_column_names_its_others(make: Making) -> None:
    rewards = make({"exact": 1.0}, {"exact": reward_sections.ExactSection(column="gold")})
    assert np.isnan(rewards.score([completion("4", columns={"task": "sum"})])).all()
    assert "the row has no 'gold' (reward.exact.column); its other columns: answer, task" in rewards.first_failure
    both = [completion("4", columns=columns) for columns in ({"gold": 4}, {})]
    assert rewards.score(both).ravel().tolist() == pytest.approx([1, np.nan], nan_ok=True)


def test_rewards_that_cannot_hang_start_no_process(make: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(sources: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr("llmsuite.rl.worker_pool._Worker", started)
    rewards = make({"exact": 1.0, "length": 1.0}, {"length": reward_sections.LengthSection(target=2)})
    rewards.load()
    assert rewards.score([completion("4"), completion("5")]).tolist() == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("8*(3-8/8)", 0.0),  # 16, with one 8 too many
        ("8+8", 0.0),  # 16, without the 3
        ("8+3+8", 0.0),  # each number, another value
        ("8*3-8", 1.0),
        (" -(8-(8*3)) ", 1.0),
        ("8*3+-8", 0.0),  # -8 is no number of the row
        ("8*3-8=16", 0.0),
        ("8*3-8 or so", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_takes_each_number_once_and_the_exact_value(make: Making, text: str, score: float) -> None:
    row = {"columns": {"numbers": [8, 3, "8"], "target": 16}}
    rewards = make({"countdown": 1.0}, {"countdown": reward_sections.CountdownSection()})
    cut = completion(text, 1, **row, finish_reason="length")
    np.testing.assert_array_equal(rewards.score([completion(text, **row), cut], 2), [[score], [0.0]])


def test_countdown_reads_the_last_match_of_a_pattern_and_needs_its_columns(make: Making) -> None:
    own = reward_sections.CountdownSection(numbers="nums", pattern="<answer>(.*?)</answer>")
    rewards = make({"countdown": 1.0}, {"countdown": own})
    row = {"columns": {"nums": [1, 2], "target": "0.5"}}
    texts = ["<answer>2/1</answer>, no: <answer>1/2</answer>", "1/2", "<answer>1/2</answer> <answer>2/1</answer>"]
    completions = [completion(text, number, **row) for number, text in enumerate(texts)]
    np.testing.assert_array_equal(rewards.score([*completions, completion("1/2", 3)], 4), [[1], [0], [0], [np.nan]])
    assert "the row has no 'nums' (reward.countdown.numbers)" in rewards.first_failure


@pytest.mark.parametrize(("name", "key"), [("format", "pattern"), ("length", "target"), ("http", "url")])
def test_keys_that_a_reward_cannot_do_without(make: Making, name: str, key: str) -> None:
    rewards = make({name: 1.0})
    with pytest.raises(UserError, match=rf"reward\.{name}\.{key}: is required"):
        rewards.load()
    with pytest.raises(UserError, match=rf"reward\.{name}\.{key}: is required"):
        rewards.score([completion("4")])


def test_keys_are_used_of_rewards_that_are_named_only() -> None:
    unused = {key[0] for key, _ in unused_keys(section({"exact": 1.0}))}
    assert unused == {"countdown", "format", "length", "math", "http", "model"}
