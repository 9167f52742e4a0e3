"""The completions of a global batch of prompts, drawn and scored by all ranks that read data.

Every rank draws for some of the prompts and scores what it has drawn; then all have all. Which rank draws for which
prompt changes nothing: a completion is a function of the weights, the prompt and its key.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from llmsuite.data.rows import Message
from llmsuite.errors import AgreedError, UserError
from llmsuite.parallel import collective
from llmsuite.rl.checks import check_length, log_probabilities, shown, token_ids
from llmsuite.rl.completion import Completion
from llmsuite.rl.drawing import Drawing, Drawn, Request, request_key
from llmsuite.rl.engine import Engine, Pending

Score = Callable[[Sequence[Completion]], np.ndarray]
"""Completions of whole groups to their scores, [completions, components] float64, NaN where one is missing."""

_FAILED, _LONGEST_REASON = 2.0, 4096
"""Where scores say whether they are missing: those of a rank whose scoring has failed. And bytes of the reason."""

Draw = Callable[[Sequence[Request], Sequence[Sequence[Drawn]]], None]
"""Draws what is empty so far: the tokens of the completions of each request."""


@dataclasses.dataclass(frozen=True)
class RolloutPrompt:
    """A prompt to complete."""

    ids: tuple[int, ...]
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The other columns of its row."""
    text: str = ""
    messages: Sequence[Message] = ()
    tools: str = ""
    """As in `llmsuite.data.rows.Prompt`, both."""


class DrawnApart(UserError):
    """What draws and what is trained are not the same model."""


class Play(Protocol):
    """Plays episodes, see `llmsuite.rl.episodes.Episodes.play`."""

    def __call__(
        self,
        requests: Sequence[Request],
        prompts: Sequence[RolloutPrompt],
        groups: Sequence[int],
        drawing: Drawing,
        draw: Draw,
        stop_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
    ) -> list[Completion]: ...


@runtime_checkable
class Filling(Protocol):
    """A rollout engine that can draw the turns of episodes."""

    def fill(
        self,
        requests: Sequence[Request],
        groups: Sequence[Sequence[Drawn]],
        drawing: Drawing,
        stop_ids: Collection[int],
    ) -> None:
        """Draw completions that are empty so far, each with random numbers of its own, as many as it may have
        tokens."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """The completions of a global batch."""

    groups: list[list[Completion]]
    """By prompt."""
    scores: np.ndarray
    """[prompts, completions of each, components], float64, NaN where one is missing."""
    version: int = 0
    """Optimizer steps that the weights had which drew them."""


@dataclasses.dataclass(frozen=True)
class Begun:
    """Completions that are being drawn."""

    version: int
    """Optimizer steps of the weights that draw."""
    pending: Pending


class Rollouts:
    """Draws completions with the current weights of the run. Made on every rank that reads data."""

    def __init__(
        self,
        engine: Engine,
        stop_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
        seed: int,
        vocab_size: int,
        on_one: bool = False,
    ):
        """
        Args:
            engine: has the current weights when `draw` or `begin` is called.
            stop_ids: tokens that end a completion.
            decode: token ids to text.
            seed: of the recipe.
            vocab_size: of the model.
            on_one: whether the first rank draws and scores all completions, not each some.
        """
        self._engine, self._stop_ids, self._decode, self._seed = engine, set(stop_ids), decode, seed
        self._vocab_size, self._on_one = vocab_size, on_one
        self._begun: dict[int, Begun] = {}
        """By step."""
        self.version = 0
        """Optimizer steps of the current weights."""
        self.further: Callable[[int], Sequence[Any]] = _nothing_further
        """Gives so many samples that come behind those of the rollout; they are used up then."""
        self.seconds = {"drawing": 0.0, "scoring": 0.0}
        """Time of this rank since the run began."""

    def begin(self, prompts: Sequence[RolloutPrompt], step: int, drawing: Drawing) -> None:
        """Begin to draw completions of a later step with the current weights; `draw` gives them then.

        Args:
            prompts: those that `draw` will be called with.
            step: likewise.
            drawing: likewise.
        """
        assert step not in self._begun, f"step {step} has begun"
        mine = self._own_share(prompts)
        requests = self._requests(prompts, step)
        pending = self._engine.begin([requests[i] for i in mine], drawing, self._stop_ids)
        self._begun[step] = Begun(self.version, pending)

    @property
    def begun(self) -> Mapping[int, Begun]:
        """What has begun, by the step that will learn from it."""
        return self._begun

    def restore(self, begun: Mapping[int, Begun]) -> None:
        """Go on with what had begun."""
        self._begun = dict(begun)

    def draw(
        self,
        prompts: Sequence[RolloutPrompt],
        step: int,
        drawing: Drawing,
        score: Score,
        num_scores: int,
        before: Sequence[RolloutPrompt] = (),
        play: Play | None = None,
    ) -> Scored:
        """Completions of each prompt, the same on every rank.

        Args:
            prompts: the global batch, the same on every rank.
            step: number of the step, 0 for an evaluation: together with seed and prompt it decides the random numbers.
            drawing: how to draw.
            score: called with whole groups that this rank has drawn, in the order of the prompts.
            num_scores: components of a score.
            before: prompts that were drawn before for the same step; groups are numbered behind them.
            play: plays episodes of several turns; None for completions of one.

        Raises:
            UserError: a prompt has no room in the model, logits are not finite, or what was drawn are no completions.
            AgreedError: `score` raises UserError on a rank.
        """
        requests, mine = self._requests(prompts, step, before), self._own_share(prompts)
        began, first, version = time.perf_counter(), len(before), self.version
        if play is None:
            begun = self._begun.pop(step, None)
            if begun is None:
                begun = Begun(version, self._engine.begin([requests[i] for i in mine], drawing, self._stop_ids))
            drawn, version = begun.pending(), begun.version
            counts = [drawing.num_generations] * len(mine)
            _check_drawn(drawn, counts, self._vocab_size, drawing.max_completion_length)
            completions = [
                self._completion(prompts[i], first + i, n, d) for i, of in zip(mine, drawn) for n, d in enumerate(of)
            ]
        else:
            given = [requests[i] for i in mine], [prompts[i] for i in mine], [first + i for i in mine]
            draw = functools.partial(self._fill, drawing=drawing)
            completions = play(*given, drawing, draw, self._stop_ids, self._decode)
        drawn_at = time.perf_counter()
        scores, why = np.full([len(completions), num_scores], np.nan), ""
        try:
            if completions:
                scores = score(completions)
        except UserError as error:  # the others learn of it with the scores
            why = str(error)
        assert scores.shape == (len(completions), num_scores), (scores.shape, len(completions), num_scores)
        self.seconds["drawing"] += drawn_at - began
        self.seconds["scoring"] += time.perf_counter() - drawn_at
        if play is None:
            scored = self._exchanged(prompts, first, drawing.num_generations, completions, scores, why)
        else:
            scored = _exchanged_whole(len(prompts), first, drawing.num_generations, completions, scores, why)
        return dataclasses.replace(scored, version=version)

    def _fill(self, requests: Sequence[Request], groups: Sequence[Sequence[Drawn]], drawing: Drawing) -> None:
        if not isinstance(self._engine, Filling):
            raise UserError("rollout.engine: draws whole completions, not the turns of an environment; set it to local")
        self._engine.fill(requests, groups, drawing, self._stop_ids)
        _check_drawn(groups, [len(group) for group in groups], self._vocab_size, drawing.max_completion_length)

    def _requests(
        self, prompts: Sequence[RolloutPrompt], step: int, before: Sequence[RolloutPrompt] = ()
    ) -> list[Request]:
        """The prompts with the keys of their completions; `before` as in `draw`."""
        seen = collections.Counter(prompt.ids for prompt in before)
        requests = []
        for prompt in prompts:
            requests.append(Request(prompt.ids, request_key(self._seed, step, prompt.ids, seen[prompt.ids])))
            seen[prompt.ids] += 1
        return requests

    def _own_share(self, prompts: Sequence[RolloutPrompt]) -> list[int]:
        """Numbers of the prompts that this rank draws for, ascending: long and short ones for everyone."""
        readers = collective.mesh().readers
        if self._on_one:
            return list(range(len(prompts))) if collective.rank() == readers[0] else []
        by_length = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].ids), i))
        return sorted(by_length[readers.index(collective.rank()) :: len(readers)])

    def _completion(self, prompt: RolloutPrompt, group: int, number: int, drawn: Drawn) -> Completion:
        assert drawn.finish_reason is not None
        return Completion(
            prompt_ids=prompt.ids,
            ids=drawn.ids,
            logprobs=drawn.logprobs,
            finish_reason=drawn.finish_reason,
            text=self._text(drawn.ids, drawn.finish_reason),
            columns=prompt.columns,
            group=group,
            number=number,
            prompt=prompt.text,
        )

    def _text(self, ids: Sequence[int], finish_reason: str) -> str:
        return self._decode(ids[:-1] if finish_reason == "stop" else ids)

    def _exchanged(
        self,
        prompts: Sequence[RolloutPrompt],
        first: int,
        count: int,
        completions: Sequence[Completion],
        scores: np.ndarray,
        why: str,
    ) -> Scored:
        """What all ranks have drawn, groups numbered from `first`: each fills its own part of arrays, which are added
        up. Raises AgreedError where a rank has a reason `why` it could not score."""
        num_scores, total = scores.shape[1], len(prompts) * count
        rows = np.array([(c.group - first) * count + c.number for c in completions], "int64")
        heads = np.zeros([total, 2 + 2 * num_scores])  # length, whether it has ended, scores, which are missing
        heads[rows, 0] = [len(c.ids) for c in completions]
        heads[rows, 1] = [c.finish_reason == "stop" for c in completions]
        heads[rows, 2 : 2 + num_scores] = np.nan_to_num(scores)
        heads[rows, 2 + num_scores :] = _FAILED if why else np.isnan(scores)
        heads = collective.sum_array_over_readers(heads)
        if (heads[:, 2 + num_scores :] == _FAILED).any():
            raise AgreedError(_first_reason(why))
        ends = np.cumsum(heads[:, 0].astype("int64"))
        tokens = np.zeros([2, int(ends[-1])])  # ids, log-probabilities
        for row, completion in zip(rows, completions):
            own = slice(ends[row] - len(completion.ids), ends[row])
            tokens[:, own] = completion.ids, completion.logprobs
        tokens = collective.sum_array_over_readers(tokens)
        found = np.where(heads[:, 2 + num_scores :] > 0, np.nan, heads[:, 2 : 2 + num_scores])
        known = dict(zip(rows.tolist(), completions))
        groups: list[list[Completion]] = []
        for i, prompt in enumerate(prompts):
            groups.append([])
            for number in range(count):
                row = i * count + number
                own = slice(ends[row] - int(heads[row, 0]), ends[row])
                ids, logprobs = tokens[0, own].astype("int64").tolist(), tokens[1, own].tolist()
                drawn = Drawn(np.zeros(0), ids, logprobs, "stop" if heads[row, 1] else "length")
                groups[-1].append(known.get(row) or self._completion(prompt, first + i, number, drawn))
        return Scored(groups, found.reshape(len(prompts), count, num_scores))


def _check_drawn(drawn: Sequence[Sequence[Drawn]], counts: Sequence[int], vocab_size: int, most: int) -> None:
    """Check what an engine has drawn, which may be a plugin's.

    Args:
        drawn: the completions of each prompt.
        counts: how many there have to be of each.
        vocab_size: of the model.
        most: tokens of a completion.

    Raises:
        UserError: they are other completions than were asked for, or have numbers that no model gives.
    """
    try:
        if [len(group) for group in drawn] != list(counts):
            raise ValueError(f"has {[len(group) for group in drawn]} completions of the prompts, not {list(counts)}")
        for i, group in enumerate(drawn):
            for n, found in enumerate(group):
                where = f"completion {n} of prompt {i}"
                found.ids = token_ids(found.ids, vocab_size, f"{where}: ids")
                found.logprobs = log_probabilities(found.logprobs, f"{where}: logprobs")
                check_length(found.ids, found.logprobs, most, where)
                if found.finish_reason not in ("stop", "length"):
                    raise ValueError(f"{where}: finish_reason is {shown(found.finish_reason)}; it is stop or length")
    except ValueError as error:
        raise UserError(f"rollout.engine: its answer is wrong: {error}") from error


def _nothing_further(count: int) -> Sequence[Any]:
    raise AssertionError("an evaluation has its own prompts and no further ones")


def _exchanged_whole(
    num_prompts: int, first: int, count: int, completions: Sequence[Completion], scores: np.ndarray, why: str
) -> Scored:
    """What all ranks have drawn, groups numbered from `first`, where a completion has more to it than its tokens: as
    bytes. Raises AgreedError where a rank has a reason `why` it could not score."""
    rows = [None] * len(scores) if why else scores
    parts = {(c.group - first) * count + c.number: pickle.dumps((c, row)) for c, row in zip(completions, rows)}
    lengths = np.zeros(num_prompts * count)
    for row, part in parts.items():
        lengths[row] = len(part)
    ends = np.cumsum(collective.sum_array_over_readers(lengths)).astype("int64")
    content = np.zeros(int(ends[-1]))
    for row, part in parts.items():
        content[ends[row] - len(part) : ends[row]] = np.frombuffer(part, "uint8")
    whole = collective.sum_array_over_readers(content).astype("uint8")
    found = [pickle.loads(part.tobytes()) for part in np.split(whole, ends[:-1])]
    if any(row is None for _, row in found):
        raise AgreedError(_first_reason(why))
    groups = [[c for c, _ in found[i : i + count]] for i in range(0, len(found), count)]
    return Scored(groups, np.array([row for _, row in found]).reshape(num_prompts, count, -1))


def _first_reason(why: str) -> str:
    """The reason of the first rank that has one, on all that read data."""
    readers, own = collective.mesh().readers, why.encode()[:_LONGEST_REASON]
    content = np.zeros([len(readers), _LONGEST_REASON])
    content[readers.index(collective.rank()), : len(own)] = np.frombuffer(own, "uint8")
    rows = collective.sum_array_over_readers(content).astype("uint8")
    return next(row.tobytes().rstrip(b"\0").decode("utf-8", "replace") for row in rows if row.any())
