"""A server that draws completions for a trainer, over HTTP: see `llmsuite.serving.training` for its side."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.rl.checks import MOST_TOKENS
from llmsuite.rl.choices import choices_of, completion_of, field, items
from llmsuite.rl.drawing import Drawing, Drawn, Request
from llmsuite.shown import Url
from llmsuite.web.client import API_KEY, MOST_ANSWER, HttpFailure, post_json, shortened

_CONFLICT = 409
_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
"""Seconds before the first further try, and most before one."""
_BYTES_OF_TOKEN = 1024
"""Most that an answer has of a token, be it of a prompt or a completion: vLLM has an object for each, some hundred."""


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

    def __init__(self, url: str, timeout: float, retries: int, closing: threading.Event, vocab_size: int = MOST_TOKENS):
        """
        Args:
            url: where it listens, without a path.
            timeout: seconds in which an answer has to be there as a whole.
            retries: further tries after one that failed.
            closing: nothing is tried any more once this is set.
            vocab_size: of the model that it draws with.
        """
        self._url, self._timeout, self._retries, self._closing = url.rstrip("/"), timeout, retries, closing
        self._vocab_size = vocab_size
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
        answer = self._post("v1/completions", _body(requests, drawing, stop_ids), most_bytes(requests, drawing))
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
                raise Failed(f"/{path} answers with other weights: {shortened(answer)}")
        self._has = version

    def _post(self, path: str, body: Any, most: int = MOST_ANSWER) -> Any:
        """The server's answer, of so many bytes at most. Raises Failed, or UserError where another try would be the
        same."""
        try:
            return post_json(Url(f"{self._url}/{path}"), body, self._timeout, most, os.environ.get(API_KEY))
        except HttpFailure as error:
            if error.may_pass or error.status == _CONFLICT:
                raise Failed(f"/{path}: {error.what}") from error
            raise UserError(f"rollout.openai: {error}{self._hint(error.status)}") from error

    def _hint(self, code: int | None) -> str:
        """What to do about an answer that is an error."""
        return ""

    def _read(
        self, answer: Any, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]
    ) -> list[list[Drawn]]:
        """The completions of an answer. Raises UserError if they are not what was asked for."""
        count = drawing.num_generations
        try:
            rows = choices_of(answer, len(requests) * count)
            drawn = [self._drawn(row, i, requests[i // count], drawing, stop_ids) for i, row in enumerate(rows)]
        except ValueError as error:
            raise self._wrong(error) from error
        return [drawn[i : i + count] for i in range(0, len(drawn), count)]

    def _drawn(self, row: Any, number: int, request: Request, drawing: Drawing, stop_ids: Collection[int]) -> Drawn:
        """The completion of a choice. Raises ValueError if it is none."""
        where = f"choices[{number}]"
        if tuple(items(row, "prompt_token_ids", where)) != request.prompt_ids:
            raise ValueError(f"{where} is of another prompt")
        logprobs = field(field(row, "logprobs", where), "token_logprobs", f"{where}.logprobs")
        return completion_of(row, logprobs, drawing, stop_ids, self._vocab_size, where)

    def _wrong(self, error: Exception) -> UserError:
        return UserError(f"rollout.openai: {self._url} answers with wrong completions: {error}")


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


def most_bytes(requests: Sequence[Request], drawing: Drawing) -> int:
    """Most bytes of the answer to requests."""
    longest = sum(len(request.prompt_ids) + drawing.max_completion_length for request in requests)
    return MOST_ANSWER + _BYTES_OF_TOKEN * drawing.num_generations * longest
