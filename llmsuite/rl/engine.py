"""The contract of rollout engines: what draws the completions that a run learns from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from llmsuite.devices.base import DeviceBackend
from llmsuite.recipe.resolve import RunPlan
from llmsuite.rl.drawing import Drawing, Drawn, Request
from llmsuite.typing import Tensor

Pending = Callable[[], list[list[Drawn]]]
"""Waits for the completions of each request. Raises UserError when they cannot be had."""


@dataclasses.dataclass(frozen=True)
class EngineContext:
    """What an engine is made of, on a rank that reads data."""

    plan: RunPlan
    backend: DeviceBackend
    draws: bool
    """Whether this rank makes requests; where the engine is remote only the first one does."""
    report: Callable[[str], None]
    """Prints a message to the user, on the first rank only."""

    @property
    def section(self) -> Any:
        """The engine's own keys, `rollout.NAME`; None without any."""
        recipe: Any = self.plan.recipe
        return getattr(recipe.rollout, recipe.rollout.engine, None)


class Engine(Protocol):
    """Draws completions. Tokens go in and out, and text is never made into tokens again."""

    def refresh(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Draw with these weights from now on. Every rank of the run goes through all of them at the same time.

        Args:
            version: optimizer steps that they have had.
            weights: every parameter by its name, whole, adapters merged; what is given may be changed later.
        """

    def begin(self, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]) -> Pending:
        """Draw the completions of each request, with the weights of this moment and the random numbers of its key,
        in the order of the requests. A remote engine returns at once; others may draw when the result is asked for.

        Args:
            requests: prompts with their keys; none on ranks that make no requests.
            drawing: how.
            stop_ids: tokens that end a completion; they are among its ids.
        """

    def close(self) -> None:
        """The run has ended, well or not."""


@runtime_checkable
class Releasing(Protocol):
    """An engine in the ranks of the run, not remote, that needs no memory while the model is trained."""

    def release(self) -> None:
        """Free weights and caches: all is drawn that was begun, and `refresh` comes before anything else is."""
