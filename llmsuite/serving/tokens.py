"""The tokenizer of the model that is served, asked as that of vLLM's server: harnesses count tokens with it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from llmsuite.errors import UserError
from llmsuite.serving.service import Service

PATHS = ("/tokenize", "/detokenize", "/tokenizer_info")
_Id = Annotated[int, Field(ge=0, lt=2**31)]


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
    tokens: list[_Id]


def add_api(app: FastAPI, service: Service) -> None:
    """The routes. Control tokens that stand in a text become tokens, and none are left out of texts of ids."""
    decoder = service.generator.decoder

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        asked = await service.body(request, TokenizeRequest)
        tokenizer = service.speaker(asked.model).generator.tokenizer
        try:
            ids = await asyncio.to_thread(tokenizer.encode, asked.prompt)
            ids = ids if asked.add_special_tokens is False else tokenizer.framed(ids)
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        texts = tokenizer.pieces(ids) if asked.return_token_strs else None
        return {"count": len(ids), "max_model_len": decoder.max_length, "tokens": ids, "token_strs": texts}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        asked = await service.body(request, DetokenizeRequest)
        tokenizer = service.speaker(asked.model).generator.tokenizer
        if wrong := [token for token in asked.tokens if token >= tokenizer.vocab_size]:
            raise HTTPException(400, f"tokens: has {wrong[0]}; the tokenizer's end at {tokenizer.vocab_size - 1}")
        return {"prompt": await asyncio.to_thread(tokenizer.decode, asked.tokens, False)}

    @app.get("/tokenizer_info")
    async def info() -> dict[str, Any]:
        return {**service.generator.tokenizer.special_tokens, "chat_template": service.prompter.template_source}
