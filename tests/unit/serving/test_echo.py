"""`echo` with `logprobs`: those of a prompt's tokens too, by which evaluation harnesses score texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference import decoder as decoding
from llmsuite.inference.adapters import MultiLoRADecoder, read_adapters
from llmsuite.inference.batch import TokenLogprob
from llmsuite.inference.evaluate import scorer
from llmsuite.inference.generate import Generator
from llmsuite.inference.load import load_model
from llmsuite.inference.prompts import Prompter
from llmsuite.serving.app import make_app
from llmsuite.serving.limits import Limits
from llmsuite.serving.logprobs import chat_logprobs, completion_logprobs
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import Service
from tests.support import tiny_llama
from tests.support.served_adapters import CONFIG, write_adapter
from tests.support.tiny_llama import FAMILIES

PROMPTS = [[5, 80, 33, 99, 7, 21, 8], [300], [17, 18, 19]]
ASK: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("echo")
    tiny_llama.write(found / "base", CONFIG, tokenizer=tiny_llama.TOKENIZER)
    write_adapter(found / "a", "a")
    return found


@pytest.fixture
def client(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    monkeypatch.setattr(decoding, "_LOGITS_CHUNK", 4)
    base = open_model(place / "base", FAMILIES)
    tokenizer = TextTokenizer(place / "base")
    decoder = MultiLoRADecoder(load_model(base, CpuBackend()), read_adapters({"a": place / "a"}, base))
    service = Service(Generator(decoder, tokenizer, set()), Prompter(tokenizer, None), "base", Limits(), Metrics())
    with TestClient(make_app(service)) as http:
        yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)


@pytest.mark.parametrize("adapter", [None, "a"])
def test_log_probabilities_of_prompts(client: openai.OpenAI, place: Path, adapter: str | None) -> None:
    base = open_model(place / "base", FAMILIES)
    base = base if adapter is None else add_adapter(base, place / adapter)
    model = tiny_llama.model(CONFIG)  # as it is trained
    for name, parameter in model.named_parameters():
        parameter.set_value(np.ascontiguousarray(base.read(name)))
    found = client.completions.create(model=adapter or "base", **ASK)
    tokenizer = TextTokenizer(place / "base")
    for prompt, choice in zip(PROMPTS, found.choices):
        kept: Any = choice.logprobs
        assert kept.tokens[: len(prompt)] == [tokenizer.decode([token]) for token in prompt]
        assert choice.text == "".join(kept.tokens)
        assert (kept.token_logprobs[0], kept.top_logprobs[0]) == (None, None)
        assert len(kept.token_logprobs) == len(kept.text_offset) == len(prompt) + 1
        (expected,) = scorer(model, 1)([prompt])
        given = np.asarray(kept.token_logprobs[1 : len(prompt)], "float64")
        assert np.abs(given - expected).max(initial=0) <= 1e-4
        # tokens of the same text, such as parts of characters, are one key
        assert {len(top) for top in kept.top_logprobs[1:]} <= {1, 2}
        assert kept.tokens[-1] in kept.top_logprobs[-1], "greedy"


def test_each_answer_has_those_of_its_prompt(client: openai.OpenAI) -> None:
    found = client.completions.create(model="base", **{**ASK, "temperature": 1}, n=2, best_of=3)
    firsts = [(choice.logprobs.token_logprobs or [])[1:3] for choice in found.choices if choice.logprobs]
    assert len(firsts) == 6
    assert firsts[0] == firsts[1] != firsts[4] == firsts[5]


def test_not_in_streams(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="echo: not with logprobs in a stream"):
        client.completions.create(model="base", **ASK, stream=True)


def test_parts_of_a_character_begin_where_it_does(place: Path) -> None:
    tokenizer = TextTokenizer(place / "base")
    text = "a 日é b"
    kept = [TokenLogprob(token, -1.0, ()) for token in tokenizer.encode(text)]
    found = completion_logprobs(kept, tokenizer)
    assert [text[at] for at, token in zip(found["text_offset"], found["tokens"]) if token == "\ufffd"] == [*"日日日éé"]
    assert all(text[at:].startswith(t) for at, t in zip(found["text_offset"], found["tokens"]) if t != "\ufffd")


def test_of_tokens_with_one_text_the_most_likely_is_reported(place: Path) -> None:
    tokenizer = TextTokenizer(place / "base")
    first, second, *_ = tokenizer.encode("日")
    kept = TokenLogprob(first, -0.5, ((first, -0.5), (second, -2.0)))
    assert completion_logprobs([kept], tokenizer)["top_logprobs"] == [{"\ufffd": -0.5}]


def test_bytes_of_a_chat_are_those_of_its_tokens(place: Path) -> None:
    tokenizer = TextTokenizer(place / "base")
    kept = [TokenLogprob(token, -1.0, ()) for token in tokenizer.encode("日é")]
    content = chat_logprobs(kept, tokenizer)["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "日é"
