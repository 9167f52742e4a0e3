"""The engine `openai` before vLLM: a server that has a label for its weights, and may lose it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file
from llmsuite.contract.registry import Registry
from llmsuite.rl import rollout_server
from llmsuite.rl.remote import RemoteEngine
from tests.support.fake_server import Answer, FakeServer, engine, expected, sampled_ids, weights

_GENERATE = "/inference/v1/generate"
_PAUSE = "/pause?mode=wait"


class FakeVllm(FakeServer):
    """Draws the number of the weights and the prompt, as vLLM 0.32 answers, which was written down from it."""

    def __init__(self) -> None:
        super().__init__()
        self.label = "default"
        self.paused = False
        self.sampling: list[dict[str, Any]] = []

    def answer(self, name: str, body: Any) -> Answer:
        if name == _GENERATE:
            return self._generated(body)
        self.asked.append(name)
        if name == _PAUSE:
            self.paused = True
            return 200, {"status": "paused"}
        if name == "/resume":
            self.paused = False
            return 200, {"status": "resumed"}
        assert self.paused, "weights are brought while it draws"
        if name == "/update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True, "new_version": self.label}
        assert (name, body["method"]) == ("/collective_rpc", "reload_weights")
        place = Path(body["kwargs"]["weights_path"])
        assert broken_file(place) is None
        self.version = int(place.name.removeprefix("version-"))
        return 200, {"results": [None]}

    def _generated(self, body: Any) -> Answer:
        assert not self.paused, "it would wait"
        self.asked.append(f"completions {self.version}")
        self.sampling.append(body["sampling_params"])
        span = {"version": self.label, "start": 0, "end": 4}
        choices = []
        for n in range(body["sampling_params"]["n"]):
            ids = [self.version or 0, body["token_ids"][1], n, 2]
            content = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in ids]
            choice = {"index": n, "logprobs": {"content": content}, "finish_reason": "stop", "stop_reason": 2}
            choices.append({**choice, "token_ids": ids, "weight_versions": [span]})
        return 200, {"request_id": "1", "choices": choices}

    def forget(self) -> None:
        self.version = None
        self.label = "default"
        self.paused = False


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    found = FakeVllm()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_server, "_PAUSE", 0.001)


def made(registry: Registry, folder: Path, server: FakeVllm) -> RemoteEngine:
    return engine(registry, folder, [server.url], "--rollout.openai.dialect=vllm")


def test_every_version_is_loaded_once_and_samples(registry: Registry, tmp_path: Path, server: FakeVllm) -> None:
    found = made(registry, tmp_path, server)
    for version in (1, 2):
        found.refresh(version, weights(found, 0.3))
        assert sampled_ids(found) == sampled_ids(found) == expected(version)
        assert server.label.startswith(f"{version}-")
    bring = [_PAUSE, "/update_weight_version", "/collective_rpc", "/update_weight_version", "/resume"]
    assert [name for name in server.asked if name.startswith("/")] == 2 * bring
    found.close()


def test_each_prompt_has_a_seed_of_its_own_and_nothing_cuts_the_distribution(
    registry: Registry, tmp_path: Path, server: FakeVllm
) -> None:
    found = made(registry, tmp_path, server)
    found.refresh(1, weights(found, 0.3))
    sampled_ids(found)
    first = {row["seed"] for row in server.sampling}
    assert len(first) == len(server.sampling) == 5
    sampled_ids(found)
    assert {row["seed"] for row in server.sampling} == first  # a function of the keys
    for row in server.sampling:
        assert (row["top_p"], row["top_k"], row["min_p"], row["temperature"]) == (1.0, 0, 0.0, 1.0)
        assert (row["stop_token_ids"], row["ignore_eos"], row["logprobs"]) == ([2], True, 0)
    found.close()


def test_a_restarted_server_gets_the_weights_again(registry: Registry, tmp_path: Path, server: FakeVllm) -> None:
    found = made(registry, tmp_path, server)
    found.refresh(1, weights(found, 0.3))
    assert sampled_ids(found) == expected(1)
    server.forget()
    assert sampled_ids(found) == expected(1)
    assert server.asked.count("/collective_rpc") == 2
    found.close()


_STEPS = [_PAUSE, "/update_weight_version", "/collective_rpc", "/resume", _GENERATE]
_FAULTS: dict[str, Callable[[Answer], Answer | None]] = {
    "dies": lambda answer: None,
    "fails": lambda answer: (500, {"error": {"message": "out of memory"}}),
}


@pytest.mark.parametrize(("name", "fault"), list(itertools.product(_STEPS, _FAULTS)))
def test_a_failed_step_is_repeated(registry: Registry, tmp_path: Path, server: FakeVllm, name: str, fault: str) -> None:
    found = made(registry, tmp_path, server)
    found.refresh(1, weights(found, 0.3))
    server.faults = {name: [_FAULTS[fault]]}
    assert sampled_ids(found) == expected(1)
    assert server.faults == {name: []}
    found.close()


def test_a_partial_update_has_another_label(registry: Registry, tmp_path: Path, server: FakeVllm) -> None:
    """Somebody lets it go on where the weights are being read."""
    found = made(registry, tmp_path, server)
    found.refresh(1, weights(found, 0.3))
    labels: list[str] = []

    def fault(answer: Answer) -> Answer:
        labels.append(server.label)
        return answer

    server.faults = {"/collective_rpc": [fault]}
    sampled_ids(found)
    assert [label.partition("-")[0] for label in labels] == ["taking 1"]
    found.close()


def _change(**more: Any) -> Callable[[Answer], Answer]:
    def fault(answer: Answer) -> Answer:
        first, *rest = answer[1]["choices"]
        return 200, {**answer[1], "choices": [{**first, **more}, *rest]}

    return fault


@pytest.mark.parametrize(
    "change",
    [
        {"weight_versions": [{"version": "0-old", "start": 0, "end": 2}, {"version": "1-new", "start": 2, "end": 4}]},
        {"weight_versions": None},
        {"finish_reason": "abort"},
    ],
    ids=["two versions", "no version", "aborted"],
)
def test_a_completion_of_other_weights_is_sampled_again(
    registry: Registry, tmp_path: Path, server: FakeVllm, change: dict[str, Any]
) -> None:
    found = made(registry, tmp_path, server)
    found.refresh(1, weights(found, 0.3))
    server.faults = {_GENERATE: [_change(**change)]}
    assert sampled_ids(found) == expected(1)
    assert server.asked.count("/collective_rpc") == 2
    found.close()


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        (_PAUSE, lambda answer: (404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
        (_GENERATE, lambda answer: (200, {**answer[1], "choices": []}), "0 choices instead of 2"),
        (_GENERATE, _change(token_ids=[1, 2]), "log-probabilities of other tokens"),
        (_GENERATE, _change(logprobs=None), "wrong completions"),
        (_GENERATE, _change(finish_reason="length"), "ends with token 2 and finish_reason 'length'"),
    ],
)
def test_a_permanent_error_is_not_retried(
    registry: Registry, tmp_path: Path, server: FakeVllm, name: str, fault: Callable[[Answer], Answer], says: str
) -> None:
    found = made(registry, tmp_path, server)
    found.refresh(1, weights(found, 0.3))
    server.faults = {name: [fault]}
    with pytest.raises(UserError, match=r"^rollout\.openai: ") as raised:
        sampled_ids(found)
    assert says in str(raised.value)
    found.close()
