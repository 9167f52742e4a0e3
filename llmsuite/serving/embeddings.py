"""POST /v1/embeddings of OpenAI's API: vectors of texts, by the model that is served."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from llmsuite.base.errors import UserError
from llmsuite.inference.batch import check_context_length
from llmsuite.inference.chunked_prefill import group_prompts
from llmsuite.serving.fair_queue import client_of
from llmsuite.serving.jobs import as_http_errors, wait_for_result
from llmsuite.serving.protocol import FAIL_FAST, Ids
from llmsuite.serving.scheduler import Steps
from llmsuite.serving.service import EmbeddingDecoder, Service

PATH = "/v1/embeddings"
MAX_TEXTS = 2048
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS), FAIL_FAST]
_Ids = Annotated[Ids, Field(min_length=1)]


class EmbeddingRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    input: str | _Texts | _Ids | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_TEXTS), FAIL_FAST] = Field(
        description=f"a string, a list of 1 to {MAX_TEXTS} strings, a list of token ids, or a list of such lists"
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """One entry for each vector."""
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else self.input


def add_api(app: FastAPI, service: Service) -> None:
    """Add the route of embeddings."""

    @app.post(PATH)
    async def embed(request: Request) -> Response:
        body = await service.parse_body(request, EmbeddingRequest)
        deadline = time.monotonic() + service.limits.request_timeout
        try:
            texts = await service.threads.run(client_of(request), _checked, service, body)
            vectors = await _embedded(service, request, body, texts, deadline)
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        if body.dimensions not in (None, vectors.shape[1]):
            raise HTTPException(400, f"dimensions: is {body.dimensions}; this model's vectors have {vectors.shape[1]}")
        count = sum(map(len, texts))
        service.metrics.prompt_tokens.inc(count)
        model = body.model or service.name
        return await service.threads.run(client_of(request), _answer, body, vectors, count, model)


def _checked(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    """Token ids of each text. Raises UserError naming one that is empty or too long."""
    decoder = service.generator.decoder
    if not isinstance(decoder, EmbeddingDecoder) or service.version_info():
        raise UserError("embeddings: are not available with --engine static or --rl")
    prompter = service.served_model(body.model).prompter
    found: list[list[int]] = []
    for text in body.texts:
        if isinstance(text, str):
            found.append(prompter.plain(text, is_complete=True))
        else:
            found.append(text)
    for number, ids in enumerate(found):
        check_context_length(ids, 0, decoder, f"input {number}")
    return found


async def _embedded(
    service: Service, request: Request, body: EmbeddingRequest, texts: list[list[int]], deadline: float
) -> np.ndarray:
    """The vectors [N, D]. Between two chunks other requests continue. Raises HTTPException."""
    decoder: Any = service.generator.decoder
    more = {"adapter": body.model} if body.model in service.adapters else {}
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # texts of similar length share a batch
    found: dict[int, np.ndarray] = {}
    limits = service.limits

    def steps(members: list[list[int]]) -> Steps:
        vectors: Any = None
        for vectors in decoder.embed(members, service.scheduler.next_chunk_tokens, **more):
            if vectors is None:
                yield
        return vectors

    for group in group_prompts([len(texts[number]) for number in order], limits.prompt_piece, limits.batch_size):
        members = [order[place] for place in group]
        with as_http_errors():
            made = service.scheduler.submit_steps(steps([texts[number] for number in members]), client_of(request))
        found |= dict(zip(members, await wait_for_result(request, made, deadline)))
    return np.stack([found[number] for number in range(len(texts))])


def _answer(body: EmbeddingRequest, vectors: np.ndarray, count: int, model: str) -> Response:
    """The response with the vectors; `count`: tokens of all texts together."""
    found = [
        {"object": "embedding", "index": number, "embedding": _written(vector, body)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": found, "model": model, "usage": usage})


def _written(vector: np.ndarray, body: EmbeddingRequest) -> Any:
    """A vector in the requested encoding: base64 has little-endian float32."""
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype("float64").tolist()
