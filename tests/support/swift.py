"""Files of ms-swift, and its choice of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

BARE: dict[str, Any] = {"model": "Qwen/Qwen2.5-7B-Instruct", "dataset": "rows.jsonl", "max_length": 2048}
RLHF = {**BARE, "command": "swift rlhf", "rlhf_type": "dpo"}
FULL = {**BARE, "tuner_type": "full", "deepspeed": "zero2"}
MEGATRON = {**BARE, "command": "megatron sft", "num_train_epochs": 2}
MEGATRON_DPO = {**MEGATRON, "command": "megatron rlhf", "rlhf_type": "dpo"}


def load_datasets(
    sizes: Sequence[int], counts: Sequence[int | None], ratio: float | None, data_seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The rows of each data set for training and for evaluation, by `datasets` itself: written after `load_dataset`,
    `post_process` and `sample_dataset` of ms-swift, for the default `dataset_shuffle`."""
    state = np.random.RandomState(data_seed)
    training = []
    evaluation = []
    for size, count in zip(sizes, counts):
        rows = datasets.Dataset.from_dict({"n": range(size)})
        wanted = size if count is None else count
        held_out: list[int] = []
        if ratio:
            test_size = max(int(min(size, wanted) * ratio), 1)
            seed = state.randint(0, 2**31 - 1)
            split = rows.train_test_split(test_size=test_size, shuffle=True, seed=seed)
            rows = split["train"]
            held_out = split["test"]["n"][:]
            wanted -= test_size
        numbers = np.tile(range(len(rows)), wanted // len(rows))
        if wanted % len(rows):
            numbers = np.concatenate([numbers, state.permutation(len(rows))[: wanted % len(rows)]])
        training.append(rows.select(numbers)["n"][:])
        evaluation.append(held_out)
    return training, evaluation
