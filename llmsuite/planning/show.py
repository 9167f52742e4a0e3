"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmsuite.planning.estimate import Estimate
from llmsuite.planning.memory import NOT_COUNTED, StageMemory


def show_plan(found: Estimate, memory: float | None) -> Iterator[str]:
    """The lines of a plan; `memory` of a device, in bytes, where it is known."""
    yield from _model(found)
    yield ""
    yield from _memory(found, memory)
    yield ""
    yield "not counted:"
    yield from (f"  - {what}" for what in NOT_COUNTED)


def _model(found: Estimate) -> Iterator[str]:
    plan, layout = found.plan, found.layout
    trained = "" if layout.num_trained == layout.num_parameters else f", {layout.num_trained:,} of them trained"
    yield f"{plan.stage.name} of {plan.family.name}, {layout.num_parameters:,} parameters{trained}"
    yield f"{plan.degrees.num_ranks} x {plan.device.name}: {plan.degrees}, sharding {plan.recipe.parallel.sharding}"
    batch = found.batch
    yield (
        f"a step: {plan.recipe.train.global_batch_size} samples = {found.num_micro_batches} micro-batches of "
        f"{batch.rows} x {batch.length} tokens x {plan.degrees.num_data_ranks} data ranks"
    )


def _memory(found: Estimate, memory: float | None) -> Iterator[str]:
    columns = ("parameters", "masters", "moments", "gradients", "activations", "buffers", "peak")
    yield "memory of a rank of each pipeline stage"
    rows = [["stage", "elements", *columns]]
    for stage in found.stages:
        rows.append([str(stage.stage), f"{stage.num_parameters:,}", *map(size, _parts(stage))])
    yield from table(rows)
    if any(stage.host for stage in found.stages):
        yield f"in host memory, a rank: {size(max(stage.host for stage in found.stages))} of optimizer state"
    if memory is not None:
        verdict = "fits" if found.peak <= memory else "does not fit"
        yield f"peak {size(found.peak)}: {verdict} in {size(memory)}"


def _parts(stage: StageMemory) -> list[float]:
    return [
        *(stage.parameters, stage.copies, stage.moments, stage.gradients, stage.activations),
        *(stage.buffers, stage.peak),
    ]


def size(num_bytes: float) -> str:
    """Bytes as people read them: three digits and a unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns that are as wide as their widest cell, all but the first column to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        yield "  " + "  ".join(cells).rstrip()
