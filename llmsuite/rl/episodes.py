"""Episodes: multi-turn completions, in which an environment responds to each turn of the model.

Token in, token out: the sampled tokens are never tokenized again from text. Between two turns of the model are the
observation tokens of the environment, as the chat template renders them: they are input and masked out of the loss.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from llmsuite.base.redaction import redacted
from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.specs import EnvironmentSpec, RewardSpec, Turn
from llmsuite.data.chat_template import PLACEHOLDER, ChatTemplate
from llmsuite.data.encoding import encode_continuations
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.group_sampling import SampledCompletion, SampleRequest, SamplingParams, uniforms
from llmsuite.rl.completion import Completion
from llmsuite.rl.environments import Begin, Step, StepResult, environment_source
from llmsuite.rl.rollouts import RolloutPrompt, SampleTurns
from llmsuite.rl.worker_pool import Call, Limits, WorkerPool


@dataclasses.dataclass
class Episode:
    """An episode that is being played."""

    request: SampleRequest
    number: int
    """Index in the group of its prompt."""
    prompt: str
    tools: str
    messages: list[Message]
    """All turns so far, with placeholders for those of the model."""
    room: int
    """The maximum number of tokens after the prompt."""
    uniforms: np.ndarray
    """[room]: a random number in [0, 1) for each sampled token."""
    state: bytes
    """The environment, pickled."""
    scores: np.ndarray
    """The environment's reward and its parts, summed over the turns."""
    failure: str = ""
    template_kwargs: str = ""
    """Variables of the chat template, of the row."""
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampled_mask: list[bool] = dataclasses.field(default_factory=list)
    turns: list[Message] = dataclasses.field(default_factory=list)
    done: bool = False
    last: Turn | None = None

    @property
    def has_stopped(self) -> bool:
        """True where the last turn ended with a stop token."""
        return self.last is not None and self.last.finish_reason == "stop"

    @property
    def num_turns(self) -> int:
        """The number of turns of the model."""
        return sum(turn.role == "assistant" for turn in self.turns)

    def next_turn(self, max_length: int | None) -> SampledCompletion:
        """An empty completion for the next turn, of at most `max_length` tokens and the room that is left."""
        first = len(self.logprobs)
        room = self.room - len(self.ids)
        return SampledCompletion(self.uniforms[first : first + min(room, max_length or room)])

    def add_model_turn(self, completion: SampledCompletion, decode: Callable[[Sequence[int]], str]) -> None:
        """Append a sampled turn of the model."""
        assert completion.finish_reason is not None
        has_stop_token = completion.finish_reason == "stop"
        text = decode(completion.ids[:-1] if has_stop_token else completion.ids)
        self.last = Turn(text=text, ids=tuple(completion.ids), finish_reason=completion.finish_reason)
        self.ids += completion.ids
        self.logprobs += completion.logprobs
        self.sampled_mask += [True] * len(completion.ids)
        self.turns.append(Message("assistant", text))
        self.messages.append(Message("assistant", PLACEHOLDER))

    def record_step(self, result: StepResult | None, why: str) -> None:
        """Record the environment's response to the last turn; None, with the error message `why`, where it failed."""
        if result is None:
            self.failure = why
            self.done = True
            return
        self.scores += result.scores
        self.state = result.state
        self.done = result.done

    def observe(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Append messages of the environment, with their tokens."""
        self.ids += ids
        self.sampled_mask += [False] * len(ids)
        self.turns += messages
        self.messages += messages


class Episodes:
    """Plays the episodes of a recipe's environment. Every rank makes one; its processes start when it first plays."""

    def __init__(
        self,
        section: EnvironmentSection,
        registered: Mapping[str, EnvironmentSpec],
        template: ChatTemplate,
        tokenizer: TextTokenizer,
        max_length: int,
    ):
        """
        Args:
            section: of the recipe, which names an environment. Its keys are read here.
            registered: environments by name.
            template: renders the turns.
            tokenizer: of the model.
            max_length: maximum number of tokens of prompt and episode together.
        """
        source = environment_source(section, registered)
        self.parts = source.parts
        self._key = source.key
        self._max_turns = section.max_turns
        self._max_turn_length = section.max_turn_length
        self._template = template
        self._tokenizer = tokenizer
        self._max_length = max_length
        limits = Limits("environment", section.workers, section.time_limit, section.memory_limit)
        self._pool = WorkerPool([source], limits)
        weakref.finalize(self, self._pool.close)
        self._has_warned = False

    def play(
        self,
        requests: Sequence[SampleRequest],
        prompts: Sequence[RolloutPrompt],
        groups: Sequence[int],
        sampling_params: SamplingParams,
        sample_turns: SampleTurns,
        stop_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
    ) -> list[Completion]:
        """Play the episodes of each prompt. Returns them in the order of the prompts.

        Args:
            requests: their keys decide the random numbers of model and environment.
            prompts: rows of the data; the environment makes the prompt of an episode from its row.
            groups: index of each prompt in the global batch.
            sampling_params: `max_completion_length` is that of a full episode.
            sample_turns: samples turns of the model.
            stop_ids: tokens that end a turn.
            decode: token ids to text.

        Raises:
            UserError: the environment cannot be loaded, or the template changes earlier turns or omits a tool.
        """
        started = self._start(requests, prompts, sampling_params)
        playing = [_unfinished(group) for group in started]
        playing = [group for group in playing if group]
        while playing:
            completions = [self._next_turns(group) for group in playing]
            sample_turns([self._request(group) for group in playing], completions)
            flat = list(itertools.chain.from_iterable(playing))
            for episode, turn in zip(flat, itertools.chain.from_iterable(completions)):
                episode.add_model_turn(turn, decode)
            playing = [[episode] for episode in self._step(flat, stop_ids)]
        return [
            _completion(episode, prompt, group, self.parts)
            for prompt, group, episodes in zip(prompts, groups, started)
            for episode in episodes
        ]

    def load(self) -> None:
        """Load the environment now instead of at the first episode. Raises UserError when it cannot be loaded."""
        self._pool.load()

    def close(self) -> None:
        """Stop the processes."""
        self._pool.close()

    def _next_turns(self, episodes: Sequence[Episode]) -> list[SampledCompletion]:
        return [episode.next_turn(self._max_turn_length) for episode in episodes]

    def _request(self, group: Sequence[Episode]) -> SampleRequest:
        """The request for the next turns of a group: episodes with equal tokens so far, or a single episode."""
        first = group[0]
        return SampleRequest((*first.request.prompt_ids, *first.ids), (*first.request.key, first.number))

    def _start(
        self, requests: Sequence[SampleRequest], prompts: Sequence[RolloutPrompt], sampling_params: SamplingParams
    ) -> list[list[Episode]]:
        """The episodes of each prompt, before their first turn.

        Where the environment fails or its prompt is too long, the prompt is that of the row, and the episode has one
        turn, whose reward is missing.
        """
        calls = [Call(0, Begin(_row(prompt), _seed(request))) for request, prompt in zip(requests, prompts)]
        results: list[StepResult | None] = [None] * len(calls)
        whys = [""] * len(calls)
        for number, outcome in self._pool.run(calls):
            results[number] = outcome.values
            whys[number] = outcome.why
        given: list[tuple[Message, ...]] = []
        tools: list[str] = []
        for result, prompt in zip(results, prompts):
            given.append(tuple(prompt.messages) if result is None else result.messages)
            offered = "" if result is None else result.tools
            tools.append(offered or prompt.tools)
        texts = [
            self._template.prompt(messages, offered, prompt.template_kwargs)
            for messages, offered, prompt in zip(given, tools, prompts)
        ]
        groups = []
        for i, ids in enumerate(self._tokenizer.encode_batch(texts)):
            result = results[i]
            request = requests[i]
            text = texts[i]
            room = min(sampling_params.max_completion_length, self._max_length - len(ids))
            if result is not None and (room < 1 or not ids):
                whys[i] = f"its prompt has {len(ids)} tokens, and data.max_length is {self._max_length}"
                result = None
            if result is None:
                self._warn(whys[i])
                text = prompts[i].text
                ids = list(prompts[i].ids)
                room = sampling_params.max_completion_length
            base = dataclasses.replace(request, prompt_ids=tuple(ids))
            state = b"" if result is None else result.state
            group = []
            for number in range(sampling_params.num_generations):
                random_numbers = uniforms(request.key, number, room)
                scores = np.zeros(1 + len(self.parts))
                group.append(
                    Episode(
                        base,
                        number,
                        text,
                        tools[i],
                        list(given[i]),
                        room,
                        random_numbers,
                        state,
                        scores,
                        whys[i],
                        prompts[i].template_kwargs,
                    )
                )
            groups.append(group)
        return groups

    def _step(self, episodes: Sequence[Episode], stop_ids: Collection[int]) -> list[Episode]:
        """Pass the last turn of each episode to its environment. Returns the episodes that continue."""
        active = [episode for episode in episodes if not episode.failure]
        results: list[StepResult | None] = [None] * len(active)
        calls = [Call(0, Step(e.state, e.last)) for e in active if e.last is not None]
        assert len(calls) == len(active)
        for number, outcome in self._pool.run(calls):
            results[number] = outcome.values
            active[number].record_step(outcome.values, outcome.why)
            if outcome.values is None:
                self._warn(outcome.why)
        continuing = [
            (episode, result.messages)
            for episode, result in zip(active, results)
            if result is not None and not episode.done and episode.num_turns < self._max_turns
        ]
        texts = [
            self._template.continuation(e.messages, messages, e.tools, e.template_kwargs) for e, messages in continuing
        ]
        remaining = []
        for (episode, messages), ids in zip(continuing, encode_continuations(texts, self._tokenizer)):
            # the template closes the turn of the model, which has sampled its stop token itself unless it is truncated
            closes = bool(ids) and ids[0] in stop_ids and episode.has_stopped
            observation = ids[closes:]
            if len(episode.ids) + len(observation) < episode.room:
                episode.observe(messages, observation)
                remaining.append(episode)
        return remaining

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            print(redacted(f"warning: an environment failed: {self._key}: {why}"), file=sys.stderr, flush=True)
        self._has_warned = True


def _unfinished(episodes: Sequence[Episode]) -> list[Episode]:
    return [episode for episode in episodes if not episode.done]


def _row(prompt: RolloutPrompt) -> dict[str, object]:
    """The row of a prompt, as environments receive it."""
    return {**prompt.columns, "messages": [message.as_turn() for message in prompt.messages]}


def _seed(request: SampleRequest) -> int:
    """The seed of an episode's environment, 63 bits."""
    digest = hashlib.sha256(b"environment" + np.asarray(request.key, "uint64").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _completion(episode: Episode, prompt: RolloutPrompt, group: int, parts: Sequence[str]) -> Completion:
    assert episode.last is not None
    ended = episode.done and not episode.failure and episode.has_stopped
    scores = None
    if not episode.failure:
        scores = dict(zip(("score", *parts), episode.scores.tolist()))
    return Completion(
        prompt_ids=episode.request.prompt_ids,
        ids=tuple(episode.ids),
        logprobs=tuple(episode.logprobs),
        finish_reason="stop" if ended else "length",
        text=episode.last.text,
        columns=prompt.columns,
        group=group,
        number=episode.number,
        prompt=episode.prompt,
        sampled_mask=tuple(episode.sampled_mask),
        turns=tuple(episode.turns),
        episode_scores=scores,
        failure=episode.failure,
    )


def with_parts(rewards: Mapping[str, RewardSpec], episodes: Episodes | None) -> dict[str, RewardSpec]:
    """The registered rewards; the reward `environment` has the parts of the environment."""
    parts = () if episodes is None else episodes.parts
    return {
        name: dataclasses.replace(spec, parts=parts) if name == "environment" else spec
        for name, spec in rewards.items()
    }
