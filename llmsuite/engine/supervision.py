"""Loss mask of a batch, token by token, reconstructed from the arrays that the loss gets.

It works for every stage whose batches have "input_ids", and "targets" for "positions" (or for every input), or that
computes a score at "positions". With "owners", the number of the answer that each target belongs to, answers may share
a prompt: each is returned with its own copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.engine.collator import Collate
from llmsuite.engine.stage import Batch, Stage


@dataclasses.dataclass(frozen=True)
class SupervisedSequence:
    """A row of a batch without its padding, and the token that follows it."""

    ids: np.ndarray
    """Token ids [L]."""
    weights: np.ndarray
    """Weight of each token in the loss [L], which predicts it from those before; 0 where it is masked."""
    documents: np.ndarray
    """Number of the document of the row that each token belongs to [L], from 0."""


def supervised_sequences(batch: Batch, document_end: int | None = None) -> list[SupervisedSequence] | None:
    """Return the sequence of each row; None for a batch without these arrays.

    Without "document_starts" in the batch, a row is one document, or, with `document_end`, several documents that end
    with this token.
    """
    if "input_ids" not in batch or not {"positions", "targets"} & batch.keys():
        return None
    inputs = np.asarray(batch["input_ids"])
    if "targets" not in batch:
        return _score_sequences(inputs, np.asarray(batch["positions"]), batch.get("document_starts"))
    targets = np.asarray(batch["targets"])
    num_rows, length = inputs.shape
    positions = batch.get("positions")
    if positions is None:  # every input except the padding on the right
        used = len(targets) // num_rows
        positions = (np.arange(num_rows)[:, None] * length + np.arange(used)).reshape(-1)
    weights = np.asarray(batch.get("weights", np.ones(len(targets), "float32")))
    if not len(positions) == len(targets) == len(weights):
        return None
    if "owners" in batch:
        return _answer_sequences(inputs, np.asarray(positions), targets, weights, np.asarray(batch["owners"]), batch)
    rows = []
    for row in range(num_rows):
        mine = positions // length == row
        if not mine.any():
            continue
        starts = None
        if "document_starts" in batch:
            starts = np.asarray(batch["document_starts"])[row]
        at = positions[mine] - row * length
        rows.append(_row_sequence(inputs[row], at, targets[mine], weights[mine], starts, document_end))
    return rows


def _score_sequences(inputs: np.ndarray, positions: np.ndarray, starts: np.ndarray | None) -> list[SupervisedSequence]:
    """Return sequences with a score, which is computed at the last token: that token is supervised."""
    rows = []
    for row, position in zip(*np.divmod(positions, inputs.shape[1])):
        ids = inputs[row, _visible(None if starts is None else starts[row], position)]
        weights = np.zeros(len(ids))
        weights[-1] = 1
        rows.append(SupervisedSequence(ids, weights, np.zeros(len(ids), "int64")))
    return rows


def _answer_sequences(
    inputs: np.ndarray, at: np.ndarray, targets: np.ndarray, weights: np.ndarray, owners: np.ndarray, batch: Batch
) -> list[SupervisedSequence]:
    """Return the answers of each row, each after its prompt: the tokens that the position of its last target attends
    to."""
    length = inputs.shape[1]
    answers_of: dict[int, list[SupervisedSequence]] = {}
    for owner in range(owners.max() + 1):
        (mine,) = np.nonzero(owners == owner)
        row, position = divmod(int(at[mine[-1]]), length)
        starts = batch["document_starts"][row] if "document_starts" in batch else None
        visible = _visible(starts, position)
        ids = np.append(inputs[row, visible], targets[mine[-1]])
        mask = np.concatenate([np.zeros(len(ids) - len(mine)), weights[mine]])
        answers = answers_of.setdefault(row, [])
        answers.append(SupervisedSequence(ids, mask, np.full(len(ids), len(answers))))
    return [_joined(answers) for _, answers in sorted(answers_of.items())]


def _joined(answers: Sequence[SupervisedSequence]) -> SupervisedSequence:
    """Concatenate the answers of a row."""
    return SupervisedSequence(
        np.concatenate([answer.ids for answer in answers]),
        np.concatenate([answer.weights for answer in answers]),
        np.concatenate([answer.documents for answer in answers]),
    )


def _visible(starts: np.ndarray | None, position: int) -> np.ndarray:
    """Return the positions of a row that a token at `position` attends to, in order; see
    `devices.masks.document_spans`."""
    if starts is None:
        return np.arange(position + 1)
    (others,) = np.nonzero(starts[:position] != starts[position])
    own = others[-1] + 1 if len(others) else 0
    shared = own - starts[position]
    if shared == 0:
        return np.arange(own, position + 1)
    begin = np.flatnonzero(starts[:own] == np.arange(own))[-1]
    return np.concatenate([np.arange(begin, begin + shared), np.arange(own, position + 1)])


def _row_sequence(
    inputs: np.ndarray,
    at: np.ndarray,
    targets: np.ndarray,
    target_weights: np.ndarray,
    starts: np.ndarray | None,
    document_end: int | None,
) -> SupervisedSequence:
    """Return the sequence of one row of inputs, with the targets at the positions `at`. The last token of a document is
    a target only, so it is appended to its document."""
    end = int(at.max()) + 1
    ids: list[int] = []
    weights: list[float] = []
    documents: list[int] = []
    predicted = {int(p): (int(t), float(w)) for p, t, w in zip(at, targets, target_weights)}
    document = 0
    next_weight = 0.0
    for i in range(end):
        ids.append(int(inputs[i]))
        weights.append(next_weight)
        documents.append(document)
        target, next_weight = predicted.get(i, (-1, 0.0))
        is_last = i == end - 1 or (starts is not None and starts[i] != starts[i + 1])
        if is_last and target >= 0:
            ids.append(target)
            weights.append(next_weight)
            documents.append(document)
            next_weight = 0.0
        if is_last or (starts is None and inputs[i] == document_end):
            document += 1
    return SupervisedSequence(np.array(ids), np.array(weights), np.array(documents))


def check_supervision(stage: Stage[Any], collate: Collate, samples: Sequence[Any], what: str) -> None:
    """Check before the first step that some token is supervised, and that the end of some answer is.

    Args:
        stage: stage of the run.
        collate: makes its batches.
        samples: samples of a file.
        what: the file, for messages.

    Raises:
        UserError: every token is masked, or the end of every answer, so the model would never learn to stop.
    """
    eos_id = stage.context.tokenizer.eos_id
    has_answers = stage.row_kind in ("conversation", "preference", "unpaired")
    num_checked = len(samples) if has_answers else min(1, len(samples))
    for i in range(num_checked):
        rows = supervised_sequences(collate([samples[i]]))
        if rows is None:
            return  # a stage whose batches have no loss mask of this form
        if any((row.weights > 0).any() and (not has_answers or _ends(row, eos_id)) for row in rows):
            return
    if not samples:
        return
    masked = not any(
        (row.weights > 0).any()
        for sample in samples[:num_checked]
        for row in supervised_sequences(collate([sample])) or []
    )
    if masked:
        raise UserError(
            f"{what}: everything is masked: no token of its {len(samples)} samples is supervised, so the loss would "
            "be 0; look at one with `llmsuite data explain`"
        )
    if stage.context.data.end_of_answer != "token" or _has_marks(stage):
        stage.context.report(
            f"{what}: no answer ends with the end-of-sequence token of the tokenizer, as the template writes others; "
            "a model that learns so ends answers as the template does, such as with <|im_end|>"
        )
        return
    raise UserError(
        f"{what}: the end of answers is never supervised: the end-of-sequence token is masked or cut off in all of its "
        f"{len(samples)} samples, so no answer would ever end; raise data.max_length, or look at one with "
        "`llmsuite data explain`"
    )


def _has_marks(stage: Stage[Any]) -> bool:
    """Return True if the chat template marks what is supervised; False without a template."""
    try:
        return stage.context.template().has_marks
    except UserError:
        return False


def _ends(row: SupervisedSequence, eos_id: int) -> bool:
    return bool(((row.ids == eos_id) & (row.weights > 0)).any())
