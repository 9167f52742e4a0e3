"""The tokenizer of the model that is served, asked as that of vLLM's server: harnesses count tokens with it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from llmsuite.errors import UserError
from llmsuite.serving.protocol import Ids
from llmsuite.serving.service import Service
from llmsuite.serving.turns import client_of

PATHS = ("/tokenize", "/detokenize", "/tokenizer_info")


class TokenizeRequest(BaseModel):
    """POST /tokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    """Whether the text gets what the tokenizer puts in front of prompts, as those of /v1/completions do; it does unless
    this is false."""
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    tokens: Ids


def add_api(app: FastAPI, service: Service) -> None:
    """The routes. Control tokens that stand in a text become tokens, and none are left out of texts of ids."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = await service.body(request, TokenizeRequest)
        return await service.threads.run(client_of(request), _tokenized, service, asked)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = await service.body(request, DetokenizeRequest)
        return await service.threads.run(client_of(request), _text, service, asked)

    @app.get("/tokenizer_info")
    async def info() -> dict[str, Any]:
        return {**service.generator.tokenizer.special_tokens, "chat_template": service.prompter.template_source}


def _tokenized(service: Service, asked: TokenizeRequest) -> Response:
    tokenizer = service.speaker(asked.model).generator.tokenizer
    try:
        ids = tokenizer.encode(asked.prompt)
        ids = ids if asked.add_special_tokens is False else tokenizer.framed(ids)
    except UserError as error:
        raise HTTPException(400, str(error)) from None
    texts = tokenizer.pieces(ids) if asked.return_token_strs else None
    most = service.generator.decoder.max_length
    return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})


def _text(service: Service, asked: DetokenizeRequest) -> Response:
    tokenizer = service.speaker(asked.model).generator.tokenizer
    if wrong := [token for token in asked.tokens if token >= tokenizer.vocab_size]:
        raise HTTPException(400, f"tokens: has {wrong[0]}; the tokenizer's end at {tokenizer.vocab_size - 1}")
    return JSONResponse({"prompt": tokenizer.decode(asked.tokens, False)})
