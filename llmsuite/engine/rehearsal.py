"""One rank of a run, for some steps over the same samples, without saving and evaluation: `llmsuite rehearse`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.contract.registry import Registry
from llmsuite.engine.critic import Critic
from llmsuite.engine.data_loader import StepDataLoader
from llmsuite.engine.model_flops import StepWork
from llmsuite.engine.rollouts import RolloutDataLoader, RolloutEngine
from llmsuite.engine.trainer import Trainer
from llmsuite.models.experts import Experts, RowCounts
from llmsuite.models.moe import MoE
from llmsuite.parallel import collective
from llmsuite.parallel.ledger_entries import REQUESTS
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.others import OtherRanks
from llmsuite.recipe.resolve import RunPlan


class StepObserver:
    """Follows a rehearsal; this one does nothing."""

    def built(self) -> None:
        """The model and its optimizer are there, and no step has begun."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """A context around a step, which is counted from 1."""
        return contextlib.nullcontext()

    def worked(self, number: int, work: StepWork) -> None:
        """A step has ended; `work` has the micro-batches of this rank, none on a rank that loads no data."""


@dataclasses.dataclass
class Sent:
    """The numbers that a rank of the first pipeline stage sends to the others in a rehearsal, in their order."""

    headers: list[list[int]] = dataclasses.field(default_factory=list)
    """Headers of activations, see `edges.HEADER_LENGTH`."""
    numbers: list[list[float]] = dataclasses.field(default_factory=list)
    """Numbers of `collective.broadcast_from_rank0`."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sent:
        """Read what `dataclasses.asdict` has made."""
        return cls(data["headers"], data["numbers"])


class RehearsedRanks(OtherRanks):
    """Numbers of ranks that are not there. A rank of the first pipeline stage needs none, as all ranks that load data
    know the same numbers; one of a later stage gets those that the first one of its pipeline has sent in a rehearsal.
    """

    def __init__(self, mesh_: Mesh, num_chunks: int, sent: Sent):
        """
        Args:
            mesh_: coordinates of this rank.
            num_chunks: chunks of layers of each rank.
            sent: by the first rank of its pipeline; nothing for that rank itself.
        """
        self.sent = Sent()
        self._is_first = mesh_.coordinate["pp"] == 0
        self._is_last = mesh_.coordinate["pp"] == mesh_.degrees.pp - 1
        self._loads_data = mesh_.loads_data
        self._last_chunk = num_chunks - 1
        # all ranks make their forward passes in one order, and the first one sends a header in each
        self._headers = collections.deque(sent.headers)
        self._numbers = collections.deque(sent.numbers)

    def numbers_of_rank0(self, own: Sequence[float], arrived: list[float]) -> list[float]:
        found = list(own) if self._loads_data else self._numbers.popleft()
        self.sent.numbers.append(found)
        return found

    def sum_of_arrays(self, own: np.ndarray, arrived: np.ndarray) -> np.ndarray:
        return own

    def header_sent(self, header: Sequence[int], chunk: int) -> None:
        self.sent.headers.append(list(header))
        if self._is_first and chunk < self._last_chunk and any(header):
            # it comes back from the last rank, for the next chunk
            self._headers.append(list(header))

    def header(self, arrived: Sequence[int]) -> Sequence[int]:
        assert self._headers, "this rank makes more passes than the first one of its pipeline"
        found = self._headers.popleft()
        while self._is_last and not any(found):  # a stop, which the last rank does not get
            found = self._headers.popleft()
        return found


Routing = Literal["balanced", "worst"]
"""The experts that tokens are sent to: as many to each, or all to the same ones."""


class GivenRouting(RowCounts):
    """Numbers of rows of experts that nobody has chosen. Each rank has as many as this one."""

    def __init__(self, routing: Routing, num_experts: int, num_chosen: int):
        """
        Args:
            routing: of the tokens.
            num_experts: of all ranks.
            num_chosen: experts of a token.
        """
        self._routing = routing
        self._num_experts = num_experts
        self._num_chosen = num_chosen

    def here(self, counts: Tensor, num_rows: int, slots: Sequence[int] | None = None) -> list[int]:
        found = [0] * len(super().here(counts, num_rows, slots))  # the copy is a part of the step
        for slot, number in zip(slots or range(self._num_experts), self._of_experts(num_rows), strict=True):
            if slot < len(found):
                found[slot] += number
        return found

    def of_ranks(self, table: Tensor, own: Sequence[int]) -> np.ndarray:
        gathered = super().of_ranks(table, own)
        return np.tile(np.array(own, gathered.dtype), len(gathered) // len(own))

    def _of_experts(self, num_rows: int) -> list[int]:
        """Rows of every expert."""
        if self._routing == "worst":
            rows = num_rows // self._num_chosen
            return [rows] * self._num_chosen + [0] * (self._num_experts - self._num_chosen)
        each, more = divmod(num_rows, self._num_experts)
        return [each + (number < more) for number in range(self._num_experts)]


def give_routing(chunks: Iterable[Any], routing: Routing) -> None:
    """Send the tokens of a model to given experts.

    Args:
        chunks: of the model.
        routing: of the tokens.

    Raises:
        UserError: a layer has experts whose tokens take another way.
    """
    for chunk in chunks:
        for module in chunk.sublayers():
            if isinstance(module, MoE):
                gate = module.gate
                module.experts.row_counts = GivenRouting(routing, gate.num_experts, gate.num_chosen)
        for name, module in chunk.named_sublayers():
            if isinstance(module, Experts) and not isinstance(module.row_counts, GivenRouting):
                raise UserError(f"rehearse: {name} gets its tokens in code of its own, which has no numbers to go by")


def rehearse_steps(
    plan: RunPlan, registry: Registry, num_steps: int, observer: StepObserver, sent: Sent, routing: Routing = "balanced"
) -> Sent:
    """Build this rank of a run and make steps, each with the samples of the first one.

    Args:
        plan: plan of the run, on a device without values.
        registry: registered stages and model families.
        num_steps: number of steps.
        observer: follows them.
        sent: the numbers that the first rank of its pipeline has sent in its rehearsal.
        routing: of tokens to experts.

    Returns:
        The numbers that this rank has sent.
    """
    own_mesh = Mesh(plan.parallel.degrees, collective.rank())
    others = RehearsedRanks(own_mesh, plan.parallel.num_chunks, sent)
    with collective.without_others(others):
        trainer = Trainer(plan, registry)
        give_routing(trainer.built.part.chunks, routing)
        if isinstance(trainer.critic, Critic):
            give_routing(trainer.critic.built.part.chunks, routing)
        trainer.built.part.train()
        observer.built()
        if trainer.rollouts is None:
            _rehearse_rows(trainer, num_steps, observer)
        else:
            _rehearse_rollouts(trainer, trainer.rollouts, num_steps, observer)
    return others.sent


def _rehearse_rows(trainer: Trainer, num_steps: int, observer: StepObserver) -> None:
    """Make steps of a stage that trains on rows."""
    for number in range(1, num_steps + 1):
        source = StepDataLoader(trainer.data, trainer.mesh.data_rank, 0, 1, num_workers=0)
        with contextlib.closing(source) as loader:
            batches = loader.next_step(1).batches
        with observer.step(number):
            trainer.engine.step(number, batches, dict.fromkeys(REQUESTS, False))
        observer.worked(number, batches.work)


def _rehearse_rollouts(trainer: Trainer, rollouts: RolloutEngine, num_steps: int, observer: StepObserver) -> None:
    """Make steps of a stage that trains on completions, each with the rollout before it. Where a rollout has several
    steps, the others are not observed."""
    updates = trainer.plan.train.profile.updates
    source = RolloutDataLoader(
        data=trainer.data,
        train_plan=trainer.plan.train,
        engine=rollouts,
        passes=trainer.engine.passes,
        start=(0, 0),
        last_step=num_steps * updates,
        on_completions=_ignore_completions,
        critic=trainer.critic,
    )
    with contextlib.closing(source):
        for step in range(1, num_steps * updates + 1):
            begins, others = divmod(step - 1, updates)
            with observer.step(begins + 1) if others == 0 else contextlib.nullcontext():
                batches = source.next_step(step).batches
                trainer.engine.step(step, batches, dict.fromkeys(REQUESTS, False))
            if others == 0:
                observer.worked(begins + 1, batches.work)


def _ignore_completions(step: int, completions: Sequence[Mapping[str, Any]]) -> None:
    pass
