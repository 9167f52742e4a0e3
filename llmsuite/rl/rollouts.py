"""Rollouts: the completions of a global batch of prompts, sampled and scored by all data-loading ranks.

Every rank samples and scores the completions of its share of the prompts; then all ranks exchange them. The assignment
of prompts to ranks changes nothing: a completion is a function of the weights, the prompt and its key.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from llmsuite.base.errors import AgreedError, UserError
from llmsuite.data.rows import Message
from llmsuite.inference.group_sampling import SampledCompletion, SampleRequest, SamplingParams, request_key
from llmsuite.parallel import collective
from llmsuite.rl.checks import check_length, log_probabilities, shown, token_ids
from llmsuite.rl.completion import Completion
from llmsuite.rl.engine import Engine, PendingRollout

Score = Callable[[Sequence[Completion]], np.ndarray]
"""Completions of full groups to their scores, [completions, components] float64, NaN where one is missing."""

_FAILED = 2.0
"""The value of "is this score missing" (0 or 1) for a rank whose scoring has failed."""
_MAX_REASON_BYTES = 4096
"""Error messages are truncated to this size when they are exchanged."""

SampleTurns = Callable[[Sequence[SampleRequest], Sequence[Sequence[SampledCompletion]]], None]
"""Samples into the empty completions of each request."""


@dataclasses.dataclass(frozen=True)
class RolloutPrompt:
    """A prompt to complete."""

    ids: tuple[int, ...]
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The other columns of its row."""
    text: str = ""
    messages: Sequence[Message] = ()
    """Turns, the same as in `llmsuite.data.rows.Prompt`."""
    tools: str = ""
    """Functions that the prompt offers, the same as in `llmsuite.data.rows.Prompt`."""
    template_kwargs: str = ""
    """Variables of the chat template, the same as in `llmsuite.data.rows.Prompt`."""


class RolloutMismatch(UserError):
    """The rollout engine and the trainer do not compute the same model."""


class Play(Protocol):
    """Plays episodes: `llmsuite.rl.episodes.Episodes.play`."""

    def __call__(
        self,
        requests: Sequence[SampleRequest],
        prompts: Sequence[RolloutPrompt],
        groups: Sequence[int],
        sampling_params: SamplingParams,
        sample_turns: SampleTurns,
        stop_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
    ) -> list[Completion]: ...


@runtime_checkable
class EpisodeEngine(Protocol):
    """A rollout engine that can sample the turns of episodes."""

    def fill_completions(
        self,
        requests: Sequence[SampleRequest],
        groups: Sequence[Sequence[SampledCompletion]],
        sampling_params: SamplingParams,
        stop_ids: Collection[int],
    ) -> None:
        """Sample into empty completions. Each has its own random numbers, as many as it may have tokens."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """The completions of a global batch with their scores."""

    groups: list[list[Completion]]
    """By prompt."""
    scores: np.ndarray
    """[prompts, completions of each, components], float64, NaN where one is missing."""
    version: int = 0
    """Optimizer steps of the weights that sampled the completions."""


@dataclasses.dataclass(frozen=True)
class InFlightRollout:
    """Completions that are being sampled."""

    version: int
    """Optimizer steps of the weights that sample them."""
    pending: PendingRollout


class Rollouts:
    """Samples completions with the current weights of the run. Made on every data-loading rank."""

    def __init__(
        self,
        engine: Engine,
        stop_ids: Collection[int],
        decode: Callable[[Sequence[int]], str],
        seed: int,
        vocab_size: int,
        on_first_rank: bool = False,
    ):
        """
        Args:
            engine: has the current weights when `sample` or `begin` is called.
            stop_ids: tokens that end a completion.
            decode: token ids to text.
            seed: of the recipe.
            vocab_size: of the model.
            on_first_rank: True where the first rank samples and scores all completions, instead of a share on each.
        """
        self._engine = engine
        self._stop_ids = set(stop_ids)
        self._decode = decode
        self._seed = seed
        self._vocab_size = vocab_size
        self._on_first_rank = on_first_rank
        self._in_flight: dict[int, InFlightRollout] = {}
        """By step."""
        self.version = 0
        """Optimizer steps of the current weights."""
        self.next_samples: Callable[[int], Sequence[Any]] = _no_samples
        """Returns the given number of samples that follow those of the rollout in the data, and consumes them."""
        self.seconds = {"sampling": 0.0, "scoring": 0.0}
        """Time of this rank since the start of the run."""

    def begin(self, prompts: Sequence[RolloutPrompt], step: int, sampling_params: SamplingParams) -> None:
        """Start to sample completions of a later step with the current weights. `sample` returns them at that step.

        Args:
            prompts: those that `sample` will be called with.
            step: the step that `sample` will be called with.
            sampling_params: those that `sample` will be called with.
        """
        assert step not in self._in_flight, f"step {step} is in flight"
        mine = self._own_share(prompts)
        requests = self._requests(prompts, step)
        pending = self._engine.begin([requests[i] for i in mine], sampling_params, self._stop_ids)
        self._in_flight[step] = InFlightRollout(self.version, pending)

    @property
    def in_flight(self) -> Mapping[int, InFlightRollout]:
        """The rollouts that have started, by the step that will train on them."""
        return self._in_flight

    def restore(self, in_flight: Mapping[int, InFlightRollout]) -> None:
        """Continue with in-flight rollouts of a checkpoint."""
        self._in_flight = dict(in_flight)

    def sample(
        self,
        prompts: Sequence[RolloutPrompt],
        step: int,
        sampling_params: SamplingParams,
        score: Score,
        num_scores: int,
        before: Sequence[RolloutPrompt] = (),
        play: Play | None = None,
    ) -> Scored:
        """Completions of each prompt, the same on every rank.

        Args:
            prompts: the global batch, the same on every rank.
            step: number of the step, 0 for an evaluation. With seed and prompt it decides the random numbers.
            sampling_params: of all prompts.
            score: called with the full groups that this rank has sampled, in the order of the prompts.
            num_scores: components of a score.
            before: prompts that were sampled earlier for the same step; group numbers continue after theirs.
            play: plays multi-turn episodes; None for completions of one turn.

        Raises:
            UserError: a prompt has no room in the model, logits are not finite, or the engine returned invalid
                completions.
            AgreedError: `score` raises UserError on a rank.
        """
        requests = self._requests(prompts, step, before)
        mine = self._own_share(prompts)
        start = time.perf_counter()
        first = len(before)
        version = self.version
        if play is None:
            rollout = self._in_flight.pop(step, None)
            if rollout is None:
                pending = self._engine.begin([requests[i] for i in mine], sampling_params, self._stop_ids)
                rollout = InFlightRollout(version, pending)
            sampled = rollout.pending()
            version = rollout.version
            counts = [sampling_params.num_generations] * len(mine)
            _check_sampled(sampled, counts, self._vocab_size, sampling_params.max_completion_length)
            completions = []
            for i, group in zip(mine, sampled):
                completions += [self._completion(prompts[i], first + i, n, d) for n, d in enumerate(group)]
        else:
            own_requests = [requests[i] for i in mine]
            own_prompts = [prompts[i] for i in mine]
            numbers = [first + i for i in mine]
            turns = functools.partial(self._sample_turns, sampling_params=sampling_params)
            completions = play(own_requests, own_prompts, numbers, sampling_params, turns, self._stop_ids, self._decode)
        sampled_at = time.perf_counter()
        scores = np.full([len(completions), num_scores], np.nan)
        why = ""
        try:
            if completions:
                scores = score(completions)
        except UserError as error:  # exchanged with the scores: raised here, it would leave the other ranks waiting
            why = str(error)
        assert scores.shape == (len(completions), num_scores), (scores.shape, len(completions), num_scores)
        self.seconds["sampling"] += sampled_at - start
        self.seconds["scoring"] += time.perf_counter() - sampled_at
        if play is None:
            scored = self._exchange(prompts, first, sampling_params.num_generations, completions, scores, why)
        else:
            scored = _exchange_pickled(len(prompts), first, sampling_params.num_generations, completions, scores, why)
        return dataclasses.replace(scored, version=version)

    def _sample_turns(
        self,
        requests: Sequence[SampleRequest],
        groups: Sequence[Sequence[SampledCompletion]],
        sampling_params: SamplingParams,
    ) -> None:
        if not isinstance(self._engine, EpisodeEngine):
            raise UserError("rollout.engine: samples only single-turn completions, no episodes; set it to local")
        self._engine.fill_completions(requests, groups, sampling_params, self._stop_ids)
        counts = [len(group) for group in groups]
        _check_sampled(groups, counts, self._vocab_size, sampling_params.max_completion_length)

    def _requests(
        self, prompts: Sequence[RolloutPrompt], step: int, before: Sequence[RolloutPrompt] = ()
    ) -> list[SampleRequest]:
        """The prompts with the keys of their completions; `before` as in `sample`."""
        copies = collections.Counter(prompt.ids for prompt in before)
        requests = []
        for prompt in prompts:
            key = request_key(self._seed, step, prompt.ids, copies[prompt.ids])
            requests.append(SampleRequest(prompt.ids, key))
            copies[prompt.ids] += 1
        return requests

    def _own_share(self, prompts: Sequence[RolloutPrompt]) -> list[int]:
        """Indices of this rank's prompts, ascending. Long prompts are dealt out evenly to the ranks."""
        loader_ranks = collective.mesh().loader_ranks
        if self._on_first_rank and collective.rank() != loader_ranks[0]:
            return []
        if self._on_first_rank:
            return list(range(len(prompts)))
        by_length = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].ids), i))
        return sorted(by_length[loader_ranks.index(collective.rank()) :: len(loader_ranks)])

    def _completion(self, prompt: RolloutPrompt, group: int, number: int, sampled: SampledCompletion) -> Completion:
        assert sampled.finish_reason is not None
        return Completion(
            prompt_ids=prompt.ids,
            ids=sampled.ids,
            logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            text=self._text(sampled.ids, sampled.finish_reason),
            columns=prompt.columns,
            group=group,
            number=number,
            prompt=prompt.text,
        )

    def _text(self, ids: Sequence[int], finish_reason: str) -> str:
        return self._decode(ids[:-1] if finish_reason == "stop" else ids)

    def _exchange(
        self,
        prompts: Sequence[RolloutPrompt],
        first: int,
        count: int,
        completions: Sequence[Completion],
        scores: np.ndarray,
        why: str,
    ) -> Scored:
        """The completions and scores of all ranks, as tokens and numbers.

        Args:
            prompts: of all ranks.
            first: number of the first group.
            count: completions of each prompt.
            completions: of this rank.
            scores: of this rank's completions, [completions, components].
            why: the reason if scoring has failed on this rank, else "".

        Raises:
            AgreedError: scoring has failed on a rank.
        """
        num_scores = scores.shape[1]
        total = len(prompts) * count
        rows = np.array([(c.group - first) * count + c.number for c in completions], "int64")
        # completions differ in length, so lengths are exchanged first: each rank fills its own rows of an array of
        # zeros, and the sum over the ranks has all of them
        heads = np.zeros([total, 2 + 2 * num_scores])  # length, 1 if it has a stop token, scores, 1 if one is missing
        heads[rows, 0] = [len(c.ids) for c in completions]
        heads[rows, 1] = [c.finish_reason == "stop" for c in completions]
        heads[rows, 2 : 2 + num_scores] = np.nan_to_num(scores)
        heads[rows, 2 + num_scores :] = _FAILED if why else np.isnan(scores)
        heads = collective.sum_array_over_loader_ranks(heads)
        if (heads[:, 2 + num_scores :] == _FAILED).any():
            raise AgreedError(_first_reason(why))
        ends = np.cumsum(heads[:, 0].astype("int64"))
        # ids and log-probabilities, in float64, which holds an id exactly
        tokens = np.zeros([2, int(ends[-1])])
        for row, completion in zip(rows, completions):
            part = slice(ends[row] - len(completion.ids), ends[row])
            tokens[:, part] = completion.ids, completion.logprobs
        tokens = collective.sum_array_over_loader_ranks(tokens)
        all_scores = np.where(heads[:, 2 + num_scores :] > 0, np.nan, heads[:, 2 : 2 + num_scores])
        own = dict(zip(rows.tolist(), completions))
        groups: list[list[Completion]] = []
        for i, prompt in enumerate(prompts):
            groups.append([])
            for number in range(count):
                row = i * count + number
                part = slice(ends[row] - int(heads[row, 0]), ends[row])
                ids = tokens[0, part].astype("int64").tolist()
                logprobs = tokens[1, part].tolist()
                reason: Literal["stop", "length"] = "stop" if heads[row, 1] else "length"
                sampled = SampledCompletion(np.zeros(0), ids, logprobs, reason)
                groups[-1].append(own.get(row) or self._completion(prompt, first + i, number, sampled))
        return Scored(groups, all_scores.reshape(len(prompts), count, num_scores))


def _check_sampled(
    sampled: Sequence[Sequence[SampledCompletion]], counts: Sequence[int], vocab_size: int, max_length: int
) -> None:
    """Check the completions of an engine, which may be a plugin's.

    Args:
        sampled: the completions of each prompt.
        counts: the required number of completions of each prompt.
        vocab_size: of the model.
        max_length: maximum number of tokens of a completion.

    Raises:
        UserError: they are not the requested completions, or have values that no model produces.
    """
    try:
        if [len(group) for group in sampled] != list(counts):
            raise ValueError(f"has {[len(group) for group in sampled]} completions of the prompts, not {list(counts)}")
        for i, group in enumerate(sampled):
            for n, completion in enumerate(group):
                where = f"completion {n} of prompt {i}"
                completion.ids = token_ids(completion.ids, vocab_size, f"{where}: ids")
                completion.logprobs = log_probabilities(completion.logprobs, f"{where}: logprobs")
                check_length(completion.ids, completion.logprobs, max_length, where)
                reason = completion.finish_reason
                if reason not in ("stop", "length"):
                    raise ValueError(f"{where}: finish_reason is {shown(reason)}; it has to be stop or length")
    except ValueError as error:
        raise UserError(f"rollout.engine: its answer is wrong: {error}") from error


def _no_samples(count: int) -> Sequence[Any]:
    raise AssertionError("an evaluation has its own prompts and no others")


def _exchange_pickled(
    num_prompts: int, first: int, count: int, completions: Sequence[Completion], scores: np.ndarray, why: str
) -> Scored:
    """The completions and scores of all ranks, pickled, as episodes have more than tokens. Arguments as in
    `Rollouts._exchange`. Raises AgreedError when scoring has failed on a rank."""
    rows = [None] * len(scores) if why else scores
    parts = {(c.group - first) * count + c.number: pickle.dumps((c, row)) for c, row in zip(completions, rows)}
    # lengths first, then bytes: each rank fills its own part of an array of zeros, and the sum over the ranks has all
    lengths = np.zeros(num_prompts * count)
    for row, part in parts.items():
        lengths[row] = len(part)
    ends = np.cumsum(collective.sum_array_over_loader_ranks(lengths)).astype("int64")
    content = np.zeros(int(ends[-1]))
    for row, part in parts.items():
        content[ends[row] - len(part) : ends[row]] = np.frombuffer(part, "uint8")
    gathered = collective.sum_array_over_loader_ranks(content).astype("uint8")
    found = [pickle.loads(part.tobytes()) for part in np.split(gathered, ends[:-1])]
    if any(row is None for _, row in found):
        raise AgreedError(_first_reason(why))
    flat = [completion for completion, _ in found]
    groups = [flat[i : i + count] for i in range(0, len(flat), count)]
    return Scored(groups, np.array([row for _, row in found]).reshape(num_prompts, count, -1))


def _first_reason(why: str) -> str:
    """The reason of the first rank that has one, on all data-loading ranks."""
    loader_ranks = collective.mesh().loader_ranks
    own = why.encode()[:_MAX_REASON_BYTES]
    content = np.zeros([len(loader_ranks), _MAX_REASON_BYTES])
    content[loader_ranks.index(collective.rank()), : len(own)] = np.frombuffer(own, "uint8")
    rows = collective.sum_array_over_loader_ranks(content).astype("uint8")
    return next(row.tobytes().rstrip(b"\0").decode("utf-8", "replace") for row in rows if row.any())
