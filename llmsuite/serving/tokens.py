"""The tokenizer of the served model, with the routes of vLLM's server: harnesses count tokens with them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from llmsuite.base.errors import UserError
from llmsuite.serving.fair_queue import client_of
from llmsuite.serving.protocol import Ids
from llmsuite.serving.service import Service

PATHS = ("/tokenize", "/detokenize", "/tokenizer_info")


class TokenizeRequest(BaseModel):
    """POST /tokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens in front of the text, as for prompts of /v1/completions; the default is
    true."""
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    tokens: Ids


def add_api(app: FastAPI, service: Service) -> None:
    """Add the routes. Control tokens in a text become tokens, and detokenized texts include them."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await service.parse_body(request, TokenizeRequest)
        return await service.threads.run(client_of(request), _tokenized, service, body)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await service.parse_body(request, DetokenizeRequest)
        return await service.threads.run(client_of(request), _text, service, body)

    @app.get("/tokenizer_info")
    async def info() -> dict[str, Any]:
        return {**service.generator.tokenizer.special_tokens, "chat_template": service.prompter.template_source}


def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    tokenizer = service.served_model(body.model).generator.tokenizer
    try:
        ids = tokenizer.encode(body.prompt)
        ids = ids if body.add_special_tokens is False else tokenizer.with_special_tokens(ids)
    except UserError as error:
        raise HTTPException(400, str(error)) from None
    texts = None
    if body.return_token_strs:
        texts = tokenizer.pieces(ids)
    most = service.generator.decoder.max_length
    return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})


def _text(service: Service, body: DetokenizeRequest) -> Response:
    tokenizer = service.served_model(body.model).generator.tokenizer
    if wrong := [token for token in body.tokens if token >= tokenizer.vocab_size]:
        raise HTTPException(
            400, f"tokens: has {wrong[0]}; the tokenizer's vocabulary ends at {tokenizer.vocab_size - 1}"
        )
    return JSONResponse({"prompt": tokenizer.decode(body.tokens, False)})
