"""Batches for programs of whole steps."""

from __future__ import annotations

import numpy as np

from llmsuite.contract.schema.recipe import TrainSection
from tests.support.tiny_llama import CONFIG

TRAIN = TrainSection(
    max_steps=2,
    global_batch_size=4,
    micro_batch_size=4,
    learning_rate=0.1,
    optimizer="sgd",
    lr_schedule="constant",
    warmup_ratio=0.0,
    max_grad_norm=None,
)
B = 4
L = 12


def random_batch(with_documents: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    weights = draw.random([B, L], "float32")
    ids = draw.integers(0, CONFIG.vocab_size, [2, B, L])
    found = {"input_ids": ids[0], "targets": ids[1], "weights": weights / weights.sum()}
    return found | ({"document_starts": np.repeat([[0] * 5 + [5] * 7], B, 0)} if with_documents else {})
