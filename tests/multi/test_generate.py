"""Generation of a model that is cut over ranks: the same answers as on one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.support.written_family import write_family

FAMILIES = ("llama", pytest.param("deepseek", marks=pytest.mark.further))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one(runner: Runner, family: str) -> None:
    write_family(runner.directory / family, family)
    prompts = runner.directory / f"{family}-prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "What is a cat?", "1 2 3 4")))
    words = ["generate", str(runner.directory / family), "--input", str(prompts), "--max_new_tokens", "12"]
    words += [
        "--temperature",
        "1",
        "--seed",
        "4",
        "--num_return_sequences",
        "2",
        "--batch_size",
        "4",
        "--logprobs",
        "2",
    ]
    found: list[list[dict[str, Any]]] = []
    for count in (1, 2):
        target = runner.directory / f"{family}-{count}.jsonl"
        runner.run(*words, "--output", str(target), "--num_devices", str(count))
        found.append([a for line in target.read_text().splitlines() for a in json.loads(line)["answers"]])
    one, two = found
    assert [a["ids"] for a in one] == [a["ids"] for a in two]
    assert len({tuple(a["ids"]) for a in one}) >= 4
    of_one, of_two = ([t["logprob"] for a in answers for t in a["logprobs"]] for answers in found)
    assert of_two == pytest.approx(of_one, abs=1e-4)
