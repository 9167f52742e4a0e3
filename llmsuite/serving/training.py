"""The API of a rollout server for its trainer: new weights, and completions with token ids in and out.

`/v1/pause`, `/v1/update_weights` and `/v1/resume` have FastDeploy's names, and other bodies (docs/guide/rl.md);
`/v1/completions` with `return_token_ids` has vLLM's keys. Completions are sampled as the trainer samples its own
(`llmsuite.inference.group_sampling`): all of a request in one batch of their own, so that what they are does not depend
on what else the server does.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from llmsuite.base.errors import UserError
from llmsuite.inference.batch import check_context_length
from llmsuite.inference.group_sampling import SampledCompletion, SampleRequest, SamplingParams, sample_groups
from llmsuite.serving import protocol
from llmsuite.serving.fair_queue import client_of
from llmsuite.serving.jobs import as_http_errors, wait_for_result
from llmsuite.serving.protocol import FAIL_FAST
from llmsuite.serving.service import Service
from llmsuite.serving.weights import ServedWeights

PATHS = ("/v1/pause", "/v1/update_weights", "/v1/resume")
_MAX_COMPLETIONS = 4096
_Key = Annotated[list[Annotated[int, Field(ge=0, lt=2**64)]], FAIL_FAST]
_Numbers = Annotated[list[int], FAIL_FAST]


class TokenIdsRequest(BaseModel):
    """POST /v1/completions with `return_token_ids`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: Annotated[_Numbers, Field(min_length=1)] | Annotated[list[_Numbers], Field(min_length=1), FAIL_FAST] = (
        Field(description="a list of token ids, or a list of such lists, as return_token_ids is given")
    )
    n: Annotated[int, Field(ge=1, le=_MAX_COMPLETIONS)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop_token_ids: Annotated[list[int], FAIL_FAST] | None = None
    logprobs: Literal[0] | None = None
    return_token_ids: Literal[True]
    return_tokens_as_token_ids: bool = False
    # of llmsuite
    random_keys: Annotated[list[_Key], FAIL_FAST] | None = None
    """A list of numbers for each prompt; together with the number of a completion it determines the random numbers,
    instead of `seed`."""

    @property
    def prompts(self) -> list[list[int]]:
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class UpdateRequest(BaseModel):
    """POST /v1/update_weights."""

    model_config = ConfigDict(extra="forbid", strict=True)
    directory: str
    """A model directory with a manifest, which this server can read."""
    version: Annotated[int, Field(ge=0)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """sha256 of its manifest.json."""


def add_api(app: FastAPI, service: Service, weights: ServedWeights) -> None:
    """Add the routes that replace weights; they handle one request at a time."""
    service.version_info = lambda: weights.version_info
    scheduler = service.scheduler
    limits = service.limits
    turn = asyncio.Lock()

    def state() -> JSONResponse:
        return JSONResponse({"paused": scheduler.is_paused, **weights.version_info})

    @app.post(PATHS[0])
    async def pause() -> JSONResponse:
        async with turn:
            if not await asyncio.to_thread(scheduler.pause, limits.request_timeout):
                raise HTTPException(504, "running answers took longer than the server's request_timeout")
            return state()

    @app.post(PATHS[1])
    async def update(request: Request) -> JSONResponse:
        body = await service.parse_body(request, UpdateRequest)
        async with turn:
            if weights.is_complete and (weights.version, weights.digest) == (body.version, body.digest):
                return state()
            if not scheduler.is_paused:
                raise HTTPException(409, "weights are replaced while the server is paused; call /v1/pause first")
            try:
                source = await asyncio.to_thread(weights.open_checked, Path(body.directory), body.digest)
            except UserError as error:
                raise HTTPException(400, f"{error}; nothing was changed") from None

            def replace_weights() -> None:
                scheduler.clear_prefix_cache()  # it belongs to the old weights
                weights.update(source, body.version, body.digest)

            with as_http_errors():
                future = scheduler.submit_call(replace_weights, while_paused=True)
            try:
                await asyncio.wrap_future(future)
            except (OSError, UserError) as error:
                raise HTTPException(500, f"{error}; the server stays paused until an update succeeds") from None
            return state()

    @app.post(PATHS[2])
    async def resume() -> JSONResponse:
        async with turn:
            if not weights.is_complete:
                raise HTTPException(409, "the last update was not finished; call /v1/update_weights again")
            scheduler.resume()
            return state()


def wants_token_ids(content: Any) -> bool:
    """True for the body of a trainer's request for completions."""
    return isinstance(content, dict) and bool(content.get("return_token_ids"))


async def sample(service: Service, weights: ServedWeights, request: Request, body: TokenIdsRequest) -> JSONResponse:
    """Sample the completions of a `TokenIdsRequest`. Raises HTTPException."""
    started = time.monotonic()
    try:
        requests = await service.threads.run(client_of(request), _requests, service, body)
    except UserError as error:
        raise HTTPException(400, str(error)) from None
    generator = service.generator
    size = service.limits.batch_size
    sampling_params = SamplingParams(body.n, body.max_tokens, body.temperature, size)
    stop_ids = generator.stop_ids if body.stop_token_ids is None else set(body.stop_token_ids)

    def work() -> tuple[list[list[SampledCompletion]], dict[str, Any]]:
        return sample_groups(generator.decoder, requests, sampling_params, stop_ids), weights.version_info

    with as_http_errors():
        future = service.scheduler.submit_call(work, client_of(request))
    try:
        completions, version_info = await wait_for_result(request, future, started + service.limits.request_timeout)
    except UserError as error:
        raise HTTPException(500, str(error)) from None
    counts = [sum(len(r.prompt_ids) for r in requests), sum(len(c.ids) for group in completions for c in group)]
    service.metrics.prompt_tokens.inc(counts[0])
    service.metrics.generated_tokens.inc(counts[1])
    service.metrics.duration.observe(time.monotonic() - started)
    usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*counts, sum(counts))))
    head = {**protocol.envelope("text_completion", service.name), **version_info}

    def answer() -> JSONResponse:
        choices: list[dict[str, Any]] = []
        for one, group in zip(requests, completions):
            for completion in group:
                choices.append({"index": len(choices), **_choice(service, body, one.prompt_ids, completion)})
        return JSONResponse({**head, "choices": choices, "usage": usage})

    return await service.threads.run(client_of(request), answer)


def _requests(service: Service, body: TokenIdsRequest) -> list[SampleRequest]:
    """The prompts with their random keys. Raises UserError naming an invalid value."""
    prompts = body.prompts
    limits = service.limits
    decoder = service.generator.decoder
    if len(prompts) * body.n > _MAX_COMPLETIONS:
        raise UserError(f"prompt: {len(prompts) * body.n} completions are more than {_MAX_COMPLETIONS} a request")
    if body.max_tokens > limits.max_new_tokens:
        raise UserError(f"max_tokens: is {body.max_tokens}; this server gives at most {limits.max_new_tokens}")
    for number, prompt in enumerate(prompts):
        check_context_length(prompt, body.max_tokens, decoder, f"prompt {number}", "max_tokens")
    keys: Sequence[Sequence[int]]
    if body.random_keys is not None:
        keys = body.random_keys
        if len(keys) != len(prompts):
            raise UserError(f"random_keys: has {len(keys)} for {len(prompts)} prompts")
    else:
        seed = secrets.randbits(62) if body.seed is None else body.seed
        keys = [(seed, number) for number in range(len(prompts))]
    return [SampleRequest(tuple(prompt), tuple(key)) for prompt, key in zip(prompts, keys)]


def _choice(
    service: Service, body: TokenIdsRequest, prompt: Sequence[int], completion: SampledCompletion
) -> dict[str, Any]:
    """A completion in JSON. Its ids and log-probabilities are those of the sampled tokens, the stop token included."""
    tokenizer = service.generator.tokenizer
    logprobs = None
    if body.logprobs is not None:
        if body.return_tokens_as_token_ids:
            tokens = [f"token_id:{token}" for token in completion.ids]
        else:
            tokens = [tokenizer.decode([token]) for token in completion.ids]
        logprobs = {"tokens": tokens, "token_logprobs": completion.logprobs}
    text_ids = completion.ids[:-1] if completion.finish_reason == "stop" else completion.ids
    return {
        "text": tokenizer.decode(text_ids),
        "finish_reason": completion.finish_reason,
        "prompt_token_ids": prompt,
        "token_ids": completion.ids,
        "logprobs": logprobs,
    }
