"""Saves of several ranks into one directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from llmsuite.checkpoint.save import CheckpointJob, GatheredTensor, assign_writers, begin, save
from tests.support import alone, tiny_llama
from tests.support.tiny_llama import CONFIG, FAMILY, TOKENIZER
from tests.support.train_states import STATE, Bits

RANKS = 3


def tensors(step: int, calls: dict[int, list[str]] | None = None, rank: int = 0) -> list[list[GatheredTensor]]:
    """Parameters and slots as one rank has them; `calls` notes what each rank is asked for."""
    values = tiny_llama.values(seed=step)
    slots = {f"{name}/moment1": value.astype("float32") for name, value in values.items()}
    result = []
    for group in (values, slots):
        whole = alone.whole({name: Bits(value) for name, value in group.items()})
        writers = assign_writers({t.name: t.num_bytes for t in whole}, range(RANKS), {})

        def noted(tensor: GatheredTensor, writer: int) -> GatheredTensor:
            gather = tensor.gather
            assert gather is not None

            def gather_and_note() -> object:
                if calls is not None:
                    calls.setdefault(rank, []).append(tensor.name)
                return gather()

            return dataclasses.replace(tensor, writer=writer, gather=gather_and_note)

        result.append([noted(tensor, writers[tensor.name]) for tensor in whole])
    return result


def job_of(root: Path, step: int, rank: int, calls: dict[int, list[str]] | None = None) -> CheckpointJob:
    state = dataclasses.replace(STATE, step=step, samples=8 * step)
    parameters, slots = tensors(step, calls, rank)
    return CheckpointJob(
        root, state, FAMILY, CONFIG, parameters, slots, TOKENIZER, keep_last=2, rank=rank, num_ranks=RANKS
    )


def save_rank(root: Path, step: int, rank: int, calls: dict[int, list[str]] | None = None) -> Path | None:
    return save(job_of(root, step, rank, calls))


def save_all(root: Path, step: int, calls: dict[int, list[str]] | None = None) -> None:
    begin(job_of(root, step, 0))
    for rank in (2, 1, 0):
        save_rank(root, step, rank, calls)
