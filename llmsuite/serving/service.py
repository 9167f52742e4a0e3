"""From a request to its answers: what is asked is checked, queued, and followed until it is done."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel

from llmsuite.data.rows import ToolCall
from llmsuite.errors import UserError
from llmsuite.inference.batch import Line, TokenLogprob, check_room, token_logprob
from llmsuite.inference.generate import Generator
from llmsuite.inference.guided import Guide
from llmsuite.inference.prompts import Prompter, read_messages, tool_names
from llmsuite.inference.sampling import Sampling
from llmsuite.inference.shared_prefixes import SharedPrefixes
from llmsuite.serving import protocol
from llmsuite.serving.bodies import AT_ONCE, Kinds, validated
from llmsuite.serving.jobs import PATIENCE, Job, refusals, waited
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.protocol import ChatRequest, CompletionRequest
from llmsuite.serving.scheduler import Scheduler, Steps
from llmsuite.serving.threads import Threads
from llmsuite.serving.turns import Client, client_of

R = TypeVar("R", ChatRequest, CompletionRequest)
B = TypeVar("B", bound=BaseModel)


@dataclasses.dataclass(frozen=True)
class Speaker:
    """How answers of a model, or of one of its adapters, are asked for and read: by its own tokenizer and template."""

    generator: Generator
    prompter: Prompter


class Service:
    """A model that is served: requests are checked here, and become lines of the scheduler."""

    def __init__(self, generator: Generator, prompter: Prompter, name: str, limits: Limits, metrics: Metrics):
        """`prompter` has the model's chat template; `name` is what clients call the model, without an adapter of its
        decoder: these have names of their own."""
        self.generator, self.prompter, self.name, self.limits, self.metrics = generator, prompter, name, limits, metrics
        prefixes = SharedPrefixes(limits.prefix_cache_mb * 1_000_000) if limits.prefix_cache_mb else None
        self.scheduler = Scheduler(generator.decoder, metrics, limits, prefixes)
        self.threads = Threads()
        """Where it does what would keep the loop from answering others."""
        self.adapters: tuple[str, ...] = getattr(generator.decoder, "adapters", ())
        self.speakers: Mapping[str, Speaker] = {}
        """Speakers of adapters that bring a tokenizer or template, by their names."""
        self.aliases: tuple[str, ...] = ()
        """Further names of the model."""
        self.marks: Callable[[], dict[str, Any]] = dict
        """What every answer names beside the model, such as the version of its weights."""
        self.defaults = Sampling(temperature=1.0)
        """Parameters of sampling that a request does not set; the temperature is OpenAI's."""
        self.leaves_out_tools = False
        """Whether chats are answered without the tools that they may call, as of a model that knows none."""

    def speaker(self, model: str | None) -> Speaker:
        """That of the model a request names; None for the first."""
        return self.speakers.get(model or self.name) or Speaker(self.generator, self.prompter)

    async def body(self, request: Request, kind: type[B]) -> B:
        """The body of a request. Raises HTTPException saying what is wrong with it."""
        return await self.body_of(request, lambda content: kind)

    async def body_of(self, request: Request, kinds: Kinds[B]) -> B:
        """As `body`, where the model of a body depends on its content."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body has to be application/json")
        given = await request.body(), kinds, self.generator.decoder.max_length
        if len(given[0]) <= AT_ONCE:
            asked = validated(*given)
        else:
            asked = await self.threads.run(client_of(request), validated, *given)
        self.check_model(getattr(asked, "model", None))
        return asked

    def check_model(self, name: str | None) -> None:
        """Raises HTTPException for a name of no model that is served; None is the first."""
        names = (self.name, *self.aliases, *self.adapters)
        if name is not None and name not in names:
            raise HTTPException(
                404, f"model {name[:100]!r} is not served here; this is {' and '.join(map(repr, names))}"
            )

    def lines(self, asked: ChatRequest | CompletionRequest) -> tuple[list[Line], int]:
        """The answers to be made, and the number of prompts. Raises UserError."""
        option, wanted, num_logprobs = "max_tokens", asked.max_tokens, None
        if isinstance(asked, ChatRequest):
            prompts = [self.conversation(asked)]
            if asked.max_completion_tokens is not None:
                option, wanted = "max_completion_tokens", asked.max_completion_tokens
            if asked.max_tokens not in (None, wanted):
                raise UserError(f"max_tokens: is {asked.max_tokens}, and {option} is {wanted}; give one of them")
            if asked.logprobs:
                num_logprobs = asked.top_logprobs or 0
            elif asked.top_logprobs:
                raise UserError("top_logprobs: only with logprobs: true")
        else:
            prompts, num_logprobs = self._prompts(asked), asked.logprobs
            self._check_completion(asked)
            wanted = 16 if wanted is None else wanted  # as OpenAI has it
            if asked.num_drawn > (asked.n or 1):
                num_logprobs = num_logprobs or 0
        count = asked.num_drawn
        if len(prompts) * count > protocol.MAX_LINES:
            raise UserError(f"prompt: {len(prompts) * count} answers are more than {protocol.MAX_LINES} a request")
        self._check_biases(asked)
        guide, speaker = self._guide(asked), self.speaker(asked.model)
        adapter = [asked.model] if asked.model in self.adapters else []
        lines = []
        if wanted is not None and wanted > self.limits.max_new_tokens:
            raise UserError(f"{option}: is {wanted}; this server gives at most {self.limits.max_new_tokens}")
        for prompt, what in zip(prompts, self._described(asked, len(prompts))):
            room = max(1, min(self.limits.max_new_tokens, self.generator.decoder.max_length - len(prompt)))
            most = room if wanted is None else wanted
            check_room(prompt, most, self.generator.decoder, what, option)
            if asked.min_tokens > most:
                raise UserError(f"min_tokens: is {asked.min_tokens}; an answer has at most {most} tokens ({option})")
            sampling = asked.sampling(most, num_logprobs, self.defaults)
            guides = [guide.copy() if guide is not None else None for _ in range(count)]
            lines += [speaker.generator.line(prompt, sampling, n, own, *adapter) for n, own in enumerate(guides)]
        return lines, len(prompts)

    def _described(self, asked: ChatRequest | CompletionRequest, count: int) -> list[str]:
        """What the prompts of a request are called, where one of them is wrong."""
        if isinstance(asked, ChatRequest):
            return ["messages: the prompt"]
        return [f"prompt[{number}]: the prompt" for number in range(count)] if count > 1 else ["prompt: the prompt"]

    def conversation(self, asked: ChatRequest) -> list[int]:
        """The ids of a chat, with the beginning of its answer. Tools that are left out are taken from the request.

        Raises:
            UserError: the template refuses the chat, or has no form for calls.
        """
        if self.leaves_out_tools and not asked.has_to_call:
            asked.tools = asked.tool_choice = None
        tools, prompter = asked.tools_as_text, self.speaker(asked.model).prompter
        ids = prompter.turns(read_messages(asked.messages), tools)
        if tools:
            prompter.calls  # noqa: B018  (the model has to have a form for them)
        return ids

    def _check_completion(self, asked: CompletionRequest) -> None:
        """Raises UserError for values that contradict each other, or that this model has no answer to."""
        if asked.max_tokens == 0 and (asked.stream or not asked.echo):
            raise UserError("max_tokens: 0 is for prompts that are echoed, and not with stream")
        if asked.logprobs is not None and asked.echo and asked.stream:
            raise UserError("echo: not with logprobs in a stream")
        if asked.logprobs is not None and asked.echo and not hasattr(self.generator.decoder, "prompt_logits"):
            raise UserError("echo: not with logprobs and --engine static, whose programs give those of answers only")
        if asked.stream and (asked.best_of or 1) > (asked.n or 1):
            raise UserError("best_of: not with stream, as the best answer is known at the end only")
        if asked.best_of is not None and asked.best_of < (asked.n or 1):
            raise UserError(f"best_of: is {asked.best_of}; it has to be at least n, {asked.n}")

    def _guide(self, asked: ChatRequest | CompletionRequest) -> Guide | None:
        """The grammar that answers have to follow. Raises UserError."""
        if isinstance(asked, CompletionRequest):
            return None
        speaker = self.speaker(asked.model)
        schema = asked.response_format.schema_of_answer if asked.response_format is not None else None
        if (schema is not None or asked.has_to_call) and asked.min_tokens:
            raise UserError(
                "min_tokens: not with response_format or a tool_choice that ends the answer where it is whole"
            )
        if not asked.has_to_call:
            if asked.tools_as_text and any(tool.function.strict for tool in asked.tools or ()):
                calls = speaker.prompter.calls
                return speaker.generator.grammars.of_text_or_calls(calls, asked.callable_tools, schema)
            return None if schema is None else speaker.generator.grammars.of_schema(schema, "response_format")
        if schema is not None:
            raise UserError("response_format: not with a tool_choice that asks for a call")
        if not asked.callable_tools:
            raise UserError("tool_choice: asks for a call of a tool that is not in tools")
        several = asked.tool_choice == "required" and asked.parallel_tool_calls is not False
        return speaker.generator.grammars.of_calls(speaker.prompter.calls, asked.callable_tools, several)

    def _check_biases(self, asked: ChatRequest | CompletionRequest) -> None:
        size = self.generator.decoder.vocab_size
        if wrong := [token for token in asked.logit_bias or () if int(token) >= size]:
            raise UserError(f"logit_bias: has token {wrong[0]}; the model's end at {size - 1}")

    def calls(self, asked: ChatRequest, text: str) -> tuple[str, list[ToolCall]]:
        """What an answer says, and the tools it calls; one at most without `parallel_tool_calls`."""
        tools = asked.tools_as_text
        if not tools:
            return text, []
        said, found = self.speaker(asked.model).prompter.calls.parse(text, tool_names(tools))
        return said, found[:1] if asked.parallel_tool_calls is False else found

    def chosen(self, asked: ChatRequest | CompletionRequest, job: Job, num_prompts: int) -> list[Line]:
        """The answers that are given, of those that were made: the `n` with the highest mean log-probability of a token
        to each prompt."""
        made, given = asked.num_drawn, asked.n or 1
        if made == given:
            return list(job.lines)
        found = []
        for i in range(num_prompts):
            of_prompt = job.lines[i * made : (i + 1) * made]
            found += sorted(of_prompt, key=_mean_logprob, reverse=True)[:given]
        return found

    def echoed(self, asked: ChatRequest | CompletionRequest) -> list[str]:
        """The text in front of each answer that is given."""
        given = asked.n or 1
        if isinstance(asked, ChatRequest) or not asked.echo:
            return []
        prompts: Any = asked.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        tokenizer = self.speaker(asked.model).generator.tokenizer
        texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        return [text for text in texts for _ in range(given)]

    async def prompt_logprobs(
        self, request: Request, asked: ChatRequest | CompletionRequest, job: Job, num_prompts: int
    ) -> list[list[TokenLogprob]]:
        """Log-probabilities of the tokens of each prompt but the first, for each answer that is given; none where they
        are not asked for. Raises HTTPException."""
        if isinstance(asked, ChatRequest) or not asked.echo or asked.logprobs is None:
            return []
        decoder: Any = self.generator.decoder
        more = {"adapter": asked.model} if asked.model in self.adapters else {}
        found, count, deadline = [], asked.logprobs, time.monotonic() + self.limits.request_timeout

        def steps(ids: Sequence[int]) -> Steps:
            kept: list[TokenLogprob] = []
            for rows in decoder.prompt_logits(ids, self.limits.prompt_piece, **more):
                kept += [token_logprob(t, row, count) for t, row in zip(ids[len(kept) + 1 :], rows)]
                yield
            return kept

        for line in job.lines[:: asked.num_drawn]:
            with refusals():
                made = self.scheduler.make(steps(line.prompt), client_of(request))
            try:
                found += [await waited(request, made, deadline)] * (asked.n or 1)
            except UserError as error:
                raise HTTPException(400, str(error)) from None
        assert len(found) == num_prompts * (asked.n or 1)
        return found

    def _prompts(self, asked: CompletionRequest) -> list[list[int]]:
        given: Any = asked.prompt
        prompter = self.speaker(asked.model).prompter
        if isinstance(given, str):
            return [prompter.plain(given)]
        if not given:
            raise UserError("prompt: is empty")
        if isinstance(given[0], int):
            return [given]
        return [prompter.plain(p) if isinstance(p, str) else p for p in given]

    async def start(self, asked: ChatRequest | CompletionRequest, client: Client) -> tuple[Job, int]:
        """Queue the answers to a client, and return them with the number of prompts. Raises HTTPException."""
        begun = time.monotonic()
        try:
            lines, num_prompts = await self.threads.run(client, self.lines, asked)
            with refusals():
                job = Job(lines, self.scheduler, begun + self.limits.request_timeout, client)
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        self.metrics.prompt_tokens.inc(sum(len(line.prompt) for line in lines[:: len(lines) // num_prompts]))
        return job, num_prompts

    async def whole(self, request: Request, job: Job) -> None:
        """Wait for the whole answers; give up when the client does."""
        begun, task = time.monotonic(), asyncio.ensure_future(self._all(job))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=PATIENCE)
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


def _mean_logprob(line: Line) -> float:
    """The mean over an answer's tokens; the least of all for one without any."""
    return sum(kept.logprob for kept in line.logprobs) / len(line.logprobs) if line.logprobs else -math.inf
