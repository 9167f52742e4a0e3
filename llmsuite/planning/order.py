"""Before ranks start: does every member of every group come to its calls in the same order, and none wait for ever?

Each rank's calls of a step are written down in the order in which the engine makes them: the passes of
`engine.schedule` with the messages of `engine.pipeline` between them, then what `engine.step` does once. Then they are
compared, group by group, and played through. A test holds them against the calls that ranks have logged.

What is sent inside of a pass, along tp, to experts, of pieces of parameters and of gradients, stands as one call of the
whole group: there its ranks run the same operations of the same part.

Ranks that differ in their place along dp, sharding, ep or tp differ only in what they own. So of each such axis two are
played, however long it is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from llmsuite.errors import UserError
from llmsuite.parallel.mesh import AXES, Mesh
from llmsuite.parallel.schedule import Action
from llmsuite.planning.estimate import micro_batches
from llmsuite.planning.layout import Held, Layout
from llmsuite.planning.memory import full_pass, marks_padding
from llmsuite.planning.schedule import orders
from llmsuite.recipe.resolve import RunPlan


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Ranks that call each other; of a channel of messages the sender and the receiver."""

    name: str
    ranks: tuple[int, ...]
    """Those that are played."""

    def __str__(self) -> str:
        return f"{self.name} of ranks {', '.join(map(str, self.ranks))}"


class Call(NamedTuple):
    """What a rank asks of a group."""

    group: Group
    what: str
    """As `engine.calls` names it; "pass" for all that is sent inside of one."""
    size: tuple[int, ...]
    """Of the tensor; empty where it is not known or differs from rank to rank."""
    why: str

    def __str__(self) -> str:
        size = f" {list(self.size)}" if self.size else ""
        return f"{self.what}{size} ({self.why})"


@dataclasses.dataclass(frozen=True)
class Played:
    """How much was looked at."""

    num_ranks: int
    num_calls: int


def check_order(plan: RunPlan) -> Played | None:
    """Play a step of training and an evaluation of a run; None for a family that does not say its parameters.

    Raises:
        UserError: ranks would make different calls, or wait for each other for ever; it names rank and call.
    """
    if not hasattr(plan.family.names(), "parameter_shapes"):
        return None
    calls = calls_of_ranks(plan)
    if problem := first_problem(calls):
        raise UserError(f"{plan.loaded.name}: the ranks of this run would not meet: {problem}")
    return Played(len(calls), sum(map(len, calls.values())))


def first_problem(calls: Mapping[int, Sequence[Call]]) -> str:
    """The first call that the ranks of a group do not make alike, or who waits for whom; empty when all is well.

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
                if one is None or two is None or not _meet(one, two):
                    parts = (f"rank {rank} makes {call or 'none'}" for rank, call in ((first, one), (other, two)))
                    return f"call {number} of the {group}: {'; '.join(parts)}"
    return _deadlock(calls)


def _meet(one: Call, two: Call) -> bool:
    alike = {one.what, two.what} in ({one.what}, {"send", "receive"})
    return alike and one.size == two.size and one.why == two.why


def _deadlock(calls: Mapping[int, Sequence[Call]]) -> str:
    """Who waits in what, where calls that agree group by group do not end: a send waits for nobody, a receive for its
    message, every other call for all ranks of its group."""
    at = dict.fromkeys(calls, 0)
    made: dict[tuple[int, Group], int] = {}  # by rank and group, with the one it is in
    come: dict[tuple[Group, int], int] = {}  # ranks that have come to a call of a group
    inside: set[int] = set()

    def goes_on(rank: int, call: Call) -> bool:
        if rank not in inside:
            inside.add(rank)
            number = made[rank, call.group] = made.get((rank, call.group), 0) + 1
            come[call.group, number] = come.get((call.group, number), 0) + 1
        return call.what == "send" or come[call.group, made[rank, call.group]] == len(call.group.ranks)

    moved = True
    while moved:
        moved = False
        for rank, own in calls.items():
            while at[rank] < len(own) and goes_on(rank, own[at[rank]]):
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


def calls_of_ranks(plan: RunPlan, count: int | None = None) -> dict[int, list[Call]]:
    """Of each rank that is played, its calls in a step of training and in an evaluation.

    Args:
        plan: of the run.
        count: micro-batches of a step; without it as many as show the order, at most those of the run.
    """
    layout, pp = Layout(plan), plan.degrees.pp
    if count is None:  # a warm-up, a steady round, the rest of a division by the stages
        count = micro_batches(plan, full_pass(plan))
        count = min(count, 2 * pp + count % pp)
    every = orders(plan.schedule, pp, count, plan.num_chunks if pp > 1 else 1)
    ranks = played_ranks(plan)
    members: dict[tuple[object, ...], list[int]] = {}
    for mesh in ranks:
        for key, among in _places(mesh).values():
            if among:
                members.setdefault(key, []).append(mesh.rank)
    groups = {key: Group(str(key[0]), tuple(found)) for key, found in members.items()}
    channels: dict[tuple[int, int, bool], Group] = {}
    return {mesh.rank: list(_Rank(layout, mesh, groups, channels).step(every)) for mesh in ranks}


def played_ranks(plan: RunPlan) -> list[Mesh]:
    """Of every pipeline stage the first rank and its neighbours along each other axis, also those of experts."""
    degrees = plan.degrees
    experts = Mesh(degrees, 0).of_experts.degrees
    steps = {0, 1, degrees.sharding, degrees.ep, degrees.ep * experts.sharding, degrees.num_data_ranks - 1}
    data = sorted(step for step in steps if step < degrees.num_data_ranks)
    each = degrees.num_ranks // degrees.pp
    places = itertools.product(range(degrees.pp), data, sorted({0, degrees.tp - 1}))
    return [Mesh(degrees, stage * each + rank * degrees.tp + tp) for stage, rank, tp in places]


def _places(mesh: Mesh) -> dict[str, tuple[tuple[object, ...], bool]]:
    """Of each group that a rank may be in, by the engine's mesh: its key, and whether the rank is in it."""
    stage, last = mesh.coordinate["pp"], mesh.degrees.pp - 1
    found: dict[str, tuple[tuple[object, ...], bool]] = {
        "run": (("run",), True),
        "readers": (("ranks that read data",), mesh.reads_data),
        "tied": (("tied weights", *_beside(mesh, ("pp",))), stage in (0, last)),
    }
    for axis, axes in (("tp", ("tp",)), ("data", ("dp", "sharding")), ("dp", ("dp",)), ("sharding", ("sharding",))):
        found[axis] = (axis, *_beside(mesh, axes)), True
    for axis, axes in (("ep", ("ep",)), ("data", ("dp", "sharding")), ("dp", ("dp",)), ("sharding", ("sharding",))):
        found[f"experts' {axis}"] = (f"experts' {axis}", *_beside(mesh.of_experts, axes)), True
    return found


def _beside(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Where a rank is on all other axes: what the ranks of a group have in common."""
    return tuple(mesh.coordinate[axis] for axis in AXES if axis not in axes)


class _Rank:
    """Writes down the calls of one rank."""

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        groups: Mapping[tuple[object, ...], Group],
        channels: dict[tuple[int, int, bool], Group],
    ):
        self._layout, self._mesh, self._channels = layout, mesh, channels
        self._groups = {name: groups[key] for name, (key, among) in _places(mesh).items() if among}
        self._held, self._stage = layout.held(mesh), mesh.coordinate["pp"]
        self._buckets = layout.buckets(mesh)
        self._last = len(layout.bounds) - 2
        self._documents = full_pass(layout.plan).documents or marks_padding(layout.plan)
        pp, own = mesh.degrees.pp, mesh.coordinate
        self._line = [int(rank) for rank in mesh.grid[:, own["dp"], own["sharding"], own["ep"], own["tp"]]]
        self._next, self._previous = self._line[(self._stage + 1) % pp], self._line[self._stage - 1]

    def step(self, every: Sequence[Sequence[Action]]) -> Iterator[Call]:
        """Of training; then the forward passes of an evaluation."""
        passes, train = every[self._stage], self._layout.plan.recipe.train
        gated = bool(self._layout.cuts.gates)
        if gated and train.expert_balance_loss:
            yield from self._call("run", "all_reduce", (2,), "weight of the balance loss")
        last_backward = {action.chunk: action for action in passes if not action.forward}
        for action in passes:
            yield from self._pass(action, sums=last_backward.get(action.chunk) is action)
        yield from self._ledger()
        learnt = [held for held in self._held if held.is_trained]
        sums = {held.name: bucket for bucket in self._buckets for held in bucket}
        for held in learnt:
            if held.has_gradient:
                yield from self._gradient(held, sums)
        yield from self._call("run", "all_reduce", (1,), "norm of the gradients")
        if gated:
            if any(self._layout.cuts.is_expert(held.name) for held in self._held):
                yield from self._call("data", "all_reduce", (), "loads of experts")
            yield from self._call("run", "all_reduce", (3,), "loads of experts")
        for held in learnt:
            if held.parts > 1 and not held.is_stored_in_parts:
                why = f"updated values of {held.name}"
                yield from self._call(_axis("sharding", held), "all_gather", (held.piece,), why)
        for action in passes:
            if action.forward:
                yield from self._pass(action, evaluates=True)
        yield from self._ledger()

    def _call(self, name: str, what: str, size: tuple[int, ...], why: str) -> Iterator[Call]:
        """One over a group, where it has more than one rank."""
        if len((group := self._groups[name]).ranks) > 1:
            yield Call(group, what, size, why)

    def _pass(self, action: Action, evaluates: bool = False, sums: bool = False) -> Iterator[Call]:
        """`sums`: whether gradients that are complete behind it are added up over the data ranks meanwhile."""
        part = action.chunk * len(self._line) + self._stage
        ahead, behind = (part + 1, part - 1) if action.forward else (part - 1, part + 1)
        if 0 <= behind <= self._last:
            yield from self._messages("receive", action, part, evaluates)
        way = "forward" if action.forward else "backward"
        why = f"{way} pass of micro-batch {action.micro_batch} through part {part}"
        yield from self._call("tp", "pass", (), why)
        inside = [held for held in self._held if held.part == part]
        if any(held.is_expert for held in inside):
            yield from self._call("experts' ep", "pass", (), why)
        cuts = self._layout.sharding == 3 or (self._layout.sharding == 2 and not action.forward)
        for name in ("sharding", "experts' sharding"):
            if cuts and any(held.parts > 1 and _axis("sharding", held) == name for held in inside):
                yield from self._call(name, "pass", (), why)
        for name in ("data", "experts' data"):
            if sums and any(h.has_gradient and not h.adds_up_early and _axis("data", h) == name for h in inside):
                yield from self._call(name, "pass", (), why)
        if 0 <= ahead <= self._last:
            yield from self._messages("send", action, ahead, evaluates)

    def _messages(self, what: str, action: Action, to: int, evaluates: bool) -> Iterator[Call]:
        """As `engine.pipeline` sends a pass on to a part: activations with their size first, or a gradient."""
        onwards = self._next if action.forward else self._previous
        origin = self._previous if action.forward else self._next
        key = (self._mesh.rank, onwards) if what == "send" else (origin, self._mesh.rank)
        name = "activations" if action.forward else "gradients"
        channel = self._channels.setdefault((*key, action.forward), Group(f"channel of {name}", key))
        which = f"of micro-batch {action.micro_batch} for part {to}{' in an evaluation' if evaluates else ''}"
        if action.forward:
            yield Call(channel, what, (4,), f"size {which}")
            if self._documents:
                yield Call(channel, what, (), f"documents {which}")
        yield Call(channel, what, (), f"{name} {which}")

    def _ledger(self) -> Iterator[Call]:
        if self._mesh.reads_data:
            name = "readers" if self._mesh.has_middle else "run"
            yield from self._call(name, "all_reduce", (), "ledger of the loss")
        if self._mesh.has_middle:
            yield from self._call("run", "all_reduce", (), "ledger of the loss, for ranks that read nothing")

    def _gradient(self, held: Held, sums: dict[str, list[Held]]) -> Iterator[Call]:
        """With the first one of a bucket in `sums` all of them are added up."""
        why = f"gradient of {held.name}"
        bucket = sums.pop(held.name, [])
        for other in bucket:
            sums.pop(other.name, None)
        if bucket and held.adds_up_early:
            together = why if len(bucket) == 1 else f"gradients of {len(bucket)} parameters with {held.name}"
            pieces = (sum(other.piece for other in bucket),)
            yield from self._call(_axis("dp", held), "all_reduce", pieces, together)
        if held.is_tied:
            own = (held.owned,) if held.parts > 1 else held.local_shape
            yield from self._call("tied", "all_reduce", own, f"{why}, of first and last stage")


def _axis(name: str, held: Held) -> str:
    return f"experts' {name}" if held.is_expert else name


def said(played: Played | None, plan: RunPlan) -> str:
    """A line for people."""
    if played is None:
        return f"the order of calls is not checked: {plan.family.name} does not say its parameters"
    return (
        f"order of calls: {played.num_ranks} of {plan.degrees.num_ranks} ranks, those that differ, played through; "
        f"their {played.num_calls:,} calls meet"
    )
