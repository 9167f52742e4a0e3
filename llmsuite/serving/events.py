"""Answers as server-sent events, while they are being decoded."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import HTTPException

from llmsuite.data.rows import ToolCall
from llmsuite.serving import protocol
from llmsuite.serving.jobs import Job, Piece
from llmsuite.serving.protocol import ChatRequest, CompletionRequest
from llmsuite.serving.service import Service
from llmsuite.serving.turns import Client


class EventStream:
    """The answers to one request as server-sent events."""

    def __init__(self, service: Service, asked: ChatRequest | CompletionRequest, job: Job, num_prompts: int):
        self._service, self._asked, self._job, self._num_prompts = service, asked, job, num_prompts
        self._is_chat = isinstance(asked, ChatRequest)
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = {**protocol.envelope(kind, asked.model or service.name), **service.marks()}
        self._num_sent = [0] * len(job.lines)
        """Tokens of each answer whose log-probabilities have been sent."""
        self._reader = CallReader(service, asked, len(job.lines))

    async def events(self, client: Client) -> AsyncIterator[str]:
        """The events for a client, in the order the text becomes certain."""
        begun, metrics, is_first = time.monotonic(), self._service.metrics, True
        try:
            if self._is_chat:
                for number in range(len(self._job.lines)):
                    yield self._event([self._choice(number, "", None, role="assistant")])
            echoed = await self._service.threads.run(client, self._service.echoed, self._asked)
            for number, text in enumerate(echoed):
                yield self._event([self._choice(number, text, None)])
            async for piece in self._job.pieces():
                if piece.text and is_first:
                    metrics.first_token.observe(time.monotonic() - begun)
                    is_first = False
                text, calls = self._reader.read(piece)
                if text:
                    yield self._event([self._choice(piece.number, text, None, self._logprobs(piece))])
                if calls:
                    numbered = [{"index": i, **call} for i, call in enumerate(protocol.tool_calls(calls))]
                    yield self._event([self._choice(piece.number, "", None, tool_calls=numbered)])
                if piece.ended:  # tokens without a text of their own may be left
                    last = self._logprobs(piece) if self._num_sent[piece.number] < piece.num_logprobs else None
                    reason = "tool_calls" if calls else self._job.lines[piece.number].finished
                    yield self._event([self._choice(piece.number, "", reason, last)])
            if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
                yield self._event([], usage=protocol.usage(self._job.lines, self._num_prompts))
            metrics.duration.observe(time.monotonic() - begun)
        except HTTPException as error:  # the status has been sent; the client's library knows this form
            yield f"data: {json.dumps(protocol.error(error.detail, 'server_error'))}\n\n"
            return
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[Any], **more: Any) -> str:
        return f"data: {json.dumps({**self._head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

    def _choice(self, number: int, text: str, reason: str | None, logprobs: Any = None, **more: Any) -> dict[str, Any]:
        delta: dict[str, Any] = {"delta": {**more, **({"content": text} if text or "role" in more else {})}}
        content = delta if self._is_chat else {"text": text}
        return {"index": number, **content, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Log-probabilities of the tokens since the last event, where the request wants them."""
        line, begin = self._job.lines[piece.number], self._num_sent[piece.number]
        self._num_sent[piece.number] = piece.num_logprobs
        if self._asked.logprobs in (None, False):
            return None
        tokenizer = self._service.speaker(self._asked.model).generator.tokenizer
        form = protocol.chat_logprobs if self._is_chat else protocol.completion_logprobs
        return form(line.logprobs[: piece.num_logprobs], tokenizer, begin)


class CallReader:
    """Tells text from calls of tools while answers come."""

    def __init__(self, service: Service, asked: ChatRequest | CompletionRequest, count: int):
        """`count`: answers to the request."""
        self._service, self._asked = service, asked
        self._held = [""] * count
        """Text of each answer that may turn out to be a call of a tool."""
        self._is_text = [False] * count
        """Whether each answer is known to call none."""
        self._may_call = isinstance(asked, ChatRequest) and bool(asked.tools_as_text)

    def read(self, piece: Piece) -> tuple[str, list[ToolCall]]:
        """The text of a piece that can be sent, and at the end of an answer the tools that it calls."""
        if not self._may_call or self._is_text[piece.number]:
            return piece.text, []
        assert isinstance(self._asked, ChatRequest)
        calls = self._service.speaker(self._asked.model).prompter.calls
        held = self._held[piece.number] + piece.text
        if piece.ended:
            return self._service.calls(self._asked, held)
        free = calls.free(held)
        self._held[piece.number] = held[free:]
        self._is_text[piece.number] |= free > 0 and not calls.mark
        return held[:free], []
