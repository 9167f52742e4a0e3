"""What a trainer asks of a server that draws its completions: new weights, and tokens in and out.

`/v1/pause`, `/v1/update_weights` and `/v1/resume` have FastDeploy's names, and other bodies (docs/guide/rl.md);
`/v1/completions` with `return_token_ids` has vLLM's keys. Completions are drawn as the trainer draws its own
(`llmsuite.rl.drawing`): all of a request in one batch of their own, so that what they are does not depend on what else
the server does.
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

from llmsuite.errors import UserError
from llmsuite.inference.batch import check_room
from llmsuite.rl.drawing import Drawing, Drawn, draw_groups
from llmsuite.rl.drawing import Request as Drawable
from llmsuite.serving import protocol
from llmsuite.serving.jobs import refusals, waited
from llmsuite.serving.protocol import FIRST_FAULT
from llmsuite.serving.service import Service
from llmsuite.serving.turns import client_of
from llmsuite.serving.weights import ServedWeights

PATHS = ("/v1/pause", "/v1/update_weights", "/v1/resume")
_MAX_COMPLETIONS = 4096
_Key = Annotated[list[Annotated[int, Field(ge=0, lt=2**64)]], FIRST_FAULT]
_SOME = Field(min_length=1)
_Numbers = Annotated[list[int], FIRST_FAULT]


class IdsRequest(BaseModel):
    """POST /v1/completions with `return_token_ids`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: Annotated[_Numbers, Field(min_length=1)] | Annotated[list[_Numbers], Field(min_length=1), FIRST_FAULT] = (
        Field(description="a list of token ids, or a list of such lists, as return_token_ids is given")
    )
    n: Annotated[int, Field(ge=1, le=_MAX_COMPLETIONS)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop_token_ids: Annotated[list[int], FIRST_FAULT] | None = None
    logprobs: Literal[0] | None = None
    return_token_ids: Literal[True]
    return_tokens_as_token_ids: bool = False
    # of llmsuite
    random_keys: Annotated[list[_Key], FIRST_FAULT] | None = None
    """A list of numbers for each prompt; with the number of a completion it decides the random numbers, in place of
    `seed`."""

    @property
    def prompts(self) -> list[list[int]]:
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class UpdateRequest(BaseModel):
    """POST /v1/update_weights."""

    model_config = ConfigDict(extra="forbid", strict=True)
    directory: str
    """A model directory with a manifest, which this server can read."""
    version: Annotated[int, Field(ge=0)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """sha256 of its manifest.json."""


def add_api(app: FastAPI, service: Service, weights: ServedWeights) -> None:
    """The routes by which weights are replaced; one request at a time."""
    service.marks = lambda: weights.marks
    scheduler, limits, turn = service.scheduler, service.limits, asyncio.Lock()

    def state() -> JSONResponse:
        return JSONResponse({"paused": scheduler.is_paused, **weights.marks})

    @app.post(PATHS[0])
    async def pause() -> JSONResponse:
        async with turn:
            if not await asyncio.to_thread(scheduler.pause, limits.request_timeout):
                raise HTTPException(504, "answers that have begun took longer than the server's request_timeout")
            return state()

    @app.post(PATHS[1])
    async def update(request: Request) -> JSONResponse:
        asked = await service.body(request, UpdateRequest)
        async with turn:
            if weights.is_whole and (weights.version, weights.digest) == (asked.version, asked.digest):
                return state()
            if not scheduler.is_paused:
                raise HTTPException(409, "weights are replaced in a pause; ask for /v1/pause before")
            try:
                source = await asyncio.to_thread(weights.opened, Path(asked.directory), asked.digest)
            except UserError as error:
                raise HTTPException(400, f"{error}; nothing was changed") from None

            def take() -> None:
                scheduler.forget_prefixes()  # of the weights before
                weights.take(source, asked.version, asked.digest)

            with refusals():
                taken = scheduler.call(take, while_paused=True)
            try:
                await asyncio.wrap_future(taken)
            except (OSError, UserError) as error:
                raise HTTPException(500, f"{error}; the server stays paused until an update succeeds") from None
            return state()

    @app.post(PATHS[2])
    async def resume() -> JSONResponse:
        async with turn:
            if not weights.is_whole:
                raise HTTPException(409, "the last update was not finished; ask for /v1/update_weights again")
            scheduler.resume()
            return state()


def wants_ids(content: Any) -> bool:
    """Whether the body of a request for completions is one of a trainer."""
    return isinstance(content, dict) and bool(content.get("return_token_ids"))


async def draw(service: Service, weights: ServedWeights, request: Request, asked: IdsRequest) -> JSONResponse:
    """Answer an `IdsRequest`."""
    begun = time.monotonic()
    try:
        requests = await service.threads.run(client_of(request), _requests, service, asked)
    except UserError as error:
        raise HTTPException(400, str(error)) from None
    generator, size = service.generator, service.limits.batch_size
    drawing = Drawing(asked.n, asked.max_tokens, asked.temperature, size)
    stop_ids = generator.stop_ids if asked.stop_token_ids is None else set(asked.stop_token_ids)

    def work() -> tuple[list[list[Drawn]], dict[str, Any]]:
        return draw_groups(generator.decoder, requests, drawing, stop_ids), weights.marks

    with refusals():
        future = service.scheduler.call(work, client_of(request))
    try:
        drawn, marks = await waited(request, future, begun + service.limits.request_timeout)
    except UserError as error:
        raise HTTPException(500, str(error)) from None
    counts = [sum(len(r.prompt_ids) for r in requests), sum(len(c.ids) for group in drawn for c in group)]
    service.metrics.prompt_tokens.inc(counts[0])
    service.metrics.generated_tokens.inc(counts[1])
    service.metrics.duration.observe(time.monotonic() - begun)
    usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*counts, sum(counts))))
    head = {**protocol.envelope("text_completion", service.name), **marks}

    def answer() -> JSONResponse:
        choices = [
            {"index": i * asked.n + number, **_choice(service, asked, requests[i].prompt_ids, completion)}
            for i, group in enumerate(drawn)
            for number, completion in enumerate(group)
        ]
        return JSONResponse({**head, "choices": choices, "usage": usage})

    return await service.threads.run(client_of(request), answer)


def _requests(service: Service, asked: IdsRequest) -> list[Drawable]:
    """The prompts with their random keys. Raises UserError naming what is wrong."""
    prompts, limits, decoder = asked.prompts, service.limits, service.generator.decoder
    if len(prompts) * asked.n > _MAX_COMPLETIONS:
        raise UserError(f"prompt: {len(prompts) * asked.n} completions are more than {_MAX_COMPLETIONS} a request")
    if asked.max_tokens > limits.max_new_tokens:
        raise UserError(f"max_tokens: is {asked.max_tokens}; this server gives at most {limits.max_new_tokens}")
    for number, prompt in enumerate(prompts):
        check_room(prompt, asked.max_tokens, decoder, f"prompt {number}", "max_tokens")
    keys: Sequence[Sequence[int]]
    if asked.random_keys is not None:
        keys = asked.random_keys
        if len(keys) != len(prompts):
            raise UserError(f"random_keys: has {len(keys)} for {len(prompts)} prompts")
    else:
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        keys = [(seed, number) for number in range(len(prompts))]
    return [Drawable(tuple(prompt), tuple(key)) for prompt, key in zip(prompts, keys)]


def _choice(service: Service, asked: IdsRequest, prompt: Sequence[int], drawn: Drawn) -> dict[str, Any]:
    """A completion. Its ids and log-probabilities are those of the tokens drawn, with the stop token."""
    tokenizer = service.generator.tokenizer
    logprobs = None
    if asked.logprobs is not None:
        as_ids = asked.return_tokens_as_token_ids
        tokens = [f"token_id:{token}" if as_ids else tokenizer.decode([token]) for token in drawn.ids]
        logprobs = {"tokens": tokens, "token_logprobs": drawn.logprobs}
    return {
        "text": tokenizer.decode(drawn.ids[:-1] if drawn.finish_reason == "stop" else drawn.ids),
        "finish_reason": drawn.finish_reason,
        "prompt_token_ids": prompt,
        "token_ids": drawn.ids,
        "logprobs": logprobs,
    }
