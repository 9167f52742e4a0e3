"""Rewards that a server gives, and what a server gets wrong."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

from llmsuite.rl import reward_sections
from llmsuite.rl.rewards import Rewards
from tests.support.reward_case import Making, completion


class Server:
    """Answers every POST by a function of its body: a status, and JSON data, a text, or bytes that are cut off."""

    def __init__(self, answer: Any):
        self.asked: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                self.asked.append(body)
                status, data = answer(body)
                handler.send_response(status)
                if isinstance(data, bytes):
                    handler.send_header("Content-Length", str(len(data) + 1))
                handler.end_headers()
                text = data if isinstance(data, (str, bytes)) else json.dumps(data)
                handler.wfile.write(text if isinstance(text, bytes) else text.encode())

            def log_message(handler, *given: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def asking(make: Making, server: Server, **keys: Any) -> Rewards:
    return make({"http": 1.0}, {"http": reward_sections.HttpSection(url=server.url, **keys)}, workers=1)


GROUP = [completion("4", 0), completion("five", 1), completion("6", 0, group=1, columns={"answer": ["x"]})]


@pytest.mark.parametrize("status", [200, 400, 500])
def test_no_message_has_secrets_of_the_address(status: int, make: Making, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(lambda body: (status, "no scores")) as server:
        url = f"{server.url}s?key=s3cr3t#s3cr3t"
        section = reward_sections.HttpSection(url=url, retries=0)
        rewards = make({"http": 1.0}, {"http": section}, workers=1, max_failed=1.0)
        assert np.isnan(rewards.score(GROUP)).all()
    printed = capsys.readouterr().err
    assert "warning: a reward is missing: http: " in printed
    assert f"{server.url}s?key=***#***" in printed
    assert "s3cr3t" not in printed + rewards.first_failure


def test_a_server_that_is_not_there_is_named_without_secrets(make: Making, capsys: pytest.CaptureFixture[str]) -> None:
    section = reward_sections.HttpSection(url="http://127.0.0.1:1/s?key=s3cr3t", retries=0)
    make({"http": 1.0}, {"http": section}, workers=1, max_failed=1.0).score(GROUP)
    printed = capsys.readouterr().err
    assert "http://127.0.0.1:1/s?key=***" in printed
    assert "s3cr3t" not in printed


def test_paddlenlp_servers(make: Making) -> None:
    def answer(body: Any) -> Any:
        scores = [float(a == b) for a, b in zip(body["response"], body["tgt"])]
        return 200, {"error_code": 0, "error_msg": "Success", "score": scores}

    with Server(answer) as server:
        assert asking(make, server).score(GROUP).ravel().tolist() == [1, 0, 0]
        assert server.asked[0] == {"src": ["2+2?", "2+2?"], "tgt": ["4", "4"], "response": ["4", "five"]}
        assert server.asked[1] == {"src": ["2+2?"], "tgt": ['["x"]'], "response": ["6"]}


@pytest.mark.parametrize("wrap", [False, True])
def test_openrlhf_servers(make: Making, wrap: bool) -> None:
    def answer(body: Any) -> Any:
        found = {"rewards": [len(query) for query in body["query"]]}
        return 200, [found] if wrap else found

    with Server(answer) as server:
        assert asking(make, server, dialect="openrlhf").score(GROUP).ravel().tolist() == [5, 8, 5]
        first = {"query": ["2+2?4", "2+2?five"], "prompts": ["2+2?", "2+2?"], "labels": ["4", "4"]}
        assert server.asked[0] == first


WRONG: list[tuple[Any, str, int]] = [
    ((500, "out of memory"), "answers 500: out of memory", 2),
    ((429, "busy"), "answers 429: busy", 2),
    ((404, "not here"), "answers 404: not here", 1),
    ((200, b'{"score": [1.0'), "/: its answer breaks off; bytes missing: 1", 2),
    ((200, "<p>busy</p>"), "/: answers with no JSON: <p>busy</p>", 1),
    ((200, {"error_code": 5, "score": [0, 0]}), 'the server reports: {"error_code": 5', 1),
    ((200, {"score": [[1.0], [1.0]]}), "/: score[0] is [1.0], which is not a number", 1),
    ((200, {"error_code": 500, "error_msg": "it broke", "score": [0, 0]}), "the server reports: it broke", 1),
    ((200, {"score": [1.0]}), "answers with no list of 2 scores", 1),
    ((200, {"rewards": [1.0, 1.0]}), "answers with no list of 2 scores", 1),
]


def test_wrong_responses_of_a_server_are_errors(make: Making) -> None:
    now: list[Any] = []
    with Server(lambda body: now[-1]) as server:
        rewards = asking(make, server)
        for answer, why, tries in WRONG:
            now.append(answer)
            rewards.first_failure = ""
            server.asked.clear()
            assert np.isnan(rewards.score(GROUP[:2])).all()
            assert why in rewards.first_failure
            assert len(server.asked) == tries, answer


def test_a_server_that_comes_back_gets_the_request_again(make: Making) -> None:
    with Server(lambda body: (503, "wait") if len(server.asked) == 1 else (200, {"score": [1, 0]})) as server:
        assert asking(make, server).score(GROUP[:2]).ravel().tolist() == [1, 0]


def test_a_server_that_is_not_there(make: Making) -> None:
    own = {"http": reward_sections.HttpSection(url="http://127.0.0.1:9/", retries=0)}
    rewards = make({"http": 1.0}, own)
    assert np.isnan(rewards.score(GROUP[:2])).all()
    assert "http://127.0.0.1:9/: [Errno 111] Connection refused" in rewards.first_failure


def test_a_server_that_does_not_answer(make: Making) -> None:
    release = threading.Event()

    def answer(body: Any) -> Any:
        release.wait(20)
        return 200, {"score": [1, 0]}

    with Server(answer) as server:
        rewards = asking(make, server, timeout=0.2, retries=0)
        assert np.isnan(rewards.score(GROUP[:2])).all()
        release.set()
        assert "timed out" in rewards.first_failure
