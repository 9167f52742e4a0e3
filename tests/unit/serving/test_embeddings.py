"""/v1/embeddings gives the mean of the last hidden states, whatever else is in the batch."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import paddle
import pytest
from starlette.testclient import TestClient

from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.adapters import MultiLoRADecoder, read_adapters
from llmsuite.inference.generate import Generator
from llmsuite.inference.load import load_model
from llmsuite.inference.prompts import Prompter
from llmsuite.serving.app import make_app
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import Service
from tests.support import tiny_llama
from tests.support.served import make_service
from tests.support.served_adapters import CONFIG, write_adapter
from tests.support.tiny_llama import FAMILIES

TEXTS = ["Hello there, you", "a", "The capital of France", "12 ducks"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("embeddings")
    tiny_llama.write(found / "base", CONFIG, tokenizer=tiny_llama.TOKENIZER)
    write_adapter(found / "a", "a")
    return found


@pytest.fixture
def client(place: Path) -> Iterator[openai.OpenAI]:
    base = open_model(place / "base", FAMILIES)
    tokenizer = TextTokenizer(place / "base")
    decoder = MultiLoRADecoder(load_model(base, CpuBackend()), read_adapters({"a": place / "a"}, base))
    service = Service(
        Generator(decoder, tokenizer), Prompter(tokenizer, "chatml"), "base", Limits(batch_size=3), Metrics()
    )
    with TestClient(make_app(service)) as http:
        yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)


def expected(place: Path, text: str, adapter: str | None = None) -> np.ndarray:
    """By the model as it is trained: no padding, no cache."""
    base = open_model(place / "base", FAMILIES)
    ids = TextTokenizer(place / "base").encode(text)
    if adapter is not None:
        base = add_adapter(base, place / adapter)
    model = tiny_llama.model(CONFIG)
    for name, parameter in model.named_parameters():
        parameter.set_value(np.ascontiguousarray(base.read(name)))
    with paddle.no_grad():
        mean = model.hidden_states(paddle.to_tensor([ids]))[0].numpy()[0].mean(0)
    return np.asarray(mean / np.linalg.norm(mean))


@pytest.mark.parametrize("adapter", [None, "a"])
def test_the_mean_of_hidden_states(client: openai.OpenAI, place: Path, adapter: str | None) -> None:
    found = client.embeddings.create(model=adapter or "base", input=TEXTS)
    for number, (text, given) in enumerate(zip(TEXTS, found.data)):
        assert given.index == number
        assert np.abs(np.asarray(given.embedding) - expected(place, text, adapter)).max() <= 1e-5
    assert found.usage.prompt_tokens == sum(len(TextTokenizer(place / "base").encode(text)) for text in TEXTS)
    assert found.model == (adapter or "base")


def test_forms_of_input_and_output(client: openai.OpenAI, place: Path) -> None:
    ids = TextTokenizer(place / "base").encode(TEXTS[0])
    vectors = [
        client.embeddings.create(model="base", input=given, encoding_format=form).data[0].embedding
        for given in (TEXTS[0], TEXTS[:1], ids, [ids])
        for form in ("float", "base64")
    ]
    plain = [np.frombuffer(base64.b64decode(v), "<f4") if isinstance(v, str) else v for v in vectors]
    assert all(np.allclose(vector, plain[0], atol=1e-6) for vector in plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": ""}, "input 0 has no tokens"),
        ({"input": []}, "input"),
        ({"input": ["a", "b " * 100]}, "input 1 has"),
        ({"input": [[513]]}, "input 0 has token 513"),
        ({"dimensions": 7}, "dimensions: is 7; this model's vectors have 24"),
        ({"extra_body": {"task": "query"}}, "task"),
    ],
)
def test_what_has_no_vector(client: openai.OpenAI, change: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.embeddings.create(**{"model": "base", "input": "Hi", **change})


def test_models_without_hidden_states() -> None:
    with TestClient(make_app(make_service())) as http:
        answer = http.post("/v1/embeddings", json={"input": "Hi"})
    assert (answer.status_code, "are not available with --engine static" in answer.json()["error"]["message"]) == (
        400,
        True,
    )
