"""The engine `openai` before servers that fail, forget and lie."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.devices.cpu import CpuBackend
from llmsuite.errors import UserError
from llmsuite.files import broken_file, sha256_of
from llmsuite.inference.load import parameter_shapes
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.rl import rollout_server
from llmsuite.rl.drawing import Drawing, Request
from llmsuite.rl.engine import EngineContext
from llmsuite.rl.remote import RemoteEngine
from tests.paths import ROOT

DRAWING = Drawing(num_generations=2, max_completion_length=5, temperature=1.0, batch_size=4)
REQUESTS = [Request((7, i), (0, 1, i)) for i in range(5)]
STOP = {2}
Answer = tuple[int, Any]


class FakeServer:
    """Draws the number of the weights and the prompt; `faults` are answers it gives first, each for one request."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.digest: str | None = None
        self.asked: list[str] = []
        """What was asked for, in order; for completions the version that drew them."""
        self.faults: dict[str, list[Callable[[Answer], Answer | None]]] = {}
        self.delay = 0.0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                name = self.path.removeprefix("/v1/")
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer: Answer | None = outer.answer(name, body)
                if faults := outer.faults.get(name):
                    answer = faults.pop(0)(answer)  # type: ignore[arg-type]
                if answer is None:  # it dies in the middle
                    self.connection.close()
                    return
                data = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, name: str, body: Any) -> Answer:
        marks = {"weights_version": self.version, "weights_digest": self.digest}
        if name == "completions":
            time.sleep(self.delay)
            self.asked.append(f"completions {self.version}")
            rows = [(prompt, n) for prompt in body["prompt"] for n in range(body["n"])]
            ids = [[self.version or 0, prompt[1], n, 2] for prompt, n in rows]
            choices = [
                {
                    "index": i,
                    "prompt_token_ids": rows[i][0],
                    "token_ids": ids[i],
                    "logprobs": {"token_logprobs": [-0.5] * 4},
                    "finish_reason": "stop",
                }
                for i in range(len(rows))
            ]
            return 200, {**marks, "choices": choices}
        self.asked.append(name)
        if name == "update_weights":
            place = Path(body["directory"])
            assert broken_file(place) is None
            assert sha256_of(place / "manifest.json") == body["digest"]
            self.version, self.digest = body["version"], body["digest"]
        return 200, {"weights_version": self.version, "weights_digest": self.digest}

    def forget(self) -> None:
        """It is started anew."""
        self.version = self.digest = None


@pytest.fixture
def server() -> Iterator[FakeServer]:
    found = FakeServer()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_server, "_PAUSE", 0.001)


def engine(registry: Registry, folder: Path, urls: list[str], *words: str) -> RemoteEngine:
    keys = ["--rollout.engine=openai", f"--rollout.openai.urls={json.dumps(urls)}", "--rollout.openai.retries=2"]
    words = (*keys, f"--output_dir={folder}", *words)
    plan = plan_run(ROOT / "recipes" / "llama" / "grpo.json", words, registry, smoke=True)
    return RemoteEngine(EngineContext(plan, CpuBackend(), True, print))


def weights(made: RemoteEngine, value: float) -> Iterator[tuple[str, Any]]:
    for name, shape in parameter_shapes(made._family, made._config).items():
        yield name, paddle.full(shape, value)


def drawn(made: RemoteEngine) -> list[list[list[int]]]:
    return [[d.ids for d in group] for group in made.begin(REQUESTS, DRAWING, STOP)()]


def expected(version: int) -> list[list[list[int]]]:
    return [[[version, i, n, 2] for n in range(2)] for i in range(5)]


def test_versions_are_drawn_in_the_order_in_which_they_were_asked_for(
    registry: Registry, tmp_path: Path, server: FakeServer
) -> None:
    made, server.delay = engine(registry, tmp_path, [server.url]), 0.05
    made.refresh(3, weights(made, 0.3))
    first = made.begin(REQUESTS, DRAWING, STOP)
    made.refresh(4, reversed([*weights(made, 0.4)]))  # while the server draws with the weights before
    second = made.begin(REQUESTS, DRAWING, STOP)
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
    assert drawn(made) == expected(1)
    assert (server.asked.count("completions 1"), other.asked.count("completions 1")) == (2, 1)
    made.close()
    other.server.shutdown()


_BUSY = (503, {"error": {"message": "the server is paused"}})


@pytest.mark.parametrize("name", ["pause", "update_weights", "resume", "completions"])
@pytest.mark.parametrize("fault", [lambda answer: None, lambda answer: _BUSY], ids=["dies", "busy"])
def test_what_fails_is_tried_again(
    registry: Registry, tmp_path: Path, server: FakeServer, name: str, fault: Callable[[Answer], Answer | None]
) -> None:
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    server.faults = {name: [fault, fault]}
    assert drawn(made) == expected(1)
    assert server.faults == {name: []}
    made.close()


def test_a_server_that_was_started_anew_gets_the_weights_again(
    registry: Registry, tmp_path: Path, server: FakeServer
) -> None:
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    assert drawn(made) == expected(1)
    server.forget()
    assert drawn(made) == expected(1)
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
        ("completions", lambda answer: (200, {**answer[1], "choices": answer[1]["choices"][1:]}), "3 choices in place"),
        ("completions", _change(prompt_token_ids=[1]), "another prompt"),
        ("completions", _change(token_ids=[1, 2]), "2 tokens and 4 log-probabilities"),
        ("completions", _change(token_ids=["a"] * 4), "choices[0].token_ids[0] is 'a', which is no token id"),
        ("completions", _change(logprobs=None), "wrong completions"),
        ("completions", _change(logprobs={"token_logprobs": [0, None, 0, 0]}), "wrong completions"),
        ("completions", _change(finish_reason="length"), "ends with token 2 and finish_reason 'length'"),
        ("update_weights", lambda answer: (400, {"error": {"message": "another model"}}), "400: another model"),
        ("pause", lambda answer: (401, {"error": {"message": "the API key"}}), "401: the API key"),
    ],
)
def test_what_would_be_wrong_again_is_not_tried_again(
    registry: Registry, tmp_path: Path, server: FakeServer, name: str, fault: Callable[[Answer], Answer], says: str
) -> None:
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    server.faults = {name: [fault]}
    with pytest.raises(UserError, match=r"^rollout\.openai: ") as raised:
        drawn(made)
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
        drawn(made)
    assert server.asked == ["pause", "resume"]
    made.close()


def test_a_server_that_stays_away_ends_the_run_and_nothing_else(
    registry: Registry, tmp_path: Path, server: FakeServer
) -> None:
    server.server.shutdown()
    server.server.server_close()
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))
    with pytest.raises(UserError, match=r"has drawn nothing in 3 tries.*refused.*--resume"):
        drawn(made)
    made.close()


def test_a_server_with_another_trainer_is_refused(registry: Registry, tmp_path: Path, server: FakeServer) -> None:
    made = engine(registry, tmp_path, [server.url])
    made.refresh(1, weights(made, 0.3))

    def fault(answer: Answer) -> Answer:
        return 200, {**answer[1], "weights_digest": "0" * 64}

    server.faults = {"completions": [fault] * 3}
    with pytest.raises(UserError, match="it has lost the weights of version 1"):
        drawn(made)
    made.close()
