"""The output of `llmsuite plan`: an estimate, or the result of a search, as lines of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from llmsuite.models.shape_spec import MoE
from llmsuite.parallel.timeline import peak_in_flight, timeline_text
from llmsuite.planning import programs
from llmsuite.planning.cost import FAST, SLOW, Hardware, axis_size, total_bytes
from llmsuite.planning.estimate import Estimate
from llmsuite.planning.lora_ga import num_lora_ga_steps
from llmsuite.planning.memory import NOT_COUNTED, UNEVEN_EXPERTS, StageMemory
from llmsuite.planning.rollouts import stores_matrices
from llmsuite.planning.search import Fitting, Rejected

_COLUMNS = ("parameters", "masters", "moments", "gradients", "activations", "buffers", "peak")
"""Names of the figures of `_parts`."""


def show_plan(found: Estimate, memory: float | None, device: Hardware | None) -> Iterator[str]:
    """The lines of an estimate.

    Args:
        found: the estimate.
        memory: memory of a device in bytes, if known.
        device: figures from which times are computed, if known.
    """
    parts = [_model(found), _memory(found, memory), _traffic(found), _schedule(found), _work(found, device)]
    for lines in (*parts, _storage(found)):
        yield from lines
        yield ""
    yield "not counted, or not exactly:"
    yield from (f"  - {what}" for what in inexact(found))


def plan_data(found: Estimate, memory: float | None, device: Hardware | None) -> dict[str, Any]:
    """An estimate as JSON data: bytes, seconds, tokens and FLOPs. The arguments are those of `show_plan`."""
    layout = found.layout
    plan = found.parallel_plan
    return {
        "stage": found.train_plan.stage.name,
        "family": layout.model_plan.family.name,
        "parameters": layout.num_parameters,
        "trained_parameters": layout.num_trained,
        "device": plan.device.name,
        "num_ranks": plan.degrees.num_ranks,
        "degrees": dataclasses.asdict(plan.degrees),
        "sharding": plan.section.sharding,
        "global_batch_size": found.train_plan.section.global_batch_size,
        "micro_batches": found.num_micro_batches,
        "micro_batch_rows": found.batch.rows,
        "micro_batch_length": found.batch.length,
        "memory_bytes": [{"stage": stage.stage, **dict(zip(_COLUMNS, _parts(stage)))} for stage in found.stages],
        "peak_bytes": found.peak,
        "fits": None if memory is None else found.peak <= memory,
        "tokens_per_step": found.tokens,
        "flops_per_step": found.flops,
        "step_seconds": None if device is None else list(found.step_seconds(device)),
        "rollout_seconds": None if device is None else found.rollout_seconds(device),
        "checkpoint_bytes": found.storage.checkpoint,
    }


def show_search(
    fitting: Sequence[Fitting], rejected: Sequence[Rejected], most: int, sets_recompute_every: bool
) -> Iterator[str]:
    """The lines of a search.

    Args:
        fitting: the strategies that fit; the `most` fastest are shown.
        rejected: the others, each with the reason.
        most: number of strategies to show.
        sets_recompute_every: True where the recipe sets that key, which a search does not read.
    """
    yield f"{len(fitting)} strategies fit, {len(rejected)} do not"
    if fitting:
        rows = [["", "strategy", "peak", "seconds a step"]]
        for number, found in enumerate(fitting[:most], 1):
            seconds = f"{found.seconds[0]:.3g} to {found.seconds[1]:.3g}"
            rows.append([str(number), str(found.strategy), size(found.estimate.peak), seconds])
        yield from table(rows, left=(1,))
        # a search assumes that every layer is recomputed
        more = ""
        if sets_recompute_every:
            more = " --engine.recompute_every=1"
        yield f"the first: llmsuite plan RECIPE {fitting[0].strategy.overrides}{more}"
    yield ""
    yield "rejected"
    rows = [["strategy", "reason"], *([str(r.strategy), r.reason] for r in rejected)]
    yield from table(rows, left=(0, 1))


def inexact(found: Estimate) -> Iterator[str]:
    """The figures of a plan that are not exact counts."""
    yield "micro-batches: taken as full, rows of data.max_length with every position supervised; others take less"
    yield from NOT_COUNTED
    if any(isinstance(layer.mlp, MoE) for layer in found.shape_spec.layers):
        yield UNEVEN_EXPERTS
    plan = found.parallel_plan
    profile = found.train_plan.profile
    if plan.engine.compiles_steps:
        yield from programs.notes(found.layout.model_plan, plan)
    if plan.degrees.ep > 1:
        yield "bytes to and from experts: taken as evenly loaded; calls, and all other bytes, are exact"
    if profile.updates:
        yield "rollouts: the messages that gather weights and completions are not counted, nor the time of rewards"
    if profile.critic is not None:
        yield "the critic: its messages are counted as those of a model, but not compared with runs"
    if any(stage.lora_ga_init for stage in found.stages):
        yield "lora.init: its passes are taken as steps; gathering gradients and singular vectors are not counted"
    if plan.device.name != "cpu":
        yield "buffers and fused kernels of this device: not measured on such a device"
    yield "times: they assume " + " to ".join(
        f"{efficiency.flops:.0%} of the peak and {efficiency.bandwidth:.0%} of the bandwidth"
        for efficiency in (SLOW, FAST)
    )


def _model(found: Estimate) -> Iterator[str]:
    plan = found.parallel_plan
    layout = found.layout
    stage = found.train_plan.stage.name
    trained = ""
    if layout.num_trained != layout.num_parameters:
        trained = f", {layout.num_trained:,} of them trained"
    yield f"{stage} of {layout.model_plan.family.name}, {layout.num_parameters:,} parameters{trained}"
    yield f"{plan.degrees.num_ranks} x {plan.device.name}: {plan.degrees}, sharding {plan.section.sharding}"
    batch = found.batch
    yield (
        f"a step: {found.train_plan.section.global_batch_size} samples = {found.num_micro_batches} micro-batches of "
        f"{batch.rows} x {batch.length} tokens x {plan.degrees.num_data_ranks} data ranks"
    )
    if plan.engine.compiles_steps:
        found_lengths = programs.lengths(batch.length, plan.length_multiple, found.train_plan)
        listed = ", ".join(map(str, found_lengths))
        yield f"a step program for each length of rows, at most {len(found_lengths)}: {listed}"


def _memory(found: Estimate, memory: float | None) -> Iterator[str]:
    yield "memory of a rank of each pipeline stage"
    rows = [["stage", "elements", *_COLUMNS]]
    for stage in found.stages:
        rows.append([str(stage.stage), f"{stage.num_parameters:,}", *map(size, _parts(stage))])
    yield from table(rows)
    if any(stage.host for stage in found.stages):
        yield f"in host memory, a rank: {size(max(stage.host for stage in found.stages))} of optimizer state"
    if any(stage.decoder for stage in found.stages):
        weights = max(stage.decoder for stage in found.stages)
        cache = max(stage.cache for stage in found.stages)
        what = "generation"
        when = "in evaluations"
        if found.train_plan.profile.updates:
            what = "rollouts"
            when = "before a step"
        how = "unsharded"
        if stores_matrices(found.parallel_plan, found.shape_spec):
            how = "unsharded, matrices in bfloat16"
        yield f"for {what}, {when} and not during passes: {size(weights)} of weights, {how}; {size(cache)} of cache"
    if any(stage.reward for stage in found.stages):
        yield f"of it for the reward model: {size(max(stage.reward for stage in found.stages))} of weights, unsharded"
    if any(stage.reference for stage in found.stages):
        yield f"of it for the reference: {size(max(stage.reference for stage in found.stages))} of frozen weights"
    if any(stage.teacher for stage in found.stages):
        weights = max(stage.teacher for stage in found.stages)
        yield f"of it for the teacher, on the last pipeline stage: {size(weights)} of frozen weights"
    if any(stage.critic for stage in found.stages):
        yield f"of it for the critic: {size(max(stage.critic for stage in found.stages))} of parameters and moments"
    if any(stage.lora_ga_init for stage in found.stages):
        most = size(max(stage.lora_ga_init for stage in found.stages))
        yield f"of the peak, before the first step only: {most} of gradients for lora.init; see lora.init_passes"
    if memory is not None:
        result = "fits" if found.peak <= memory else "does not fit"
        yield f"peak {size(found.peak)}: {result} in {size(memory)}"


def _traffic(found: Estimate) -> Iterator[str]:
    yield "messages of a rank in a step, on the pipeline stage that sends most"
    totals = [total_bytes(counts) for counts in found.traffic]
    at = totals.index(max(totals))
    counts = dict(found.traffic[at])
    if found.critic is not None:
        for message, count in found.critic.traffic[at].items():
            counts[dataclasses.replace(message, why=f"critic: {message.why}")] = count
    rows = [["axis", "ranks", "operation", "calls", "bytes", "why"]]
    merged: dict[tuple[str, int, str, str], list[int]] = {}
    for message, count in counts.items():
        key = message.axis, axis_size(found.layout, message), message.operation, message.why
        total = merged.setdefault(key, [0, 0])
        total[0] += count
        total[1] += count * message.total_bytes
    for (axis, size_, operation, why), (calls, num_bytes) in merged.items():
        rows.append([axis, str(size_), operation, f"{calls:,}", f"{num_bytes:,}", why])
    if len(rows) == 1:
        yield "  nothing: there is one rank"
        return
    yield from table(rows, left=(0, 2, 5))


def _schedule(found: Estimate) -> Iterator[str]:
    if found.parallel_plan.degrees.pp == 1:
        yield "no pipeline"
        return
    held = [peak_in_flight(rank) for rank in found.timeline.ranks]
    yield f"pipeline {found.parallel_plan.schedule}: ranks wait {found.bubble:.1%} of a step's passes"
    yield f"  passes in flight, by stage: {', '.join(map(str, held))}"
    yield from (f"  {line}" for line in timeline_text(found.timeline))


def _work(found: Estimate, device: Hardware | None) -> Iterator[str]:
    yield f"a step: {found.tokens:,} tokens, {found.flops:.3g} FLOPs over all ranks"
    if count := num_lora_ga_steps(found.layout):
        fast, slow = (0.0, 0.0) if device is None else found.lora_ga_seconds(device)
        time = ""
        if device is not None:
            time = f", {fast:.3g} to {slow:.3g} s"
        work = f"{found.lora_ga_flops:.3g} FLOPs{time}"
        yield f"  before the first one, for lora.init: the passes of {count} steps, with gradients of matrices: {work}"
    if device is None:
        yield "  no time without --hardware, or --flops and --bandwidth"
        return
    fast, slow = found.step_seconds(device)
    a_day = [found.tokens / seconds * 86400 for seconds in (slow, fast)]
    yield f"  {fast:.3g} to {slow:.3g} s; {a_day[0]:.3g} to {a_day[1]:.3g} tokens a day"
    part = [found.flops / (found.parallel_plan.degrees.num_ranks * device.flops * s) for s in (slow, fast)]
    yield f"  {part[0]:.0%} to {part[1]:.0%} of the devices' peak, including recompute"
    sampling = found.rollout_seconds(device)
    if sampling is not None:
        yield f"  {sampling[0]:.3g} to {sampling[1]:.3g} s more to sample completions, if all have the maximum length"
    elif found.train_plan.samples_in_training_processes:
        yield "  no time to sample completions without --hardware, or --memory_bandwidth"


def _storage(found: Estimate) -> Iterator[str]:
    what = found.storage
    yield f"a checkpoint: {size(what.checkpoint)}; on disk at most {size(what.on_disk)}"
    yield f"host memory of a rank: {size(what.loading)} to read the model, {size(what.saving)} to save it"


def _parts(stage: StageMemory) -> list[float]:
    return [
        *(stage.parameters, stage.masters, stage.moments, stage.gradients, stage.activations),
        *(stage.buffers, stage.peak),
    ]


def size(num_bytes: float) -> str:
    """Bytes as text: three digits and a unit."""
    value = float(num_bytes)
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Iterator[str]:
    """Rows in columns as wide as their widest cell; the columns in `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        yield "  " + "  ".join(cells).rstrip()
