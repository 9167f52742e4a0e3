"""Defaults of sampling that a model's generation_config.json has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.inference.sampling import Sampling
from llmsuite.inference.sampling_defaults import SamplingDefaults, read_defaults
from llmsuite.serving.protocol import ChatRequest


def write(directory: Path, **content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"temperature": 0.6, "top_k": 20, "min_p": 0.1}, {"temperature": 0.6, "top_k": 20, "min_p": 0.1}),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
         {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"do_sample": None, "temperature": None, "eos_token_id": 2}, {}),
    ],
)  # fmt: skip
def test_values_fill_what_is_not_given(tmp_path: Path, content: dict[str, Any], values: dict[str, Any]) -> None:
    found = read_defaults([tmp_path / "nothing", write(tmp_path / "a", **content), write(tmp_path / "b", top_k=9)])
    assert found.values == values
    assert read_defaults([tmp_path / "a"], "ignore") == SamplingDefaults()
    filled = found.fill(Sampling(temperature=0.3, top_p=0.5), ["temperature"])
    assert (filled.temperature, filled.top_p) == (0.3, values.get("top_p", 0.5))


def test_the_message_for_users(tmp_path: Path) -> None:
    found = read_defaults([write(tmp_path, temperature=0.6, top_p=0.95)])
    assert found.note == "sampling defaults from generation_config.json: temperature 0.6, top_p 0.95"
    assert SamplingDefaults().note is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": "0.6"}, "temperature is '0.6'; it has to be a number"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": True}, "top_p is True"),
        ({"top_p": 1.5}, "top_p: is 1.5; it has to be between 0 and 1"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; it is true or false"),
        ({"repetition_penalty": 0}, "repetition_penalty: is 0"),
    ],
)
def test_faulty_values_are_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"generation_config\.json: {message}"):
        read_defaults([write(tmp_path, **content)])


def test_a_request_goes_before_them() -> None:
    defaults = Sampling(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    asked = ChatRequest(messages=[], top_p=0.5, top_k=0, temperature=None)
    found = asked.sampling(8, None, defaults)
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (0.6, 0.5, 0, 1.1)
    assert ChatRequest(messages=[], temperature=0).sampling(8, None, defaults).temperature == 0
