"""The web application: OpenAI's API over a scheduler, and a page to chat on."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from llmsuite.inference.batch import Line
from llmsuite.serving import embeddings, protocol, responses, tokens, training
from llmsuite.serving.events import EventStream
from llmsuite.serving.limits import BodyLimits, KnownHosts, Message, Receive, Send
from llmsuite.serving.page import chat_page
from llmsuite.serving.protocol import ChatRequest, CompletionRequest
from llmsuite.serving.service import R, Service
from llmsuite.serving.turns import client_of
from llmsuite.serving.weights import ServedWeights

_PATHS = (
    "/",
    "/healthz",
    "/metrics",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    responses.PATH,
    responses.COUNT_PATH,
    embeddings.PATH,
    *tokens.PATHS,
    *training.PATHS,
)
_MODEL = "/v1/models/"


def make_app(
    service: Service,
    api_key: str | None = None,
    weights: ServedWeights | None = None,
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """The application of a service.

    Args:
        service: answers.
        api_key: everything under /v1, the tokenizer and the metrics ask for it.
        weights: can be replaced by a trainer, which is answered too.
        hosts: names of this server; requests to any other name are refused. None for no check.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        await asyncio.to_thread(service.scheduler.stop)

    app = FastAPI(title="llmsuite serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimits, limits=service.limits)
    app.add_middleware(_Guard, service=service, api_key=api_key)
    if hosts is not None:
        app.add_middleware(KnownHosts, names=hosts)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(404, _refuse)
    app.add_exception_handler(405, _refuse)
    if weights is not None:
        training.add_api(app, service, weights)
    _add_api(app, service, weights)
    responses.add_api(app, service)
    embeddings.add_api(app, service)
    tokens.add_api(app, service)
    _add_pages(app, service)
    return app


class _Guard:
    """Asks for the key, and counts every request.

    FastAPI's own kind of middleware would hide from the routes that a client has gone, whose answer ends then.
    """

    def __init__(self, app: Any, service: Service, api_key: str | None):
        self._app, self._requests, self._api_key = app, service.metrics.requests, api_key

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if self._api_key is not None and (path.startswith("/v1") or path in ("/metrics", *tokens.PATHS)):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
                self._requests.labels("refused", "401").inc()
                body = protocol.error("the API key is wrong or missing", "authentication_error", "invalid_api_key")
                await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        known = "/v1/models" if path.startswith(_MODEL) else path if path in _PATHS else "other"  # labels stay few

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests.labels(known, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)


async def _refuse(request: Request, error: Exception) -> Response:
    """An error in the form of OpenAI's API."""
    assert hasattr(error, "status_code")
    status = error.status_code
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    path = request.url.path
    code = "model_not_found" if status == 404 and (path in _PATHS or path.startswith(_MODEL)) else None
    headers = {"Retry-After": "1"} if status == 429 else None
    message = str(getattr(error, "detail", error))
    if message in ("Not Found", "Method Not Allowed"):  # as the framework says it of an address
        message = f"{message}: {request.method} {path[:200]} is not there"
        if f"/v1{path}" in _PATHS:
            message += f", but /v1{path} is: the address that clients are given ends with /v1"
    return JSONResponse(protocol.error(message, kind, code), status, headers)


def _add_api(app: FastAPI, service: Service, weights: ServedWeights | None) -> None:
    """The routes of OpenAI's API."""

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        def choice(line: Line, asked: ChatRequest) -> dict[str, Any]:
            said, calls = service.calls(asked, _text(line))
            tokenizer = service.speaker(asked.model).generator.tokenizer
            message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
            if calls:
                message |= {"content": said or None, "tool_calls": protocol.tool_calls(calls)}
            return {
                "message": message,
                "finish_reason": "tool_calls" if calls else line.finished,
                "logprobs": protocol.chat_logprobs(line.logprobs, tokenizer) if asked.logprobs else None,
            }

        asked = await service.body(request, ChatRequest)
        return await _answer(service, request, asked, "chat.completion", choice)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        def kind(content: Any) -> type[CompletionRequest | training.IdsRequest]:
            is_drawn = weights is not None and training.wants_ids(content)
            return training.IdsRequest if is_drawn else CompletionRequest

        asked = await service.body_of(request, kind)
        if isinstance(asked, training.IdsRequest):
            assert weights is not None
            return await training.draw(service, weights, request, asked)

        def choice(line: Line, asked: CompletionRequest) -> dict[str, Any]:
            wants_logprobs, tokenizer = asked.logprobs is not None, service.speaker(asked.model).generator.tokenizer
            return {
                "text": _text(line),
                "finish_reason": line.finished,
                "logprobs": protocol.completion_logprobs(line.logprobs, tokenizer) if wants_logprobs else None,
            }

        return await _answer(service, request, asked, "text_completion", choice)

    def described(name: str) -> dict[str, Any]:
        more = {"parent": service.name} if name in service.adapters else service.marks()
        alias = {"root": service.name} if name in service.aliases else {}
        return {"id": name, "object": "model", "created": 0, "owned_by": "local", **alias, **more}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = (service.name, *service.aliases, *service.adapters)
        return {"object": "list", "data": [described(name) for name in names]}

    @app.get(_MODEL + "{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return described(name)


async def _answer(
    service: Service, request: Request, asked: R, name: str, choice: Callable[[Line, R], dict[str, Any]]
) -> Response:
    """Answer a request: as a stream of events, or whole with a choice for each line."""
    if asked.stream_options is not None and not asked.stream:
        raise HTTPException(400, "stream_options: only with stream")
    job, num_prompts = await service.start(asked, client_of(request))
    marks = service.marks()  # those of when it was queued: weights are replaced when nothing is left in the queue
    if asked.stream:
        events = EventStream(service, asked, job, num_prompts).events(client_of(request))
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    await service.whole(request, job)
    of_prompts = await service.prompt_logprobs(request, asked, job, num_prompts)

    def answer() -> Response:
        given = service.chosen(asked, job, num_prompts)
        choices = [{"index": n, **choice(line, asked)} for n, line in enumerate(given)]
        for one, text in zip(choices, service.echoed(asked)):
            one["text"] = text + one["text"]
        tokenizer = service.speaker(asked.model).generator.tokenizer
        for one, line, of_prompt in zip(choices, given, of_prompts):
            # with the token that ended the answer: harnesses take off one, of an answer of one token
            ending = [line.ending] if line.ending is not None else []
            both = of_prompt + line.logprobs + ending
            one["logprobs"] = protocol.echoed_logprobs(line.prompt[0], both, tokenizer)
        head = protocol.envelope(name, asked.model or service.name)
        return JSONResponse({**head, **marks, "choices": choices, "usage": protocol.usage(job.lines, num_prompts)})

    return await service.threads.run(client_of(request), answer)  # it may have very many log-probabilities


def _add_pages(app: FastAPI, service: Service) -> None:
    """Health, metrics for Prometheus, and the page to chat on."""

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": service.name}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        document = chat_page()
        return HTMLResponse(document.html, headers={"Content-Security-Policy": document.policy})


def _text(line: Line) -> str:
    assert line.text is not None
    return line.text.text
