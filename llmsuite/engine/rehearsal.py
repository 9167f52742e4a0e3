"""One rank of a run, for some steps over the same samples, without saving and evaluation: `llmsuite rehearse`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

from llmsuite.contract.registry import Registry
from llmsuite.engine.data_loader import StepDataLoader
from llmsuite.engine.trainer import Trainer
from llmsuite.parallel.ledger_entries import REQUESTS
from llmsuite.parallel.p2p import HeaderObserver
from llmsuite.recipe.resolve import RunPlan


class StepObserver:
    """Follows a rehearsal; this one does nothing."""

    def built(self) -> None:
        """The model and its optimizer are there, and no step has begun."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """A context around a step, which is counted from 1."""
        return contextlib.nullcontext()


class RehearsedHeaders(HeaderObserver):
    """Headers of activations, which a rank without the others gets from a rehearsal of the first pipeline stage."""

    def __init__(self, known: Sequence[Sequence[int]]):
        self.sent_headers: list[list[int]] = []
        self._known = known
        self._num_arrived = 0

    def restart(self) -> None:
        """Begin with the first micro-batch of a step."""
        self.sent_headers.clear()
        self._num_arrived = 0

    def sent(self, header: Sequence[int]) -> None:
        self.sent_headers.append(list(header))

    def arrived(self, header: Sequence[int]) -> Sequence[int]:
        # every chunk of a rank receives the micro-batches in their order
        number = self._num_arrived
        self._num_arrived += 1
        return list(self._known[number % len(self._known)])


def rehearse_steps(
    plan: RunPlan, registry: Registry, num_steps: int, observer: StepObserver, headers: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Build this rank of a run and make steps, each with the samples of the first one.

    Args:
        plan: plan of the run, on a device without values.
        registry: registered stages and model families.
        num_steps: number of steps.
        observer: follows them.
        headers: headers of the activations of a step, that the first pipeline stage sends; they are needed in a later
            one.

    Returns:
        The headers of the activations that this rank sends in a step.
    """
    trainer = Trainer(plan, registry)
    assert trainer.rollouts is None, "the command refuses rollouts"
    part = trainer.built.part
    part.train()
    observed = RehearsedHeaders(headers)
    part.observe_headers(observed)
    observer.built()
    for number in range(1, num_steps + 1):
        observed.restart()
        with contextlib.closing(StepDataLoader(trainer.data, trainer.mesh.data_rank, 0, 1, num_workers=0)) as loader:
            batches = loader.next_step(1).batches
        with observer.step(number):
            trainer.engine.step(number, batches, dict.fromkeys(REQUESTS, False))
    return observed.sent_headers
