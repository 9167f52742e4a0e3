"""From a request to its answers: requests are validated, queued, and tracked until they are done."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from fastapi import HTTPException, Request
from pydantic import BaseModel

from llmsuite.base.errors import UserError
from llmsuite.data.rows import ToolCall
from llmsuite.inference.batch import DecodingSequence, TokenLogprob, check_context_length, token_logprob
from llmsuite.inference.decoder import PromptDecoder
from llmsuite.inference.generate import Generator
from llmsuite.inference.guided import Guide
from llmsuite.inference.prefix_cache import PrefixCache
from llmsuite.inference.prompts import Prompter, read_messages, tool_names
from llmsuite.inference.sampling import Sampling
from llmsuite.inference.thoughts import (
    CHANNEL_TOKENS,
    AnswerReader,
    ChannelReader,
    ThoughtReader,
    has_channels,
    has_thoughts,
    opens_thoughts,
)
from llmsuite.serving import protocol
from llmsuite.serving.bodies import MAX_INLINE_BYTES, ModelOf, validate_body
from llmsuite.serving.fair_queue import Client, client_of
from llmsuite.serving.jobs import POLL_SECONDS, Job, as_http_errors, wait_for_result
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.protocol import ChatRequest, CompletionRequest
from llmsuite.serving.scheduler import Scheduler, Steps
from llmsuite.serving.thread_pool import FairThreadPool

_PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that are read to see whether it opens the thoughts of the answer."""
R = TypeVar("R", ChatRequest, CompletionRequest)
B = TypeVar("B", bound=BaseModel)


@runtime_checkable
class AdapterDecoder(Protocol):
    """A decoder that also has adapters of its model."""

    adapters: tuple[str, ...]
    """Their names."""


@runtime_checkable
class EmbeddingDecoder(Protocol):
    """A decoder that also embeds texts."""

    def embed(self, texts: Sequence[Sequence[int]], num_tokens: int | None = None) -> Iterator[np.ndarray | None]:
        """Embed texts chunk by chunk, see `ModelDecoder.embed`."""


@runtime_checkable
class NamesModel(Protocol):
    """Body of a request that may name a model."""

    model: str | None
    """The name; None for the default."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The tokenizer and template of a model or of one of its adapters, with which prompts are made and answers read."""

    generator: Generator
    prompter: Prompter


class Service:
    """A model that is served: requests are validated here, and become sequences of the scheduler."""

    def __init__(self, generator: Generator, prompter: Prompter, name: str, limits: Limits, metrics: Metrics):
        """
        Args:
            generator: the model.
            prompter: with the model's chat template.
            name: the model's name in the API; adapters of its decoder have names of their own.
            limits: of requests.
            metrics: updated by the scheduler.
        """
        self.generator = generator
        self.prompter = prompter
        self.name = name
        self.limits = limits
        self.metrics = metrics
        prefix_cache = None
        if limits.prefix_cache_mb:
            prefix_cache = PrefixCache(limits.prefix_cache_mb * 1_000_000)
        self.scheduler = Scheduler(generator.decoder, metrics, limits, prefix_cache)
        self.threads = FairThreadPool()
        """Threads for work that would block the event loop."""
        self.adapters: tuple[str, ...] = ()
        if isinstance(generator.decoder, AdapterDecoder):
            self.adapters = generator.decoder.adapters
        self.adapter_models: Mapping[str, ServedModel] = {}
        """Adapters that have a tokenizer or template of their own, by their names."""
        self.aliases: tuple[str, ...] = ()
        """Additional names of the model."""
        self.version_info: Callable[[], dict[str, Any]] = dict
        """Additional keys of every answer, such as the version of the weights."""
        self.defaults = Sampling(temperature=1.0)
        """Sampling parameters that a request does not set; the temperature is OpenAI's default."""
        self.leaves_out_tools = False
        """Answer chats without their optional tools, for a model that supports none."""

    def served_model(self, model: str | None) -> ServedModel:
        """The model of a name in a request; None for the default."""
        return self.adapter_models.get(model or self.name) or ServedModel(self.generator, self.prompter)

    async def parse_body(self, request: Request, model: type[B]) -> B:
        """Parse and validate the body of a request. Raises HTTPException with its fault."""
        return await self.parse_body_as(request, lambda content: model)

    async def parse_body_as(self, request: Request, model_of: ModelOf[B]) -> B:
        """Parse and validate the body of a request, whose pydantic model depends on the content. Raises HTTPException
        with its fault."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body has to be application/json")
        raw = await request.body()
        max_length = self.generator.decoder.max_length
        if len(raw) <= MAX_INLINE_BYTES:
            body = validate_body(raw, model_of, max_length)
        else:
            body = await self.threads.run(client_of(request), validate_body, raw, model_of, max_length)
        self.check_model(body.model if isinstance(body, NamesModel) else None)
        return body

    def check_model(self, name: str | None) -> None:
        """Check the name of a model in a request; None is the default. Raises HTTPException if it is not served."""
        names = (self.name, *self.aliases, *self.adapters)
        if name is not None and name not in names:
            served = " and ".join(map(repr, names))
            raise HTTPException(404, f"model {name[:100]!r} is not served here; this is {served}")

    def make_sequences(self, body: ChatRequest | CompletionRequest) -> tuple[list[DecodingSequence], int]:
        """Make the sequences of a request; returns them with the number of prompts. Raises UserError."""
        option = "max_tokens"
        requested = body.max_tokens
        num_logprobs = None
        if isinstance(body, ChatRequest):
            prompts = [self.conversation(body)]
            if body.max_completion_tokens is not None:
                option = "max_completion_tokens"
                requested = body.max_completion_tokens
            if body.max_tokens not in (None, requested):
                raise UserError(f"max_tokens: is {body.max_tokens}, and {option} is {requested}; give one of them")
            if body.logprobs:
                num_logprobs = body.top_logprobs or 0
            elif body.top_logprobs:
                raise UserError("top_logprobs: only with logprobs: true")
        else:
            prompts = self._prompts(body)
            num_logprobs = body.logprobs
            self._check_completion(body)
            requested = 16 if requested is None else requested  # OpenAI's default
            if body.num_sampled > (body.n or 1):
                num_logprobs = num_logprobs or 0
        count = body.num_sampled
        if len(prompts) * count > protocol.MAX_SEQUENCES:
            raise UserError(f"prompt: {len(prompts) * count} answers are more than {protocol.MAX_SEQUENCES} a request")
        self._check_biases(body)
        guide = self._guide(body)
        served_model = self.served_model(body.model)
        adapter = None
        if body.model in self.adapters:
            adapter = body.model
        shown = self.shown_tokens(body)
        sequences = []
        if requested is not None and requested > self.limits.max_new_tokens:
            raise UserError(f"{option}: is {requested}; this server gives at most {self.limits.max_new_tokens}")
        for prompt, what in zip(prompts, _prompt_names(body, len(prompts))):
            room = max(1, min(self.limits.max_new_tokens, self.generator.decoder.max_length - len(prompt)))
            most = room if requested is None else requested
            check_context_length(prompt, most, self.generator.decoder, what, option)
            if body.min_tokens > most:
                raise UserError(f"min_tokens: is {body.min_tokens}; an answer has at most {most} tokens ({option})")
            sampling = body.sampling(most, num_logprobs, self.defaults)
            for number in range(count):
                own_guide = guide.copy() if guide is not None else None
                sequence = served_model.generator.make_sequence(prompt, sampling, number, own_guide, adapter, shown)
                sequences.append(sequence)
        return sequences, len(prompts)

    def conversation(self, body: ChatRequest) -> list[int]:
        """The ids of a chat, with the beginning of its answer. Tools that are left out are removed from the request.

        Raises:
            UserError: the template does not accept the chat, or does not support tool calls.
        """
        if self.leaves_out_tools and not body.has_to_call:
            body.tools = body.tool_choice = None
        tools = body.tools_as_text
        prompter = self.served_model(body.model).prompter
        try:
            kwargs = body.template_kwargs_as_text
        except ValueError as error:
            raise UserError(str(error)) from error
        ids = prompter.turns(read_messages(body.messages), tools, kwargs)
        if tools:
            prompter.tool_call_format  # noqa: B018  (raises for a model without tool calls)
        return ids

    def _check_completion(self, body: CompletionRequest) -> None:
        """Check values that depend on each other or on the model. Raises UserError."""
        if body.max_tokens == 0 and (body.stream or not body.echo):
            raise UserError("max_tokens: 0 is for prompts that are echoed, and not with stream")
        if body.logprobs is not None and body.echo and body.stream:
            raise UserError("echo: not with logprobs in a stream")
        if body.logprobs is not None and body.echo and not isinstance(self.generator.decoder, PromptDecoder):
            raise UserError("echo: not with logprobs and --engine static, whose programs give those of answers only")
        if body.stream and (body.best_of or 1) > (body.n or 1):
            raise UserError("best_of: not with stream, as the best answer is known at the end only")
        if body.best_of is not None and body.best_of < (body.n or 1):
            raise UserError(f"best_of: is {body.best_of}; it has to be at least n, {body.n}")

    def _guide(self, body: ChatRequest | CompletionRequest) -> Guide | None:
        """The grammar that answers have to follow; None for any text. Raises UserError."""
        if isinstance(body, CompletionRequest):
            return None
        served_model = self.served_model(body.model)
        schema = None
        if body.response_format is not None:
            schema = body.response_format.schema_of_answer
        if (schema is not None or body.has_to_call) and body.min_tokens:
            raise UserError(
                "min_tokens: not with response_format or a tool_choice that ends the answer where it is complete"
            )
        if not body.has_to_call:
            if body.tools_as_text and any(tool.function.strict for tool in body.tools or ()):
                calls = served_model.prompter.tool_call_format
                return served_model.generator.grammars.text_or_tool_calls(calls, body.callable_tools, schema)
            if schema is None:
                return None
            return served_model.generator.grammars.from_schema(schema, "response_format")
        if schema is not None:
            raise UserError("response_format: not with a tool_choice that asks for a call")
        if not body.callable_tools:
            raise UserError("tool_choice: asks for a call of a tool that is not in tools")
        several = body.tool_choice == "required" and body.parallel_tool_calls is not False
        call_format = served_model.prompter.tool_call_format
        return served_model.generator.grammars.tool_calls(call_format, body.callable_tools, several)

    def _check_biases(self, body: ChatRequest | CompletionRequest) -> None:
        size = self.generator.decoder.vocab_size
        if wrong := [token for token in body.logit_bias or () if int(token) >= size]:
            raise UserError(f"logit_bias: has token {wrong[0]}; the model's vocabulary ends at {size - 1}")

    def shown_tokens(self, body: ChatRequest | CompletionRequest) -> tuple[str, ...]:
        """The special tokens that the text of an answer has, so that `thought_reader` finds the channels of its
        messages; empty for a model without channels."""
        if isinstance(body, CompletionRequest) or _has_prescribed_form(body):
            return ()
        source = self.served_model(body.model).prompter.template_source
        return CHANNEL_TOKENS if has_channels(source) else ()

    def thought_reader(self, body: ChatRequest, sequence: DecodingSequence) -> AnswerReader | None:
        """A reader that separates the thoughts of an answer from its content; None where the model writes none.

        An answer whose form is prescribed, by a schema or as a call, has no thoughts.
        """
        served_model = self.served_model(body.model)
        source = served_model.prompter.template_source
        if _has_prescribed_form(body):
            return None
        if has_channels(source):
            return ChannelReader()
        if not has_thoughts(source):
            return None
        end = served_model.generator.tokenizer.decode(sequence.prompt[-_PROMPT_END_TOKENS:], False)
        return ThoughtReader(opens_thoughts(end))

    def split_answer(self, body: ChatRequest, sequence: DecodingSequence) -> tuple[str, str, list[ToolCall]]:
        """Split an answer into its thoughts, its text and its tool calls."""
        assert sequence.text is not None
        text = sequence.text.text
        thoughts = ""
        reader = self.thought_reader(body, sequence)
        if reader is not None:
            thoughts, text = reader.push(text, True)
        content, calls = self.parse_tool_calls(body, text)
        return thoughts, content, calls

    def parse_tool_calls(self, body: ChatRequest, text: str) -> tuple[str, list[ToolCall]]:
        """Split an answer into its text and its tool calls; at most one call without `parallel_tool_calls`."""
        tools = body.tools_as_text
        if not tools:
            return text, []
        content, calls = self.served_model(body.model).prompter.tool_call_format.parse(text, tool_names(tools))
        return content, calls[:1] if body.parallel_tool_calls is False else calls

    def best_answers(self, body: ChatRequest | CompletionRequest, job: Job, num_prompts: int) -> list[DecodingSequence]:
        """The `n` answers to each prompt that are returned, of those that were sampled: those with the highest mean
        log-probability of a token."""
        sampled = body.num_sampled
        returned = body.n or 1
        if sampled == returned:
            return list(job.sequences)
        found = []
        for i in range(num_prompts):
            of_prompt = job.sequences[i * sampled : (i + 1) * sampled]
            found += sorted(of_prompt, key=_mean_logprob, reverse=True)[:returned]
        return found

    def echoed_texts(self, body: ChatRequest | CompletionRequest) -> list[str]:
        """The prompt's text in front of each returned answer; empty without `echo`."""
        if isinstance(body, ChatRequest) or not body.echo:
            return []
        prompts: Any = body.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        tokenizer = self.served_model(body.model).generator.tokenizer
        texts: list[str] = []
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
            texts += [text] * (body.n or 1)
        return texts

    async def prompt_logprobs(
        self, request: Request, body: ChatRequest | CompletionRequest, job: Job, num_prompts: int
    ) -> list[list[TokenLogprob]]:
        """Log-probabilities of the tokens of each prompt but the first, for each returned answer; empty where they are
        not requested. Raises HTTPException."""
        if isinstance(body, ChatRequest) or not body.echo or body.logprobs is None:
            return []
        decoder: Any = self.generator.decoder
        more = {"adapter": body.model} if body.model in self.adapters else {}
        found = []
        count = body.logprobs
        deadline = time.monotonic() + self.limits.request_timeout

        def steps(ids: Sequence[int]) -> Steps:
            kept: list[TokenLogprob] = []
            for rows in decoder.prompt_logits(ids, self.scheduler.next_chunk_tokens, **more):
                kept += [token_logprob(t, row, count) for t, row in zip(ids[len(kept) + 1 :], rows)]
                yield
            return kept

        for sequence in job.sequences[:: body.num_sampled]:
            with as_http_errors():
                future = self.scheduler.submit_steps(steps(sequence.prompt), client_of(request))
            try:
                found += [await wait_for_result(request, future, deadline)] * (body.n or 1)
            except UserError as error:
                raise HTTPException(400, str(error)) from None
        assert len(found) == num_prompts * (body.n or 1)
        return found

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        given: Any = body.prompt
        prompter = self.served_model(body.model).prompter
        if isinstance(given, str):
            return [prompter.plain(given)]
        if not given:
            raise UserError("prompt: is empty")
        if isinstance(given[0], int):
            return [given]
        return [prompter.plain(p) if isinstance(p, str) else p for p in given]

    async def start(self, body: ChatRequest | CompletionRequest, client: Client) -> tuple[Job, int]:
        """Queue the answers to a request; returns them with the number of prompts. Raises HTTPException."""
        started = time.monotonic()
        try:
            sequences, num_prompts = await self.threads.run(client, self.make_sequences, body)
            with as_http_errors():
                job = Job(sequences, self.scheduler, started + self.limits.request_timeout, client)
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        firsts = sequences[:: len(sequences) // num_prompts]
        self.metrics.prompt_tokens.inc(sum(len(sequence.prompt) for sequence in firsts))
        return job, num_prompts

    async def wait_for_answers(self, request: Request, job: Job) -> None:
        """Wait until all answers of a job have ended. Raises HTTPException, also when the client disconnects."""
        started = time.monotonic()
        task = asyncio.ensure_future(self._consume(job))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=POLL_SECONDS)
                if not task.done() and await request.is_disconnected():
                    task.cancel()
                    raise HTTPException(499, "the client has disconnected")
            task.result()
        finally:
            task.cancel()
        self.metrics.duration.observe(time.monotonic() - started)

    async def _consume(self, job: Job) -> None:
        started = time.monotonic()
        is_first = True
        async for delta in job.deltas():
            if is_first and delta.text:
                self.metrics.first_token.observe(time.monotonic() - started)
                is_first = False


def _prompt_names(body: ChatRequest | CompletionRequest, count: int) -> list[str]:
    """Names of the prompts of a request, for messages."""
    if isinstance(body, ChatRequest):
        return ["messages: the prompt"]
    if count > 1:
        return [f"prompt[{number}]: the prompt" for number in range(count)]
    return ["prompt: the prompt"]


def _mean_logprob(sequence: DecodingSequence) -> float:
    """Mean log-probability of an answer's tokens; minus infinity for an answer without tokens."""
    if not sequence.logprobs:
        return -math.inf
    return sum(token.logprob for token in sequence.logprobs) / len(sequence.logprobs)


def _has_prescribed_form(body: ChatRequest) -> bool:
    """Return True where a schema or a call is the only possible answer."""
    schema = None if body.response_format is None else body.response_format.schema_of_answer
    return schema is not None or body.has_to_call
