"""What a batch teaches, token by token: read off the arrays that the loss gets, so that it is what is trained.

A stage whose batches have "input_ids", and "targets" for "positions" (or for every input), needs to do nothing for it;
nor one that reads a score off "positions". With "owners" too, the number of the answer that each target is of, answers
may share a prompt: each is told with its own copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.errors import UserError
from llmsuite.train.stage import Batch, Stage


@dataclasses.dataclass(frozen=True)
class TaughtSequence:
    """A row of a batch without its padding, and the token that follows it."""

    ids: np.ndarray
    """[length]."""
    weights: np.ndarray
    """[length]: what predicting each token from those before it counts for; 0 where it is only read."""
    documents: np.ndarray
    """[length]: which document of the row each token belongs to, from 0."""


def supervised_sequences(batch: Batch, document_end: int | None = None) -> list[TaughtSequence] | None:
    """Of each row. None when the batch does not tell.

    Without documents in the batch a row is one, unless `document_end` is the token that parts them.
    """
    if "input_ids" not in batch or not {"positions", "targets"} & batch.keys():
        return None
    inputs = np.asarray(batch["input_ids"])
    if "targets" not in batch:
        return _scored(inputs, np.asarray(batch["positions"]), batch.get("document_starts"))
    targets = np.asarray(batch["targets"])
    num_rows, length = inputs.shape
    positions = batch.get("positions")
    if positions is None:  # every input but the padding on the right
        used = len(targets) // num_rows
        positions = (np.arange(num_rows)[:, None] * length + np.arange(used)).reshape(-1)
    weights = np.asarray(batch.get("weights", np.ones(len(targets), "float32")))
    if not len(positions) == len(targets) == len(weights):
        return None
    if "owners" in batch:
        return _answers(inputs, np.asarray(positions), targets, weights, np.asarray(batch["owners"]), batch)
    rows = []
    for row in range(num_rows):
        mine = positions // length == row
        if not mine.any():
            continue
        at, learnt = positions[mine] - row * length, targets[mine]
        documents = None if "document_starts" not in batch else np.asarray(batch["document_starts"])[row]
        rows.append(_sequence(inputs[row], at, learnt, weights[mine], documents, document_end))
    return rows


def _scored(inputs: np.ndarray, positions: np.ndarray, documents: np.ndarray | None) -> list[TaughtSequence]:
    """Where a score is learnt rather than tokens: it is read off the last one, which counts."""
    rows = []
    for row, position in zip(*np.divmod(positions, inputs.shape[1])):
        ids = inputs[row, _seen(None if documents is None else documents[row], position)]
        weights = np.zeros(len(ids))
        weights[-1] = 1
        rows.append(TaughtSequence(ids, weights, np.zeros(len(ids), "int64")))
    return rows


def _answers(
    inputs: np.ndarray, at: np.ndarray, targets: np.ndarray, weights: np.ndarray, owners: np.ndarray, batch: Batch
) -> list[TaughtSequence]:
    """Of each row its answers, each behind what is seen from where its last token is predicted."""
    length = inputs.shape[1]
    of_rows: dict[int, list[TaughtSequence]] = {}
    for owner in range(owners.max() + 1):
        (mine,) = np.nonzero(owners == owner)
        row, position = divmod(int(at[mine[-1]]), length)
        seen = _seen(batch["document_starts"][row] if "document_starts" in batch else None, position)
        ids = np.append(inputs[row, seen], targets[mine[-1]])
        learnt = np.concatenate([np.zeros(len(ids) - len(mine)), weights[mine]])
        answers = of_rows.setdefault(row, [])
        answers.append(TaughtSequence(ids, learnt, np.full(len(ids), len(answers))))
    fields = [field.name for field in dataclasses.fields(TaughtSequence)]
    return [
        TaughtSequence(*(np.concatenate([getattr(answer, field) for answer in answers]) for field in fields))
        for _, answers in sorted(of_rows.items())
    ]


def _seen(documents: np.ndarray | None, position: int) -> np.ndarray:
    """The places of a row that a token at `position` sees, in their order; see `devices.ops.document_spans`."""
    if documents is None:
        return np.arange(position + 1)
    (others,) = np.nonzero(documents[:position] != documents[position])
    own = others[-1] + 1 if len(others) else 0
    shared = own - documents[position]
    if shared == 0:
        return np.arange(own, position + 1)
    begin = np.flatnonzero(documents[:own] == np.arange(own))[-1]
    return np.concatenate([np.arange(begin, begin + shared), np.arange(own, position + 1)])


def _sequence(
    inputs: np.ndarray,
    at: np.ndarray,
    targets: np.ndarray,
    target_weights: np.ndarray,
    numbers: np.ndarray | None,
    document_end: int | None,
) -> TaughtSequence:
    """Inputs of one row and what is predicted at some of them. The last token of a document is only predicted, so it
    is put in behind it."""
    end = int(at.max()) + 1
    ids: list[int] = []
    weights: list[float] = []
    documents: list[int] = []
    predicted = {int(p): (int(t), float(w)) for p, t, w in zip(at, targets, target_weights)}
    document, next_weight = 0, 0.0
    for i in range(end):
        ids.append(int(inputs[i]))
        weights.append(next_weight)
        documents.append(document)
        target, next_weight = predicted.get(i, (-1, 0.0))
        is_last = i == end - 1 or (numbers is not None and numbers[i] != numbers[i + 1])
        if is_last and target >= 0:
            ids.append(target)
            weights.append(next_weight)
            documents.append(document)
            next_weight = 0.0
        if is_last or (numbers is None and inputs[i] == document_end):
            document += 1
    return TaughtSequence(np.array(ids), np.array(weights), np.array(documents))


def check_learnable(stage: Stage[Any], samples: Sequence[Any], what: str) -> None:
    """Before the first step: something is learnt, and where answers are, so are their ends.

    Raises:
        UserError: every token is masked, or no answer would ever learn to end.
    """
    eos_id = stage.context.tokenizer.eos_id
    has_answers = getattr(stage, "row_kind", None) in ("conversation", "preference", "unpaired")
    for i in range(len(samples) if has_answers else min(1, len(samples))):
        rows = supervised_sequences(stage.collate([samples[i]]))
        if rows is None:
            return  # a stage that learns otherwise
        if any((row.weights > 0).any() and (not has_answers or _ends(row, eos_id)) for row in rows):
            return
    if not samples:
        return
    masked = not any(
        (row.weights > 0).any()
        for sample in samples[: len(samples) if has_answers else 1]
        for row in supervised_sequences(stage.collate([sample])) or []
    )
    if masked:
        raise UserError(
            f"{what}: everything is masked: no token of its {len(samples)} samples is learnt, so the loss would be 0; "
            "look at one with `llmsuite data explain`"
        )
    raise UserError(
        f"{what}: the end is never learnt: the end-of-sequence token is masked or cut off in all of its "
        f"{len(samples)} samples, so no answer would ever end; raise data.max_length, or look at one with "
        "`llmsuite data explain`"
    )


def _ends(row: TaughtSequence, eos_id: int) -> bool:
    return bool(((row.ids == eos_id) & (row.weights > 0)).any())
