"""Requests of lm-evaluation-harness 0.4.13, without it, as `local-completions` and `local-chat-completions`.

Requests have the keys of those that were recorded, with other ids. How it reads answers is written down in `read`: of
each choice it takes the log-probabilities after the context but the last, which it takes for those of the one token
it asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.evaluate import scorer
from llmsuite.inference.generate import Generator
from llmsuite.inference.load import load_model
from llmsuite.inference.prompts import Prompter
from llmsuite.inference.sampling import Sampling
from llmsuite.serving.app import make_app
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import Service
from tests.support import tiny_llama
from tests.support.served_adapters import CONFIG
from tests.support.tiny_llama import FAMILIES

CONTEXTS = [[5, 80, 33, 99], [300], [17, 18, 19, 20, 21], [2]]
CONTINUATIONS = [[7, 21, 8], [41], [6, 6], [90, 91, 92, 93]]
KEY = "the-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("harness") / "model"
    tiny_llama.write(place, CONFIG, tokenizer=tiny_llama.TOKENIZER)
    return place


def generator(model: Path, stops: set[int]) -> Generator:
    return Generator(ModelDecoder(load_model(open_model(model, FAMILIES), CpuBackend())), TextTokenizer(model), stops)


def serve(model: Path, stops: set[int]) -> TestClient:
    """A server of the model whose answers end with some tokens."""
    made = generator(model, stops)
    service = Service(made, Prompter(made.tokenizer, "chatml"), "m", Limits(), Metrics())
    return TestClient(make_app(service, KEY), headers={"Authorization": f"Bearer {KEY}"})


@pytest.fixture
def client(model: Path) -> Iterator[TestClient]:
    with serve(model, set()) as http:
        yield http


def read(body: dict[str, Any], lengths: list[int]) -> list[tuple[float, bool]]:
    """The sum of each continuation's log-probabilities, and whether it is the greedy one."""
    found = []
    for choice, length in zip(sorted(body["choices"], key=lambda one: one["index"]), lengths, strict=True):
        kept = choice["logprobs"]
        values, top = (kept[key][length:-1] for key in ("token_logprobs", "top_logprobs"))
        found.append((sum(values), all(value == max(best.values()) for value, best in zip(values, top, strict=True))))
    return found


def score(client: TestClient, contexts: list[list[int]], continuations: list[list[int]]) -> list[tuple[float, bool]]:
    prompts = [[*one, *other] for one, other in zip(contexts, continuations, strict=True)]
    asked = {
        "model": "m",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return read(answer.json(), [len(one) for one in contexts])


def expected(contexts: list[list[int]], continuations: list[list[int]]) -> list[float]:
    """By the model as it is trained."""
    score_all = scorer(tiny_llama.model(CONFIG), 4)
    texts = [[*one, *other] for one, other in zip(contexts, continuations, strict=True)]
    return [float(np.sum(rows[-len(other) :])) for rows, other in zip(score_all(texts), continuations, strict=True)]


def test_log_likelihoods_are_those_of_the_model(client: TestClient) -> None:
    found = score(client, CONTEXTS, CONTINUATIONS)
    assert [value for value, _ in found] == pytest.approx(expected(CONTEXTS, CONTINUATIONS), abs=1e-4)
    assert not any(is_greedy for _, is_greedy in found)


def test_a_continuation_after_which_the_model_ends(model: Path) -> None:
    """Its answer has no token of its own, and the last of the continuation must not be taken for it."""
    ((answer,),) = generator(model, set()).answers([CONTEXTS[0]], Sampling(max_new_tokens=2))
    first, last = answer.ids
    with serve(model, {last}) as client:
        ((value, is_greedy),) = score(client, [CONTEXTS[0]], [[first]])
    assert is_greedy
    assert value == pytest.approx(expected([CONTEXTS[0]], [[first]])[0], abs=1e-4)


def test_a_batch_may_be_large(client: TestClient) -> None:
    contexts = [[number] for number in range(10, 138)]
    continuations = [[7, 8]] * 128
    found = [value for value, _ in score(client, contexts, continuations)]
    assert found == pytest.approx(expected(contexts, continuations), abs=1e-4)
    asked = {"model": "m", "prompt": [[1]] * 129, "max_tokens": 1}
    assert "129 answers are more than 128" in client.post("/v1/completions", json=asked).text


def test_a_prompt_alone_is_scored_without_a_token(client: TestClient) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": [[5, 80, 33]], "max_tokens": 0, "logprobs": 1}
    body = client.post("/v1/completions", json={**asked, "echo": True}).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None
    given = choice["logprobs"]["token_logprobs"][1:]
    assert given == pytest.approx(scorer(tiny_llama.model(CONFIG), 1)([[5, 80, 33]])[0], abs=1e-4)
    assert body["usage"]["completion_tokens"] == 0
    for wrong in ({}, {"echo": True, "stream": True, "logprobs": None}):
        refused = client.post("/v1/completions", json={**asked, **wrong})
        assert (refused.status_code, "max_tokens: 0 is for prompts" in refused.text) == (400, True)


def test_its_tokenizer_is_that_of_the_server(client: TestClient, model: Path) -> None:
    tokenizer = TextTokenizer(model)
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == tokenizer.special_tokens["eos_token"]
    assert "<|im_start|>" in info["chat_template"]
    for text in ("test", "Question: 2 + 2?\nAnswer: 4", "Grüße 你好", info["eos_token"]):
        found = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        assert (found["tokens"], found["count"]) == (tokenizer.encode(text), len(tokenizer.encode(text)))
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    assert client.post("/tokenize", json={"prompt": info["eos_token"]}).json()["tokens"] == [tokenizer.eos_id]
    pieces = client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json()["token_strs"]
    assert "".join(pieces) == "Hi"
    for path, asked in (
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}),
        ("/tokenize", {"prompt": "a", "model": "another"}),
        ("/detokenize", {"tokens": [tokenizer.vocab_size]}),
    ):
        refused = client.post(path, json=asked)
        assert (refused.status_code, "error" in refused.json()) == (404 if "model" in asked else 400, True), asked
    half = client.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers={"Content-Type": "application/json"})
    assert (half.status_code, "surrogate" in half.text) == (400, True)
    for path in ("/tokenizer_info", "/tokenize", "/detokenize"):
        assert client.post(path, json={}, headers={"Authorization": "Bearer wrong"}).status_code == 401
