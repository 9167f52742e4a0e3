"""The client of a server that samples completions for a trainer. The server side is `llmsuite.serving.training`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import Url
from llmsuite.base.web.client import API_KEY, MAX_ANSWER_BYTES, HttpFailure, post_json, shortened
from llmsuite.inference.group_sampling import SampledCompletion, SampleRequest, SamplingParams
from llmsuite.rl.checks import MAX_VOCAB_SIZE
from llmsuite.rl.response_parsing import choices_of, completion_of, field, items

_CONFLICT = 409
_PAUSE = 0.5
"""Seconds before the first retry; twice as long before each later one."""
_MAX_PAUSE = 10.0
"""Maximum number of seconds before a retry."""
_BYTES_PER_TOKEN = 1024
"""Upper bound of the size of a token of prompt or completion in a response; vLLM sends an object of about 100 bytes."""


@dataclasses.dataclass(frozen=True)
class Version:
    """Weights in a directory."""

    number: int
    place: Path
    digest: str
    """sha256 of its manifest."""

    def is_named_by(self, answer: Any) -> bool:
        """Return True if a response comes from these weights."""
        if not isinstance(answer, dict):
            return False
        return (answer.get("weights_version"), answer.get("weights_digest")) == (self.number, self.digest)


class RetryableError(Exception):
    """A request that has failed, and may succeed when it is repeated."""


class RolloutServer:
    """One server. Not thread-safe."""

    def __init__(
        self, url: str, timeout: float, retries: int, closing: threading.Event, vocab_size: int = MAX_VOCAB_SIZE
    ):
        """
        Args:
            url: its address, without a path.
            timeout: seconds within which the full response has to arrive.
            retries: retries after a failed request.
            closing: no more requests are made once this is set.
            vocab_size: of the model.
        """
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._retries = retries
        self._closing = closing
        self._vocab_size = vocab_size
        self._loaded: Version | None = None
        """The weights that the server has loaded; None where that is unknown."""

    def sample(
        self,
        version: Version,
        requests: Sequence[SampleRequest],
        sampling_params: SamplingParams,
        stop_ids: Collection[int],
    ) -> list[list[SampledCompletion]]:
        """Completions of each request, with the given weights, which the server loads if necessary.

        Raises:
            UserError: the server refuses, its response is invalid, or all retries have failed.
        """
        for left in range(self._retries, -1, -1):
            try:
                if self._loaded != version:
                    self._load(version)
                groups = self._request(version, requests, sampling_params, stop_ids)
                if groups is not None:
                    return groups
                why = (
                    f"it has lost the weights of version {version.number}: it was restarted, or another trainer uses it"
                )
            except RetryableError as error:
                why = str(error)
            self._loaded = None
            pause = min(_PAUSE * 2 ** (self._retries - left), _MAX_PAUSE)
            if left and self._closing.wait(pause):
                break
        raise UserError(
            f"rollout.openai: {self._url} has sampled nothing in {self._retries + 1} tries; the last one: {why}. The "
            "checkpoints of the run are intact: repair the server, and continue with --resume"
        )

    def _request(
        self,
        version: Version,
        requests: Sequence[SampleRequest],
        sampling_params: SamplingParams,
        stop_ids: Collection[int],
    ) -> list[list[SampledCompletion]] | None:
        """Completions of each request; None if other weights sampled them. Raises RetryableError or UserError."""
        answer = self._post(
            "v1/completions", _body(requests, sampling_params, stop_ids), max_response_bytes(requests, sampling_params)
        )
        if not version.is_named_by(answer):
            return None
        return self._parse(answer, requests, sampling_params, stop_ids)

    def _load(self, version: Version) -> None:
        """Let the server load weights, from the first step on. Raises RetryableError or UserError."""
        answer = self._post("v1/pause", {})
        if not isinstance(answer, dict) or "weights_digest" not in answer:  # FastDeploy has the same paths
            self._post("v1/resume", {})
            raise UserError(
                f"rollout.openai: {self._url} is no `llmsuite serve --rl`: its response to /v1/pause does not name "
                "its weights, so completions of other weights could not be recognised. For vLLM set "
                "rollout.openai.dialect; FastDeploy loads no weights from a directory"
            )
        new = {"directory": str(version.place), "version": version.number, "digest": version.digest}
        for path, body in (("v1/update_weights", new), ("v1/resume", {})):
            answer = self._post(path, body)
            if not version.is_named_by(answer):
                raise RetryableError(f"/{path} answers with other weights: {shortened(answer)}")
        self._loaded = version

    def _post(self, path: str, body: Any, max_bytes: int = MAX_ANSWER_BYTES) -> Any:
        """The server's response, of at most `max_bytes`. Raises RetryableError, or UserError where a retry would fail
        in the same way."""
        try:
            return post_json(Url(f"{self._url}/{path}"), body, self._timeout, max_bytes, os.environ.get(API_KEY))
        except HttpFailure as error:
            if error.is_transient or error.status == _CONFLICT:
                raise RetryableError(f"/{path}: {error.what}") from error
            raise UserError(f"rollout.openai: {error}{self._hint(error.status)}") from error

    def _hint(self, code: int | None) -> str:
        """Advice to append to the message about an error response."""
        return ""

    def _parse(
        self, answer: Any, requests: Sequence[SampleRequest], sampling_params: SamplingParams, stop_ids: Collection[int]
    ) -> list[list[SampledCompletion]]:
        """The completions of a response. Raises UserError if they are not those of the requests."""
        count = sampling_params.num_generations
        try:
            rows = choices_of(answer, len(requests) * count)
            flat = [
                self._parse_choice(row, i, requests[i // count], sampling_params, stop_ids)
                for i, row in enumerate(rows)
            ]
        except ValueError as error:
            raise self._wrong(error) from error
        return [flat[i : i + count] for i in range(0, len(flat), count)]

    def _parse_choice(
        self, row: Any, number: int, request: SampleRequest, sampling_params: SamplingParams, stop_ids: Collection[int]
    ) -> SampledCompletion:
        """The completion of a choice. Raises ValueError when it is invalid."""
        where = f"choices[{number}]"
        if tuple(items(row, "prompt_token_ids", where)) != request.prompt_ids:
            raise ValueError(f"{where} is of another prompt")
        logprobs = field(field(row, "logprobs", where), "token_logprobs", f"{where}.logprobs")
        return completion_of(row, logprobs, sampling_params, stop_ids, self._vocab_size, where)

    def _wrong(self, error: Exception) -> UserError:
        return UserError(f"rollout.openai: {self._url} answers with wrong completions: {error}")


def seed_of(keys: Sequence[Sequence[int]]) -> int:
    """A seed for requests with these keys, below 2**56."""
    return int.from_bytes(hashlib.sha256(json.dumps(keys).encode()).digest()[:7], "big")


def _body(
    requests: Sequence[SampleRequest], sampling_params: SamplingParams, stop_ids: Collection[int]
) -> dict[str, Any]:
    keys = [list(request.key) for request in requests]
    return {
        "prompt": [list(request.prompt_ids) for request in requests],
        "n": sampling_params.num_generations,
        "max_tokens": sampling_params.max_completion_length,
        "temperature": sampling_params.temperature,
        "seed": seed_of(keys),
        "random_keys": keys,
        "stop_token_ids": sorted(stop_ids),
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def max_response_bytes(requests: Sequence[SampleRequest], sampling_params: SamplingParams) -> int:
    """Upper bound of the size of the response to requests."""
    longest = sum(len(request.prompt_ids) + sampling_params.max_completion_length for request in requests)
    return MAX_ANSWER_BYTES + _BYTES_PER_TOKEN * sampling_params.num_generations * longest
