"""Batches as the loss of a stage gets them: in eager mode those of `collate`, in a step program full rows.

A loss is written once, with the functions of this module. In eager mode the entries of a batch are arrays, and only the
positions with a target are computed. The shapes of a program are static: there, the entries are tensors, tokens are all
positions of the rows, and those without a target have zeros.

Shapes: B rows, L length, N tokens (the "positions" with a target), A answers, P pairs of a chosen and a rejected answer
(A = 2 P, chosen first). In a program tokens are [B, L] instead of [N]. Answers are [B], or [B, S] where rows are packed
with up to S answers; pairs are [P], or [P, S] for P rows of chosen answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import shared_tensor_of, tensor_of
from llmsuite.parallel.loss_ledger import BatchSum
from llmsuite.parallel.program.pipeline import LENGTHS

Batch = dict[str, Any]
"""The arrays of one micro-batch, by name. It has the integers "num_tokens" (without padding) and "num_supervised"; it
may have "lengths" [B], the tokens of each row without padding, and "weight", the loss weight."""
_STATS = "prepass_stats"
_ANSWERS = "answers"
"""Input of a program, [B, L]: the number within its row, from 1, of the answer that a target belongs to; 0 for none."""
_SLOTS = "slots"
"""Input of a program with packed rows, [B, S]: the number within its row, from 1, of the answer in each slot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The entries of a stage's batches that its loss uses, for step programs, which need static shapes.

    Some entries need no listing: "input_ids" and "document_starts" [B, L], "lengths" [B], "positions" [N], which are
    all positions where the entry is missing, "targets" [N], and "owners" [N], the number of the answer of each token.
    """

    rows: Sequence[str] = ()
    """Entries [B, ...] that have the same shape in every batch."""
    tokens: Sequence[str] = ()
    """Entries [N]."""
    answers: Sequence[str] = ()
    """Entries [A]. A slot without an answer repeats those of the first answer of its row."""
    pairs: Sequence[str] = ()
    """Entries [P]. They are 0 for a slot without an answer."""
    has_pairs: bool = False
    """True where answers are pairs, the chosen ones in the first half of the rows, the rejected ones in the second."""
    has_documents: bool = False
    """True where a row may hold several documents; then programs have "document_starts" for every batch."""
    slots: int = 0
    """Largest number of answers in a row where rows are packed; 0 where each row is one answer."""


class ProgramBatch(Batch):
    """The batch of a micro-batch inside of a step program: tensors with static shapes."""

    def __init__(self, inputs: Mapping[str, Tensor], has_pairs: bool = False):
        """
        Args:
            inputs: inputs of the program, made by `program_inputs`.
            has_pairs: `BatchLayout.has_pairs`.
        """
        super().__init__({name: value for name, value in inputs.items() if not name.startswith(_STATS)})
        prefix = f"{_STATS}."
        self[_STATS] = {name.removeprefix(prefix): inputs[name] for name in inputs if name.startswith(prefix)}
        self.has_pairs = has_pairs

    def __missing__(self, name: str) -> BatchSum:
        """A number, such as "weight". A program does not know it while it is traced; it may be a denominator."""
        return BatchSum(name)

    def mask_of_answers(self) -> Tensor:
        """1 for the tokens of each answer, else 0: [B, L], or [B, S, L] where rows are packed; bool or float32."""
        if _SLOTS not in self:
            return self[_ANSWERS]
        return self[_ANSWERS].unsqueeze(1) == self[_SLOTS].unsqueeze(-1)


# for losses


def tensor(batch: Batch, name: str) -> Tensor:
    """An entry of a batch as a tensor, which nobody may change in place: all arrays of a batch go to a device in one
    copy, and others may get the same tensor. Raises UserError in a program that does not have the entry."""
    value = batch[name]
    if isinstance(value, BatchSum):
        raise UserError(
            f'engine.program: is step, and the loss of this stage uses batch["{name}"], which its `batch_layout` does '
            "not list; or set engine.program to layers"
        )
    return shared_tensor_of(value) if isinstance(value, np.ndarray) else value


def stat(batch: Batch, name: str) -> Tensor:
    """A statistic of the global batch, which a pre-pass has computed, as a tensor that broadcasts."""
    value = batch[_STATS][name]
    return tensor_of(value, "float32") if isinstance(value, (int, float)) else value


def total(batch: Batch, name: str) -> float | BatchSum:
    """The sum of an entry of a batch, as the weight of `LossTerms` or of one of their sums."""
    if isinstance(batch, ProgramBatch):
        return BatchSum(name)
    return float(np.sum(batch[name], dtype="float64"))


def flat_targets(batch: Batch) -> Tensor:
    """The targets of all rows, [N]; in a program [B L]."""
    return tensor(batch, "targets").flatten()


def as_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Values for `flat_targets` as values of tokens: [N], in a program [B, L]. In a program with answers, values
    without a target become 0."""
    if not isinstance(batch, ProgramBatch):
        return values
    values = values.reshape(batch["targets"].shape)
    if _ANSWERS not in batch:
        return values
    return values * _is_target(batch).astype(values.dtype)


def sum_of_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Sum of values of tokens, a scalar. Values without a target do not count; they have to be finite."""
    if not isinstance(batch, ProgramBatch):
        return values.sum()
    return (values * _is_target(batch).astype(values.dtype)).sum()


def sum_by_answer(values: Tensor, batch: Batch) -> Tensor:
    """Sum of the values of the tokens of each answer: [A], in a program [B] or [B, S]."""
    if not isinstance(batch, ProgramBatch):
        return paddle.mv(_is_owner(batch).astype(values.dtype), values)
    if _SLOTS in batch:
        values = values.unsqueeze(1)  # [B, 1, L]
    return (values * batch.mask_of_answers().astype(values.dtype)).sum(-1)


def tokens_by_answer(batch: Batch) -> Tensor:
    """Number of tokens of each answer, float32: [A], in a program [B] or [B, S]."""
    if isinstance(batch, ProgramBatch):
        return batch.mask_of_answers().astype("float32").sum(-1)
    return _is_owner(batch).astype("float32").sum(-1)


def split_pairs(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Values of answers as those of the chosen and those of the rejected answers: [P] each, in a program [P] or [P,
    S]."""
    if not isinstance(batch, ProgramBatch):
        chosen, rejected = values.split(2)
        return chosen, rejected
    # in a program the rejected answers follow the chosen ones row by row
    by_pair = values.reshape([-1, 2, *values.shape[1:]])
    return by_pair[:, 0], by_pair[:, 1]


def _is_owner(batch: Batch) -> Tensor:
    """True for the tokens of each answer, [A, N]."""
    owners = tensor(batch, "owners")
    return owners == paddle.arange(int(batch["owners"][-1]) + 1, dtype=owners.dtype).unsqueeze(-1)


def _is_target(batch: ProgramBatch) -> Tensor:
    return batch[_ANSWERS] > 0


# for the engine


def arrays_in(batch: Batch) -> Iterator[np.ndarray]:
    """The arrays of a batch, and of the batches that are entries of it."""
    for value in batch.values():
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, dict):
            yield from arrays_in(value)


def program_inputs(batch: Batch, layout: BatchLayout, length: int) -> dict[str, np.ndarray]:
    """The inputs of a step program for a batch: arrays whose dim 0 is the number of rows or of pairs, and whose other
    dims depend on `length` and the layout only.

    Args:
        batch: a batch of the stage.
        layout: of the stage.
        length: number of tokens that rows are padded to, at least L; not used without "input_ids".
    """
    found: dict[str, np.ndarray] = {name: np.asarray(batch[name]) for name in layout.rows}
    shape: tuple[int, ...] = (len(next(iter(found.values()))),) if found else ()
    pairs: dict[str, np.ndarray] = {}
    if "input_ids" in batch:
        rows = _Rows(batch, length)
        found |= rows.arrays(layout)
        shape = (len(batch["input_ids"]), 1)
        if "owners" in batch:
            answers, pairs = rows.arrays_of_answers(layout)
            found |= answers
            shape = next(iter(pairs.values())).shape if layout.has_pairs else shape[:1]
    if layout.has_pairs:
        found = {name: interleave_pairs(array) for name, array in found.items()}
    found |= pairs
    for name, value in batch.get(_STATS, {}).items():
        found[f"{_STATS}.{name}"] = np.full(shape, value, "float32")
    return found


def interleave_pairs(rows: np.ndarray) -> np.ndarray:
    """Reorder rows of P chosen answers followed by P rejected ones, so that each rejected answer follows its chosen
    one. Programs split rows over ranks; then both answers of a pair are on the same rank."""
    return np.stack(np.split(rows, 2), 1).reshape(rows.shape)


class _Rows:
    """Conversion of a batch with "input_ids" to full rows."""

    def __init__(self, batch: Batch, length: int):
        self._batch = batch
        self._ids = batch["input_ids"]
        self._length = length
        positions = batch.get("positions", np.arange(self._ids.size))
        self._at = np.divmod(positions, self._ids.shape[1])

    def arrays(self, layout: BatchLayout) -> dict[str, np.ndarray]:
        """Ids, document starts, lengths and the values of tokens, by name."""
        batch = self._batch
        padding = [(0, 0), (0, self._length - self._ids.shape[1])]
        found = {"input_ids": np.pad(self._ids, padding)}  # on the right, which causal attention never sees
        if layout.has_documents:
            starts = batch.get("document_starts", np.zeros_like(self._ids))
            found["document_starts"] = np.pad(starts, padding, "edge")
        if "lengths" in batch:
            found[LENGTHS] = np.asarray(batch["lengths"], "int64")
        for name in ("targets", *layout.tokens):
            if name in batch:
                found[name] = self._full(batch[name])
        return found

    def arrays_of_answers(self, layout: BatchLayout) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The answer of each token and the values of answers, by name; and the values of pairs."""
        batch = self._batch
        owners = batch["owners"]
        rows = self._at[0]
        firsts = np.searchsorted(rows, np.arange(len(self._ids)))  # the answers of a row have consecutive numbers
        found = {_ANSWERS: self._full((1 + owners - owners[firsts][rows]).astype("float32"))}
        answers = {name: np.asarray(batch[name]) for name in layout.answers if name in batch}
        pairs = {name: np.asarray(batch[name]) for name in layout.pairs}
        if layout.slots:
            _, firsts = np.unique(owners, return_index=True)
            slots = Slots.of(rows[firsts], len(self._ids), layout.slots)
            found[_SLOTS] = slots.numbers
            answers = {name: array[slots.answers] for name, array in answers.items()}
            of_pairs = np.split(slots.answers, 2)[0] if layout.has_pairs else slots.answers
            is_taken = slots.is_taken[: len(of_pairs)]
            pairs = {name: array[of_pairs] * is_taken for name, array in pairs.items()}
        return found | answers, pairs

    def _full(self, values: np.ndarray) -> np.ndarray:
        """Values of tokens [N] in full rows [B, length], with zeros elsewhere."""
        found = np.zeros([len(self._ids), self._length], values.dtype)
        found[self._at] = values
        return found


@dataclasses.dataclass(frozen=True)
class Slots:
    """Slots for the answers of packed rows in a program: S in each row. A slot without an answer repeats the first one
    of its row."""

    answers: np.ndarray
    """[B, S]: the number of the answer in each slot."""
    is_taken: np.ndarray
    """[B, S], float32: 1 for a slot with an answer of its own, else 0."""

    @classmethod
    def of(cls, rows: np.ndarray, num_rows: int, size: int) -> Slots:
        """
        Args:
            rows: the row of each answer, ascending; every row has one.
            num_rows: B.
            size: S.
        """
        counts = np.bincount(rows, minlength=num_rows)
        first = np.cumsum(counts) - counts
        slot = np.arange(size)
        is_taken = slot < counts[:, None]
        return cls(first[:, None] + np.where(is_taken, slot, 0), is_taken.astype("float32"))

    @property
    def numbers(self) -> np.ndarray:
        """[B, S], float32: the number of each slot's answer within its row, from 1."""
        return (self.answers - self.answers[:, :1] + 1).astype("float32")
