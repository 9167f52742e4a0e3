"""The recipe section `parallel` and the rules between its keys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from llmsuite.contract.schema.numbers import NonNegativeInt, PositiveInt
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.contract.schema.section import Section


def _sequence_parallel(parallel: ParallelSection) -> Iterator[Violation]:
    if parallel.tensor_parallel_degree == 1:
        yield "sequence_parallel", "needs tensor_parallel_degree above 1; set it to false"


def _fused(parallel: ParallelSection) -> Iterator[Violation]:
    if parallel.tensor_parallel_degree == 1 and parallel.fuse_projections:
        yield "fuse_projections", "needs tensor_parallel_degree above 1; set it to false"


def _interleaved(parallel: ParallelSection) -> Iterator[Violation]:
    schedule = parallel.pipeline_schedule
    chunks = parallel.virtual_pipeline_degree
    if schedule == "interleaved" and parallel.pipeline_parallel_degree == 1:
        yield "pipeline_schedule", "is interleaved, which needs pipeline_parallel_degree above 1"
    if schedule == "interleaved" and chunks == 1:
        yield "virtual_pipeline_degree", "is 1, which is the schedule 1F1B; choose that, or 2 or more"


def _chunks(parallel: ParallelSection) -> Iterator[Violation]:
    schedule = parallel.pipeline_schedule
    chunks = parallel.virtual_pipeline_degree
    if schedule != "interleaved" and chunks not in (None, 1):
        message = f"is {chunks}, but pipeline_schedule {schedule} has one chunk per rank; choose interleaved"
        yield "virtual_pipeline_degree", message


def _cut_without_pipeline(parallel: ParallelSection) -> Iterator[Violation]:
    if parallel.pipeline_parallel_degree == 1:
        yield "pipeline_cut", "needs pipeline_parallel_degree above 1: there is no pipeline to split layers over"


def _cut_in_order(parallel: ParallelSection) -> Iterator[Violation]:
    cut = parallel.pipeline_cut
    if not isinstance(cut, str) and any(a >= b for a, b in itertools.pairwise(cut)):
        yield "pipeline_cut", f"is {cut}; the layers have to be in increasing order"


def _sharding_degree(parallel: ParallelSection) -> Iterator[Violation]:
    degree = parallel.sharding_parallel_degree
    if parallel.sharding == "none" and degree > 1:
        message = f"is {degree} but sharding is none; choose stage1, stage2 or stage3, or 1"
        yield "sharding_parallel_degree", message


_UNUSED = (
    Rule(
        "`sequence_parallel` with tensor parallel degree 1",
        "there are no ranks to shard sequences over",
        ("--parallel.tensor_parallel_degree=1",),
        _sequence_parallel,
    ),
    Rule(
        "`pipeline_cut` without a pipeline",
        "it would change nothing",
        ("--parallel.pipeline_parallel_degree=1", "--parallel.pipeline_cut=parameters"),
        _cut_without_pipeline,
    ),
)
"""Rules that yield the keys without effect, whatever their own values are."""
_RULES = (
    Rule(
        "`fuse_projections` with tensor parallel degree 1",
        "there is no all-reduce to save",
        (
            "--parallel.fuse_projections=true",
            "--parallel.tensor_parallel_degree=1",
            "--parallel.sequence_parallel=false",
        ),
        _fused,
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
        "layers of `pipeline_cut` that are not in order",
        "each part of the model has consecutive layers",
        ("--parallel.pipeline_cut=[16,16]",),
        _cut_in_order,
    ),
    Rule(
        "`sharding_parallel_degree` without `sharding`",
        "nothing would be sharded",
        ("--parallel.sharding=none", "--parallel.sharding_parallel_degree=2"),
        _sharding_degree,
    ),
)
PARALLEL_RULES = (*_UNUSED, *_RULES)
"""Rules between keys of section `parallel`."""


@dataclasses.dataclass(kw_only=True)
class ParallelSection(Section):
    """Parallelism: the degree of each mesh axis and the sharding of model, optimizer and data over ranks. The data
    parallel degree is derived: devices / (tp * pp * sharding)."""

    tensor_parallel_degree: PositiveInt = 1
    """Number of ranks over which each weight matrix is sharded (tp)."""
    pipeline_parallel_degree: PositiveInt = 1
    """Number of pipeline stages over which the layers are split (pp)."""
    pipeline_schedule: Literal["FThenB", "1F1B", "interleaved"] = "1F1B"
    """Order of forward and backward passes in a pipeline. "FThenB" (GPipe) keeps the activations of all micro-batches,
    "1F1B" those of at most one micro-batch per pipeline stage. "interleaved" is 1F1B with several chunks of layers on
    each rank: a smaller pipeline bubble, more messages."""
    virtual_pipeline_degree: PositiveInt | None = None
    """Number of chunks of layers on each rank with the interleaved schedule: chunk c of pipeline stage s is part
    c * pipeline_parallel_degree + s of the model. Default: 2 with that schedule, 1 with the others."""
    pipeline_cut: Literal["layers", "parameters"] | list[PositiveInt] = "layers"
    """Partition of the layers into parts. "layers": the same number of layers in each part, one more in the first parts
    if the number does not divide. "parameters": minimises the parameters of the largest part, embedding and head
    included. A list: the first layer of the second, third, ... part, counted from 0."""
    sharding: Literal["none", "stage1", "stage2", "stage3"] = "none"
    """ZeRO stage. stage1: shard optimizer states. stage2: also gradients. stage3: also parameters."""
    sharding_parallel_degree: PositiveInt = 1
    """Size of the sharding axis. 1: sharding uses all data ranks."""
    expert_parallel_degree: PositiveInt = 1
    """Number of data ranks (dp x sharding) over which the routed experts of an MoE model are distributed; these ranks
    exchange tokens by all-to-all (ep)."""
    sequence_parallel: bool = False
    """Shard activations along the sequence dimension outside the tensor parallel regions."""
    fuse_projections: bool | None = None
    """In the backward pass, use one all-reduce over the tensor parallel ranks for all projections of the same input
    (queries, keys and values; gate and up): each rank first adds up its gradients of that input. Two all-reduces per
    layer instead of five, under sequence parallel two reduce-scatters; parameters and checkpoints do not change.
    Default: true where it is supported, on devices that send while they compute; `llmsuite doctor --ops` shows them."""
    gradient_bucket_bytes: NonNegativeInt | None = None
    """Size of gradient buckets in bytes of float32: gradients that become ready one after another are reduced over the
    data ranks in one call up to this size. 0: one call per gradient. Default: chosen by the device; `llmsuite doctor
    --ops` shows it."""

    @property
    def num_chunks(self) -> int:
        """Number of parts of the model on one rank."""
        return self.virtual_pipeline_degree or (2 if self.pipeline_schedule == "interleaved" else 1)

    def problems(self) -> Iterator[tuple[str, str]]:
        for rule in _RULES:
            yield from rule.check(self)

    def unused(self) -> Iterator[tuple[str, str]]:
        for rule in _UNUSED:
            yield from rule.check(self)
