"""Prompts with an answer to each: what stages that compare answers share.

Shapes: A answers, D hidden, N tokens of answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.stages.base import Batch
from llmsuite.stages.language_model import hidden_at_positions
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
    """Answers to arrays, one a row; see `collate_rows`."""
    return collate_rows([[answer] for answer in answers], pad_id, length_multiple)


def collate_rows(rows: Sequence[Sequence[Answer]], pad_id: int, length_multiple: int) -> Batch:
    """Rows of answers to arrays, padded on the right to a multiple; the last token of each answer is only a target.

    Answers are numbered through the rows. With several in a row the batch has "documents", as `CausalLM.hidden_states`
    takes it: each answer with its prompt is one, and the padding.
    """
    lengths = [sum(len(answer) - 1 for answer in row) for row in rows]
    length = -(-max(lengths) // length_multiple) * length_multiple
    input_ids = np.full([len(rows), length], pad_id, dtype="int64")
    documents = np.empty_like(input_ids)
    positions: list[np.ndarray] = []
    targets: list[list[int]] = []
    for i, row in enumerate(rows):
        begin = 0
        for answer in row:
            end = begin + len(answer) - 1
            input_ids[i, begin:end] = (answer.prompt + answer.ids)[:-1]
            documents[i, begin:end] = begin
            last = i * length + end
            positions.append(np.arange(last - len(answer.ids), last))  # each predicts the token behind it
            targets.append(answer.ids)
            begin = end
        documents[i, begin:] = begin
    batch = {
        "input_ids": input_ids,
        "positions": np.concatenate(positions),
        "targets": np.concatenate(targets).astype("int64"),
        "owners": np.repeat(np.arange(len(targets)), [len(ids) for ids in targets]),
        "lengths": np.array(lengths),
        "num_tokens": sum(lengths) + len(targets),
        "num_supervised": sum(map(len, targets)),
    }
    return batch | {"documents": documents} if len(targets) > len(rows) else batch


def answer_logps(model: Any, batch: Batch) -> Tensor:
    """[A]: log-probability of each answer given its prompt. Logits are made for the positions of answers only."""
    picked = hidden_at_positions(model, batch)  # [N, D]
    nll = model.token_nll(picked, paddle.to_tensor(batch["targets"]))  # [N]
    belongs = batch["owners"] == np.arange(batch["owners"][-1] + 1)[:, None]
    # in float64: what is learnt from is differences of these sums, and the last digits of float32 would be lost in them
    sums = paddle.mv(paddle.to_tensor(belongs.astype("float64")), nll.astype("float64"))
    return -sums.astype("float32")


def num_tokens(batch: Batch) -> np.ndarray:
    """[A]: tokens of each answer."""
    return np.bincount(batch["owners"]).astype("float32")
