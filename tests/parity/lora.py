"""Adapters on strategies: what is run, on how many ranks, and compared with one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, four_layers, once

LORA = ("--lora.rank=4", "--lora.lora_plus_ratio=4")


def recipe(family: str, stage: str = "lora") -> str:
    """The recipe of a stage; adapters go with all of them."""
    return f"recipes/{family}/{stage}.json"


def case(
    name: str,
    num_ranks: int = 1,
    parallel: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
    run: Sequence[str] = (),
    family: str = "llama",
    stage: str = "lora",
    optimizer: str = "sgd",
    mutation: str | None = None,
    resume: bool = False,
) -> Case:
    """A run of adapters.

    Args:
        name: of its directory.
        num_ranks: of the launch.
        parallel: the section of the recipe.
        words: how it is computed; with a micro-batch of 1 where they say nothing, to add up gradients.
        run: what is computed; the run in one process has it too.
        family: of the model.
        stage: whose recipe is taken.
        optimizer: which of `OPTIMIZERS`.
        mutation: an error that is put in.
        resume: see `Case`.
    """
    micro = (
        () if any(word.startswith("--train.micro_batch_size") for word in words) else ("--train.micro_batch_size=1",)
    )
    one = ("--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}", "--engine.recompute=none")
    many = ("--checkpoint.save_steps=null",)
    every = [*COMMON, *OPTIMIZERS[optimizer], *four_layers(family), *LORA, *run]
    given = [*(one if num_ranks == 1 else many), *micro, f"--parallel={json.dumps(parallel or {})}", *words]
    words = once([*every, f"--launch.num_devices={num_ranks}", *given])
    return Case(name, num_ranks, words, mutation, recipe(family, stage), resume=resume)
