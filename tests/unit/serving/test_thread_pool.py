"""The thread pool: clients take turns, and no more threads run than there are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmsuite.serving.app import make_app
from llmsuite.serving.bodies import MAX_INLINE_BYTES
from llmsuite.serving.thread_pool import FairThreadPool
from tests.support.served import make_service


def test_a_client_waits_for_one_of_anothers_at_most() -> None:
    order: list[str] = []
    go_on = threading.Event()

    def work(name: str) -> None:
        assert go_on.wait(60)
        order.append(name)

    async def scenario() -> None:
        threads = FairThreadPool(1)
        tasks = [asyncio.create_task(threads.run("greedy", work, "greedy")) for _ in range(40)]
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(threads.run("modest", work, "modest")))
        await asyncio.sleep(0.01)
        go_on.set()
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert order.index("modest") <= 2
    assert order.count("greedy") == 40


def test_the_result_or_what_is_raised_is_given() -> None:
    async def scenario() -> None:
        threads = FairThreadPool(2)
        assert await threads.run("a", divmod, 7, 2) == (3, 1)
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                await threads.run("a", divmod, 7, 0)
        assert await threads.run("a", threading.get_ident) != threading.get_ident()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_who_goes_leaves_its_place_when_its_thread_is_free() -> None:
    running = 0
    most = 0
    lock = threading.Lock()
    go_on = threading.Event()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert go_on.wait(60)
        with lock:
            running -= 1

    async def scenario() -> None:
        threads = FairThreadPool(2)
        gone = [asyncio.create_task(threads.run("a", work)) for _ in range(6)]
        while running < 2:
            await asyncio.sleep(0.001)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        stays = [asyncio.create_task(threads.run("b", work)) for _ in range(4)]
        await asyncio.sleep(0.05)
        assert running == 2, "both threads are busy yet, though nobody waits for them"
        go_on.set()
        await asyncio.gather(*stays)
        while running:  # a thread whose caller has left may be the last to end
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert (running, most) == (0, 2)


class Noted(FairThreadPool):
    """Keeps who has taken a thread."""

    def __init__(self) -> None:
        super().__init__(1)
        self.clients: list[str] = []

    async def run(self, client: str, work: Callable[..., Any], *given: Any) -> Any:
        self.clients.append(client)
        return await super().run(client, work, *given)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/responses/input_tokens", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [7]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("size", [0, MAX_INLINE_BYTES])
def test_every_route_takes_turns(path: str, body: dict[str, Any], size: int) -> None:
    service = make_service()
    service.threads = noted = Noted()
    with TestClient(make_app(service), client=("192.0.2.7", 1)) as http:
        answer = http.post(path, json=body, headers={"authorization": "Bearer made-up", "x-padding": ""})
        assert answer.status_code == (400 if path == "/v1/embeddings" else 200), answer.text
        count = len(noted.clients)
        http.post(path, json={**body, "model": "a" * size} if size else body)
    assert set(noted.clients) == {"192.0.2.7"}
    assert len(noted.clients) > count or not size
