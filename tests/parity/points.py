"""Points of the lattice of strategies: sets that cover what may be chosen, found greedily.

A further dimension, or a further value of one, is one more line in `DIMENSIONS`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_RANKS = 8
SIZE = 60
SHORT_SIZE = 12
SHORT_RANKS = 4


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One thing that is chosen."""

    name: str
    values: tuple[Any, ...]
    key: str | None = None
    """Family of the recipe; None when it becomes something else."""
    of_the_run: bool = False
    """Whether the run in one process has it as well; what is left is the strategy."""


DIMENSIONS = (
    Dimension("tp", (1, 2), "parallel.tensor_parallel_degree"),
    Dimension("pp", (1, 2, 4), "parallel.pipeline_parallel_degree"),
    Dimension("schedule", ("1F1B", "FThenB", "interleaved"), "parallel.pipeline_schedule"),
    Dimension("sharding", ("none", "stage1", "stage2", "stage3"), "parallel.sharding"),
    Dimension("sharding_degree", (1, 2), "parallel.sharding_parallel_degree"),
    Dimension("data_ranks", (1, 2, 4)),
    Dimension("micro_batch_size", (1, 2), "train.micro_batch_size"),
    Dimension("recompute", ("none", "full", "selective"), "engine.recompute"),
    Dimension("offload", (False, True), "engine.offload_optimizer"),
    Dimension("loss_chunk", (None, 7), "engine.loss_chunk_tokens"),
    Dimension("sequence_parallel", (False, True), "parallel.sequence_parallel"),
    Dimension("mode", ("dynamic", "to_static"), "engine.mode"),
    Dimension("stage", ("dpo", "tokens"), of_the_run=True),
    Dimension("tied", (False, True), "model.config.tie_word_embeddings", of_the_run=True),
    Dimension("optimizer", ("sgd", "adamw"), of_the_run=True),
)

# Points that would not be legal, or no different from another one; `llmsuite validate` has the last word, in a test.
LEFT_OUT: tuple[Callable[[Point], bool], ...] = (
    lambda p: not 1 < p.num_ranks <= MAX_RANKS,
    lambda p: p["sequence_parallel"] and p["tp"] == 1,
    lambda p: p["schedule"] != "1F1B" and p["pp"] == 1,
    lambda p: p["schedule"] == "interleaved" and p["pp"] == 4,  # the tiny model has four layers, not eight
    lambda p: p["sharding"] != "none" and p["data_ranks"] == 1,
    lambda p: p["sharding"] == "none" and p["sharding_degree"] > 1,
    lambda p: p["data_ranks"] % p["sharding_degree"] != 0,
    lambda p: p["recompute"] == "selective" and p["mode"] == "to_static",
)

# What has gone wrong, or nearly: of each set, one point in the short lattice has all of it.
DANGEROUS: tuple[dict[str, Any], ...] = (
    {"pp": 2, "tied": True, "tp": 2},  # the gradients of a tied embedding, cut over tp, on two stages
    {"pp": 4, "tied": True},  # with stages between them that have none
    {"pp": 2, "sequence_parallel": True, "micro_batch_size": 1},  # pieces of sequences travel
    {"pp": 2, "sharding": "stage2", "data_ranks": 2},  # gradients are given away while micro-batches come
    {"sequence_parallel": True, "sharding": "stage2", "recompute": "full"},  # partial gradients of norms
    {"sharding": "stage1", "sharding_degree": 2, "data_ranks": 4},  # two kinds of data ranks
    {"tp": 2, "data_ranks": 2, "optimizer": "sgd"},  # the norm counts what is held twice once
    {"stage": "tokens", "pp": 2, "data_ranks": 2},  # micro-batches of different weight
    {"pp": 2, "schedule": "FThenB", "recompute": "full"},
    {"schedule": "interleaved", "tied": True, "data_ranks": 2},  # first and last part on ranks that have others too
    {"sharding": "stage3", "pp": 2, "tied": True},  # a part of an embedding on two stages
    {"sharding": "stage3", "tp": 2, "mode": "to_static"},  # what a program holds is freed and gathered
    {"loss_chunk": 7, "sharding": "stage3", "tied": True, "data_ranks": 2},  # chunks, and parts of what they all take
    {"loss_chunk": 7, "tp": 2, "sequence_parallel": True},  # partial sums of each chunk
    {"mode": "to_static", "sequence_parallel": True, "recompute": "full"},
    {"mode": "to_static", "pp": 2, "tp": 2},  # rings of programs beside groups of pipelines
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One strategy, and the run it is tried on."""

    values: tuple[Any, ...]
    """In the order of `DIMENSIONS`."""

    def __getitem__(self, name: str) -> Any:
        return self.values[_NAMES[name]]

    def but(self, **choices: Any) -> Point:
        """The same with some other choices."""
        assert choices.keys() <= _NAMES.keys(), choices
        return Point(tuple(choices.get(d.name, self[d.name]) for d in DIMENSIONS))

    def __str__(self) -> str:
        return "-".join(map(str, self.values))

    @property
    def num_ranks(self) -> int:
        return int(self["tp"] * self["pp"] * self["data_ranks"])

    @property
    def is_legal(self) -> bool:
        return not any(rule(self) for rule in LEFT_OUT)

    @property
    def run(self) -> tuple[tuple[str, Any], ...]:
        """The choices that are no strategy: equal ones are compared with the same run in one process."""
        return tuple((d.name, self[d.name]) for d in DIMENSIONS if d.of_the_run)

    def words(self, strategy: bool = True) -> list[str]:
        """The words of the command line that make a run of it; without the strategy, of the run in one process."""
        keys = {d.key: self[d.name] for d in DIMENSIONS if d.key is not None and (strategy or d.of_the_run)}
        parallel = {k.removeprefix("parallel."): v for k, v in keys.items() if k.startswith("parallel.")}
        rest = {k: v for k, v in keys.items() if not k.startswith("parallel.")}
        if strategy:
            rest["launch.num_devices"] = self.num_ranks
        else:
            rest |= {"launch.num_devices": 1, "train.micro_batch_size": 8, "engine.recompute": "none"}
        return [f"--parallel={json.dumps(parallel)}", *(f"--{key}={json.dumps(value)}" for key, value in rest.items())]

    def choices(self) -> set[Any]:
        """Each of its choices."""
        return set(enumerate(self.values))

    def pairs(self) -> set[Any]:
        """Every pair of its choices."""
        return set(itertools.combinations(enumerate(self.values), 2))

    def dangers(self) -> set[Any]:
        """Which of the dangerous combinations it has."""
        return {i for i, wanted in enumerate(DANGEROUS) if all(self[name] == value for name, value in wanted.items())}


_NAMES = {dimension.name: i for i, dimension in enumerate(DIMENSIONS)}


def point(**choices: Any) -> Point:
    """The first value of every dimension, but for these choices."""
    return Point(tuple(d.values[0] for d in DIMENSIONS)).but(**choices)


@functools.cache
def legal() -> list[Point]:
    """Every point."""
    return [p for values in itertools.product(*(d.values for d in DIMENSIONS)) if (p := Point(values)).is_legal]


@functools.cache
def covering() -> list[Point]:
    """Points in which every legal pair of choices occurs; the same list every time."""
    chosen = _cover(legal(), Point.pairs)
    # then the corners where most things meet, until there are sixty
    rest = sorted(set(legal()) - set(chosen), key=lambda p: (-p.num_ranks, str(p)))
    missing = max(0, SIZE - len(chosen))
    return chosen + rest[:: max(1, len(rest) // max(1, missing))][:missing]


@functools.cache
def short() -> list[Point]:
    """A few points in which every single choice and every dangerous combination occurs."""
    points = _cover(legal(), lambda p: {("one", c) for c in p.choices()} | {("many", d) for d in p.dangers()})
    small = [p for p in legal() if p.num_ranks <= SHORT_RANKS]  # and as many pairs as there is time for
    return _cover(small, Point.pairs, points, SHORT_SIZE)


def _cover(
    points: Iterable[Point], what: Callable[[Point], set[Any]], begin: Sequence[Point] = (), most: int = 10**9
) -> list[Point]:
    """Add to the points of `begin` until everything is covered, or there are enough."""
    covers = {point: what(point) for point in points}
    chosen = list(begin)
    missing = set().union(*covers.values()).difference(*map(what, begin))
    while missing and len(chosen) < most:
        best = max(covers, key=lambda point: (len(covers[point] & missing), -point.num_ranks))
        chosen.append(best)
        missing -= covers[best]
    return chosen
