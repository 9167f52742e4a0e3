"""The engine `openai` before servers that fail, forget and lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.contract.registry import Registry
from llmsuite.rl import rollout_server
from tests.support.fake_server import PARAMS, REQUESTS, STOP, Answer, FakeServer, engine, expected, sampled_ids, weights


@pytest.fixture
def server() -> Iterator[FakeServer]:
    found = FakeServer()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_server, "_PAUSE", 0.001)


def test_versions_are_sampled_in_the_order_of_the_requests(
    registry: Registry, tmp_path: Path, server: FakeServer
) -> None:
    made = engine(registry, tmp_path, [server.url])
    server.delay = 0.05
    made.refresh(3, weights(made, 0.3))
    first = made.begin(REQUESTS, PARAMS, STOP)
    made.refresh(4, reversed([*weights(made, 0.4)]))  # while the server draws with the weights before
    second = made.begin(REQUESTS, PARAMS, STOP)
    assert [[d.ids for d in group] for group in second()] == expected(4)
    assert [[d.ids for d in group] for group in first()] == expected(3)
    bring = ["pause", "update_weights", "resume"]
    assert server.asked == [*bring, *["completions 3"] * 3, *bring, *["completions 4"] * 3]
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-4"]
    model = open_model(tmp_path / "weights" / "version-4", registry.models)
    assert all((model.read(name) == np.float32(0.4)).all() for name in model.names)
    made.close()


def test_servers_share_the_work(registry: Registry, tmp_path: Path, server: FakeServer) -> None:
    other = FakeServer()
    made = engine(registry, tmp_path, [server.url, other.url])
    made.refresh(1, weights(made, 0.3))
    assert sampled_ids(made) == expected(1)
    assert (server.asked.count("completions 1"), other.asked.count("completions 1")) == (2, 1)
    made.close()
    other.server.shutdown()


_BUSY = (503, {"error": {"message": "the server is paused"}})


@pytest.mark.parametrize("name", ["pause", "update_weights", "resume", "completions"])
@pytest.mark.parametrize("fault", [lambda answer: None, lambda answer: _BUSY], ids=["dies", "busy"])
def test_a_failed_request_is_repeated(
    registry: Registry, tmp_path: Path, server: FakeServer, name: str, fault: Callable[[Answer], Answer | None]
) -> None:
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    server.faults = {name: [fault, fault]}
    assert sampled_ids(made) == expected(1)
    assert server.faults == {name: []}
    made.close()


def test_a_restarted_server_gets_the_weights_again(registry: Registry, tmp_path: Path, server: FakeServer) -> None:
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    assert sampled_ids(made) == expected(1)
    server.forget()
    assert sampled_ids(made) == expected(1)
    assert server.asked.count("update_weights") == 2
    made.close()


def _change(**more: Any) -> Callable[[Answer], Answer]:
    """Change the first choice of an answer."""

    def fault(answer: Answer) -> Answer:
        first, *rest = answer[1]["choices"]
        return 200, {**answer[1], "choices": [{**first, **more}, *rest]}

    return fault


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("completions", lambda answer: (400, {"error": {"message": "top_k: wrong"}}), "answers 400: top_k: wrong"),
        ("completions", lambda answer: (200, {**answer[1], "choices": answer[1]["choices"][1:]}), "3 choices instead"),
        ("completions", _change(prompt_token_ids=[1]), "another prompt"),
        ("completions", _change(token_ids=[1, 2]), "2 tokens and 4 log-probabilities"),
        ("completions", _change(token_ids=["a"] * 4), "choices[0].token_ids[0] is 'a', which is not a token id"),
        ("completions", _change(logprobs=None), "wrong completions"),
        ("completions", _change(logprobs={"token_logprobs": [0, None, 0, 0]}), "wrong completions"),
        ("completions", _change(finish_reason="length"), "ends with token 2 and finish_reason 'length'"),
        ("update_weights", lambda answer: (400, {"error": {"message": "another model"}}), "400: another model"),
        ("pause", lambda answer: (401, {"error": {"message": "the API key"}}), "401: the API key"),
    ],
)
def test_a_permanent_error_is_not_retried(
    registry: Registry, tmp_path: Path, server: FakeServer, name: str, fault: Callable[[Answer], Answer], says: str
) -> None:
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    server.faults = {name: [fault]}
    with pytest.raises(UserError, match=r"^rollout\.openai: ") as raised:
        sampled_ids(made)
    assert says in str(raised.value)
    made.close()


def test_a_server_that_does_not_name_its_weights_is_another_one(
    registry: Registry, tmp_path: Path, server: FakeServer
) -> None:
    """FastDeploy 2.6 answers to the same paths so."""
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    server.faults = {"pause": [lambda answer: (200, {"request_id": "control-1", "status": "success", "result": None})]}
    with pytest.raises(UserError, match=r"is no `llmsuite serve --rl`.*rollout\.openai\.dialect"):
        sampled_ids(made)
    assert server.asked == ["pause", "resume"]
    made.close()


def test_a_server_that_stays_away_ends_the_run_and_nothing_else(
    registry: Registry, tmp_path: Path, server: FakeServer
) -> None:
    server.server.shutdown()
    server.server.server_close()
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    with pytest.raises(UserError, match=r"has sampled nothing in 3 tries.*refused.*--resume"):
        sampled_ids(made)
    made.close()


def test_a_server_with_another_trainer_is_refused(registry: Registry, tmp_path: Path, server: FakeServer) -> None:
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))

    def fault(answer: Answer) -> Answer:
        return 200, {**answer[1], "weights_digest": "0" * 64}

    server.faults = {"completions": [fault] * 3}
    with pytest.raises(UserError, match="it has lost the weights of version 1"):
        sampled_ids(made)
    made.close()
