"""The part of `llmsuite plan` about `engine.program: step`: the memory of such steps, and how many programs are made.

A program keeps what its backward pass needs, and the sums of gradients over micro-batches have memory of their own from
step to step. Sharding cuts the state of the optimizer where the program computes with it: no rank has a piece of a
parameter beside the parameter. Masters of parameters in 16 bits are what the program updates, so they are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmsuite.models.mtp import is_embedding_shared
from llmsuite.parallel.program.lengths import bucket, length_multiple, longest_row
from llmsuite.planning.layout import LocalParameter
from llmsuite.recipe.resolve import RunPlan


def lengths(plan: RunPlan) -> list[int]:
    """The lengths that rows of a step may be padded to; a program is made for each of them that is met."""
    longest, multiple = longest_row(plan), length_multiple(plan)
    if plan.stage.fills_rows:
        return [longest]
    return sorted({bucket(length, longest, multiple) for length in range(multiple, longest + 1, multiple)})


def memory_of_steps(kept: float, held: Sequence[LocalParameter], num_micro_batches: int) -> dict[str, Any]:
    """The fields of `StageMemory` that differ for a rank whose steps are programs.

    Args:
        kept: bytes that layers keep of one micro-batch until its backward pass.
        held: the parameters of the rank.
        num_micro_batches: of a step.
    """
    # stage 2 does as stage 1: a gradient is whole until it is summed over the data ranks; in stage 3 it is a slice
    gradients = float(sum(4 * (h.num_owned if h.is_stored_in_parts else h.size) for h in held if h.has_gradient))
    activations = kept + sum(h.size * h.num_bytes for h in held if h.is_stored_in_parts)
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


def notes(plan: RunPlan) -> Iterator[str]:
    """What of a plan for such programs is not exact."""
    yield "programs of whole steps: what they keep is taken as what layers keep; messages as those of compiled layers"
    if plan.degrees.ep > 1:
        yield "programs of whole steps: experts get the tokens of all data ranks; counted is what is sent op by op"
    is_copied = plan.degrees.pp > 1 and is_embedding_shared(plan.model_config)
    if is_copied and plan.recipe.parallel.sharding == "stage3":
        yield "programs of whole steps: a tied embedding of a pipeline is counted in slices, and stays whole"
