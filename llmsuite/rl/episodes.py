"""Episodes: completions of several turns, between which an environment answers.

Token in, token out: what the model wrote is never made of text again. Between two of its turns stand the tokens of what
the environment says, as the chat template writes it: they are read, and nothing is learnt from them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from llmsuite.data.chat_template import PLACEHOLDER, ChatTemplate
from llmsuite.data.encoding import encode_continuations
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.rl.completion import Completion
from llmsuite.rl.drawing import Drawing, Drawn, Request, uniforms
from llmsuite.rl.environments import Answer, Begin, Step, environment_source
from llmsuite.rl.rollouts import Draw, RolloutPrompt
from llmsuite.rl.worker_pool import Call, Limits, WorkerPool
from llmsuite.schema.environment import EnvironmentSection
from llmsuite.shown import redacted
from llmsuite.specs import EnvironmentSpec, RewardSpec, Turn


@dataclasses.dataclass
class Episode:
    """An episode under way."""

    request: Request
    number: int
    prompt: str
    tools: str
    messages: list[Message]
    """All turns so far, with placeholders for those of the model."""
    room: int
    """Tokens that prompt and episode may have together, less the prompt's."""
    uniforms: np.ndarray
    state: bytes
    scores: np.ndarray
    """The environment's reward and its parts, added up over the turns."""
    failure: str = ""
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    is_own: list[bool] = dataclasses.field(default_factory=list)
    turns: list[Message] = dataclasses.field(default_factory=list)
    done: bool = False
    last: Turn | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether the last turn ended by itself."""
        return self.last is not None and self.last.finish_reason == "stop"

    @property
    def num_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)

    def next_turn(self, longest: int | None) -> Drawn:
        """What the next turn is drawn into, of so many tokens at most."""
        first, left = len(self.logprobs), self.room - len(self.ids)
        return Drawn(self.uniforms[first : first + min(left, longest or left)])

    def take(self, drawn: Drawn, decode: Callable[[Sequence[int]], str]) -> None:
        """Append what the model has written."""
        assert drawn.finish_reason is not None
        text = decode(drawn.ids[:-1] if drawn.finish_reason == "stop" else drawn.ids)
        self.last = Turn(text=text, ids=tuple(drawn.ids), finish_reason=drawn.finish_reason)
        self.ids += drawn.ids
        self.logprobs += drawn.logprobs
        self.is_own += [True] * len(drawn.ids)
        self.turns.append(Message("assistant", text))
        self.messages.append(Message("assistant", PLACEHOLDER))

    def hear(self, answer: Answer | None, why: str) -> None:
        """Take the answer of the environment; None where there is none."""
        if answer is None:
            self.failure, self.done = why, True
            return
        self.scores += answer.scores
        self.state, self.done = answer.state, answer.done

    def read(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Append what the environment has said."""
        self.ids += ids
        self.is_own += [False] * len(ids)
        self.turns += messages
        self.messages += messages


class Episodes:
    """Plays the episodes of a recipe's environment. Every rank makes one; processes are started when it plays."""

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
            template: writes the turns.
            tokenizer: of the model.
            max_length: tokens of prompt and episode together.
        """
        source = environment_source(section, registered)
        self.parts, self._key, self._max_turns = source.parts, source.key, section.max_turns
        self._max_turn_length = section.max_turn_length
        self._template, self._tokenizer, self._max_length = template, tokenizer, max_length
        limits = Limits("environment", section.workers, section.time_limit, section.memory_limit)
        self._pool = WorkerPool([source], limits)
        weakref.finalize(self, self._pool.close)
        self._has_warned = False

    def play(
        self,
        requests: Sequence[Request],
        prompts: Sequence[RolloutPrompt],
        groups: Sequence[int],
        drawing: Drawing,
        draw: Draw,
        stop_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
    ) -> list[Completion]:
        """The episodes of each prompt, in the order of the prompts.

        Args:
            requests: their keys decide the random numbers of model and environment.
            prompts: the rows, as they are in the file; the environment makes the prompt of the episode from each.
            groups: number of each prompt in the global batch.
            drawing: how to draw; the greatest length is that of a whole episode.
            draw: draws turns.
            stop_ids: tokens that end a turn.
            decode: token ids to text.

        Raises:
            UserError: the environment cannot be loaded, or the template does not keep what was written, or leaves out
                a tool.
        """
        begun = self._begun(requests, prompts, drawing)
        playing = [[e for e in group if not e.done] for group in begun]
        playing = [group for group in playing if group]
        while playing:
            drawn = [[episode.next_turn(self._max_turn_length) for episode in group] for group in playing]
            draw([self._request(group) for group in playing], drawn)
            flat = [episode for group in playing for episode in group]
            for episode, turn in zip(flat, (turn for group in drawn for turn in group)):
                episode.take(turn, decode)
            playing = [[episode] for episode in self._answered(flat, stop_ids)]
        return [
            _completion(episode, prompt, group, self.parts)
            for prompt, group, episodes in zip(prompts, groups, begun)
            for episode in episodes
        ]

    def load(self) -> None:
        """Load the environment; else that is done when the first episode begins. Raises UserError when it cannot be
        loaded."""
        self._pool.load()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _request(self, group: Sequence[Episode]) -> Request:
        """What the next turns of episodes go on from that are alike so far, or of one alone."""
        first = group[0]
        return Request((*first.request.prompt_ids, *first.ids), (*first.request.key, first.number))

    def _begun(
        self, requests: Sequence[Request], prompts: Sequence[RolloutPrompt], drawing: Drawing
    ) -> list[list[Episode]]:
        """The episodes before their first turn. Where the environment gives no prompt that has room, they have that of
        the row, and one turn, whose reward is missing."""
        calls = [Call(0, Begin(_row(prompt), _seed(request))) for request, prompt in zip(requests, prompts)]
        answers, whys = [None] * len(calls), [""] * len(calls)  # type: list[Answer | None], list[str]
        for number, outcome in self._pool.run(calls):
            answers[number], whys[number] = outcome.values, outcome.why
        given = [tuple(prompt.messages) if a is None else a.messages for a, prompt in zip(answers, prompts)]
        tools = [prompt.tools if a is None else a.tools or prompt.tools for a, prompt in zip(answers, prompts)]
        texts = [self._template.prompt(messages, offered) for messages, offered in zip(given, tools)]
        groups = []
        for i, ids in enumerate(self._tokenizer.encode_batch(texts)):
            answer, request, text = answers[i], requests[i], texts[i]
            room = min(drawing.max_completion_length, self._max_length - len(ids))
            if answer is not None and (room < 1 or not ids):
                whys[i] = f"its prompt has {len(ids)} tokens, and data.max_length is {self._max_length}"
                answer = None
            if answer is None:
                self._warn(whys[i])
                text, ids, room = prompts[i].text, list(prompts[i].ids), drawing.max_completion_length
            base = dataclasses.replace(request, prompt_ids=tuple(ids))
            groups.append([
                Episode(
                    base, number, text, tools[i], list(given[i]), room, uniforms(request.key, number, room),
                    b"" if answer is None else answer.state, np.zeros(1 + len(self.parts)), whys[i],
                )
                for number in range(drawing.num_generations)
            ])  # fmt: skip
        return groups

    def _answered(self, episodes: Sequence[Episode], stop_ids: Collection[int]) -> list[Episode]:
        """Let the environment answer; returns the episodes that go on."""
        asked = [episode for episode in episodes if not episode.failure]
        heard: list[Answer | None] = [None] * len(asked)
        calls = [Call(0, Step(e.state, e.last)) for e in asked if e.last is not None]
        assert len(calls) == len(asked)
        for number, outcome in self._pool.run(calls):
            heard[number] = outcome.values
            asked[number].hear(outcome.values, outcome.why)
            if outcome.values is None:
                self._warn(outcome.why)
        going = [
            (episode, answer.messages)
            for episode, answer in zip(asked, heard)
            if answer is not None and not episode.done and episode.num_turns < self._max_turns
        ]
        texts = [self._template.continuation(e.messages, messages, e.tools) for e, messages in going]
        left = []
        for (episode, messages), ids in zip(going, encode_continuations(texts, self._tokenizer)):
            # the model has written the end of its turn itself, unless that is truncated
            closes = bool(ids) and ids[0] in stop_ids and episode.has_stopped
            seen = ids[closes:]
            if len(episode.ids) + len(seen) < episode.room:
                episode.read(messages, seen)
                left.append(episode)
        return left

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            print(redacted(f"warning: an environment failed: {self._key}: {why}"), file=sys.stderr, flush=True)
        self._has_warned = True


def _row(prompt: RolloutPrompt) -> dict[str, object]:
    """A row as environments see it."""
    return {**prompt.columns, "messages": [message.as_turn() for message in prompt.messages]}


def _seed(request: Request) -> int:
    """The seed of an episode's environment, 63 bits."""
    digest = hashlib.sha256(b"environment" + np.asarray(request.key, "uint64").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _completion(episode: Episode, prompt: RolloutPrompt, group: int, parts: Sequence[str]) -> Completion:
    assert episode.last is not None
    ended = episode.done and not episode.failure and episode.has_stopped
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
        is_own=tuple(episode.is_own),
        turns=tuple(episode.turns),
        episode_scores=None if episode.failure else dict(zip(("score", *parts), episode.scores.tolist())),
        failure=episode.failure,
    )


def with_parts(rewards: Mapping[str, RewardSpec], episodes: Episodes | None) -> dict[str, RewardSpec]:
    """The registered rewards, of which `environment` has the parts that the environment gives."""
    parts = () if episodes is None else episodes.parts
    return {
        name: dataclasses.replace(spec, parts=parts) if name == "environment" else spec
        for name, spec in rewards.items()
    }
