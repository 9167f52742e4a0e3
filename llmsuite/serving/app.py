"""The web application: OpenAI's API on top of a scheduler, and a chat page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Protocol, runtime_checkable

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from llmsuite.inference.batch import DecodingSequence
from llmsuite.serving import embeddings, logprobs, protocol, responses, tokens, training
from llmsuite.serving.events import EventStream
from llmsuite.serving.fair_queue import client_of
from llmsuite.serving.jobs import StreamedAnswer
from llmsuite.serving.limits import BodyLimits, Message, Receive, Send, TrustedHosts
from llmsuite.serving.page import chat_page
from llmsuite.serving.protocol import ChatRequest, CompletionRequest
from llmsuite.serving.service import R, Service
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
        service: answers the requests.
        api_key: required for everything under /v1, the tokenizer and the metrics; None for no key.
        weights: with it, a trainer can replace the weights and sample completions.
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
        app.add_middleware(TrustedHosts, names=hosts)
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
    """Middleware that checks the key, and counts every request.

    FastAPI's `middleware` decorator would hide disconnections of clients from the routes, which then end the answer.
    """

    def __init__(self, app: Any, service: Service, api_key: str | None):
        self._app = app
        self._requests = service.metrics.requests
        self._api_key = api_key

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
        if path.startswith(_MODEL):
            label = "/v1/models"
        elif path in _PATHS:
            label = path
        else:
            label = "other"  # so that the number of labels is bounded

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests.labels(label, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)


@runtime_checkable
class HttpFault(Protocol):
    """`HTTPException` of FastAPI, or of the framework below it, which raises its own for paths that do not exist."""

    status_code: int
    detail: str


async def _refuse(request: Request, error: Exception) -> Response:
    """Respond with an error in the format of OpenAI's API."""
    assert isinstance(error, HttpFault)
    status = error.status_code
    if status >= 500:
        kind = "server_error"
    elif status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error"
    path = request.url.path
    code = None
    if status == 404 and (path in _PATHS or path.startswith(_MODEL)):
        code = "model_not_found"
    headers = None
    if status == 429:
        headers = {"Retry-After": "1"}
    message = str(error.detail)
    if message in ("Not Found", "Method Not Allowed"):  # the messages of the framework
        message = f"{message}: {request.method} {path[:200]} does not exist"
        if f"/v1{path}" in _PATHS:
            message += f", but /v1{path} does: the base URL of clients ends with /v1"
    return JSONResponse(protocol.error(message, kind, code), status, headers)


def _add_api(app: FastAPI, service: Service, weights: ServedWeights | None) -> None:
    """Add the routes of OpenAI's API."""

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        def choice(sequence: DecodingSequence, body: ChatRequest) -> dict[str, Any]:
            thoughts, content, calls = service.split_answer(body, sequence)
            tokenizer = service.served_model(body.model).generator.tokenizer
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if thoughts:
                message["reasoning_content"] = thoughts
            if calls:
                message |= {"content": content or None, "tool_calls": protocol.tool_calls(calls)}
            return {
                "message": message,
                "finish_reason": "tool_calls" if calls else sequence.finish_reason,
                "logprobs": logprobs.chat_logprobs(sequence.logprobs, tokenizer) if body.logprobs else None,
            }

        body = await service.parse_body(request, ChatRequest)
        return await _answer(service, request, body, "chat.completion", choice)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        def model_of(content: Any) -> type[CompletionRequest | training.TokenIdsRequest]:
            is_from_trainer = weights is not None and training.wants_token_ids(content)
            if is_from_trainer:
                return training.TokenIdsRequest
            return CompletionRequest

        body = await service.parse_body_as(request, model_of)
        if isinstance(body, training.TokenIdsRequest):
            assert weights is not None
            return await training.sample(service, weights, request, body)

        def choice(sequence: DecodingSequence, body: CompletionRequest) -> dict[str, Any]:
            wants_logprobs = body.logprobs is not None
            tokenizer = service.served_model(body.model).generator.tokenizer
            return {
                "text": _text(sequence),
                "finish_reason": sequence.finish_reason,
                "logprobs": logprobs.completion_logprobs(sequence.logprobs, tokenizer) if wants_logprobs else None,
            }

        return await _answer(service, request, body, "text_completion", choice)

    def describe(name: str) -> dict[str, Any]:
        more = {"parent": service.name} if name in service.adapters else service.version_info()
        alias = {"root": service.name} if name in service.aliases else {}
        return {"id": name, "object": "model", "created": 0, "owned_by": "local", **alias, **more}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = (service.name, *service.aliases, *service.adapters)
        return {"object": "list", "data": [describe(name) for name in names]}

    @app.get(_MODEL + "{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return describe(name)


async def _answer(
    service: Service, request: Request, body: R, name: str, choice: Callable[[DecodingSequence, R], dict[str, Any]]
) -> Response:
    """Answer a request: as a stream of events, or in one response with a choice for each returned answer."""
    if body.stream_options is not None and not body.stream:
        raise HTTPException(400, "stream_options: only with stream")
    job, num_prompts = await service.start(body, client_of(request))
    version_info = service.version_info()  # of now: weights are only replaced while the queue is empty
    if body.stream:
        events = EventStream(service, body, job, num_prompts).events(client_of(request))
        return StreamedAnswer(events, job)
    await service.wait_for_answers(request, job)
    prompt_logprobs = await service.prompt_logprobs(request, body, job, num_prompts)

    def answer() -> Response:
        returned = service.best_answers(body, job, num_prompts)
        choices = [{"index": n, **choice(sequence, body)} for n, sequence in enumerate(returned)]
        for one, text in zip(choices, service.echoed_texts(body)):
            one["text"] = text + one["text"]
        tokenizer = service.served_model(body.model).generator.tokenizer
        for one, sequence, of_prompt in zip(choices, returned, prompt_logprobs):
            # with the stop token: evaluation harnesses request one token and remove the last entry
            stop = []
            if sequence.stop_logprob is not None:
                stop = [sequence.stop_logprob]
            kept = of_prompt + sequence.logprobs + stop
            one["logprobs"] = logprobs.echoed_logprobs(sequence.prompt[0], kept, tokenizer)
        head = protocol.envelope(name, body.model or service.name)
        usage = protocol.usage(job.sequences, num_prompts)
        return JSONResponse({**head, **version_info, "choices": choices, "usage": usage})

    return await service.threads.run(client_of(request), answer)  # it may have very many log-probabilities


def _add_pages(app: FastAPI, service: Service) -> None:
    """Add the routes for health, metrics for Prometheus, and the chat page."""

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


def _text(sequence: DecodingSequence) -> str:
    assert sequence.text is not None
    return sequence.text.text
