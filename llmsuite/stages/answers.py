"""Prompts with an answer to each: what stages that compare answers share.

Shapes: A answers, L length, D hidden, N tokens of answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.stages.base import Batch
from llmsuite.stages.reference_cache import answer_key

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to a prompt, as token ids. It ends with the end-of-sequence token."""

    prompt: list[int]
    ids: list[int]

    @property
    def key(self) -> str:
        """Its name in the reference cache."""
        return answer_key(self.prompt, self.ids)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.ids)


def ended(answer: list[int], eos: int) -> list[int]:
    """The answer up to the end-of-sequence token, which is learnt; what a template puts behind it is not."""
    if eos not in answer:
        return [*answer, eos]
    return answer[: len(answer) - answer[::-1].index(eos)]


def collate(answers: Sequence[Answer], pad_id: int, length_multiple: int) -> Batch:
    """Answers to arrays, padded on the right to a multiple; the last token of each is only a target."""
    longest = max(map(len, answers)) - 1
    length = -(-longest // length_multiple) * length_multiple
    input_ids = np.full([len(answers), length], pad_id, dtype="int64")
    positions, targets, owners = [], [], []
    for i, answer in enumerate(answers):
        input_ids[i, : len(answer) - 1] = (answer.prompt + answer.ids)[:-1]
        first = i * length + len(answer.prompt) - 1  # the position that predicts the first token of the answer
        positions.append(np.arange(first, first + len(answer.ids)))
        targets.append(answer.ids)
        owners.append(np.full(len(answer.ids), i))
    return {
        "input_ids": input_ids,
        "positions": np.concatenate(positions),
        "targets": np.concatenate(targets).astype("int64"),
        "owners": np.concatenate(owners),
        "lengths": np.array([len(answer) - 1 for answer in answers]),
        "num_tokens": sum(map(len, answers)),
        "num_supervised": sum(len(answer.ids) for answer in answers),
    }


def answer_logps(model: Any, batch: Batch) -> Tensor:
    """[A]: log-probability of each answer given its prompt. Logits are made for the positions of answers only."""
    hidden, _ = model.hidden_states(paddle.to_tensor(batch["input_ids"]))  # [A, L, D]
    picked = hidden.flatten(0, 1).index_select(paddle.to_tensor(batch["positions"]), 0)  # [N, D]
    nll = model.token_nll(picked, paddle.to_tensor(batch["targets"]))  # [N]
    belongs = batch["owners"] == np.arange(len(batch["input_ids"]))[:, None]
    return -paddle.mv(paddle.to_tensor(belongs.astype("float32")), nll)


def num_tokens(batch: Batch) -> np.ndarray:
    """[A]: tokens of each answer."""
    return np.bincount(batch["owners"], minlength=len(batch["input_ids"])).astype("float32")
