"""The output of `llmsuite recipe tune`: layouts side by side, what each change gains, and what is ruled out."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmsuite.planning.cost import Hardware, part_costs
from llmsuite.planning.estimate import Estimate
from llmsuite.planning.report import table
from llmsuite.planning.search import Candidates, Fitting, Rejected, Strategy

_GIB = 2.0**30
_MAX_SHOWN = 8
_CHANGES = {
    "tp": "tensor parallel",
    "pp": "pipeline",
    "chunks": "chunks of a pipeline stage",
    "sharding": "sharding",
    "ep": "expert parallel",
    "micro_batch": "micro-batch",
    "recompute": "recompute",
    "offload": "optimizer in host memory",
}


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """The rehearsal of a layout."""

    seconds: float = math.inf
    """Time of a step."""
    tokens_per_second: float = 0.0
    """Tokens of a step for each device and second."""
    mfu: float = 0.0
    peak: float = 0.0
    """Bytes of the fullest rank."""
    launch_bound: float = 0.0
    """How much longer the host needs than the device, as a factor; 0 where it is faster."""
    error: str = ""
    """Why a rank did not reach the end of a step."""

    @classmethod
    def from_reports(cls, reports: Sequence[Mapping[str, Any]]) -> Rehearsed:
        """Read the reports of the ranks of a layout, with predicted times."""
        for report in reports:
            if "error" in report:
                return cls(error=f"rank {report['rank']} fails: {report['error']['text']}")
        figures = [report["predicted"] for report in reports]
        bound = max(each["host_seconds"] / max(each["busy_seconds"], 1e-9) for each in figures)
        return cls(
            seconds=figures[0]["step_seconds"],
            tokens_per_second=figures[0]["tokens_per_second"],
            mfu=figures[0]["mfu"],
            peak=max(report["peak_bytes"] for report in reports),
            launch_bound=bound if bound > 1 else 0.0,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """A layout, planned and rehearsed."""

    found: Any
    """`Fitting`; of the recipe as it is, `Rejected` where it does not fit, and a text where it is not possible."""
    rehearsed: Rehearsed | None
    """None where only planned."""

    @property
    def seconds(self) -> float:
        """Seconds of a step: rehearsed, else planned at best."""
        if self.rehearsed is not None:
            return self.rehearsed.seconds
        return float(self.found.seconds[0]) if isinstance(self.found, Fitting) else math.inf

    def is_possible(self, limit: float) -> bool:
        """True where it runs to the end of a step in `limit` bytes, as far as is known."""
        return self.rehearsed is None or (not self.rehearsed.error and self.rehearsed.peak <= limit)

    def rank_key(self, limit: float) -> tuple[bool, float]:
        """Sorts the best first."""
        return not self.is_possible(limit), self.seconds


def recommended(own: Result, results: Sequence[Result], limit: float) -> Result:
    """The fastest layout that runs: that of the recipe itself where it is rehearsed, and faster than the others. The
    arguments are those of `show_results`."""
    is_first = own.rehearsed is not None and own.rank_key(limit) < results[0].rank_key(limit)
    return own if is_first else results[0]


def show_results(own: Result, results: Sequence[Result], limit: float, device: Hardware) -> Iterator[str]:
    """A table of the layouts, that of the recipe first.

    Args:
        own: of the recipe as it is.
        results: other layouts, the best first.
        limit: bytes that a rank may take.
        device: figures of the device.
    """
    head = ["layout", "planned: s", "tokens/s", "MFU", "GiB", "rehearsed: s", "tokens/s", "MFU", "GiB", "gain", ""]
    rows = [head]
    best = recommended(own, results, limit)
    for name, result in [("the recipe as it is", own), *((str(r.found.strategy), r) for r in results)]:
        gain = ""
        if result is not own and math.isfinite(own.seconds) and math.isfinite(result.seconds):
            gain = f"{own.seconds / result.seconds - 1:+.0%}"
        note = "recommended" if result is best and result.is_possible(limit) else ""
        rows.append(
            [name, *_planned(result.found, device), *_rehearsed(result.rehearsed), gain, _note(note, result, limit)]
        )
    yield "layouts; tokens/s are those of a device, gain is in speed"
    yield from table(rows, left=(0, 10))
    if isinstance(own.found, str):
        yield f"  the recipe as it is: {own.found}"
    elif isinstance(own.found, Rejected):
        yield f"  the recipe as it is: {own.found.reason}"


def _note(note: str, result: Result, limit: float) -> str:
    rehearsed = result.rehearsed
    if rehearsed is None:
        return note
    found = [note] if note else []
    if rehearsed.error:
        found.append(rehearsed.error)
    elif rehearsed.peak > limit:
        found.append(f"takes more than {limit / _GIB:.1f} GiB")
    if rehearsed.launch_bound:
        found.append(f"launch-bound by {rehearsed.launch_bound:.1f}")
    return ", ".join(found)


def _planned(found: Fitting | Rejected | str, device: Hardware) -> list[str]:
    """Cells of a plan: seconds, tokens/s of a device and MFU at worst and at best, GiB."""
    if isinstance(found, str):
        return ["-"] * 4
    if isinstance(found, Rejected):
        return ["-", "-", "-", f"{found.peak / _GIB:.1f}"]
    each = found.estimate.tokens / found.estimate.parallel_plan.degrees.num_ranks
    fast, slow = found.seconds
    part = model_flops(found.estimate) / found.estimate.parallel_plan.degrees.num_ranks / device.flops
    return [
        f"{fast:.3g} to {slow:.3g}",
        f"{each / slow:,.0f} to {each / fast:,.0f}",
        f"{part / slow:.0%} to {part / fast:.0%}",
        f"{found.estimate.peak / _GIB:.1f}",
    ]


def _rehearsed(found: Rehearsed | None) -> list[str]:
    if found is None or found.error:
        return ["-"] * 4
    return [
        f"{found.seconds:.3g}",
        f"{found.tokens_per_second:,.0f}",
        f"{found.mfu:.1%}",
        f"{found.peak / _GIB:.1f}",
    ]


def model_flops(found: Estimate) -> float:
    """FLOPs of a step over all ranks, without what is computed again."""
    plan = found.parallel_plan
    layout = copy.copy(found.layout)
    engine = dataclasses.replace(plan.engine, recompute="none", loss_chunk_tokens=None)
    layout.parallel_plan = dataclasses.replace(plan, engine=engine)
    costs = part_costs(layout, found.train_plan, found.shape_spec, found.batch)
    return dataclasses.replace(found, costs=costs).flops


def show_changes(own: Fitting | Rejected | str, best: Fitting, candidates: Candidates) -> Iterator[str]:
    """The gain of each change of the recipe, by arithmetic: the recommended layout with one thing as it was."""
    if isinstance(own, str):
        return
    before = own.strategy
    after = best.strategy
    changed = [key for key in _CHANGES if _value(before, key, candidates) != _value(after, key, candidates)]
    yield ""
    if not changed:
        yield "the recipe has the recommended layout already"
        return
    yield "what each change gains: the recommended layout with one thing as it was, planned"
    rows = [["change", "from", "to", "without it"]]
    for key in changed:
        strategy = dataclasses.replace(after, **{key: dataclasses.asdict(before)[key]})
        found = candidates.try_exactly(strategy) if key == "recompute" else candidates.try_strategy(strategy)
        words = [str(_value(each, key, candidates)) for each in (before, after)]
        rows.append([_CHANGES[key], *words, _without(found, best)])
    yield from table(rows, left=(0, 1, 2, 3))


def _value(strategy: Strategy, key: str, candidates: Candidates) -> object:
    """A part of a strategy, where None is the recipe's own value."""
    own = {
        "micro_batch": candidates.train_plan.section.micro_batch_size,
        "offload": candidates.own_parallel_plan.engine.offload_optimizer,
    }
    value = dataclasses.asdict(strategy)[key]
    return own[key] if value is None else value


def _without(found: Fitting | Rejected, best: Fitting) -> str:
    if isinstance(found, Rejected):
        return found.reason
    ratio = found.seconds[0] / best.seconds[0] - 1
    word = "slower" if ratio > 0 else "faster"
    time = "as fast" if abs(ratio) < 0.005 else f"{abs(ratio):.0%} {word}"
    return f"{time}, {found.estimate.peak / _GIB:.1f} GiB for {best.estimate.peak / _GIB:.1f}, {_passes(found, best)}"


def _passes(found: Fitting, best: Fitting) -> str:
    counts = [each.estimate.num_micro_batches for each in (found, best)]
    return f"{counts[0]} micro-batches for {counts[1]}, recompute {found.strategy.recompute}"


def show_ruled_out(num_fitting: int, rejected: Sequence[Rejected]) -> Iterator[str]:
    """The layouts that were not considered, with the reasons."""
    yield ""
    yield f"{num_fitting} layouts fit; ruled out by the plan: {len(rejected)}"
    rows = [["layout", "reason"]]
    nearest = sorted(rejected, key=lambda other: other.peak)
    rows += [[str(other.strategy), other.reason] for other in nearest[:_MAX_SHOWN]]
    if rejected:
        yield from table(rows, left=(0, 1))
    if len(rejected) > _MAX_SHOWN:
        yield f"  and {len(rejected) - _MAX_SHOWN} more"
