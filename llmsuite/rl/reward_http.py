"""The reward `http`: completions are scored by a server with the protocol of PaddleNLP's or OpenRLHF's reward
servers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import Url
from llmsuite.base.web.client import HttpFailure, post_json, shortened
from llmsuite.contract.specs import Score
from llmsuite.rl.checks import number_of
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_sections import HttpSection

_PAUSE = 0.5
"""Seconds before the first retry; twice as long before each later one."""


def http(section: HttpSection) -> Score:
    """Scores by a server, with one request for the completions of a prompt."""
    url = section.url
    dialect = section.dialect
    column = section.column
    timeout = section.timeout
    retries = section.retries
    if url is None:
        raise UserError("reward.http.url: is required with the reward http; set it to where the server listens")
    server = Url(url)

    def score(completions: Sequence[Completion]) -> list[float | ValueError]:
        body = {"paddlenlp": _for_paddlenlp, "openrlhf": _for_openrlhf}[dialect](completions, column)
        answer = _post(server, body, timeout, retries)
        key, scores = {"paddlenlp": _from_paddlenlp, "openrlhf": _from_openrlhf}[dialect](answer, server)
        if not isinstance(scores, list) or len(scores) != len(completions):
            raise HttpFailure(server, f"answers with no list of {len(completions)} scores: {shortened(answer)}")
        return [_score(value, f"{server}: {key}[{i}]") for i, value in enumerate(scores)]

    return score


def _score(value: Any, where: str) -> float | ValueError:
    """A score, or the error instead of raising it: the other scores of the response may be valid."""
    try:
        return number_of(value)
    except (TypeError, ValueError) as error:
        return ValueError(f"{where} is {error}")


def _label(completion: Completion, column: str) -> str:
    label = completion.columns.get(column, "")
    if isinstance(label, str):
        return label
    return json.dumps(label, ensure_ascii=False)


def _for_paddlenlp(completions: Sequence[Completion], column: str) -> dict[str, list[str]]:
    return {
        "src": [c.prompt for c in completions],
        "tgt": [_label(c, column) for c in completions],
        "response": [c.text for c in completions],
    }


def _from_paddlenlp(answer: Any, server: Url) -> tuple[str, Any]:
    """The key of the scores, and the scores. With an error the server sends zeros, which are no scores."""
    if isinstance(answer, dict) and answer.get("error_code", 0) != 0:
        raise HttpFailure(server, f"the server reports: {shortened(answer.get('error_msg') or answer)}")
    if not isinstance(answer, dict):
        return "score", None
    return "score", answer.get("score")


def _for_openrlhf(completions: Sequence[Completion], column: str) -> dict[str, list[str]]:
    return {
        "query": [c.prompt + c.text for c in completions],
        "prompts": [c.prompt for c in completions],
        "labels": [_label(c, column) for c in completions],
    }


def _from_openrlhf(answer: Any, server: Url) -> tuple[str, Any]:
    """The key of the scores, and the scores. Some servers wrap the object into a list."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if not isinstance(answer, dict):
        return "rewards", None
    return "rewards", answer.get("rewards")


def _post(url: Url, body: Any, timeout: float, retries: int) -> Any:
    """The server's response, as JSON data. Raises HttpFailure when the last try has failed."""
    for left in range(retries, -1, -1):
        try:
            return post_json(url, body, timeout)
        except HttpFailure as error:
            if not left or not error.is_transient:
                raise
        time.sleep(_PAUSE * 2 ** (retries - left))
    raise AssertionError("the last try returns or raises")
