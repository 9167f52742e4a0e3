"""The reward `http`: completions are scored by a server, in the words of PaddleNLP's or OpenRLHF's reward servers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from llmsuite.errors import UserError
from llmsuite.rl.checks import number_of
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_sections import HttpSection
from llmsuite.shown import Url
from llmsuite.specs import Score
from llmsuite.web.client import HttpFailure, post_json, shortened

_PAUSE = 0.5
"""Seconds before the first further try; twice as long before each one after it."""


def http(section: HttpSection) -> Score:
    """Asks a server, one request for the completions of a prompt."""
    url, dialect, column = section.url, section.dialect, section.column
    timeout, retries = section.timeout, section.retries
    if url is None:
        raise UserError("reward.http.url: is required with the reward http; set it to where the server listens")
    server = Url(url)

    def score(completions: Sequence[Completion]) -> list[float | ValueError]:
        body = {"paddlenlp": _for_paddlenlp, "openrlhf": _for_openrlhf}[dialect](completions, column)
        answer = _post(server, body, timeout, retries)
        key, scores = {"paddlenlp": _of_paddlenlp, "openrlhf": _of_openrlhf}[dialect](answer, server)
        if not isinstance(scores, list) or len(scores) != len(completions):
            raise HttpFailure(server, f"answers with no list of {len(completions)} scores: {shortened(answer)}")
        return [_score(value, f"{server}: {key}[{i}]") for i, value in enumerate(scores)]

    return score


def _score(value: Any, where: str) -> float | ValueError:
    """A score, or an error in its place: the others of the answer may be good."""
    try:
        return number_of(value)
    except (TypeError, ValueError) as error:
        return ValueError(f"{where} is {error}")


def _label(completion: Completion, column: str) -> str:
    label = completion.columns.get(column, "")
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def _for_paddlenlp(completions: Sequence[Completion], column: str) -> dict[str, list[str]]:
    return {
        "src": [c.prompt for c in completions],
        "tgt": [_label(c, column) for c in completions],
        "response": [c.text for c in completions],
    }


def _of_paddlenlp(answer: Any, server: Url) -> tuple[str, Any]:
    """The scores, and where they are. The server gives zeros along with an error, which are none."""
    if isinstance(answer, dict) and answer.get("error_code", 0) != 0:
        raise HttpFailure(server, f"the server says: {shortened(answer.get('error_msg') or answer)}")
    return "score", answer.get("score") if isinstance(answer, dict) else None


def _for_openrlhf(completions: Sequence[Completion], column: str) -> dict[str, list[str]]:
    return {
        "query": [c.prompt + c.text for c in completions],
        "prompts": [c.prompt for c in completions],
        "labels": [_label(c, column) for c in completions],
    }


def _of_openrlhf(answer: Any, server: Url) -> tuple[str, Any]:
    """The scores, and where they are; some servers wrap the object into a list."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return "rewards", answer.get("rewards") if isinstance(answer, dict) else None


def _post(url: Url, body: Any, timeout: float, retries: int) -> Any:
    """The server's answer, as JSON data. Raises HttpFailure after the last try, with what was wrong in it."""
    for left in range(retries, -1, -1):
        try:
            return post_json(url, body, timeout)
        except HttpFailure as error:
            if not left or not error.may_pass:
                raise
        time.sleep(_PAUSE * 2 ** (retries - left))
    raise AssertionError("the last try returns or raises")
