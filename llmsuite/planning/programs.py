"""Plans for `engine.program: step`: the memory of step programs, and the number of programs.

A program keeps the tensors that its backward pass needs, and the sums of gradients over micro-batches have memory of
their own from step to step. Sharding cuts the state of the optimizer where the program computes with it: no rank has a
shard of a parameter in addition to the parameter. A program updates the masters of 16-bit parameters, so they are not
sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmsuite.models.mtp import is_embedding_shared
from llmsuite.parallel.program.lengths import padded_length
from llmsuite.planning.layout import LocalParameter
from llmsuite.recipe.plans import ModelPlan, ParallelPlan, TrainPlan


def lengths(longest: int, multiple: int, train_plan: TrainPlan) -> list[int]:
    """The lengths that rows of a step may be padded to; a program is built for each length that occurs.

    Args:
        longest: length of a full row, padded.
        multiple: `length_multiple` of the run.
        train_plan: of the run.
    """
    if "fixed_length" in train_plan.stage.capabilities:
        return [longest]
    return sorted({padded_length(length, longest, multiple) for length in range(multiple, longest + 1, multiple)})


def memory_of_steps(kept: float, held: Sequence[LocalParameter], num_micro_batches: int) -> dict[str, Any]:
    """The fields of `StageMemory` that differ for a rank whose steps are programs.

    Args:
        kept: bytes that layers keep of one micro-batch until its backward pass.
        held: the parameters of the rank.
        num_micro_batches: of a step.
    """
    # stage 2 is as stage 1: a gradient is unsharded until it is summed over the data ranks; in stage 3 it is a slice
    gradients = float(sum(4 * (h.num_owned if h.is_stored_sharded else h.size) for h in held if h.has_gradient))
    activations = kept + sum(h.size * h.num_bytes for h in held if h.is_stored_sharded)
    with_masters = [h for h in held if h.has_master]
    activations += sum(h.size * h.num_bytes for h in with_masters)  # the copies that a program makes of them
    return {
        "masters": float(sum(4 * h.size for h in with_masters)),
        "gradients": gradients,
        "sums": gradients if num_micro_batches > 1 else 0.0,
        "activations": activations,
        "held": activations + gradients,
        "update": gradients,
    }


def notes(model_plan: ModelPlan, parallel_plan: ParallelPlan) -> Iterator[str]:
    """The figures of a plan for step programs that are not exact."""
    yield "step programs: they are assumed to keep what layers keep, and to send what compiled layers send"
    if parallel_plan.degrees.ep > 1:
        yield "step programs: experts get the tokens of all data ranks; the messages of eager mode are counted"
    is_copied = parallel_plan.degrees.pp > 1 and is_embedding_shared(model_plan.config)
    if is_copied and parallel_plan.section.sharding == "stage3":
        yield "step programs: a tied embedding of a pipeline is counted as sliced, but is not sliced"
