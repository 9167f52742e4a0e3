"""Parsing of names on a hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.base.hub.local_copies import PINS, known_pins
from llmsuite.base.hub.names import HUBS, ORDER, HubName, hub_name, hub_order

WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:org/name", HubName("hf", "org/name")),
        ("org/name", HubName("", "org/name")),
        ("org/name@v1.0", HubName("", "org/name", revision="v1.0")),
        ("hf:gpt2", HubName("hf", "gpt2")),
        ("hf:org/name@refs/pr/3", HubName("hf", "org/name", revision="refs/pr/3")),
        ("ms:org/name/sub/rows.jsonl@master", HubName("ms", "org/name", "sub/rows.jsonl", "master")),
        ("aistudio:org/name?split=train", HubName("aistudio", "org/name", query="split=train")),
        ("meta-llama/Llama-3.1-8B-Instruct", HubName("", "meta-llama/Llama-3.1-8B-Instruct")),
    ],
)
def test_texts_that_are_names_on_a_hub(text: str, name: HubName) -> None:
    assert hub_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    ["/org/name", "./org/name", "../name", "~/name", "name", "a/b/c", "runs/sft", "models/m", "data/rows",
     "x/rows.jsonl", "hf://org/name?split=train", "https://host/a", "", "x/corpus.idx", "recipes/llama"],
)  # fmt: skip
def test_texts_that_are_paths(text: str) -> None:
    assert hub_name(text) is None


def test_an_existing_file_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") is not None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert hub_name("hf:org/name") is not None
    (tmp_path / "org" / "corpus.idx").touch()
    assert hub_name("org/corpus") is None, "an indexed corpus"


@pytest.mark.parametrize("text", ["hf:", "hf:/name", "ms:name", "hf:org/name/../../x", "hf:org name/x", "hf:org//x"])
def test_a_hub_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"is no name on|leaves the repository"):
        hub_name(text)


@given(st.sampled_from(sorted(HUBS)), WORDS, WORDS, st.none() | WORDS)
def test_a_name_is_read_as_it_is_written(hub: str, first: str, second: str, revision: str | None) -> None:
    name = HubName(hub, f"{first}/{second}", "", revision)
    assert hub_name(str(name)) == name


def test_the_order_of_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, order in (("", ["hf"]), ("ms, hf,ms", ["ms", "hf"])):
        monkeypatch.setenv(ORDER, text)
        assert hub_order() == order
    monkeypatch.setenv(ORDER, "hf,github")
    with pytest.raises(UserError, match="LLMSUITE_HUBS: 'github' is no hub; known: hf, ms, aistudio"):
        hub_order()


@pytest.mark.parametrize("reports", ["x", "[1]", '{"model a": 1}', "3"])
def test_pins_that_the_launcher_did_not_write(reports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PINS, reports)
    with pytest.raises(UserError, match=f"{PINS} is .*: unset it"):
        known_pins()
