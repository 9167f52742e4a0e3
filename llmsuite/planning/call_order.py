"""Check for deadlocks before ranks start: the ranks of every group must make the same calls, in the same order.

The calls of each rank in a step are listed in the order in which the engine makes them: the passes of
`parallel.schedule` with the messages of `parallel.pipeline` between them, then the collectives of
`engine.eager_engine`. They are compared group by group, and then simulated until all are done or no rank can continue.
A test compares them with the calls that real ranks log.

Communication inside of a pass (along tp, to experts, of sharded parameters and gradients) counts as one call of its
group: there all ranks of the group run the same operations of the same part.

Ranks that differ along dp, sharding, ep or tp differ only in the shards that they own. So two ranks of each such axis
are enough, however long it is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.models.protocols import HasShapes
from llmsuite.parallel import edges, ledger_entries
from llmsuite.parallel.mesh import (
    AXES,
    DATA,
    EXPERT,
    GROUP_AXES,
    LOADER_RANKS,
    MODEL,
    RUN,
    SHARDING,
    TENSOR,
    TIED,
    Mesh,
)
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.timeline import orders
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.estimate import micro_batches
from llmsuite.planning.layout import Layout, LocalParameter
from llmsuite.planning.memory import full_micro_batch
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan

_SUMMED_FROM = {TIED: "of first and last stage", MODEL: "of all layers and heads"}


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Ranks of a process group; for a channel of messages, the sender and the receiver."""

    name: str
    ranks: tuple[int, ...]
    """The members that are checked."""

    def __str__(self) -> str:
        return f"{self.name} of ranks {', '.join(map(str, self.ranks))}"


class Call(NamedTuple):
    """One call of a rank: a collective, or a message."""

    group: Group
    what: str
    """The operation, by its name in `launch.calls`; "pass" for all communication inside of a pass."""
    size: tuple[int, ...]
    """Shape of the tensor; empty where it is not known or differs from rank to rank."""
    why: str

    def __str__(self) -> str:
        size = f" {list(self.size)}" if self.size else ""
        return f"{self.what}{size} ({self.why})"


@dataclasses.dataclass(frozen=True)
class OrderCheck:
    """The extent of a check that found no problem."""

    num_ranks: int
    num_calls: int


def check_order(
    name: str, model_plan: ModelPlan, data_plan: DataPlan, parallel_plan: ParallelPlan, train_plan: TrainPlan
) -> OrderCheck | None:
    """Simulate the calls of a training step and an evaluation; None for a family that does not list its parameters.

    Args:
        name: of the recipe, for the message.
        model_plan: of the run.
        data_plan: of the run.
        parallel_plan: of the run.
        train_plan: of the run.

    Raises:
        UserError: ranks would make different calls, or deadlock; the message names rank and call.
    """
    if not isinstance(model_plan.family.names(), HasShapes):
        return None
    batch = full_micro_batch(model_plan, data_plan, parallel_plan, train_plan)
    pp = parallel_plan.degrees.pp
    # enough to show the order: warm-up, one steady round, and the remainder of a division by the stages
    count = micro_batches(parallel_plan, train_plan, batch)
    count = min(count, 2 * pp + count % pp)
    calls = calls_of_ranks(Layout(model_plan, parallel_plan), train_plan, batch, count)
    problem = first_problem(calls)
    if problem:
        raise UserError(f"{name}: the calls of this run's ranks do not match: {problem}")
    return OrderCheck(len(calls), sum(map(len, calls.values())))


def first_problem(calls: Mapping[int, Sequence[Call]]) -> str:
    """The first call in which the ranks of a group differ, or the ranks that wait for each other; empty without a
    problem.

    Args:
        calls: of every rank, in its order.
    """
    by_group: dict[Group, dict[int, list[Call]]] = {}
    for rank, made in calls.items():
        for call in made:
            by_group.setdefault(call.group, {}).setdefault(rank, []).append(call)
    for group, by_rank in by_group.items():
        first, *others = group.ranks
        for other in others:
            pairs = itertools.zip_longest(by_rank.get(first, ()), by_rank.get(other, ()))
            for number, (one, two) in enumerate(pairs, 1):
                if one is None or two is None or not _match(one, two):
                    parts = (f"rank {rank} makes {call or 'none'}" for rank, call in ((first, one), (other, two)))
                    return f"call {number} of the {group}: {'; '.join(parts)}"
    return _deadlock(calls)


def _match(one: Call, two: Call) -> bool:
    fits = {one.what, two.what} in ({one.what}, {"send", "receive"})
    return fits and one.size == two.size and one.why == two.why


def _deadlock(calls: Mapping[int, Sequence[Call]]) -> str:
    """The ranks that wait, with their calls, if a simulation does not end; empty if it ends.

    The calls agree group by group. A send does not wait, a receive waits for its message, every other call for all
    ranks of its group.
    """
    at = dict.fromkeys(calls, 0)
    made: dict[tuple[int, Group], int] = {}  # calls of a rank over a group, including the one it is in
    arrived: dict[tuple[Group, int], int] = {}  # ranks that have reached a call of a group
    inside: set[int] = set()

    def completes(rank: int, call: Call) -> bool:
        if rank not in inside:
            inside.add(rank)
            number = made[rank, call.group] = made.get((rank, call.group), 0) + 1
            arrived[call.group, number] = arrived.get((call.group, number), 0) + 1
        return call.what == "send" or arrived[call.group, made[rank, call.group]] == len(call.group.ranks)

    moved = True
    while moved:
        moved = False
        for rank, own in calls.items():
            while at[rank] < len(own) and completes(rank, own[at[rank]]):
                at[rank] += 1
                inside.discard(rank)
                moved = True
    waiting = {rank: own[at[rank]] for rank, own in calls.items() if at[rank] < len(own)}
    if not waiting:
        return ""
    parts = []
    for rank, call in itertools.islice(waiting.items(), 4):
        number = made[rank, call.group]
        missing = [r for r in call.group.ranks if made.get((r, call.group), 0) < number]
        parts.append(f"rank {rank} waits in {call} for {', '.join(f'rank {r}' for r in missing)}")
    return f"{len(waiting)} ranks wait for each other for ever: {'; '.join(parts)}"


def calls_of_ranks(layout: Layout, train_plan: TrainPlan, batch: MicroBatch, count: int) -> dict[int, list[Call]]:
    """The calls of each representative rank in a training step and an evaluation.

    Args:
        layout: of the run.
        train_plan: of the run.
        batch: a full micro-batch.
        count: micro-batches of a step.
    """
    plan = layout.parallel_plan
    pp = plan.degrees.pp
    every = orders(plan.schedule, pp, count, plan.num_chunks if pp > 1 else 1)
    ranks = representative_ranks(plan.degrees)
    members: dict[tuple[object, ...], list[int]] = {}
    for mesh in ranks:
        for key, is_member in _group_keys(mesh).values():
            if is_member:
                members.setdefault(key, []).append(mesh.rank)
    groups = {key: Group(str(key[0]), tuple(found)) for key, found in members.items()}
    channels: dict[edges.Channel, Group] = {}
    sends_documents = batch.documents or batch.has_token_metadata
    calls = {}
    for mesh in ranks:
        rank = _Rank(layout, train_plan.section, mesh, groups, channels, sends_documents)
        calls[mesh.rank] = list(rank.step(every))
    return calls


def representative_ranks(degrees: Degrees) -> list[Mesh]:
    """On every pipeline stage, the first rank and its neighbours along the other axes, including those of the expert
    mesh."""
    experts = Mesh(degrees, 0).expert_mesh.degrees
    steps = {0, 1, degrees.sharding, degrees.ep, degrees.ep * experts.sharding, degrees.num_data_ranks - 1}
    data = sorted(step for step in steps if step < degrees.num_data_ranks)
    each = degrees.num_ranks // degrees.pp
    coordinates = itertools.product(range(degrees.pp), data, sorted({0, degrees.tp - 1}))
    return [Mesh(degrees, stage * each + rank * degrees.tp + tp) for stage, rank, tp in coordinates]


def _group_keys(mesh: Mesh) -> dict[str, tuple[tuple[object, ...], bool]]:
    """Key of the rank's group and whether the rank is a member, for each kind of group of the engine's mesh."""
    stage = mesh.coordinate["pp"]
    last = mesh.degrees.pp - 1
    found: dict[str, tuple[tuple[object, ...], bool]] = {
        RUN: (("run",), True),
        LOADER_RANKS: (("ranks that load data",), mesh.loads_data),
        TIED: (("tied weights", *_other_coordinates(mesh, ("pp",))), stage in (0, last)),
    }
    for axis, axes in GROUP_AXES.items():
        found[axis] = (axis, *_other_coordinates(mesh, axes)), True
        found[f"experts' {axis}"] = (f"experts' {axis}", *_other_coordinates(mesh.expert_mesh, axes)), True
    return found


def _other_coordinates(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """A rank's coordinates on all other axes, which the ranks of a group have in common."""
    return tuple(mesh.coordinate[axis] for axis in AXES if axis not in axes)


class _Rank:
    """The calls of one rank."""

    def __init__(
        self,
        layout: Layout,
        train: TrainSection,
        mesh: Mesh,
        groups: Mapping[tuple[object, ...], Group],
        channels: dict[edges.Channel, Group],
        sends_documents: bool,
    ):
        self._layout = layout
        self._train = train
        self._mesh = mesh
        self._channels = channels
        self._groups = {name: groups[key] for name, (key, is_member) in _group_keys(mesh).items() if is_member}
        self._parameters = layout.parameters(mesh)
        self._stage = mesh.coordinate["pp"]
        self._buckets = layout.buckets(mesh)
        self._num_parts = len(layout.bounds) - 1
        self._documents = sends_documents
        own = mesh.coordinate
        pipeline = mesh.grid[:, own["dp"], own["sharding"], own["ep"], own["tp"]]
        self._pipeline = [int(rank) for rank in pipeline]

    def step(self, every: Sequence[Sequence[Action]]) -> Iterator[Call]:
        """A training step, then the forward passes of an evaluation."""
        passes = every[self._stage]
        gated = bool(self._layout.shard_plan.gates)
        if gated and self._train.expert_balance_loss:
            yield from self._call(RUN, "all_reduce", (2,), "weight of the balance loss")
        last_backward = {action.chunk: action for action in passes if not action.forward}
        for action in passes:
            yield from self._pass(action, sums=last_backward.get(action.chunk) is action)
        yield from self._ledger()
        trained = [parameter for parameter in self._parameters if parameter.is_trained]
        sums = {parameter.name: bucket for bucket in self._buckets for parameter in bucket}
        for parameter in trained:
            if parameter.has_gradient:
                yield from self._gradient(parameter, sums)
        yield from self._call(RUN, "all_reduce", (1,), "norm of the gradients")
        if gated:
            if any(self._layout.shard_plan.is_expert(parameter.name) for parameter in self._parameters):
                yield from self._call(DATA, "all_reduce", (), "loads of experts")
            yield from self._call(RUN, "all_reduce", (3,), "loads of experts")
        blocks = sum(parameter.exchanged_blocks(self._train.optimizer) for parameter in trained)
        if blocks:
            for group in (DATA, TENSOR):
                yield from self._call(group, "all_reduce", (2 * blocks,), "scales of 8-bit moments")
        for parameter in trained:
            if parameter.gathers_update:
                why = f"updated values of {parameter.name}"
                yield from self._call(_axis(SHARDING, parameter), "all_gather", (parameter.shard_size,), why)
        for action in passes:
            if action.forward:
                yield from self._pass(action, evaluates=True)
        yield from self._ledger()

    def _call(self, name: str, what: str, size: tuple[int, ...], why: str) -> Iterator[Call]:
        """A collective, if its group has more than one rank."""
        if len((group := self._groups[name]).ranks) > 1:
            yield Call(group, what, size, why)

    def _pass(self, action: Action, evaluates: bool = False, sums: bool = False) -> Iterator[Call]:
        """One pass. With `sums`, gradients that it completes are reduced over the data ranks while it runs."""
        part = action.chunk * len(self._pipeline) + self._stage
        if edges.source(part, self._num_parts, action.forward) is not None:
            yield from self._messages("receive", action, part, evaluates)
        way = "forward" if action.forward else "backward"
        why = f"{way} pass of micro-batch {action.micro_batch} through part {part}"
        yield from self._call(TENSOR, "pass", (), why)
        inside = [parameter for parameter in self._parameters if parameter.part == part]
        if any(parameter.is_expert for parameter in inside):
            yield from self._call(f"experts' {EXPERT}", "pass", (), why)
        cuts = self._layout.sharding == 3 or (self._layout.sharding == 2 and not action.forward)
        for name in (SHARDING, f"experts' {SHARDING}"):
            if cuts and any(parameter.num_shards > 1 and _axis(SHARDING, parameter) == name for parameter in inside):
                yield from self._call(name, "pass", (), why)
        for name in (DATA, f"experts' {DATA}"):
            if sums and any(h.has_gradient and not h.reduces_each_pass and _axis(DATA, h) == name for h in inside):
                yield from self._call(name, "pass", (), why)
        target = edges.target(part, self._num_parts, action.forward)
        if target is not None:
            yield from self._messages("send", action, target, evaluates)

    def _messages(self, what: str, action: Action, to: int, evaluates: bool) -> Iterator[Call]:
        """The messages of a result that is sent to part `to`."""
        side = edges.outgoing if what == "send" else edges.incoming
        key = side(self._pipeline, self._mesh.rank, action.forward)
        name = "activations" if action.forward else "gradients"
        channel = self._channels.setdefault(key, Group(f"channel of {name}", (key.sender, key.receiver)))
        which = f"of micro-batch {action.micro_batch} for part {to}{' in an evaluation' if evaluates else ''}"
        with_header = edges.has_header(to, self._num_parts, action.micro_batch)
        for content in edges.contents(action.forward, self._documents, with_header):
            size = (edges.HEADER_LENGTH,) if content == "header" else ()
            yield Call(channel, what, size, f"{content.replace('_', ' ')} {which}")

    def _ledger(self) -> Iterator[Call]:
        for call in ledger_entries.ledger_calls(self._mesh, num_sums=1):
            yield from self._call(call.group, "all_reduce", (), call.why)

    def _gradient(self, parameter: LocalParameter, sums: dict[str, list[LocalParameter]]) -> Iterator[Call]:
        """The reductions of one gradient; the first one of a bucket in `sums` reduces the full bucket."""
        why = f"gradient of {parameter.name}"
        bucket = sums.pop(parameter.name, [])
        for other in bucket:
            sums.pop(other.name, None)
        together = why
        if len(bucket) > 1:
            together = f"gradients of {len(bucket)} parameters with {parameter.name}"
        # others are reduced inside of a pass
        after_passes = [reduction for reduction in parameter.reductions if bucket and reduction.of_shards]
        for reduction in after_passes:
            size = (reduction.size(bucket),)
            yield from self._call(_axis(reduction.group, parameter), reduction.operation, size, together)
        for kind in parameter.model_sums:
            yield from self._call(kind, "all_reduce", parameter.owned_shape, f"{why}, {_SUMMED_FROM[kind]}")


def _axis(name: str, parameter: LocalParameter) -> str:
    return f"experts' {name}" if parameter.is_expert else name


def summary(check: OrderCheck | None, family: str, num_ranks: int) -> str:
    """The result of a check as a line of text."""
    if check is None:
        return f"order of calls: not checked, because family {family} does not list its parameters"
    return (
        f"order of calls: {check.num_ranks} of {num_ranks} ranks, those that differ, simulated; "
        f"their {check.num_calls:,} calls match"
    )
