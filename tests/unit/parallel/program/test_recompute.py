"""Programs that compute attention again give the same numbers, and keep no scores of pairs of tokens."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
from paddle.base import core

from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import Options, StepPrograms
from llmsuite.parallel.recompute import recompute_attention
from tests.support import alone, tiny_llama
from tests.support.program_batches import TRAIN
from tests.support.program_loss import program_loss

ROWS = 4
LENGTH = 256
LAYERS = 3
CONFIG = dataclasses.replace(tiny_llama.CONFIG, num_hidden_layers=LAYERS)
SCORES = CONFIG.num_attention_heads * ROWS * LENGTH**2 * 4
"""Bytes, of a layer."""


def _steps(is_again: bool, enough: float = 0) -> tuple[dict[str, float], int, int]:
    """Outputs of the fifth step; the peak of tensor bytes that a step adds, as the least over all steps after the
    first; and the number of softmaxes of a step. A thread of Paddle frees tensors, later on a busy machine: so there
    are up to 40 steps until one adds no more bytes than `enough`, and at least 5."""
    model = tiny_llama.model(CONFIG)  # with the plain form of attention
    model.train()
    if is_again:
        recompute_attention(model, tiny_llama.FAMILY.shard_plan or UNSHARDED)
    optimizer = ProgramOptimizer(alone.shards(dict(model.named_parameters())), TRAIN, 2)
    programs = StepPrograms(MeshLayout(model), optimizer, program_loss, options=Options(recompute=is_again))
    peaks = list[int]()
    befores = list[int]()
    outputs = list[dict[str, float]]()
    while len(peaks) < 5 or (len(peaks) < 40 and min(peaks[1:]) - min(befores[1:]) > enough):
        step = len(peaks) % 5 + 1
        ids = np.random.default_rng(step).integers(0, CONFIG.vocab_size, [2, ROWS, LENGTH])
        weights = np.full([ROWS, LENGTH], 1 / (ROWS * LENGTH), "float32")
        gc.collect()  # programs of other tests, which would be freed meanwhile
        befores.append(core.host_memory_stat_current_value("Allocated", 0))
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        outputs.append(programs.run(step, {"input_ids": ids[0], "targets": ids[1], "weights": weights}, 1))
        peaks.append(core.host_memory_stat_peak_value("Allocated", 0))
    return outputs[4], min(peaks[1:]) - min(befores[1:]), programs.operations()["pd_op.softmax"]


def test_attention_alone() -> None:
    kept, most, once = _steps(is_again=False, enough=float("inf"))
    # those of one layer are there while its gradient is made
    enough = most - 0.9 * (LAYERS - 1) * SCORES
    again, less, twice = _steps(True, enough)
    assert again == pytest.approx(kept, rel=1e-6)
    assert (once, twice) == (LAYERS, 2 * LAYERS)
    assert less < enough, (most, less)
