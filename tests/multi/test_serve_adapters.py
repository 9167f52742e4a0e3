"""One server, three adapters over its model, sixteen clients at once: each gets what it gets alone."""

from __future__ import annotations

import concurrent.futures
import itertools
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.multi.conftest import Runner
from tests.support import served_adapters, tiny_llama
from tests.support.server import KEY, Server
from tests.support.several_adapters import CONFIG

CLIENTS = 16
REQUESTS = 6
MODELS = ("tiny", *served_adapters.TARGETS)
ADAPTERS = tuple(served_adapters.TARGETS)


@pytest.fixture(scope="module")
def server(runner: Runner) -> Iterator[Server]:
    place = runner.directory / "adapters"
    tiny_llama.write(place / "base", CONFIG, tokenizer=tiny_llama.TOKENIZER)
    named = [f"{name}={served_adapters.write_adapter(place / name, name)}" for name in ADAPTERS]
    started = Server(runner, place / "base", "--adapters", *named, "--batch_size", "16", LLMSUITE_API_KEY=KEY)
    yield started
    assert started.stop() == 0


def ask(client: openai.OpenAI, name: str, number: int) -> str:
    """Greedy or drawn, whole or streamed, chats or texts: whatever the number says."""
    asked: dict[str, Any] = {"model": name, "max_tokens": 8 + number % 9, "seed": number, "temperature": number % 2}
    if number % 3 == 0:
        found = client.completions.create(prompt=f"text {number % 5}", **asked)
        assert found.model == name
        return found.choices[0].text
    messages: Any = [{"role": "user", "content": f"turn {number % 5}"}]
    if number % 3 == 1:
        events = client.chat.completions.create(messages=messages, stream=True, **asked)
        return "".join(event.choices[0].delta.content or "" for event in events)
    return client.chat.completions.create(messages=messages, **asked).choices[0].message.content or ""


def test_16_clients_of_three_adapters_get_their_own_answers(server: Server) -> None:
    numbers = range(CLIENTS * REQUESTS)
    wanted = [(MODELS[number % len(MODELS)], number // len(MODELS)) for number in numbers]
    with server.client() as client:
        alone = {pair: ask(client, *pair) for pair in dict.fromkeys(wanted)}
    before = _counted(server)

    def work(number: int) -> list[str]:
        with server.client() as client:
            return [ask(client, *pair) for pair in wanted[number::CLIENTS]]

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(work, range(CLIENTS)))
    for number, pair in enumerate(wanted):
        assert answers[number % CLIENTS][number // CLIENTS] == alone[pair], pair
    for one, other in itertools.combinations(MODELS, 2):
        mine, theirs = ([alone[name, number] for number in range(20)] for name in (one, other))
        assert mine != theirs, "else any adapter would do"
    passes, tokens = (after - earlier for after, earlier in zip(_counted(server), before))
    assert tokens > 1.5 * passes, "they were decoded one by one"


def _counted(server: Server) -> tuple[float, float]:
    """Passes and tokens so far."""
    told = server.get("/metrics")
    passes, tokens = (
        float(re.findall(rf"^llmsuite_{name}_total ([\d.e+]+)", told, re.MULTILINE)[0])
        for name in ("passes", "generated_tokens")
    )
    return passes, tokens
