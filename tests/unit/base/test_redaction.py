"""Secrets of URLs stay where they were given, and no text drives the terminal."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base import redaction
from llmsuite.base.errors import Problem, RecipeError, UserError
from llmsuite.base.progress import report
from llmsuite.base.redaction import Secrets, Url, printable, redacted, redacted_data, redacted_words
from llmsuite.engine.output import recipe_text
from llmsuite.observe.events import environment
from tests.support.paths import ROOT

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"https://host/a.jsonl?token={SECRET}", "https://host/a.jsonl?token=***"),
        (f"see https://u:{SECRET}@host/a?x={SECRET}&rows=3#{SECRET}=1, and", None),
        (f"s3://bucket/a?X-Amz-Signature={SECRET}&X-Amz-Date=1", "s3://bucket/a?X-Amz-Signature=***&X-Amz-Date=***"),
        (f"https://{SECRET}@host/a", "https://***@host/a"),
        (f"https://host/a?{SECRET}", "https://host/a?***"),
        (f"https://host/a#{SECRET}", "https://host/a#***"),
        (f"https://host/a?x=1#{SECRET}", "https://host/a?x=***#***"),
        (f"https://host/a?{SECRET}&x=1", "https://host/a?***&x=***"),
        (f"https://host/a?x=1&{SECRET}", "https://host/a?x=***&***"),
        (f"https://host/a?rows=5&{SECRET}#{SECRET}", "https://host/a?rows=5&***#***"),
        (f"https://host/a?x=1;{SECRET}#a={SECRET}&{SECRET}", "https://host/a?x=***;***#a=***&***"),
        (f"https://host/a#rows={SECRET}", "https://host/a#rows=***"),
        (f"https://host/a?x=1=={SECRET}?{SECRET}##{SECRET}", None),
        ("https://host/a?#", "https://host/a?#"),
        ("hf://ORG/NAME?split=train&rows=5", "hf://ORG/NAME?split=train&rows=5"),
        ("hf:ORG/NAME?split=train", "hf:ORG/NAME?split=train"),
        ("https://host:8000/a/b.jsonl", "https://host:8000/a/b.jsonl"),
        ("data/train.jsonl", "data/train.jsonl"),
    ],
)
def test_urls_have_no_secrets(given: str, expected: str | None) -> None:
    assert SECRET not in redacted(given).replace(f"#{SECRET}=", "")
    assert expected is None or redacted(given) == expected
    assert redacted(redacted(given)) == redacted(given)


def test_records_and_messages_have_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"https://host/a.jsonl?token={SECRET}"
    words = [
        "llmsuite",
        "run",
        f"--data.train={url}",
        "--api_key",
        SECRET,
        f"--api_key={SECRET}",
        "--x.token=" + SECRET,
    ]
    monkeypatch.setattr(sys, "argv", words)
    report(f"fetching {url}")
    said = [
        recipe_text({"data": {"train": url, "more": [url]}, url: 1}),
        json.dumps(environment("cpu", "dp 1", 1)),
        str(UserError(f"{url}: cannot be fetched")),
        str(RecipeError([Problem(f"--data.train={url}", "data.train", "is wrong")])),
        capsys.readouterr().out,
    ]
    assert all("host/a.jsonl?token=***" in text for text in said)
    assert not any(SECRET in text for text in said)
    assert redacted_words(["--lr=1", "x"]) == ["--lr=1", "x"]
    assert redacted_data((1, None, 2.5, True)) == [1, None, 2.5, True]


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Secrets:
    """The secrets of a process that has none yet."""
    made = Secrets()
    monkeypatch.setattr("llmsuite.base.redaction.SECRETS", made)
    return made


def test_what_is_known_is_hidden_anywhere(secrets: Secrets) -> None:
    secrets.add_url("https://me:p%40ss-word@host/a?token=abcdef12&version=2024-01-01&k=Zq83vXr3c2lnbmF0#part-of-it")
    secrets.add_words(["--api_key", "of-an-option", "--auth.token=of-another", "--lr=0.001234"])
    secrets.add_variables(
        {
            "HF_TOKEN": "hf_abcdefg",
            "TOKENIZERS_PARALLELISM": "disabled",
            "SSH_KEY": str(ROOT),
            "X_KEY": 'quoted "one"',
        }
    )
    redact = [
        "p%40ss-word", "p@ss-word", base64.b64encode(b"me:p@ss-word").decode(), "abcdef12", "Zq83vXr3c2lnbmF0",
        "part-of-it", "of-an-option", "of-another", "hf_abcdefg",
    ]  # fmt: skip
    for text in redact:
        assert secrets.redact(f"retries of /a?x={text} ended") == "retries of /a?x=*** ended"
    assert json.dumps(secrets.redact(repr('quoted "one"'))) == json.dumps("'***'")
    for text in ("2024-01-01", "0.001234", "disabled", str(ROOT), "me", "host"):
        assert secrets.redact(text) == text


LETTERS = st.text("abAB1 ", max_size=8)


@given(
    values=st.lists(st.text("abAB1", min_size=6, max_size=12), min_size=1, max_size=4),
    parts=st.lists(st.tuples(st.one_of(st.integers(0, 3), LETTERS), st.integers(0, 12), st.booleans()), max_size=10),
)
def test_a_secret_in_several_parts_is_hidden(values: list[str], parts: list[tuple[int | str, int, bool]]) -> None:
    """Texts and cut secrets are written with and without a flush between them."""
    secrets = Secrets()
    for value in values:
        secrets.add(value)
    buffer = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "SECRETS", secrets)
        stream = redaction.FilteredStream(buffer, hides_urls=False, encoding="utf-8", write_through=True)
        whole = ""
        flushed = False
        for content, cut, flushes in parts:
            text = content if isinstance(content, str) else values[content % len(values)]
            for part in (text[:cut], text[cut:]):
                assert stream.write(part) == len(part)
                whole += part
                if flushes:
                    stream.flush()
            flushed = flushed or flushes
        stream.write("\n")
        found = buffer.getvalue().decode()
    assert secrets.redact(found) == found
    if secrets.redact(whole) == whole:
        assert found == whole + "\n"
    elif len(values) == 1 and not flushed:
        assert found == secrets.redact(whole) + "\n"


@given(st.integers(1, 60), st.integers(1, 60), st.booleans())
def test_a_url_in_several_parts_is_hidden(first: int, second: int, flushes: bool) -> None:
    text = f"see https://user:{SECRET}@host/a?token={SECRET}#{SECRET} there"
    begin = len("see https://")
    cuts = sorted({0, max(begin, first), max(begin, second), len(text)})
    buffer = io.BytesIO()
    stream = redaction.FilteredStream(buffer, hides_urls=True, encoding="utf-8", write_through=True)
    for a, b in itertools.pairwise(cuts):
        stream.write(text[a:b])
        if flushes:
            stream.flush()
    assert buffer.getvalue().decode() == redacted(text)


def test_what_is_held_at_the_end_of_a_stream(secrets: Secrets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "SECRETS", secrets)
    secrets.add("begin-Zq1-of-it")
    for written, shown in (("see begin-Zq1", "see ***"), ("see beg", "see ***"), ("see it", "see it")):
        with tempfile.TemporaryFile() as file:
            raw = open(file.fileno(), "wb", closefd=False)  # noqa: SIM115  (the stream closes it)
            with redaction.FilteredStream(raw, False, encoding="utf-8") as stream:
                stream.write(written)
            file.seek(0)
            assert file.read().decode() == shown
    buffer = io.BytesIO()
    stream = redaction.FilteredStream(buffer, False, encoding="utf-8", write_through=True)
    stream.write("see be")
    stream.flush()
    assert buffer.getvalue() == b"see be"  # a word in parts is not delayed
    stream.write("gin-Zq1-of-it, and")
    assert buffer.getvalue() == b"see be***, and"


@pytest.mark.parametrize(
    "name", ["PGPASSWORD", "MYSQL_PWD", "SSHPASS", "ACCESSTOKEN", "HF_TOKEN_2", "OPENAI_API_KEYS", "api_key_list"]
)
def test_variables_of_keys_are_known_by_their_names(secrets: Secrets, name: str) -> None:
    secrets.add_variables({name: "zq87-vxr3", "PWD": "/no/such/place", "MAX_TOKENS": "100000", "MONKEY_SIZE": "300000"})
    assert secrets.redact("zq87-vxr3 /no/such/place 100000 300000") == "*** /no/such/place 100000 300000"


@pytest.mark.parametrize("value", ["pässwört12", 'ab"cd1234X', "both'\"of-them", " ends with a space "])
def test_a_secret_is_hidden_as_it_is_quoted(secrets: Secrets, value: str) -> None:
    secrets.add(value)
    for text in (value, value.strip(), json.dumps(value)[1:-1], repr(value)[1:-1]):
        assert secrets.redact(f"<{text}>") in ("<***>", "< *** >"), text
    secrets.add("first-line\r\nsecond-line")
    assert secrets.redact("the second-line") == "the ***"


def test_bytes_that_are_no_text_are_hidden(secrets: Secrets) -> None:
    secrets.add_variables({"MY_TOKEN": "abc\udcffdefgh1", "FOO_URL": "http://me:ab\udcffcdefgh1@h/"})
    assert secrets.redact("abc\udcffdefgh1 ab\udcffcdefgh1") == "*** ***"


def test_long_texts_are_redacted_in_a_time_of_their_length(secrets: Secrets) -> None:
    """By the square of their length these would take minutes."""
    for text in (
        "a" * 300_000 + " http://x",
        "/-" * 150_000 + " ?",
        "/-" * 150_000 + "#?",
        "/?" * 150_000,
        "?" * 300_000,
    ):
        assert redacted(text) == text
        secrets.add_data(text)
    redacted("/-" * 150_000 + "#?a=b")
    for number in range(2000):
        secrets.add_url(f"https://host/a?X-Amz-Signature={number:08d}abcdef&X-Amz-Security-Token={number:08d}ghijkl")
    assert secrets.redact("00000007abcdef") == "***"
    assert redacted("a" * 100 + "http://me:pass-of-me@host") == "a" * 100 + "http://***@host"


def test_an_option_with_a_hyphen_is_hidden() -> None:
    assert redacted_words(["--api-key=option-Zq87", "--api-key", "option-Zq88"]) == [
        "--api-key=***",
        "--api-key",
        "***",
    ]
    assert redacted_data({"api-key": "abc"}) == {"api-key": "***"}


@pytest.mark.parametrize("word", ["a", "secret", "12345", ""])
def test_common_words_are_no_secrets(secrets: Secrets, word: str) -> None:
    secrets.add(word)
    assert secrets.redact(f"the {word} of a text") == f"the {word} of a text"


@given(st.lists(st.text(min_size=8, max_size=20), min_size=1, max_size=5), st.text(max_size=30))
def test_no_secret_is_left(values: list[str], text: str) -> None:
    """Also where one is a part of another one."""
    made = Secrets()
    for value in values:
        made.add(value)
    shown = made.redact(text.join([*values, *values]))
    assert not any(value in shown for value in values if "*" not in value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("with url: /a.jsonl?token=abc (Caused by", "with url: /a.jsonl?token=*** (Caused by"),
        ("/a/b?sig=1&split=train", "/a/b?sig=***&split=train"),
        ("is it in data/a.jsonl? no=1", "is it in data/a.jsonl? no=1"),
        ("a/b?c=d", "a/b?c=d"),
    ],
)
def test_an_address_without_its_host(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_keys_that_are_called_so_are_hidden() -> None:
    given = {"api_key": "abc", "pad_token": "<pad>", "wandb": {"password": "x", "tokens": 3, "secret_key": "y"}}
    redact = {"api_key": "***", "pad_token": "<pad>", "wandb": {"password": "***", "tokens": 3, "secret_key": "***"}}
    assert redacted_data(given) == redact


@given(
    marks=st.lists(st.sampled_from(["?", "#", "&", ";", "=", "==", "&&", "?x=", "#x=", "&x"]), min_size=1, max_size=6)
)
def test_nothing_after_the_path_is_shown(marks: list[str]) -> None:
    """Wherever it stands, but as the name of a value; and a text is the same whether it was redacted before or not."""
    start = "?" if marks[0][0] not in "?#" else ""
    url = f"https://host/a{start}" + "".join(f"{mark}{SECRET}" for mark in marks)
    shown = redacted(f"see {url} there")
    assert re.sub(rf"{SECRET}x?(?==)", "", shown).find(SECRET) == -1
    assert shown.startswith("see https://host/a")
    assert shown.endswith(" there")
    assert redacted(shown) == shown


def test_an_address_is_shown_without_secrets() -> None:
    url = Url(f"https://u:{SECRET}@host/a/b.jsonl?token={SECRET}#{SECRET}")
    assert str(url) == f"{url}" == "https://***@host/a/b.jsonl?token=***#***"
    assert SECRET not in repr([url])
    assert url.name == "b.jsonl"
    assert url.full.count(SECRET) == 3
    assert url == Url(url.full)


def test_control_characters_are_written_out() -> None:
    assert printable("a\tb\nä\x1b[2J\x9b31m\r\x07\x7f") == r"a" "\tb\nä" r"\x1b[2J\x9b31m\x0d\x07\x7f"
    assert printable("a\ud800\udcffb") == r"a\ud800\udcffb"


def test_neither_errors_nor_runs_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from llmsuite.cli.main import main

    run = tmp_path / "a\x1b[2J"
    run.mkdir()
    record = {"step": 1, "loss": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run / "recipe.json").write_text(json.dumps({"stage": "sft\x1b[2J"}))
    (run / "environment.json").write_text(json.dumps({"host": "\x1b]0;title\x07"}))
    event = {"time": "\x1b[2J", "event": "failed", "error": "\x1b[31mred"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n" + "{}\n")
    for words in (["runs", "list", str(tmp_path)], ["runs", "show", str(run)], ["runs", "show", f"{run}\x1b"]):
        main(words)
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert r"\x1b[31mred" in said.out
