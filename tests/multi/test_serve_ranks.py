"""`serve` of a model that is cut over ranks: what one process answers, and it ends as it should."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.support.server import KEY, LIMITS, Server
from tests.support.written_family import write_family

ASKED = [f"{i} and {i + 1}" * (1 + i % 3) for i in range(9)]


def asks(server: Server) -> list[Any]:
    """Everything that reaches the model, of several clients at once."""
    client = server.client()

    def one(prompt: str) -> Any:
        drawn = {"temperature": 1, "seed": 5} if len(prompt) % 2 else {"temperature": 0}
        choice = client.completions.create(model="tiny", prompt=prompt, max_tokens=11, **drawn).choices[0]
        return choice.text, choice.finish_reason

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found: list[Any] = list(pool.map(one, ASKED))
    echoed = client.completions.create(
        model="tiny", prompt="one two", max_tokens=3, temperature=0, echo=True, logprobs=0
    )
    assert echoed.choices[0].logprobs is not None
    numbers = [value for value in echoed.choices[0].logprobs.token_logprobs or [] if value is not None]
    embedded = client.embeddings.create(model="tiny", input=["Hello there", "one"])
    return [*found, [numbers, *(item.embedding for item in embedded.data)]]


@pytest.mark.parametrize(
    "words", [["--num_devices", "2"], ["--pipeline_parallel_degree", "2"]], ids=["tensor", "pipeline"]
)
def test_ranks_serve_as_one(runner: Runner, words: list[str]) -> None:
    name = words[0].strip("-")
    model: Path = write_family(runner.directory / name, "llama")
    found = []
    for more in ([], words):
        server = Server(runner, model, *LIMITS, *more, LLMSUITE_API_KEY=KEY)
        try:
            found.append(asks(server) if name == "num_devices" else asks_for_answers(server))
        finally:
            code = server.stop()
        assert code == 0
    (*one, of_one), (*two, of_two) = found
    assert two == one
    assert len({text for text, _ in one}) > 5
    for first, second in zip(of_one, of_two, strict=True):
        assert second == pytest.approx(first, abs=1e-4)


def asks_for_answers(server: Server) -> list[Any]:
    """Answers only; a pipeline has nothing else."""
    client = server.client()
    found: list[Any] = []
    for prompt in ASKED[:6]:
        choice = client.completions.create(model="tiny", prompt=prompt, max_tokens=11, temperature=0).choices[0]
        found.append((choice.text, choice.finish_reason))
    return [*found, []]
