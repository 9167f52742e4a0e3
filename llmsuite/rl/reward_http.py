"""The reward `http`: completions are scored by a server, in the words of PaddleNLP's or OpenRLHF's reward servers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from llmsuite.errors import UserError
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_sections import HttpSection
from llmsuite.shown import Url
from llmsuite.specs import Score

_PAUSE = 0.5
"""Seconds before the first further try; twice as long before each one after it."""
_BUSY = 429
_SHOWN = 300


def http(section: HttpSection) -> Score:
    """Asks a server, one request for the completions of a prompt."""
    url, dialect, column = section.url, section.dialect, section.column
    timeout, retries = section.timeout, section.retries
    if url is None:
        raise UserError("reward.http.url: is required with the reward http; set it to where the server listens")
    server = Url(url)

    def score(completions: Sequence[Completion]) -> list[float | None]:
        body = {"paddlenlp": _for_paddlenlp, "openrlhf": _for_openrlhf}[dialect](completions, column)
        answer = _post(server, body, timeout, retries)
        scores = {"paddlenlp": _of_paddlenlp, "openrlhf": _of_openrlhf}[dialect](answer)
        if not isinstance(scores, list) or len(scores) != len(completions):
            raise ValueError(f"{server} answers with no list of {len(completions)} scores: {_short(answer)}")
        return scores

    return score


def _label(completion: Completion, column: str) -> str:
    label = completion.columns.get(column, "")
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def _for_paddlenlp(completions: Sequence[Completion], column: str) -> dict[str, list[str]]:
    return {
        "src": [c.prompt for c in completions],
        "tgt": [_label(c, column) for c in completions],
        "response": [c.text for c in completions],
    }


def _of_paddlenlp(answer: Any) -> Any:
    """The scores. The server gives zeros along with an error, which are none."""
    if isinstance(answer, dict) and answer.get("error_code", 0) != 0:
        raise ValueError(f"the server says: {answer.get('error_msg') or _short(answer)}")
    return answer.get("score") if isinstance(answer, dict) else None


def _for_openrlhf(completions: Sequence[Completion], column: str) -> dict[str, list[str]]:
    return {
        "query": [c.prompt + c.text for c in completions],
        "prompts": [c.prompt for c in completions],
        "labels": [_label(c, column) for c in completions],
    }


def _of_openrlhf(answer: Any) -> Any:
    """The scores; some servers wrap the object into a list."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return answer.get("rewards") if isinstance(answer, dict) else None


def _post(url: Url, body: Any, timeout: float, retries: int) -> Any:
    """The server's answer, as JSON data.

    Raises:
        OSError, ValueError: after the last try, with what was wrong in it.
    """
    data = json.dumps(body, ensure_ascii=False).encode()
    request = urllib.request.Request(url.whole, data, {"Content-Type": "application/json"})
    for left in range(retries, -1, -1):
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                said = response.read().decode("utf-8", "replace")
            try:
                return json.loads(said)
            except ValueError as error:
                raise ValueError(f"{url} answers with no JSON: {_short(said)}") from error
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode("utf-8", "replace")
            if not left or (error.code != _BUSY and error.code < 500):
                raise ValueError(f"{url} answers {error.code}: {_short(said)}") from error
        except (OSError, HTTPException) as error:  # the latter of an answer that is cut off
            if not left:
                raise OSError(f"{url}: {getattr(error, 'reason', error)}") from error
        time.sleep(_PAUSE * 2 ** (retries - left))
    raise AssertionError("the last try returns or raises")


def _short(answer: Any) -> str:
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
