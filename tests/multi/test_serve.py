"""A server in a process of its own, asked by the official client library, by bad clients and by a browser."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.multi.conftest import Runner
from tests.support.browser import IS_THERE, REASON, chromium, screenshot, severe, view, waiting
from tests.support.server import KEY, LIMITS, Server
from tests.support.written_family import write_family
from tests.tools import load


@pytest.fixture(scope="module")
def model(runner: Runner) -> Path:
    return write_family(runner.directory / "served", "llama")


@pytest.fixture(scope="module")
def server(runner: Runner, model: Path) -> Iterator[Server]:
    started = Server(runner, model, *LIMITS, LLMSUITE_API_KEY=KEY)
    yield started
    assert started.stop() == 0


def test_what_prompts_begin_with_is_computed_once(server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [list(range(40))], "max_tokens": 2, "temperature": 0}
    first, second = (server.client().completions.create(**asked) for _ in range(2))
    known = [answer.usage.prompt_tokens_details for answer in (first, second) if answer.usage is not None]
    assert [told.cached_tokens for told in known if told is not None] == [0, 32]
    assert first.choices[0].text == second.choices[0].text


def test_it_listens_on_this_machine_only(server: Server) -> None:
    assert server.host == "127.0.0.1"


def test_the_official_client_gets_what_generate_says(server: Server, runner: Runner, model: Path) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["tiny"]
    target = runner.directory / "said.jsonl"
    runner.run("generate", str(model), "--prompt", "Hello there", "--max_new_tokens", "12", "--output", str(target))
    expected = json.loads(target.read_text())["answers"][0]
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello there"}],
        "temperature": 0,
        "max_tokens": 12,
    }
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected["text"], expected["finish_reason"])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected["ids"]) == 12
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [t.logprob == t.top_logprobs[0].logprob for t in choice.logprobs.content] == [True] * 12  # it is greedy
    stream = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == expected["text"]
    assert len(stream) > 6
    assert stream[-1].usage == answer.usage
    with_logprobs = client.chat.completions.create(**asked, stream=True, logprobs=True, top_logprobs=2)
    told = [c.choices[0].logprobs for c in with_logprobs]
    streamed_ones = [t for logprobs in told if logprobs is not None for t in logprobs.content or []]
    assert [t.bytes for t in streamed_ones] == [t.bytes for t in choice.logprobs.content]
    assert [t.logprob for t in streamed_ones] == pytest.approx([t.logprob for t in choice.logprobs.content], abs=1e-4)
    assert len(told) > 6
    parts = client.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}]})  # fmt: skip
    assert parts.choices[0].message.content == expected["text"]


def test_completions_take_every_form_of_prompt(server: Server) -> None:
    client = server.client()
    both = client.completions.create(
        model="tiny", prompt=["one two", "three"], max_tokens=9, temperature=1, seed=3, n=2, logprobs=1
    )
    assert len({choice.text for choice in both.choices}) == 4
    alone = client.completions.create(model="tiny", prompt="three", max_tokens=9, temperature=1, seed=3, n=2)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in both.choices[2:]]
    assert both.choices[0].logprobs is not None
    tokens = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4, temperature=0)
    same = client.completions.create(model="tiny", prompt=[[5, 6, 7]], max_tokens=4, temperature=0)
    assert tokens.choices[0].text == same.choices[0].text
    streamed = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == tokens.choices[0].text
    prompt: dict[str, Any] = {
        "model": "tiny",
        "prompt": "three",
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": 2,
        "n": 2,
    }
    whole = client.completions.create(**prompt)
    parts: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.completions.create(**prompt, stream=True):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            parts[chunk.choices[0].index].append(logprobs)
    for wanted in whole.choices:
        assert wanted.logprobs is not None
        for key in ("tokens", "text_offset"):
            assert [v for part in parts[wanted.index] for v in getattr(part, key)] == getattr(wanted.logprobs, key)
        assert sum(len(part.top_logprobs) for part in parts[wanted.index]) == 9


def test_64_clients_at_once_lose_nothing(server: Server) -> None:
    def ask(number: int, client: openai.OpenAI) -> str:
        asked: dict[str, Any] = {"model": "tiny", "temperature": 1, "seed": number, "max_tokens": 4 + number % 13}
        messages: Any = [{"role": "user", "content": f"client {number} " * (1 + number % 5)}]
        if number % 2:
            stream = client.chat.completions.create(messages=messages, stream=True, **asked)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return client.chat.completions.create(messages=messages, **asked).choices[0].message.content or ""

    with server.client() as client:
        alone = {number: ask(number, client) for number in range(0, 64, 9)}
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        clients = [server.client() for _ in range(64)]
        answers = list(pool.map(ask, range(64), clients))
    assert len(answers) == 64
    assert sum(map(bool, answers)) > 56  # a few end with their first token
    assert {number: answers[number] for number in alone} == alone
    passes, tokens = (
        float(re.findall(rf"^llmsuite_{name}_total ([\d.]+)", server.get("/metrics"), re.MULTILINE)[0])
        for name in ("passes", "generated_tokens")
    )
    assert tokens > 1.5 * passes, "they were decoded one by one"


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "other"}, 404, "model 'other' is not served here"),
        ({"temperature": -1}, 400, "temperature: "),
        ({"max_tokens": 0}, 400, "max_tokens: "),
        ({"max_tokens": 65}, 400, "at most 64"),
        ({"n": 17}, 400, "n: "),
        ({"messages": []}, 400, "messages: has to be a list of turns"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "'messages[0]' has the unknown role 'wizard'"),
        ({"messages": [{"role": "user", "content": "x " * 900}]}, 400, "the model's context length is"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
        ({"stop": ""}, 400, "stop"),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias: has to be an object of at most "),
        ({"wisdom": 1}, 400, "wisdom: is not known here"),
        ({"seed": 2**63}, 400, "seed: "),
    ],
    ids=lambda value: None if isinstance(value, int) else str(value)[:30].encode("ascii", "replace").decode(),
)
def test_what_is_wrong_is_said(server: Server, change: dict[str, Any], status: int, says: str) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **change}
    code, body = server.post(json.dumps(asked).encode(), path="/v1/chat/completions")
    assert (code, says in body["error"]["message"]) == (status, True), body


def test_the_client_library_raises_its_own_errors(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError):
        server.client().completions.create(model="tiny", prompt="x", max_tokens=-1)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"[" * 60000, "application/json", 400),
        (b"\xff\xfe{}", "application/json", 400),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400),
        (b'"text"', "application/json", 400),
        (b'{"prompt": []}', "application/json", 400),
        (b'{"prompt": [99999999]}', "application/json", 400),
        (b'{"prompt": [-1]}', "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 415),
        (b'{"prompt": "' + b"a" * 200_000 + b'"}', "application/json", 413),
    ],
    ids=["empty", "half", "deep", "not-utf8", "nan", "text", "no-prompt", "no-token", "negative", "plain", "huge"],
)
def test_malformed_and_huge_requests_hurt_nobody(server: Server, body: bytes, kind: str, status: int) -> None:
    code, answer = server.post(body, kind)
    assert code == status
    assert answer["error"]["message"]
    assert json.loads(server.get("/healthz"))["status"] == "ok"


def test_slow_and_broken_clients_hurt_nobody(server: Server) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += "Content-Type: application/json\r\n"
    slow = f'{head}Content-Length: 500\r\n\r\n{{"prompt": '.encode()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(server.send, slow) for _ in range(7)]
        assert server.client().completions.create(model="tiny", prompt="x", max_tokens=4).choices
        assert all(b" 408 " in future.result().splitlines()[0] for future in waiting)
    chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
    endless = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + 4 * chunk
    assert b" 413 " in server.send(endless).splitlines()[0]
    assert b" 400 " in server.send(b"NONSENSE\r\n\r\n").splitlines()[0]
    # one that leaves in the middle of its answer leaves the batch
    body = json.dumps({"prompt": "x", "max_tokens": 64, "min_tokens": 64, "stream": True}).encode()
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.recv(200)
    deadline = time.monotonic() + 30
    while "llmsuite_answers_running 0.0" not in server.get("/metrics"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_bad_clients_cost_good_ones_nothing(runner: Runner, model: Path) -> None:
    loaded = Server(runner, model, *load.LIMITS)
    load.load(load.Target(loaded.port, loaded.process.pid), clients=16, rounds=2, requests=2)
    assert loaded.stop() == 0


def test_a_full_server_says_so_and_ends_well(runner: Runner) -> None:
    model = write_family(runner.directory / "talks", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    server = Server(runner, model, "--batch_size", "1", "--max_waiting", "1", "--max_new_tokens", "5000")

    def ask(tokens: int, **more: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": "x", "max_tokens": tokens, "extra_body": {"min_tokens": tokens}, **more}

    clients = [server.client() for _ in range(4)]
    endless = server.client().completions.create(**ask(5000, stream=True))
    next(iter(endless))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        others = [pool.submit(client.completions.create, **ask(4)) for client in clients]
        refused = list(itertools.islice(concurrent.futures.as_completed(others), 3))
        assert all(isinstance(future.exception(), openai.RateLimitError) for future in refused)
        endless.close()  # which lets the one that waits in
        (waited,) = set(others) - set(refused)
        assert waited.result().choices[0].finish_reason == "length"
    last = server.client().completions.create(**ask(50, stream=True))
    next(iter(last))
    server.process.send_signal(signal.SIGTERM)
    ended = list(last)[-1].choices[0].finish_reason  # what has begun is brought to its end
    assert ended == "length"
    server.process.communicate(timeout=60)
    assert server.process.returncode == 0


@pytest.mark.skipif(not IS_THERE, reason=REASON)
def test_the_chat_page_shows_what_the_api_answers(server: Server, tmp_path: Path) -> None:

    with chromium(tmp_path / "profile") as browser:
        view(browser, 900, "light")
        browser.get(server.url + "/")
        wait = waiting(browser)
        wait.until(lambda b: b.find_element("id", "model").text == "tiny")
        # without the key, the server's own words are shown
        browser.find_element("id", "text").send_keys("Hello there\n")
        wait.until(lambda b: b.find_elements("css selector", ".error"))
        assert "API key" in browser.find_element("css selector", ".error").text
        browser.find_element("css selector", "#settings summary").click()
        for field, value in (("key", KEY), ("temperature", "0"), ("tokens", "12")):
            element = browser.find_element("id", field)
            element.clear()
            element.send_keys(value)
        browser.find_element("id", "new").click()
        for number, text in enumerate(("Hello there", "<b>And</b> now?"), 1):
            browser.find_element("id", "text").send_keys(text + "\n")
            wait.until(lambda b, n=number: len(b.find_elements("css selector", ".assistant[data-done]")) == n)
        turns = browser.execute_script("return JSON.parse(localStorage['llmsuite.chats'])[0].turns")
        ask: Any = [{key: turn[key] for key in ("role", "content")} for turn in turns]
        assert [turn["content"] for turn in ask[::2]] == ["Hello there", "<b>And</b> now?"]
        for count in (1, 3):
            answer = server.client().chat.completions.create(
                model="tiny", messages=ask[:count], temperature=0, max_tokens=12
            )
            assert ask[count]["content"] == answer.choices[0].message.content
            assert turns[count]["note"].startswith("12 tokens, ")
        assert severe(browser, "401") == []
        screenshot(browser, "chat.png", tmp_path)
