"""Batched sampling of several completions for each prompt, with one prefill per prompt.

Completions leave the batch as they end, and those of other prompts join it (continuous batching). The tokens of a
completion are a function of the weights, the prompt and its own random numbers: the rest of the batch changes them by
rounding only.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from llmsuite.inference.batch import Batch, BatchSequence, Compaction
from llmsuite.inference.decoder import Decoder
from llmsuite.inference.sampling import sample_by_uniform


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The parameters with which completions are sampled."""

    num_generations: int
    """Completions of each prompt."""
    max_completion_length: int
    """Tokens, the stop token included."""
    temperature: float
    """Logits are divided by it; 0 for greedy decoding."""
    batch_size: int
    """Completions that are decoded together; more where one prompt has more completions."""
    top_k: int = 0
    """Only the k most likely tokens are sampled; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability are sampled."""


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """A prompt, with the key of the random numbers of its completions."""

    prompt_ids: tuple[int, ...]
    key: tuple[int, ...]
    """Decides the random numbers, together with the index of a completion in its group."""


@dataclasses.dataclass
class SampledCompletion:
    """The tokens of one completion, filled in while it is sampled."""

    uniforms: np.ndarray
    """[max_completion_length], float64: a random number in [0, 1) for each token."""
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    """Log-probability of each token in the full distribution at the temperature, whatever `top_k` and `top_p` are."""
    finish_reason: Literal["stop", "length"] | None = None


def request_key(seed: int, step: int, prompt_ids: Sequence[int], occurrence: int = 0) -> tuple[int, ...]:
    """The key of the random numbers of a prompt's completions at a step.

    Args:
        seed: of the recipe.
        step: the training step of the completions.
        prompt_ids: of the prompt.
        occurrence: the number of earlier copies of the same prompt in the global batch.
    """
    digest = hashlib.sha256(np.asarray(prompt_ids, "int64").tobytes()).digest()
    return (seed, step, *(int(word) for word in np.frombuffer(digest[:16], "uint32")), occurrence)


def uniforms(key: Sequence[int], number: int, count: int) -> np.ndarray:
    """Random numbers in [0, 1) of the `number`-th completion, [count] float64; a smaller count is a prefix of a
    larger."""
    entropy = hashlib.sha256(np.asarray([*key, number], "uint64").tobytes()).digest()
    # raw words, not `Generator.random`: NumPy promises only that the raw stream never changes, and a resumed run has to
    # sample the same completions
    words = np.random.Philox(key=np.frombuffer(entropy[:16], "uint64")).random_raw(count)
    # the upper 53 bits, the precision of float64, as numbers below 1
    return (words >> np.uint64(11)).astype("float64") * 2.0**-53


def sample_groups(
    decoder: Decoder, requests: Sequence[SampleRequest], sampling_params: SamplingParams, stop_ids: Collection[int]
) -> list[list[SampledCompletion]]:
    """Sample `num_generations` completions for each request; longer prompts are started first.

    Args:
        decoder: the model.
        requests: prompts, each with room in the model for a completion of the maximum length.
        sampling_params: of all requests.
        stop_ids: tokens that end a completion; its ids include them.

    Returns:
        The completions of each request, in the order of the requests.

    Raises:
        UserError: the model's logits are not finite.
    """
    length = sampling_params.max_completion_length
    groups = []
    for request in requests:
        numbers = range(sampling_params.num_generations)
        groups.append([SampledCompletion(uniforms(request.key, number, length)) for number in numbers])
    fill_completions(decoder, requests, groups, sampling_params, stop_ids)
    return groups


def fill_completions(
    decoder: Decoder,
    requests: Sequence[SampleRequest],
    groups: Sequence[Sequence[SampledCompletion]],
    sampling_params: SamplingParams,
    stop_ids: Collection[int],
) -> None:
    """Sample into completions that are empty so far.

    Each completion brings its own random numbers, as many as it may have tokens; otherwise as `sample_groups`.
    """
    largest_group = max(map(len, groups), default=1)
    batch = Batch(decoder, compaction=_COMPACTION)
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), requests[i].key))
    waiting = collections.deque(order)
    min_room = max(1, sampling_params.batch_size // _REFILLS)
    while waiting or batch.sequences:
        room = sampling_params.batch_size - len(batch.sequences)
        if waiting and (not batch.sequences or room >= max(min_room, largest_group)):
            count = max(1, room // largest_group)
            new = []
            for _ in range(min(count, len(waiting))):
                number = waiting.popleft()
                ids = requests[number].prompt_ids
                new.append([_RolloutSequence(ids, one, sampling_params, stop_ids) for one in groups[number]])
            batch.start(new)
        else:
            batch.advance()


_REFILLS = 4
"""Prompts join when 1 / `_REFILLS` of the batch is free: the KV cache is copied each time."""
_COMPACTION = Compaction(min_ended=1 / 8, min_padding=1 / 4)


class _RolloutSequence(BatchSequence):
    """A completion that is being sampled by its own random numbers.

    It is decoded on one rank, or on each by itself: ranks that decode the same batch would have to agree on tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        completion: SampledCompletion,
        sampling_params: SamplingParams,
        stop_ids: Collection[int],
    ):
        """
        Args:
            prompt: token ids.
            completion: is filled in; empty so far.
            sampling_params: temperature, top_k, top_p.
            stop_ids: tokens that end the completion; its ids include them.
        """
        super().__init__(prompt)
        self._completion = completion
        self._sampling_params = sampling_params
        self._stop_ids = stop_ids
        self._logprob = 0.0
        """Log-probability of the sampled token."""

    def sample(self, logits: np.ndarray) -> int:
        """Sample the next token, and keep its log-probability. logits: [V] float32."""
        uniform = self._completion.uniforms[len(self._completion.ids)]
        params = self._sampling_params
        token, self._logprob = sample_by_uniform(logits, params.temperature, uniform, params.top_k, params.top_p)
        return token

    def append(self, token: int, logits: np.ndarray) -> str:
        """Append the sampled token; a completion releases no text."""
        completion = self._completion
        completion.ids.append(token)
        completion.logprobs.append(self._logprob)
        if token in self._stop_ids:
            completion.finish_reason = "stop"
        elif len(completion.ids) == len(completion.uniforms):
            completion.finish_reason = "length"
        self.finish_reason = completion.finish_reason
        return ""
