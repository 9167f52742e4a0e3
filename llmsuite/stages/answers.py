"""Prompts with an answer to each: what stages that compare answers share.

Shapes: A answers, D hidden, N tokens of answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.stages.language_model import hidden_at_positions
from llmsuite.stages.reference_cache import answer_key
from llmsuite.train.stage import Batch
from llmsuite.typing import Tensor


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
    """Answers to arrays, one a row; see `pack_rows`."""
    return pack_rows([[answer] for answer in answers], pad_id, length_multiple)


def pack_rows(
    rows: Sequence[Sequence[Answer]], pad_id: int, length_multiple: int, shares_prompts: bool = False
) -> Batch:
    """Rows of answers to arrays, padded on the right to a multiple; the last token of each answer is only a target.

    Answers are numbered through the rows. With several in a row the batch has "document_starts", which
    `CausalLM.hidden_states` takes: each answer with its prompt is a document, and so is the padding. See `lay` for
    shared prompts.
    """
    known = [[Answer(answer.prompt, answer.ids[:-1]) for answer in row] for row in rows]
    laid = lay(known, pad_id, length_multiple, shares_prompts)
    targets = [answer.ids for row in rows for answer in row]
    batch = laid.batch | {
        "positions": np.concatenate(laid.places),  # each predicts the token behind it
        "targets": np.concatenate(targets).astype("int64"),
        "owners": np.repeat(np.arange(len(targets)), [len(ids) for ids in targets]),
    }
    return batch | {
        # as many as were read, also where several answers share some of them
        "num_tokens": sum(len(answer) for row in rows for answer in row),
        "num_supervised": len(batch["targets"]),
    }


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows of answers as arrays."""

    batch: Batch
    """"input_ids", "lengths", and with several answers in a row "document_starts"."""
    places: list[np.ndarray]
    """Of each answer: of the last token of its prompt, and of its own tokens, counted through the rows."""


def lay(rows: Sequence[Sequence[Answer]], pad_id: int, length_multiple: int, shares_prompts: bool) -> PackedRows:
    """Rows of answers to arrays, padded on the right to a multiple.

    With `shares_prompts` answers of a row to the same prompt lie behind one copy of it, and see it and themselves: the
    second one and those behind it go on from the end of the prompt, see `devices.ops.document_spans`.
    """
    grouped = [_by_prompt(row) if shares_prompts else [[number] for number in range(len(row))] for row in rows]
    lengths = [
        sum(len(row[group[0]].prompt) + sum(len(row[number].ids) for number in group) for group in groups)
        for row, groups in zip(rows, grouped)
    ]
    length = -(-max(lengths) // length_multiple) * length_multiple
    input_ids = np.full([len(rows), length], pad_id, dtype="int64")
    starts = np.empty_like(input_ids)
    places: list[np.ndarray] = []
    for i, (row, groups) in enumerate(zip(rows, grouped)):
        begin, of_row = 0, {}
        for group in groups:
            prompt = row[group[0]].prompt
            end = begin + len(prompt)
            last = end - 1
            input_ids[i, begin:end], starts[i, begin:end] = prompt, begin
            for number in group:
                start, end = end, end + len(row[number].ids)
                input_ids[i, start:end], starts[i, start:end] = row[number].ids, start - len(prompt)
                of_row[number] = i * length + np.array([last, *range(start, end)])
            begin = end
        starts[i, begin:] = begin
        places += [of_row[number] for number in range(len(row))]
    batch = {"input_ids": input_ids, "lengths": np.array(lengths)}
    return PackedRows(batch | {"document_starts": starts} if len(places) > len(rows) else batch, places)


def _by_prompt(answers: Sequence[Answer]) -> list[list[int]]:
    """The numbers of the answers to the same prompt together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(tuple(answer.prompt), []).append(number)
    return list(groups.values())


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
