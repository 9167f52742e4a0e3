"""Servers that sample for runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.server import Server

ALONE = ("--parallel={}", "--launch.num_devices=1", "--train.micro_batch_size=8")
PIPELINE = ('--parallel={"pipeline_parallel_degree": 2}', "--launch.num_devices=2", "--train.micro_batch_size=4")


def served(server: Server) -> tuple[str, ...]:
    """The words of a run that a server draws for."""
    return asking(server.url, 6)


def asking(url: str, retries: int) -> tuple[str, ...]:
    keys = f"--rollout.openai.urls={json.dumps([url])}", f"--rollout.openai.retries={retries}"
    return ("--rollout.engine=openai", *keys)


def completions(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "completions.jsonl").read_text().splitlines()]
