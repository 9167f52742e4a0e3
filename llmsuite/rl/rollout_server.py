"""A server that draws completions for a trainer, over HTTP: see `llmsuite.serving.training` for its side."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.errors import UserError
from llmsuite.rl.drawing import Drawing, Drawn, Request

_KEY = "LLMSUITE_API_KEY"
_BUSY = 429
_CONFLICT = 409
_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
"""Seconds before the first further try, and most before one."""
_SHOWN = 300


@dataclasses.dataclass(frozen=True)
class Version:
    """Weights in a directory."""

    number: int
    place: Path
    digest: str
    """sha256 of its manifest."""

    def is_named_by(self, answer: Any) -> bool:
        """Whether an answer comes from these weights."""
        named = (answer.get("weights_version"), answer.get("weights_digest")) if isinstance(answer, dict) else None
        return named == (self.number, self.digest)


class Failed(Exception):
    """A try that did not succeed; another one may."""


class RolloutServer:
    """One server. Only one thread at a time uses it."""

    def __init__(self, url: str, timeout: float, retries: int, closing: threading.Event):
        """
        Args:
            url: where it listens, without a path.
            timeout: seconds to wait for an answer.
            retries: further tries after one that failed.
            closing: nothing is tried any more once this is set.
        """
        self._url, self._timeout, self._retries, self._closing = url.rstrip("/"), timeout, retries, closing
        self._has: Version | None = None
        """The weights it has, as far as is known."""

    def draw(
        self, version: Version, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]
    ) -> list[list[Drawn]]:
        """Completions of each request, with weights that the server gets if it does not have them.

        Raises:
            UserError: it refuses, answers with something else, or no try has succeeded.
        """
        for left in range(self._retries, -1, -1):
            try:
                if self._has != version:
                    self._bring(version)
                drawn = self._ask(version, requests, drawing, stop_ids)
                if drawn is not None:
                    return drawn
                why = (
                    f"it has lost the weights of version {version.number}: it was started anew, or has another trainer"
                )
            except Failed as error:
                why = str(error)
            self._has = None
            pause = min(_PAUSE * 2 ** (self._retries - left), _LONGEST_PAUSE)
            if left and self._closing.wait(pause):
                break
        raise UserError(
            f"rollout.openai: {self._url} has drawn nothing in {self._retries + 1} tries; the last one: {why}. The "
            "checkpoints of the run are as they were: see to the server, and go on with --resume"
        )

    def _ask(
        self, version: Version, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]
    ) -> list[list[Drawn]] | None:
        """Completions of each request, or None if other weights have drawn them. Raises Failed, or UserError."""
        answer = self._post("v1/completions", _body(requests, drawing, stop_ids))
        return self._read(answer, requests, drawing, stop_ids) if version.is_named_by(answer) else None

    def _bring(self, version: Version) -> None:
        """Let the server take weights. What was interrupted half way is done again. Raises Failed, or UserError."""
        answer = self._post("v1/pause", {})
        if not isinstance(answer, dict) or "weights_digest" not in answer:  # as FastDeploy, which has the same paths
            self._post("v1/resume", {})
            raise UserError(
                f"rollout.openai: {self._url} is no `llmsuite serve --rl`: what it answers to /v1/pause does not name "
                "its weights, so that a completion of other weights would not be known for one. For vLLM set "
                "rollout.openai.dialect; FastDeploy takes no weights from a directory"
            )
        new = {"directory": str(version.place), "version": version.number, "digest": version.digest}
        for path, body in (("v1/update_weights", new), ("v1/resume", {})):
            answer = self._post(path, body)
            if not version.is_named_by(answer):
                raise Failed(f"/{path} answers with other weights: {_short(answer)}")
        self._has = version

    def _post(self, path: str, body: Any) -> Any:
        """The server's answer. Raises Failed, or UserError where another try would be the same."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        asked = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(asked, timeout=self._timeout) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error.read().decode("utf-8", "replace"))
            if error.code < 500 and error.code not in (_BUSY, _CONFLICT):
                raise UserError(
                    f"rollout.openai: {self._url}/{path} answers {error.code}: {said}{self._hint(error.code)}"
                ) from error
            raise Failed(f"/{path} answers {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Failed(f"/{path}: {getattr(error, 'reason', None) or repr(error)}") from error
        except ValueError as error:
            raise Failed(f"/{path}: the answer is not JSON: {error}") from error

    def _hint(self, code: int) -> str:
        """What to do about an answer that is an error."""
        return ""

    def _read(
        self, answer: Any, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]
    ) -> list[list[Drawn]]:
        """The completions of an answer. Raises UserError if they are not what was asked for."""
        count = drawing.num_generations
        try:
            rows = sorted(answer["choices"], key=lambda choice: choice["index"])
            if [row["index"] for row in rows] != list(range(len(requests) * count)):
                raise ValueError(f"{len(rows)} choices in place of {len(requests) * count}")
            drawn = [_drawn(row, requests[i // count], drawing, stop_ids) for i, row in enumerate(rows)]
        except (TypeError, KeyError, ValueError) as error:
            raise self._wrong(error) from error
        return [drawn[i : i + count] for i in range(0, len(drawn), count)]

    def _wrong(self, error: Exception) -> UserError:
        return UserError(f"rollout.openai: {self._url} answers with wrong completions: {error!r}")


def seed_of(keys: Sequence[Sequence[int]]) -> int:
    """A seed for requests with these keys, below 2**56."""
    return int.from_bytes(hashlib.sha256(json.dumps(keys).encode()).digest()[:7], "big")


def _body(requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]) -> dict[str, Any]:
    keys = [list(request.key) for request in requests]
    return {
        "prompt": [list(request.prompt_ids) for request in requests],
        "n": drawing.num_generations,
        "max_tokens": drawing.max_completion_length,
        "temperature": drawing.temperature,
        "seed": seed_of(keys),
        "random_keys": keys,
        "stop_token_ids": sorted(stop_ids),
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _drawn(row: Any, request: Request, drawing: Drawing, stop_ids: Collection[int]) -> Drawn:
    """A completion of an answer. Raises ValueError, TypeError or KeyError if it is none."""
    if tuple(row["prompt_token_ids"]) != request.prompt_ids:
        raise ValueError(f"choice {row['index']} is of another prompt")
    return checked(row, row["logprobs"]["token_logprobs"], drawing, stop_ids)


def checked(row: Any, logprobs: Any, drawing: Drawing, stop_ids: Collection[int]) -> Drawn:
    """A completion of an answer, with the log-probabilities of its tokens. Raises ValueError, TypeError or KeyError if
    it is none."""
    ids, reason = row["token_ids"], row["finish_reason"]
    if not all(type(token) is int and token >= 0 for token in ids) or not np.isfinite(logprobs).all():
        raise ValueError(f"choice {row['index']} has no token ids with their log-probabilities")
    if len(ids) != len(logprobs) or not 1 <= len(ids) <= drawing.max_completion_length:
        raise ValueError(f"choice {row['index']} has {len(ids)} tokens and {len(logprobs)} log-probabilities")
    if reason not in ("stop", "length") or (reason == "stop") != (ids[-1] in stop_ids):
        raise ValueError(f"choice {row['index']} ends with token {ids[-1]} and finish_reason {reason!r}")
    return Drawn(np.zeros(0), list(ids), [float(value) for value in logprobs], reason)


def _message(said: str) -> str:
    """The text of an error, in OpenAI's form or any other."""
    try:
        return _short(json.loads(said)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return _short(said)


def _short(answer: Any) -> str:
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
