"""What `llmsuite data explain` and `stats` say is what is trained; what would teach nothing is refused first."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.data.rows import Conversation, Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.supervision import check_supervision, supervised_sequences
from llmsuite.models.families.llama import SMOKE
from llmsuite.recipe.load import REMOVE
from llmsuite.stages.explain import _changed, explain
from llmsuite.stages.language_model import WeightedTokens
from llmsuite.stages.stats import histogram
from tests.support import tokenizers
from tests.support.sft_case import make_stage

EOS = 2
TALK = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Bye."},
    ]
}
PAIR = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; gives exit code, standard output and standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        code = main([*map(str, words)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def recipe(write_recipe: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def write(stage: str, rows: list[Any], **keys: Any) -> Path:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return write_recipe({"stage": stage, "data.train": str(tmp_path / "rows.jsonl"), **keys})

    return write


def table(out: str) -> list[dict[str, str]]:
    """The rows of tokens that were printed."""
    found = re.findall(r"^ +(\d+) +(\d+)  (\w+) +(\d+) +(\d+|-) +(\S+)  (.*)$", out, re.MULTILINE)
    return [dict(zip(("position", "id", "role", "document", "label", "weight", "token"), row)) for row in found]


def test_every_token_of_a_conversation(run: Any, recipe: Any, tmp_path: Path) -> None:
    code, out, err = run(
        "data", "explain", recipe("sft", [{"src": "a", "tgt": "b"}, {"src": "c", "tgt": "d"}]), "--row=2"
    )
    assert (code, err) == (0, "")
    assert out.splitlines()[:3] == [
        f"{tmp_path / 'rows.jsonl'}:2: 11 tokens, 2 supervised",
        "the end of the sequence is supervised",
        "generation is prompted with 9 tokens: the same that precede the answer here",
    ]
    rows = table(out)
    assert [row["token"] for row in rows if row["label"] != "-"] == ["d", "<|im_end|>"]
    assert all(row["label"] in ("-", row["id"]) and (row["weight"] == "1") == (row["label"] != "-") for row in rows)
    assert [row["role"] for row in rows] == ["user"] * 6 + ["assistant"] * 5
    assert "\x1b" not in out  # it goes to no terminal


def test_roles_of_a_long_conversation(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(TALK))
    stage = make_stage()
    place, dropped, (found,) = explain(stage, path, 1)
    assert (place, dropped, found.prompt_matches) == (f"{path}:1", None, True)
    turns: list[tuple[str, str]] = []
    for role, piece in zip(found.roles, stage.context.tokenizer.pieces(found.sequence.ids)):
        if turns and turns[-1][0] == role:
            turns[-1] = role, turns[-1][1] + piece
        else:
            turns.append((role, piece))
    ends = "<|im_end|>\n"
    assert turns == [
        ("system", f"<|im_start|>system\nBe brief.{ends}"),
        ("user", f"<|im_start|>user\nHi?{ends}"),
        ("assistant", f"<|im_start|>assistant\nHello.{ends}"),
        ("user", f"<|im_start|>user\nAnd?{ends}"),
        ("assistant", "<|im_start|>assistant\nBye.<|im_end|>"),
    ]
    (sample,) = stage.reader.read(path)
    np.testing.assert_array_equal(found.sequence.ids, sample.ids)
    np.testing.assert_array_equal(found.sequence.weights, sample.weights)


def test_both_answers_of_a_pair(run: Any, recipe: Any, tmp_path: Path) -> None:
    _, out, _ = run("data", "explain", recipe("dpo", [PAIR]))
    heads = [line for line in out.splitlines() if line.startswith(str(tmp_path))]
    assert [head.split(":1 ")[1].split(":")[0] for head in heads] == ["(chosen)", "(rejected)"]
    rows = table(out)
    supervised = "".join(row["token"] for row in rows if row["label"] != "-")
    assert supervised == "Hello.<|im_end|>No.<|im_end|>"


def test_prompt_and_answer_of_a_text(run: Any, recipe: Any) -> None:
    given = recipe("sft", [{"q": "1+1?", "a": 2}], **{"data.text_template": "Q: {q} A: {a}"})
    code, out, err = run("data", "explain", given)
    assert (code, err) == (0, "")
    assert "the same that precede the answer here" in out
    rows = table(out)
    assert "".join(row["token"] for row in rows if row["label"] != "-") == "2<|im_end|>"
    assert "".join(row["token"] for row in rows if row["role"] == "prompt") == "Q: 1+1? A: "
    code, out, err = run("data", "explain", recipe("sft", [{"text": "A text."}]))
    assert (code, err) == (0, "")
    assert {row["role"] for row in table(out)} == {"text"}
    assert [row["weight"] for row in table(out)][:2] == ["0", "1"]


def test_weights_of_turns_are_shown(run: Any, recipe: Any) -> None:
    talk = {"messages": [*TALK["messages"][:2], {**TALK["messages"][2], "weight": 0.25}, *TALK["messages"][3:]]}
    _, out, _ = run("data", "explain", recipe("sft", [talk]))
    assert "".join(row["token"] for row in table(out) if row["weight"] == "0.25") == "Hello.<|im_end|>"
    assert "".join(row["token"] for row in table(out) if row["weight"] == "1") == "Bye.<|im_end|>"


def test_all_pairs_of_ranked_answers(run: Any, recipe: Any, tmp_path: Path) -> None:
    row = {"prompt": "Hi?", "responses": ["x", "y", "z"], "ranks": [3, 1, 1]}
    _, out, _ = run("data", "explain", recipe("rm", [row]))
    heads = [line for line in out.splitlines() if line.startswith(str(tmp_path))]
    names = ["(chosen of pair 1)", "(rejected of pair 1)", "(chosen of pair 2)", "(rejected of pair 2)"]
    assert [head.split(":1 ")[1].split(":")[0] for head in heads] == names
    code, out, _ = run("data", "stats", recipe("dpo", [row, {**row, "ranks": [1, 1, 1]}]))
    assert code == 0
    assert "1 with ranked answers that make no pair" in out
    assert "1 rows with ranked answers make 2 pairs" in out


def test_documents_of_a_corpus(run: Any, recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two\n\nthree\n\n" * 30)
    path = recipe("pretrain", [], **{"data.train": str(tmp_path / "text.txt"), "data.max_length": 16})
    _, out, _ = run("data", "explain", path)
    rows = table(out)
    assert len(rows) == 17
    assert [row["label"] == "-" for row in rows] == [True] + [False] * 16
    parts = re.split(r"(?<=\|im_end\|>)", "".join(row["token"] for row in rows))
    assert parts[0] == "one two<|im_end|>"
    assert len({row["document"] for row in rows}) == len([part for part in parts if part])


def test_a_row_that_is_dropped_says_why(run: Any, recipe: Any, tmp_path: Path) -> None:
    code, out, _ = run("data", "explain", recipe("sft", [TALK], **{"data.max_length": 8}))
    assert code == 0
    assert out == f"{tmp_path / 'rows.jsonl'}:1: is dropped: longer than data.max_length 8 (sft.truncate is false)\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain", "--row=3"], "--row 3: .*rows are numbered from 1 to 1"),
        (["explain", "--plot=a.png"], "data explain: has no option --plot; it has --row, --smoke"),
        (["stats", "--row=1"], "data stats: has no option --row"),
        (["stats", "--data.train=absent.jsonl"], "data.train: absent.jsonl is not a file"),
        (["index", "--data.train=x"], "data index: --data.train=x: this action takes no recipe keys"),
        (["index"], "data index: give the output and the tokenizer"),
        (["explain", "another.json"], "data explain: takes one recipe, and got 2"),
    ],
)
def test_invalid_options_of_the_command_are_refused(run: Any, recipe: Any, words: list[str], message: str) -> None:
    code, out, err = run("data", words[0], recipe("sft", [TALK]), *words[1:])
    assert (code, out) == (2, "")
    assert re.search(message, err)


# statistics


def test_stats_count_samples_lengths_and_drops(
    run: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "padding_free", lambda backend, precision: False)  # whether there is g++ or not
    rows = [{"src": "a" * n, "tgt": "b"} for n in (1, 1, 1, 40)] + [{"src": "a", "tgt": ""}, {"src": "a"}]
    keys = {"data.on_bad_row": "skip", "train.micro_batch_size": 4, "train.global_batch_size": 4}
    code, out, _ = run("data", "stats", recipe("sft", rows, **keys), "--plot", str(tmp_path / "lengths.png"))
    assert code == 0
    path = tmp_path / "rows.jsonl"
    assert out.splitlines()[:4] == [
        str(path),
        "  rows       6 read, 4 used, 2 dropped",
        "             dropped: 1 with no supervised turn of the assistant, or an empty one",
        f"             dropped: 1 that cannot be read: has no key 'tgt' (1, first at {path}:6)",
    ]
    (lengths,) = (line for line in out.splitlines() if line.startswith("  lengths"))
    tokenizer = make_stage().context.tokenizer
    long = 10 + len(tokenizer.encode("a" * 40))
    assert f"least 11, median 11, 90% {11 + (long - 11) * 0.7:.0f}" in lengths
    padding = 1 - (3 * 10 + long - 1) / (4 * (long - 1))
    assert f"  padding    {padding:.1%} with train.micro_batch_size 4" in out
    assert "  ends       supervised in 4 of 4 samples" in out
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("stage", "rows"), [("sft", [{"src": "a" * n, "tgt": "b"} for n in (1, 9, 40)]), ("dpo", [PAIR])]
)
def test_rows_that_are_joined_have_no_padding(
    run: Any, recipe: Any, monkeypatch: pytest.MonkeyPatch, stage: str, rows: list[Any]
) -> None:
    monkeypatch.setattr(CpuBackend, "padding_free", lambda backend, precision: True)
    count = len(rows)
    keys = {"train.micro_batch_size": count, "train.global_batch_size": count}
    code, out, _ = run("data", "stats", recipe(stage, rows, **keys))
    assert code == 0
    assert f"  padding    0.0% with train.micro_batch_size {count}" in out
    assert f" in {count if stage == 'sft' else 2} sequences, {count} samples" in out  # as before they are joined


def test_a_plot_without_matplotlib_says_what_to_install(run: Any, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    code, _, err = run("data", "stats", recipe("sft", [TALK]), "--plot=a.png")
    assert (code, err) == (2, "--plot: needs the package matplotlib; install it with: pip install matplotlib\n")


@pytest.mark.parametrize("lengths", [[7], [1, 2, 3], [5] * 10, list(range(1, 1000))])
def test_a_histogram_counts_everything(lengths: list[int]) -> None:
    lines = histogram(np.array(lengths))
    assert sum(int(line.split()[-1]) for line in lines) == len(lengths)
    assert int(lines[0].split()[0]) == min(lengths)
    assert len(lines) <= 16


# refusals before the first step


def masked(ids: list[int], *supervised: int) -> WeightedTokens:
    weights = np.zeros(len(ids), "float32")
    weights[list(supervised)] = 1
    return WeightedTokens(np.array(ids, "int32"), weights)


def test_data_without_the_end_of_a_turn_is_refused() -> None:
    stage = make_stage()
    check_supervision(stage, stage.collate, [masked([1, 5, 6, EOS], 2), masked([1, 5, EOS], 1, 2)], "data.train: a")
    with pytest.raises(
        UserError, match=r"data\.train: a: the end of answers is never supervised: .* all of its 2 samples"
    ):
        check_supervision(stage, stage.collate, [masked([1, 5, EOS], 1), masked([1, 5, 6], 1, 2)], "data.train: a")
    check_supervision(stage, stage.collate, [], "data.eval: none")


def test_data_without_supervised_tokens_is_refused() -> None:
    stage = make_stage()
    with pytest.raises(
        UserError, match=r"data\.train: a: everything is masked: no token of its 2 samples is supervised"
    ):
        check_supervision(stage, stage.collate, [masked([1, 5, EOS]), masked([1, 5, 6])], "data.train: a")


def test_answers_that_are_all_cut_are_refused_by_a_run(recipe: Any, tmp_path: Path) -> None:
    long = {"src": "a", "tgt": "word " * 100}
    keys = {"data.max_length": 32, "sft.truncate": True, "model.config": SMOKE, "model.preset": REMOVE}
    words = [sys.executable, "-m", "llmsuite", "run", str(recipe("sft", [long, long], **keys))]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 2, result.stderr
    expected_error = (
        "the end of answers is never supervised: the end-of-sequence token is masked or cut off in all of its 2 samples"
    )
    assert expected_error in result.stderr
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))


def test_a_generation_prompt_that_differs_from_training_is_shown(tmp_path: Path) -> None:
    stage = make_stage()
    row = Conversation((Message("user", "Hi?"), Message("assistant", "Hello.")), (False, True))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"src": "Hi?", "tgt": "Hello."}))
    assert row.supervised == (False, True)
    stage.make_samples = lambda rows, counts: [masked([1, 282, 201, 5, EOS], 3, 4)]  # type: ignore[method-assign]
    _, _, (found,) = explain(stage, path, 1)
    assert not found.prompt_matches


def test_packed_documents_are_numbered() -> None:
    batch = {
        "input_ids": np.array([[1, 5, 1, 7, 0]]),  # documents 1 5 2 and 1 7 8 2 would be longer by their targets
        "document_starts": np.array([[0, 0, 2, 2, 4]]),
        "positions": np.array([1, 3]),
        "targets": np.array([EOS, EOS]),
        "weights": np.array([1.0, 0.5]),
    }
    rows = supervised_sequences(batch)
    assert rows is not None
    (row,) = rows
    assert row.ids.tolist() == [1, 5, EOS, 1, 7, EOS]
    assert row.weights.tolist() == [0, 0, 1, 0, 0, 0.5]
    assert row.documents.tolist() == [0, 0, 0, 1, 1, 1]
    assert supervised_sequences({"ids": 1}) is None


def test_tokens_that_differ_from_the_text_are_shown(tmp_path: Path) -> None:
    plain = tokenizers.byte_level(False)
    same = TextTokenizer(tokenizers.write(tmp_path / "same", plain))
    assert _changed("Hello world\n", same) is None
    plain.normalizer = normalizers.Lowercase()
    lower = TextTokenizer(tokenizers.write(tmp_path / "lower", plain))
    assert _changed("the Paris", lower) == "'Paris' is 'paris' in tokens"


def test_what_the_template_is_given(run: Any, recipe: Any) -> None:
    row = {
        "messages": [{"role": "user", "content": "Hi?", "name": "Ann"}, {"role": "assistant", "content": "Hello."}],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "id": 7,
    }
    path = recipe("sft", [row], **{"data.ignore_columns": ["id"], "data.chat_template": "chatml"})
    code, out, err = run("data", "explain", path)
    assert (code, err) == (0, "")
    assert "\nbesides roles and contents, the chat template is given: name of messages[0]; tools weather\n" in out
    code, _, err = run("data", "explain", recipe("sft", [row]))
    assert code == 2
    assert "rows.jsonl:1: has the columns 'id', which openai does not read: remove them from the rows" in err


def test_the_fields_of_a_row_are_shown_with_filled_texts(run: Any, recipe: Any) -> None:
    keys = {"data.columns": {"instruction": "q", "output": "{a}!"}, "data.fill": {"{{NAME}}": "Ada"}}
    code, out, err = run("data", "explain", recipe("sft", [{"q": "{{NAME}}?", "a": "I am {{NAME}}"}], **keys))
    assert (code, err) == (0, "")
    assert "rows.jsonl:1: instruction is made of 'q': 'Ada?'\n" in out
    assert "rows.jsonl:1: output is made of '{a}!': 'I am Ada!'\n" in out
