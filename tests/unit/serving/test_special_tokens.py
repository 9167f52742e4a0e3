"""Tokens that begin a text, stop texts that are special tokens, and the sampling that a model recommends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.generate import Generator
from llmsuite.inference.prompts import Prompter
from llmsuite.serving.app import make_app
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import Service
from tests.support.paths import DATA
from tests.support.served import NAN, RAISES, TableDecoder

BOS = "<|im_start|>"
TEXT = "Hello there"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A model whose tokenizer puts BOS in front of a text and EOS after it; what follows a token is in a table."""
    directory = tmp_path_factory.mktemp("begun") / "tokenizer"
    shutil.copytree(DATA / "tokenizer", directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    ends = [BOS, "<|im_end|>"]
    around = [{"SpecialToken": {"id": ends[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    around.append({"SpecialToken": {"id": ends[1], "type_id": 0}})
    ids = {token: {"id": token, "ids": [number], "tokens": [token]} for number, token in enumerate(ends, 1)}
    single = {"type": "TemplateProcessing", "single": around, "pair": around, "special_tokens": ids}
    (directory / "tokenizer.json").write_text(json.dumps({**content, "post_processor": single}))
    tokenizer = TextTokenizer(directory)
    decoder = TableDecoder(tokenizer.vocab_size)
    decoder.prompt_logits = lambda ids, most: [decoder.table[ids[:-1]]]  # type: ignore[attr-defined]
    decoder.table[:] = -5
    decoder.table[:, [NAN, RAISES]] = -np.inf  # a high temperature would sample them now and then
    for before, after in ((40, 41), (41, 0), (0, 42), (42, 40)):
        decoder.table[before, after] = 5
    decoder.table[[i for i in range(tokenizer.vocab_size) if i not in (0, 40, 41)], 40] = 4
    return Service(Generator(decoder, tokenizer), Prompter(tokenizer, "chatml"), "toy", Limits(), Metrics())


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service)) as http:
        yield http


def test_prompts_begin_as_the_tokenizer_begins_texts(client: TestClient, service: Service) -> None:
    tokenizer = service.generator.tokenizer
    plain = tokenizer.encode(TEXT)
    written = service.prompter.plain(BOS + TEXT)  # its characters, after the token
    assert (written[0], written.count(1), len(written) > len(plain) + 2) == (1, 1, True)
    for given, count in ((TEXT, len(plain) + 1), (plain, len(plain)), (BOS + TEXT, len(written))):
        options: dict[str, Any] = {"prompt": given, "max_tokens": 1}
        assert client.post("/v1/completions", json=options).json()["usage"]["prompt_tokens"] == count
    options = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 0}
    found = client.post("/v1/completions", json=options).json()
    (choice,) = found["choices"]
    kept = choice["logprobs"]
    assert (found["usage"]["prompt_tokens"], choice["text"]) == (len(plain) + 1, TEXT)
    assert "".join(kept["tokens"]) == TEXT, "the token in front is no text"
    assert [kept["text_offset"][0], kept["text_offset"][1]] == [0, 0]
    assert len(kept["token_logprobs"]) == len(plain) + 1
    assert [value is None for value in kept["token_logprobs"][:2]] == [True, False], "the first has one"
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
    rendered = tokenizer.encode(f"{BOS}user\n{TEXT}<|im_end|>\n{BOS}assistant\n")
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] == len(rendered)


def test_tokenize_is_that_of_prompts(client: TestClient, service: Service) -> None:
    plain = service.generator.tokenizer.encode(TEXT)
    for options, tokens in (
        ({}, [1, *plain]),
        ({"add_special_tokens": True}, [1, *plain]),
        ({"add_special_tokens": False}, plain),
    ):
        assert client.post("/tokenize", json={"prompt": TEXT, **options}).json()["tokens"] == tokens
    assert client.post("/tokenize", json={"prompt": BOS + TEXT}).json()["tokens"] == [1, *plain]
    assert service.prompter.plain(TEXT, is_complete=True) == [1, *plain, 2], "embeddings are of whole texts"


def test_a_stop_text_that_is_a_special_token(client: TestClient, service: Service) -> None:
    tokenizer = service.generator.tokenizer
    prompt = [5, 40]
    message = tokenizer.decode([41])
    options: dict[str, Any] = {"prompt": [prompt], "max_tokens": 6, "temperature": 0}
    (full,) = client.post("/v1/completions", json=options).json()["choices"]
    assert full["finish_reason"] == "length"
    for stop in ("<|endoftext|>", message + "<|endoftext|>"):
        (cut,) = client.post("/v1/completions", json={**options, "stop": stop}).json()["choices"]
        assert (cut["text"], cut["finish_reason"]) == ("" if message in stop else message, "stop")
        events = client.post("/v1/completions", json={**options, "stop": [stop], "stream": True}).text
        data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in data) == cut["text"]
        assert data[-1]["choices"][0]["finish_reason"] == "stop"


def test_recommended_sampling_counts_where_a_request_has_none(client: TestClient, service: Service) -> None:
    def sampled(**options: Any) -> set[str]:
        body = {"prompt": [[5, 40]], "max_tokens": 3, "n": 8, **options}
        choices = client.post("/v1/completions", json=body).json()["choices"]
        return {choice["text"] for choice in choices}

    before = service.defaults
    assert before.temperature == 1, "as OpenAI has it"
    try:
        assert len(sampled(temperature=100)) > 1
        service.defaults = type(before)(temperature=100.0)
        assert len(sampled()) > 1
        service.defaults = type(before)(temperature=0.0)
        assert len(sampled()) == 1
        assert len(sampled(temperature=100)) > 1
    finally:
        service.defaults = before
