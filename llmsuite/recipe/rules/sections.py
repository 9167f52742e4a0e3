"""Rules between keys of one section; checked when a recipe is read."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from llmsuite.recipe.rules.rule import Broken, Rule

if TYPE_CHECKING:
    from llmsuite.recipe.schema import EngineSection, ParallelSection

# between keys of the section `parallel`


def _sequence_parallel(parallel: ParallelSection) -> Broken:
    if parallel.sequence_parallel and parallel.tensor_parallel_degree == 1:
        yield "sequence_parallel", "needs tensor_parallel_degree above 1; set it to false"


def _interleaved(parallel: ParallelSection) -> Broken:
    schedule, chunks = parallel.pipeline_schedule, parallel.virtual_pipeline_degree
    if schedule == "interleaved" and parallel.pipeline_parallel_degree == 1:
        yield "pipeline_schedule", "is interleaved, which needs pipeline_parallel_degree above 1"
    if schedule == "interleaved" and chunks == 1:
        yield "virtual_pipeline_degree", "is 1, which is the schedule 1F1B; choose that, or 2 or more"


def _chunks(parallel: ParallelSection) -> Broken:
    schedule, chunks = parallel.pipeline_schedule, parallel.virtual_pipeline_degree
    if schedule != "interleaved" and chunks not in (None, 1):
        message = f"is {chunks}, but pipeline_schedule {schedule} has one chunk a rank; choose interleaved"
        yield "virtual_pipeline_degree", message


def _cut_of_nothing(parallel: ParallelSection) -> Broken:
    if parallel.pipeline_cut != "layers" and parallel.pipeline_parallel_degree == 1:
        yield "pipeline_cut", "needs pipeline_parallel_degree above 1: there is nothing to cut"


def _cut_in_order(parallel: ParallelSection) -> Broken:
    cut = parallel.pipeline_cut
    if not isinstance(cut, str) and any(a >= b for a, b in itertools.pairwise(cut)):
        yield "pipeline_cut", f"is {cut}; each layer has to come after the one before it"


def _sharding_degree(parallel: ParallelSection) -> Broken:
    degree = parallel.sharding_parallel_degree
    if parallel.sharding == "none" and degree > 1:
        message = f"is {degree} but sharding is none; choose stage1, stage2 or stage3, or 1"
        yield "sharding_parallel_degree", message


# between keys of the section `engine`


def _every_nothing(engine: EngineSection) -> Broken:
    if engine.recompute_every > 1 and engine.recompute != "full":
        yield "recompute_every", f"is {engine.recompute_every}, but recompute is {engine.recompute}; choose full, or 1"


def _inside_a_program(engine: EngineSection) -> Broken:
    if engine.recompute == "selective" and engine.mode == "to_static":
        yield "recompute", "is selective, which is inside of what to_static compiles; choose full or none, or dynamic"


PARALLEL_RULES = (
    Rule(
        "`sequence_parallel` with tensor parallel degree 1",
        "nothing to cut over",
        ("--parallel.tensor_parallel_degree=1",),
        _sequence_parallel,
    ),
    Rule(
        "`interleaved` without a pipeline, or with one chunk",
        "it would be another schedule",
        ("--parallel.pipeline_schedule=interleaved", "--parallel.virtual_pipeline_degree=1"),
        _interleaved,
    ),
    Rule(
        "a virtual degree without `interleaved`",
        "it would change nothing",
        ("--parallel.virtual_pipeline_degree=2",),
        _chunks,
    ),
    Rule(
        "`pipeline_cut` without a pipeline",
        "it would change nothing",
        ("--parallel.pipeline_parallel_degree=1", "--parallel.pipeline_cut=parameters"),
        _cut_of_nothing,
    ),
    Rule(
        "layers of `pipeline_cut` that are not in order",
        "no cut",
        ("--parallel.pipeline_cut=[16,16]",),
        _cut_in_order,
    ),
    Rule(
        "`sharding_parallel_degree` without `sharding`",
        "nothing would be cut",
        ("--parallel.sharding=none", "--parallel.sharding_parallel_degree=2"),
        _sharding_degree,
    ),
)
"""Between keys of the section `parallel`."""

ENGINE_RULES = (
    Rule(
        "`recompute_every` without `recompute: full`",
        "it would change nothing",
        ("--engine.recompute=none", "--engine.recompute_every=2"),
        _every_nothing,
    ),
    Rule(
        "`recompute: selective` with `to_static`",
        "a layer is compiled whole",
        ("--engine.recompute=selective", "--engine.mode=to_static"),
        _inside_a_program,
    ),
)
"""Between keys of the section `engine`."""
