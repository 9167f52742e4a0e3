"""POST /v1/embeddings of OpenAI's API: texts as vectors, by the model that is served."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from llmsuite.errors import UserError
from llmsuite.inference.batch import check_room
from llmsuite.inference.pieces import in_groups
from llmsuite.serving.jobs import refusals, waited
from llmsuite.serving.protocol import FIRST_FAULT, Ids
from llmsuite.serving.scheduler import Steps
from llmsuite.serving.service import Service
from llmsuite.serving.turns import client_of

PATH = "/v1/embeddings"
MAX_TEXTS = 2048
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS), FIRST_FAULT]
_Ids = Annotated[Ids, Field(min_length=1)]


class EmbeddingRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    input: str | _Texts | _Ids | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_TEXTS), FIRST_FAULT] = Field(
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
    """The route of embeddings."""

    @app.post(PATH)
    async def embed(request: Request) -> Response:
        asked = await service.body(request, EmbeddingRequest)
        deadline = time.monotonic() + service.limits.request_timeout
        try:
            texts = await service.threads.run(client_of(request), _checked, service, asked)
            vectors = await _embedded(service, request, asked, texts, deadline)
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        if asked.dimensions not in (None, vectors.shape[1]):
            raise HTTPException(400, f"dimensions: is {asked.dimensions}; this model's vectors have {vectors.shape[1]}")
        count = sum(map(len, texts))
        service.metrics.prompt_tokens.inc(count)
        model = asked.model or service.name
        return await service.threads.run(client_of(request), _answer, asked, vectors, count, model)


def _checked(service: Service, asked: EmbeddingRequest) -> list[list[int]]:
    """The ids of each text. Raises UserError naming one that is empty or too long."""
    decoder = service.generator.decoder
    if not hasattr(decoder, "embed") or service.marks():
        raise UserError("embeddings: are given by models that are served as they are, not with --engine static or --rl")
    prompter = service.speaker(asked.model).prompter
    found = [prompter.plain(text, is_whole=True) if isinstance(text, str) else text for text in asked.texts]
    for number, ids in enumerate(found):
        check_room(ids, 0, decoder, f"input {number}")
    return found


async def _embedded(
    service: Service, request: Request, asked: EmbeddingRequest, texts: list[list[int]], deadline: float
) -> np.ndarray:
    """The vectors [N, D]; between its batches those of others go on. Raises HTTPException."""
    decoder: Any = service.generator.decoder
    more = {"adapter": asked.model} if asked.model in service.adapters else {}
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # those of a length share a batch
    found: dict[int, np.ndarray] = {}
    limits = service.limits

    def steps(chosen: list[list[int]]) -> Steps:
        vectors: Any = None
        for vectors in decoder.embed(chosen, limits.prompt_piece, **more):
            if vectors is None:
                yield
        return vectors

    for group in in_groups([len(texts[number]) for number in order], limits.prompt_piece, limits.batch_size):
        chosen = [order[place] for place in group]
        with refusals():
            made = service.scheduler.make(steps([texts[number] for number in chosen]), client_of(request))
        found |= dict(zip(chosen, await waited(request, made, deadline)))
    return np.stack([found[number] for number in range(len(texts))])


def _answer(asked: EmbeddingRequest, vectors: np.ndarray, count: int, model: str) -> Response:
    """The vectors of texts of so many tokens together."""
    found = [
        {"object": "embedding", "index": number, "embedding": _written(vector, asked)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": found, "model": model, "usage": usage})


def _written(vector: np.ndarray, asked: EmbeddingRequest) -> Any:
    """A vector as the client wants it: base64 is of float32, the low byte first."""
    if asked.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype("float64").tolist()
