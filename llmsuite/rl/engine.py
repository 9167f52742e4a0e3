"""The contract of rollout engines, which sample the completions that a run trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from llmsuite.base.typing import Tensor
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.group_sampling import SampledCompletion, SampleRequest, SamplingParams
from llmsuite.recipe.plans import ModelPlan

PendingRollout = Callable[[], list[list[SampledCompletion]]]
"""Waits for the completions of each request. Raises UserError when sampling them has failed."""


@dataclasses.dataclass(frozen=True)
class EngineContext:
    """The parts of a run that an engine is constructed from, on a data-loading rank."""

    model: ModelPlan
    """Family and shape of the model, and its files."""
    backend: DeviceBackend
    precision: str
    """Precision of the run, such as "bf16"."""
    section: Any
    """The engine's own keys, `rollout.NAME`; None without any."""
    output_dir: Path
    """Directory of the run."""
    makes_requests: bool
    """True where this rank requests completions; with a remote engine only the first rank does."""
    report: Callable[[str], None]
    """Prints a message to the user, on the first rank only."""


class Engine(Protocol):
    """Samples completions. Tokens go in and out; text is never tokenized again."""

    def refresh(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sample with these weights from now on. Every rank of the run iterates over all of them at the same time, as
        gathering a parameter is a collective call.

        Args:
            version: the number of optimizer steps of these weights.
            weights: name and full value of every parameter, adapters merged; a tensor may be overwritten later.
        """

    def begin(
        self, requests: Sequence[SampleRequest], sampling_params: SamplingParams, stop_ids: Collection[int]
    ) -> PendingRollout:
        """Start sampling the completions of each request, with the current weights and the random numbers of its key.

        A remote engine returns immediately; others may sample when the result is requested.

        Args:
            requests: prompts with their keys; empty on ranks that make no requests.
            sampling_params: of all requests.
            stop_ids: tokens that end a completion; its ids include them.

        Returns:
            A function that waits for the completions, in the order of the requests.
        """

    def close(self) -> None:
        """Release resources: the run has ended, successfully or not."""


@runtime_checkable
class ReleasableEngine(Protocol):
    """An engine in the processes of the run that needs no memory while the model is trained."""

    def release(self) -> None:
        """Free weights and caches. No request is pending, and `refresh` is called before the next one."""
