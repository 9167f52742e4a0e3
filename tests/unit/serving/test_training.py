"""A server as the engine of a trainer: tokens in and out, and weights that are replaced whole or not at all."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy
from starlette.testclient import TestClient

from llmsuite.base.files import committed_checkpoint, committed_directory, sha256_of, write_json
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import Generator
from llmsuite.inference.group_sampling import SampleRequest, SamplingParams, sample_groups
from llmsuite.inference.load import load_model
from llmsuite.inference.prompts import Prompter
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.inference.sampling import Sampling
from llmsuite.serving.app import make_app
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import Service
from llmsuite.serving.weights import ServedWeights
from tests.support.families import FAMILIES
from tests.support.written_family import write_family

KEYS = [[5, 1, 2**32, 0], [5, 1, 7, 0]]
PROMPTS = [[5, 6, 7], [8, 9]]
ASKED: dict[str, Any] = {
    "prompt": PROMPTS, "n": 3, "max_tokens": 12, "temperature": 0.8, "random_keys": KEYS, "logprobs": 0,
    "return_token_ids": True, "return_tokens_as_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories with a manifest; "first" is served."""
    root = tmp_path_factory.mktemp("weights")
    return {name: written(root / name, seed) for name, seed in (("first", 3), ("second", 4), ("third", 5))}


def written(final: Path, seed: int, family: str = "llama", **config: Any) -> Path:
    with committed_checkpoint(final, {}, is_created=False) as directory:
        directory.rmdir()
        write_family(directory, family, seed)
        if config:
            known = json.loads((directory / "config.json").read_text())
            write_json(directory / "config.json", {**known, **config})
    return final


def build(place: Path) -> RefreshableModel:
    return RefreshableModel(load_model(open_model(place, FAMILIES), CpuBackend()), CpuBackend().ops("fp32"))


@pytest.fixture
def weights(places: dict[str, Path]) -> ServedWeights:
    return ServedWeights(build(places["first"]), FAMILIES)


@pytest.fixture
def client(places: dict[str, Path], weights: ServedWeights) -> Iterator[TestClient]:
    tokenizer = TextTokenizer(places["first"])
    generator = Generator(ModelDecoder(weights._model.model), tokenizer)
    limits = Limits(batch_size=4, max_new_tokens=4000)
    service = Service(generator, Prompter(tokenizer, None), "tiny", limits, Metrics())
    with TestClient(make_app(service, weights=weights)) as found:
        yield found


def update(place: Path, version: int) -> dict[str, Any]:
    return {"directory": str(place), "version": version, "digest": sha256_of(place / "manifest.json")}


def replace(client: TestClient, place: Path, version: int) -> None:
    for path, body in (("pause", {}), ("update_weights", update(place, version)), ("resume", {})):
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text


def draw(client: TestClient, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={**ASKED, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(place: Path, stop_ids: set[int], sampling_params: SamplingParams) -> list[Any]:
    """Completions that a trainer with these weights samples itself."""
    decoder = ModelDecoder(build(place).model)
    requests = [SampleRequest(tuple(prompt), tuple(key)) for prompt, key in zip(PROMPTS, KEYS)]
    groups = sample_groups(decoder, requests, sampling_params, stop_ids)
    return near([(c.ids, c.logprobs, c.finish_reason) for group in groups for c in group])


def near(completions: list[Any]) -> list[Any]:
    """Equal tokens, with log-probabilities that may differ in their last digits."""
    return [(ids, pytest.approx(logprobs, abs=1e-5), reason) for ids, logprobs, reason in completions]


def parts(answer: dict[str, Any]) -> list[Any]:
    return [(c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"]) for c in answer["choices"]]


def test_tokens_are_those_that_the_trainer_would_draw(client: TestClient, places: dict[str, Path]) -> None:
    own = expected(places["first"], set(), SamplingParams(3, 12, 0.8, 4))
    stop = own[0][0][4]  # so that some end before they are as long as can be
    answer = draw(client, stop_token_ids=[stop])
    own = expected(places["first"], {stop}, SamplingParams(3, 12, 0.8, 4))
    assert parts(answer) == own
    assert {reason for _, _, reason in own} == {"stop", "length"}
    assert answer["choices"][0]["token_ids"][-1] == stop
    for choice, prompt in zip(answer["choices"], np.repeat(np.arange(2), 3)):
        assert choice["prompt_token_ids"] == PROMPTS[prompt]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert answer["usage"]["completion_tokens"] == sum(len(ids) for ids, _, _ in own)
    assert answer["weights_version"] is None


def test_what_else_the_server_does_changes_nothing(client: TestClient) -> None:
    alone = near(parts(draw(client)))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        talks = {"prompt": "some words", "max_tokens": 40, "temperature": 1}
        others = [pool.submit(client.post, "/v1/completions", json=talks) for _ in range(4)]
        again = [pool.submit(draw, client) for _ in range(3)]
        assert all(parts(future.result()) == alone for future in again)
        assert all(future.result().status_code == 200 for future in others)
    seeds = [parts(draw(client, random_keys=None, seed=seed)) for seed in (1, 1, 2)]
    assert seeds[0] == near(seeds[1])
    assert seeds[0] != near(seeds[2])


def test_new_weights_serve_and_every_answer_names_them(client: TestClient, places: dict[str, Path]) -> None:
    for version, place in ((7, places["second"]), (8, places["third"]), (9, places["first"])):
        replace(client, place, version)
        answer = draw(client)
        assert parts(answer) == expected(place, {2}, SamplingParams(3, 12, 0.8, 4))
        named = [answer, client.post("/v1/completions", json={"prompt": "a"}).json()]
        named.append(client.get("/v1/models").json()["data"][0])
        for found in named:
            assert found["weights_version"] == version
            assert found["weights_digest"] == sha256_of(place / "manifest.json")
    events = client.post("/v1/completions", json={"prompt": "a", "stream": True}).text
    assert json.loads(events.split("\n")[0].removeprefix("data: "))["weights_version"] == 9
    # the same once more is no work, and needs no pause
    assert client.post("/v1/update_weights", json=update(places["first"], 9)).status_code == 200


def test_an_update_creates_no_parameters(weights: ServedWeights, places: dict[str, Path]) -> None:
    """Paddle keeps the name of each one for ever, and a server gets new weights for weeks."""
    names = paddle.base.unique_name.dygraph_parameter_name_checker._name_set
    counted = []
    for version, name in enumerate(("second", "third", "first", "second")):
        source = weights.open_checked(places[name], sha256_of(places[name] / "manifest.json"))
        weights.update(source, version, "")
        counted.append(len(names))
    assert len(set(counted)) == 1


def _other_byte(place: Path) -> None:
    (file,) = place.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def _other_shape(place: Path) -> None:
    (place / "manifest.json").unlink()
    (file,) = place.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    safetensors.numpy.save_file({**tensors, name: tensors[name][:-2]}, file)
    _commit(place)


def _not_finite(place: Path) -> None:
    (file,) = place.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][0, :3] = np.nan
    safetensors.numpy.save_file(tensors, file)
    _commit(place)


def _lacks_a_tensor(place: Path) -> None:
    (file,) = place.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(file)
    tensors.pop("model.norm.weight")
    safetensors.numpy.save_file(tensors, file)
    _commit(place)


def _other_model(place: Path) -> None:
    known = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**known, "rms_norm_eps": 0.5}))
    _commit(place)


def _commit(place: Path) -> None:
    """Give a directory a manifest of what is in it now."""
    (place / "manifest.json").unlink(missing_ok=True)
    with committed_directory(place) as directory:
        shutil.copytree(place, directory, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_other_byte, "does not have the sha256"),
        (_other_shape, "have another shape"),
        (_not_finite, "q_proj.weight' has 3 of "),
        (_lacks_a_tensor, "tensor 'model.norm.weight', but the file does not have it"),
        (_other_model, "rms_norm_eps 0.5 instead of"),
        (lambda place: (place / "config.json").unlink(), "is missing"),
        (shutil.rmtree, "has no manifest.json"),
    ],
    ids=["damaged", "shape", "finite", "names", "config", "file", "directory"],
)
def test_weights_that_are_not_right_change_nothing(
    client: TestClient, places: dict[str, Path], tmp_path: Path, change: Callable[[Path], Any], says: str
) -> None:
    place = tmp_path / "wrong"
    shutil.copytree(places["second"], place)
    body = update(place, 3)
    change(place)
    if (place / "manifest.json").is_file():
        body = update(place, 3)
    before = parts(draw(client))
    client.post("/v1/pause")
    answer = client.post("/v1/update_weights", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert client.post("/v1/resume").json() == {"paused": False, "weights_version": None, "weights_digest": None}
    assert parts(draw(client)) == near(before)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800", "a/" * 3000])
def test_a_directory_that_can_be_none_changes_nothing(client: TestClient, name: str) -> None:
    client.post("/v1/pause")
    body = json.dumps({"directory": name, "version": 1, "digest": "0" * 64})
    headers = {"content-type": "application/json"}
    assert client.post("/v1/update_weights", content=body, headers=headers).status_code == 400
    assert client.post("/v1/resume").json()["weights_version"] is None


def test_an_update_has_a_pause_and_a_digest(client: TestClient, places: dict[str, Path]) -> None:
    answer = client.post("/v1/update_weights", json=update(places["second"], 1))
    assert answer.status_code == 409
    client.post("/v1/pause")
    other = {**update(places["second"], 1), "digest": "0" * 64}
    assert "not the given digest" in client.post("/v1/update_weights", json=other).json()["error"]["message"]
    assert client.post("/v1/update_weights", json={"directory": "x"}).status_code == 400


def test_half_an_update_never_serves(
    client: TestClient, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ModelDirectory.read
    calls = []

    def fails(self: ModelDirectory, name: str, index: Any = None) -> np.ndarray:
        calls.append(name)
        if len(calls) == 4:
            raise OSError("the disk is gone")
        return read(self, name, index)

    monkeypatch.setattr(ModelDirectory, "read", fails)
    client.post("/v1/pause")
    assert client.post("/v1/update_weights", json=update(places["second"], 1)).status_code == 500
    assert client.post("/v1/resume").status_code == 409
    assert client.post("/v1/completions", json=ASKED).status_code == 503
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    replace(client, places["second"], 1)
    assert parts(draw(client)) == expected(places["second"], {2}, SamplingParams(3, 12, 0.8, 4))


def test_a_pause_lets_end_what_has_begun(client: TestClient) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        # text decodes pass by pass: there is time to ask for the pause in the middle
        long = {"prompt": "a", "max_tokens": 100, "min_tokens": 100}
        running = pool.submit(client.post, "/v1/completions", json=long)
        while "llmsuite_answers_running 1.0" not in client.get("/metrics").text:
            assert not running.done(), "it was too fast"
        assert client.post("/v1/pause").json()["paused"]
        assert running.result().json()["usage"]["completion_tokens"] == 100
        assert client.post("/v1/completions", json=ASKED).status_code == 503
        client.post("/v1/resume")
        draw(client)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top_p": 0.5}, "top_p: "),
        ({"prompt": [[5], []]}, "prompt 1 has no tokens"),
        ({"prompt": [[5, 10**6]], "random_keys": None}, "prompt 0 has token 1000000"),
        ({"prompt": []}, "prompt"),
        ({"random_keys": KEYS[:1]}, "random_keys: has 1 for 2 prompts"),
        ({"n": 4000}, "completions are more than"),
        ({"max_tokens": 5000}, "at most 4000"),
        ({"logprobs": 3}, "logprobs: "),
    ],
)
def test_what_cannot_be_sampled_is_refused(client: TestClient, change: dict[str, Any], says: str) -> None:
    answer = client.post("/v1/completions", json={**ASKED, **change})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_other_servers_have_none_of_it(places: dict[str, Path]) -> None:
    tokenizer = TextTokenizer(places["first"])
    generator = Generator(ModelDecoder(build(places["first"]).model), tokenizer)
    service = Service(generator, Prompter(tokenizer, None), "tiny", Limits(), Metrics())
    with TestClient(make_app(service)) as client:
        assert client.post("/v1/pause").status_code == 404
        assert client.post("/v1/update_weights", json=update(places["second"], 1)).status_code == 404
        assert "return_token_ids" in client.post("/v1/completions", json=ASKED).json()["error"]["message"]
        assert "weights_version" not in client.post("/v1/completions", json={"prompt": "a"}).json()


def test_nothing_is_kept_of_prompts_that_other_weights_have_read(client: TestClient, places: dict[str, Path]) -> None:
    body = {"prompt": list(range(5, 90)), "max_tokens": 12, "temperature": 0}

    def say() -> str:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    before = say()
    assert say() == before
    assert "llmsuite_prefix_hits_total 1.0" in client.get("/metrics").text
    replace(client, places["second"], 1)
    after = say()
    assert "llmsuite_prefix_hits_total 1.0" in client.get("/metrics").text
    tokenizer = TextTokenizer(places["second"])
    generator = Generator(ModelDecoder(build(places["second"]).model), tokenizer)
    ((alone,),) = generator.answers([list(range(5, 90))], Sampling(max_new_tokens=12))
    assert after == alone.text != before
