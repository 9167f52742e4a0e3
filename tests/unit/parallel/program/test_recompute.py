"""Programs that compute attention again give the same numbers, and keep no scores of pairs of tokens."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
from paddle.base import core

from llmsuite.models.shard_plan import WHOLE
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import Options, StepPrograms
from llmsuite.parallel.recompute import recompute_attention
from llmsuite.stages.language_model import program_loss
from tests.unit import alone, tiny_llama
from tests.unit.parallel.program.test_kernels import TRAIN

ROWS, LENGTH, LAYERS = 4, 256, 3
CONFIG = dataclasses.replace(tiny_llama.CONFIG, num_hidden_layers=LAYERS)
SCORES = CONFIG.num_attention_heads * ROWS * LENGTH**2 * 4
"""Bytes, of a layer."""


def _steps(is_again: bool) -> tuple[dict[str, float], int, int]:
    """What the last of a few tells; the most bytes of tensors in a step beside those from before, of the step after the
    first that had least, as a thread of Paddle's frees tensors, later on a busy machine; and how many softmaxes a step
    has."""
    model = tiny_llama.model(CONFIG)  # with the plain form of attention
    model.train()
    if is_again:
        recompute_attention(model, tiny_llama.FAMILY.shard_plan or WHOLE)
    optimizer = ProgramOptimizer(alone.shards(dict(model.named_parameters())), TRAIN, 2)
    programs = StepPrograms(model, optimizer, program_loss, options=Options(recompute=is_again))
    peaks = []
    for step in range(1, 6):
        ids = np.random.default_rng(step).integers(0, CONFIG.vocab_size, [2, ROWS, LENGTH])
        weights = np.full([ROWS, LENGTH], 1 / (ROWS * LENGTH), "float32")
        gc.collect()  # programs of other tests, which would be freed meanwhile
        before = core.host_memory_stat_current_value("Allocated", 0)
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        told = programs.run(step, {"input_ids": ids[0], "targets": ids[1], "weights": weights}, 1)
        peaks.append(core.host_memory_stat_peak_value("Allocated", 0) - before)
    return told, min(peaks[1:]), programs.operations()["pd_op.softmax"]


def test_attention_alone() -> None:
    (kept, most, once), (again, less, twice) = (_steps(is_again) for is_again in (False, True))
    assert again == pytest.approx(kept, rel=1e-6)
    assert (once, twice) == (LAYERS, 2 * LAYERS)
    # those of one layer are there while its gradient is made
    assert most - less > 0.9 * (LAYERS - 1) * SCORES, (most, less)
