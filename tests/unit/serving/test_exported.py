"""Exported programs answer over HTTP as they do from the command line, in float32 and in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.export import export
from llmsuite.inference.generate import Generator
from llmsuite.inference.load import load_model
from llmsuite.inference.predictor import Predictor
from llmsuite.inference.prompts import Prompter
from llmsuite.inference.sampling import Sampling
from llmsuite.serving.app import make_app
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import Service
from tests.support import tiny_llama
from tests.support.served_adapters import CONFIG
from tests.support.tiny_llama import FAMILIES

PROMPTS = [[5, 80, 33, 99], [300], [17, 18, 19, 20, 21]]
GAPS = {"fp32": 1e-5, "bf16": 0.1}
"""Most that a log-probability may be off from the model's in float32, in nats."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported") / "model"
    tiny_llama.write(place, CONFIG, tokenizer=tiny_llama.TOKENIZER)
    return place


@pytest.fixture(scope="module", params=GAPS)
def exported(request: pytest.FixtureRequest, model: Path) -> tuple[str, Path]:
    static = model.parent / request.param
    export(open_model(model, FAMILIES), static, CpuBackend(), model, request.param)
    return request.param, static


def of_program(static: Path) -> Generator:
    return Generator(Predictor(static), TextTokenizer(static), set())


def test_answers_are_those_of_the_program(exported: tuple[str, Path], model: Path) -> None:
    precision, static = exported
    generator = of_program(static)
    service = Service(generator, Prompter(generator.tokenizer, "chatml"), "m", Limits(), Metrics())
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "seed": 2}
    with TestClient(make_app(service)) as http:
        client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)
        greedy = client.completions.create(**body, prompt=PROMPTS, temperature=0, logprobs=0)
        sampled = client.completions.create(**body, prompt=PROMPTS, temperature=1, n=2)
        stream = client.completions.create(**body, prompt=PROMPTS[0], temperature=0, stream=True)
        assert "".join(event.choices[0].text for event in stream) == greedy.choices[0].text
        chat = client.chat.completions.create(**body, messages=[{"role": "user", "content": "Hi"}])
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 9
    found = list(of_program(static).answers(PROMPTS, Sampling(max_new_tokens=9, num_logprobs=0)))
    decode = generator.tokenizer.decode
    assert [choice.text for choice in greedy.choices] == [decode(list(answer.ids)) for (answer,) in found]
    sampling = Sampling(max_new_tokens=9, temperature=1.0, seed=2)
    pairs = of_program(static).answers(PROMPTS, sampling, num_return_sequences=2)
    assert [choice.text for choice in sampled.choices] == [decode(list(a.ids)) for pair in pairs for a in pair]
    trained = ModelDecoder(load_model(open_model(model, FAMILIES), CpuBackend()))
    first = [next(iter(Generator(trained, generator.tokenizer, set()).answers([p], Sampling(max_new_tokens=1,
        num_logprobs=generator.decoder.vocab_size))))[0].logprobs[0] for p in PROMPTS]  # fmt: skip
    gaps = [
        abs(dict(every.top)[answer.ids[0]] - choice.logprobs.token_logprobs[0])
        for every, (answer,), choice in zip(first, found, greedy.choices, strict=True)
        if choice.logprobs is not None and choice.logprobs.token_logprobs
    ]
    assert len(gaps) == len(PROMPTS)
    assert max(gaps) <= GAPS[precision]
    assert (max(gaps) > 1e-5) == (precision == "bf16"), "it is the other precision"
