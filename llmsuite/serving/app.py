"""The web application: OpenAI's API over a scheduler, and a page to chat on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import ValidationError

from llmsuite.errors import UserError
from llmsuite.inference.batch import Line
from llmsuite.inference.generate import Generator
from llmsuite.inference.prompts import Prompter, read_messages
from llmsuite.serving import protocol
from llmsuite.serving.limits import BodyLimits, Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.protocol import ChatRequest, CompletionRequest
from llmsuite.serving.scheduler import Busy, Scheduler

_PAGE = Path(__file__).with_name("page.html")
R = TypeVar("R", ChatRequest, CompletionRequest)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some text of one of the answers of a request."""

    number: int
    text: str
    ended: bool
    num_logprobs: int
    """How many of the answer's tokens have log-probabilities by now."""


class Job:
    """The answers to one request, as they come."""

    def __init__(self, lines: Sequence[Line], scheduler: Scheduler, deadline: float):
        """Raises Busy."""
        self.lines = lines
        self._scheduler, self._deadline = scheduler, deadline
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(number: int) -> Any:
            def hear(text: str, ended: bool) -> None:
                piece = Piece(number, text, ended, len(lines[number].logprobs))
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                    loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

            return hear

        scheduler.submit(lines, [listener(number) for number in range(len(lines))])

    async def pieces(self) -> AsyncIterator[Piece]:
        """Until all answers have ended. Raises HTTPException when they do not."""
        open_ones = len(self.lines)
        try:
            while open_ones:
                left = self._deadline - time.monotonic()
                try:
                    piece = await asyncio.wait_for(self._pieces.get(), max(left, 0.0))
                except asyncio.TimeoutError:
                    raise HTTPException(504, "the answer took longer than the server's request_timeout") from None
                if piece.ended and self.lines[piece.number].finished is None:
                    raise HTTPException(500, "the model could not go on; see the server's log")
                open_ones -= piece.ended
                yield piece
        finally:
            self._scheduler.cancel([line for line in self.lines if line.finished is None])


class Service:
    """What the routes share."""

    def __init__(self, generator: Generator, prompter: Prompter, name: str, limits: Limits, metrics: Metrics):
        """`prompter` has the model's chat template; `name` is what clients call the model."""
        self.generator, self.prompter, self.name, self.limits, self.metrics = generator, prompter, name, limits, metrics
        self.scheduler = Scheduler(generator.decoder, metrics, limits.batch_size, limits.max_waiting)

    async def read(self, request: Request, kind: type[R]) -> R:
        """The body of a request. Raises HTTPException saying what is wrong with it."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body has to be application/json")
        try:
            asked = kind.model_validate(json.loads(await request.body()))
        except (ValueError, RecursionError) as error:
            if isinstance(error, ValidationError):
                wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:5])
                raise HTTPException(400, wrong) from None
            raise HTTPException(400, f"the body is not JSON: {error}"[:300]) from None
        if asked.model not in (None, self.name):
            raise HTTPException(404, f"model {asked.model!r} is not served here; this is {self.name!r}")
        if asked.stream_options is not None and not asked.stream:
            raise HTTPException(400, "stream_options: only with stream")
        return asked

    def lines(self, asked: ChatRequest | CompletionRequest) -> tuple[list[Line], int]:
        """The answers to be made, and to how many prompts. Raises UserError."""
        wanted, num_logprobs = asked.max_tokens, None
        if isinstance(asked, ChatRequest):
            prompts = [self.prompter.turns(read_messages(asked.messages))]
            wanted = asked.max_completion_tokens or wanted
            if asked.logprobs:
                num_logprobs = asked.top_logprobs or 0
            elif asked.top_logprobs:
                raise UserError("top_logprobs: only with logprobs: true")
        else:
            prompts, num_logprobs = self._prompts(asked.prompt), asked.logprobs
            wanted = wanted or 16  # as OpenAI has it
        count = asked.n or 1
        if len(prompts) * count > protocol.MAX_ANSWERS:
            raise UserError(f"prompt: {len(prompts) * count} answers are more than {protocol.MAX_ANSWERS} a request")
        lines = []
        for prompt in prompts:
            room = max(1, min(self.limits.max_new_tokens, self.generator.decoder.max_length - len(prompt)))
            if wanted is not None and wanted > self.limits.max_new_tokens:
                raise UserError(f"max_tokens: is {wanted}; this server gives at most {self.limits.max_new_tokens}")
            sampling = asked.sampling(wanted or room, num_logprobs)
            lines += [self.generator.line(prompt, sampling, number) for number in range(count)]
        return lines, len(prompts)

    def _prompts(self, given: Any) -> list[list[int]]:
        if isinstance(given, str):
            return [self.generator.tokenizer.encode(given)]
        if not given:
            raise UserError("prompt: is empty")
        if isinstance(given[0], int):
            return [given]
        return [self.generator.tokenizer.encode(p) if isinstance(p, str) else p for p in given]

    async def start(self, asked: ChatRequest | CompletionRequest) -> tuple[Job, int]:
        """Make the answers wait for their place. Raises HTTPException."""
        begun = time.monotonic()
        try:
            lines, num_prompts = await asyncio.to_thread(self.lines, asked)
            job = Job(lines, self.scheduler, begun + self.limits.request_timeout)
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        except Busy:
            raise HTTPException(429, "the server has no room for more requests; try again later") from None
        self.metrics.prompt_tokens.inc(sum(len(line.prompt) for line in lines[:: len(lines) // num_prompts]))
        return job, num_prompts

    async def whole(self, request: Request, job: Job) -> None:
        """Wait for the answers; give up when the client does."""
        begun, task = time.monotonic(), asyncio.ensure_future(self._all(job))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=0.5)
                if not task.done() and await request.is_disconnected():
                    task.cancel()
                    raise HTTPException(499, "the client has gone")
            task.result()
        finally:
            task.cancel()
        self.metrics.duration.observe(time.monotonic() - begun)

    async def _all(self, job: Job) -> None:
        begun, first = time.monotonic(), True
        async for piece in job.pieces():
            if first and piece.text:
                self.metrics.first_token.observe(time.monotonic() - begun)
                first = False

    async def events(self, asked: Any, job: Job, num_prompts: int, is_chat: bool) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head, begun, first = protocol.envelope(kind, self.name), time.monotonic(), True

        def event(choices: list[Any], **more: Any) -> str:
            return f"data: {json.dumps({**head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

        told = [0] * len(job.lines)  # of each answer, the tokens whose log-probabilities have been sent

        def logprobs(piece: Piece) -> dict[str, Any] | None:
            """Of the tokens since the last event."""
            line, begin = job.lines[piece.number], told[piece.number]
            told[piece.number] = piece.num_logprobs
            form = protocol.chat_logprobs if is_chat else protocol.completion_logprobs
            return form(line.logprobs[: piece.num_logprobs], self.generator.tokenizer, begin) if wants else None

        wants = asked.logprobs not in (None, False)

        def choice(number: int, text: str, reason: str | None, more: Any = None, **role: str) -> dict[str, Any]:
            said: dict[str, Any] = {"delta": {**role, **({"content": text} if text or role else {})}}
            return {"index": number, **(said if is_chat else {"text": text}), "finish_reason": reason, "logprobs": more}

        try:
            if is_chat:
                for number in range(len(job.lines)):
                    yield event([choice(number, "", None, role="assistant")])
            async for piece in job.pieces():
                if piece.text:
                    if first:
                        self.metrics.first_token.observe(time.monotonic() - begun)
                        first = False
                    yield event([choice(piece.number, piece.text, None, logprobs(piece))])
                if piece.ended:  # tokens without a text of their own may be left
                    last = logprobs(piece) if told[piece.number] < piece.num_logprobs else None
                    yield event([choice(piece.number, "", job.lines[piece.number].finished, last)])
            if asked.stream_options is not None and asked.stream_options.include_usage:
                yield event([], usage=protocol.usage(job.lines, num_prompts))
            self.metrics.duration.observe(time.monotonic() - begun)
        except HTTPException as error:  # the status has been sent; the client's library knows this form
            yield f"data: {json.dumps(protocol.error(error.detail, 'server_error'))}\n\n"
            return
        yield "data: [DONE]\n\n"


def make_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The application of a service. With a key, everything under /v1 and the metrics ask for it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        await asyncio.to_thread(service.scheduler.stop)

    app = FastAPI(title="llmsuite serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimits, limits=service.limits)

    @app.middleware("http")
    async def guard(request: Request, proceed: Any) -> Response:
        path = request.url.path
        if api_key is not None and (path.startswith("/v1") or path == "/metrics"):
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
                service.metrics.requests.labels("refused", "401").inc()
                body = protocol.error("the API key is wrong or missing", "authentication_error", "invalid_api_key")
                return JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})
        response: Response = await proceed(request)
        known = path if path in _PATHS else "other"  # paths of strangers would fill the memory
        service.metrics.requests.labels(known, str(response.status_code)).inc()
        return response

    @app.exception_handler(HTTPException)
    @app.exception_handler(404)
    @app.exception_handler(405)
    async def refuse(request: Request, error: Exception) -> Response:
        assert hasattr(error, "status_code")
        status = error.status_code
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        code = "model_not_found" if status == 404 and request.url.path in _PATHS else None
        headers = {"Retry-After": "1"} if status == 429 else None
        return JSONResponse(protocol.error(str(getattr(error, "detail", error)), kind, code), status, headers)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = await service.read(request, ChatRequest)
        job, num_prompts = await service.start(asked)
        if asked.stream:
            return _stream(service.events(asked, job, num_prompts, is_chat=True))
        await service.whole(request, job)
        choices = [
            {
                "index": number,
                "message": {"role": "assistant", "content": _text(line), "refusal": None},
                "finish_reason": line.finished,
                "logprobs": protocol.chat_logprobs(line.logprobs, service.generator.tokenizer)
                if asked.logprobs
                else None,
            }
            for number, line in enumerate(job.lines)
        ]
        head = protocol.envelope("chat.completion", service.name)
        return JSONResponse({**head, "choices": choices, "usage": protocol.usage(job.lines, num_prompts)})

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        asked = await service.read(request, CompletionRequest)
        job, num_prompts = await service.start(asked)
        if asked.stream:
            return _stream(service.events(asked, job, num_prompts, is_chat=False))
        await service.whole(request, job)
        choices = [
            {
                "index": number,
                "text": _text(line),
                "finish_reason": line.finished,
                "logprobs": protocol.completion_logprobs(line.logprobs, service.generator.tokenizer)
                if asked.logprobs is not None
                else None,
            }
            for number, line in enumerate(job.lines)
        ]
        head = protocol.envelope("text_completion", service.name)
        return JSONResponse({**head, "choices": choices, "usage": protocol.usage(job.lines, num_prompts)})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": service.name, "object": "model", "created": 0, "owned_by": "local"}]}

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": service.name}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": policy})

    return app


_PATHS = ("/", "/healthz", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _text(line: Line) -> str:
    assert line.text is not None
    return line.text.text
