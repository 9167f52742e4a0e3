"""Adapters over one model: each request gets the answers of the model that is merged with its adapter, in one batch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.cli.model import open_generator
from llmsuite.cli.serve import _adapters, _check_templates, _prompter
from llmsuite.contract.registry import Registry
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.adapters import MultiLoRADecoder, read_adapters
from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import Generator
from llmsuite.inference.load import load_model
from llmsuite.inference.prompts import Prompter
from llmsuite.inference.sampling import Sampling
from llmsuite.serving.app import make_app
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import ServedModel, Service
from tests.support import tiny_llama
from tests.support.served_adapters import CONFIG, TARGETS, adapted, base_of, write_adapter, write_base_and_adapters
from tests.support.toy_decoder import ToyDecoder

PROMPTS = ([5, 80, 33, 99, 7], [300, 4], [17, 18, 19], [5, 80, 33, 99, 7], [401])
GREEDY = Sampling(max_new_tokens=10)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and its adapters."""
    return write_base_and_adapters(tmp_path_factory.mktemp("adapters"))


def merged_answers(place: Path, name: str | None) -> list[list[int]]:
    """Answers of a merged model, one prompt at a time."""
    base = base_of(place)
    decoder = ModelDecoder(load_model(base if name is None else add_adapter(base, place / name), CpuBackend()))
    generator = Generator(decoder, TextTokenizer(place / "base"), stop_ids=set())
    return [list(answer.ids) for prompt in PROMPTS for (answer,) in generator.answers([prompt], GREEDY)]


def test_a_batch_of_several_adapters(place: Path) -> None:
    names = (None, "a", "b", "c", "a")
    sequences = [DecodingSequence(prompt, GREEDY, set(), adapter=name) for prompt, name in zip(PROMPTS, names)]
    batch = Batch(adapted(place))
    batch.advance(sequences[:2])
    batch.advance(sequences[2:])  # the others join
    while batch.sequences:
        batch.advance()
    alone = {name: merged_answers(place, name) for name in (None, "a", "b", "c")}
    assert [line.ids for line in sequences] == [alone[name][number] for number, name in enumerate(names)]
    assert len({str(answers) for answers in alone.values()}) == 4, "else any adapter would do"


def test_requests_choose_by_model(place: Path) -> None:
    tokenizer = TextTokenizer(place / "base")
    generator = Generator(adapted(place), tokenizer, stop_ids=set())
    service = Service(generator, Prompter(tokenizer, "chatml"), "base", Limits(), Metrics())
    with TestClient(make_app(service)) as http:
        client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)
        assert [(m.id, getattr(m, "parent", None)) for m in client.models.list()] == [
            ("base", None),
            *((name, "base") for name in TARGETS),
        ]
        for name in ("base", *TARGETS):
            found = client.completions.create(model=name, prompt=list(PROMPTS[0]), temperature=0, max_tokens=10)
            expected = merged_answers(place, None if name == "base" else name)[0]
            assert (found.model, found.choices[0].text) == (name, tokenizer.decode(expected))
            events = client.completions.create(
                model=name, prompt=list(PROMPTS[0]), temperature=0, max_tokens=10, stream=True
            )
            assert {event.model for event in events} == {name}
        with pytest.raises(openai.NotFoundError, match="model 'd' is not served here; this is 'base' and 'a' and 'b'"):
            client.completions.create(model="d", prompt="Hi")


def test_adapters_that_are_more_than_factors(place: Path, tmp_path: Path) -> None:
    def refusal(directory: Path) -> str:
        with pytest.raises(UserError) as caught:
            MultiLoRADecoder(load_model(base_of(place), CpuBackend()), read_adapters({"x": directory}, base_of(place)))
        return str(caught.value)

    lengths = {
        f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector.weight": np.ones(v.shape[1], "float32")
        for name, v in tiny_llama.values(CONFIG).items()
        if name.split(".")[-2] in TARGETS["a"]
    }
    assert "no plain pair of factors; merge it" in refusal(
        write_adapter(tmp_path / "dora", "a", {"use_dora": True}, lengths)
    )
    embedding = {
        "base_model.model.model.embed_tokens.lora_embedding_A": np.ones([3, 512], "float32"),
        "base_model.model.model.embed_tokens.lora_embedding_B": np.ones([24, 3], "float32"),
    }
    assert "model.embed_tokens.weight is not the matrix of a linear layer" in refusal(
        write_adapter(tmp_path / "embedding", "a", (), embedding)
    )
    assert "is no LoRA adapter" in refusal(place / "base")


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        (["a"], {}, "--adapters a: has to be NAME=DIR"),
        (["a=x", "a=y"], {}, "'a' is the name of the model or of another adapter"),
        (["m=x"], {}, "'m' is the name of the model"),
        (["a=x"], {"rl": True}, "without --rl"),
        (["a=x"], {"precision": "int8"}, "with --engine dynamic and --precision fp32"),
    ],
)
def test_wrong_arguments_are_named(given: list[str], more: dict[str, Any], message: str) -> None:
    args = argparse.Namespace(**{"adapters": given, "rl": False, "engine": "dynamic", "precision": "fp32", **more})
    with pytest.raises(UserError, match=message):
        _adapters(args, "m")
    args = argparse.Namespace(adapters=["a=x", "b=y=z"], rl=False, engine="dynamic", precision="fp32")
    assert _adapters(args, "m") == {"a": Path("x"), "b": Path("y=z")}


def test_each_adapter_is_asked_by_its_own_template(place: Path, tmp_path: Path, registry: Registry) -> None:
    """Adapters without a template use that of the model."""
    own = write_adapter(tmp_path / "own", "a")
    (own / "chat_template.jinja").write_text("{% for message in messages %}[{{ message['content'] }}]{% endfor %}")
    more = dict.fromkeys(("base", "config", "tokenizer", "tensor_parallel_degree"))
    more |= {"allow_pickle": False, "engine": "dynamic", "pipeline_parallel_degree": 1, "precision": "fp32"}
    args = argparse.Namespace(
        model=str(place / "base"),
        device="cpu",
        num_devices=1,
        chat_template="tokenizer",
        control_tokens=False,
        chat_template_kwargs=None,
        **more,
    )
    opened = open_generator(args, registry, adapters={"own": own, "b": place / "b"})
    assert opened.adapter_generators["b"] is opened.generator, "it brings nothing"
    prompters = {name: _prompter(generator, args, False) for name, generator in opened.adapter_generators.items()}
    adapter_models = {name: ServedModel(opened.adapter_generators[name], prompters[name]) for name in prompters}
    service = Service(opened.generator, _prompter(opened.generator, args, True), "base", Limits(), Metrics())
    service.adapter_models = adapter_models
    with TestClient(make_app(service)) as http:
        turns = [{"role": "user", "content": "hello"}]
        counts = {}
        for name in ("base", "own", "b"):
            asked = {"model": name, "messages": turns, "max_tokens": 1}
            counts[name] = http.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"]
    tokenizer = TextTokenizer(place / "base")
    assert counts["own"] == len(tokenizer.encode("[hello]"))
    assert counts["b"] == counts["base"] > counts["own"]


def test_a_base_without_a_template_serves_an_adapter_that_has_one(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    tiny_llama.write(bare, CONFIG, tokenizer=tiny_llama.TOKENIZER)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = TextTokenizer(bare)
    args = argparse.Namespace(chat_template="tokenizer", chat_template_kwargs=None, control_tokens=False)
    generator = Generator(ToyDecoder(8), tokenizer)
    assert _prompter(generator, args, False).template_source is None
    with pytest.raises(UserError, match="has no chat template"):
        _prompter(generator, args, True)
    bare_prompter = _prompter(generator, args, False)
    _check_templates(args, [bare_prompter])
    args.chat_template_kwargs = '{"day": 1}'
    _check_templates(args, [bare_prompter, Prompter(tokenizer, "chatml")])
    with pytest.raises(UserError, match="--chat_template_kwargs: neither the model nor an adapter has a chat template"):
        _check_templates(args, [bare_prompter, bare_prompter])
