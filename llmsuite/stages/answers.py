"""Answers to prompts as token ids, as batches, and their log-probabilities: for the stages that compare answers.

Shapes: A answers, L length, D hidden, N tokens of answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.rl.completion import Completion
from llmsuite.stages import language_model
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


def ensure_eos(answer: list[int], eos: int) -> list[int]:
    """The answer up to and with its last end-of-sequence token, which is appended if it has none; what a template puts
    behind that token is dropped."""
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
    `CausalLM.hidden_states` takes: each answer with its prompt is a document, and so is the padding. See `pack_inputs`
    for shared prompts.
    """
    inputs = [[Answer(answer.prompt, answer.ids[:-1]) for answer in row] for row in rows]
    packed = pack_inputs(inputs, pad_id, length_multiple, shares_prompts)
    targets = [answer.ids for row in rows for answer in row]
    batch = packed.batch | {
        "positions": np.concatenate(packed.positions),  # each predicts the token behind it
        "targets": np.concatenate(targets).astype("int64"),
        "owners": np.repeat(np.arange(len(targets)), [len(ids) for ids in targets]),
    }
    return batch | {
        # a prompt that several answers share counts for each of them
        "num_tokens": sum(len(answer) for row in rows for answer in row),
        "num_supervised": len(batch["targets"]),
    }


def leave_out_observed(batch: Batch, completions: Sequence[Completion]) -> None:
    """Keep as targets only the tokens that the model has drawn, not those of an environment between its turns, which
    stay in the input.

    Args:
        batch: of `pack_rows`, whose answers are the completions.
        completions: in the order of the batch.
    """
    if not any(completion.is_own for completion in completions):
        return
    is_own = [completion.is_own or [True] * len(completion.ids) for completion in completions]
    kept = np.concatenate([np.asarray(row, bool) for row in is_own])
    assert len(kept) == len(batch["targets"]), (len(kept), len(batch["targets"]))
    for key in ("positions", "targets", "owners"):
        batch[key] = batch[key][kept]
    batch["num_supervised"] = int(kept.sum())


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows of answers as arrays."""

    batch: Batch
    """"input_ids", "lengths", and with several answers in a row "document_starts"."""
    positions: list[np.ndarray]
    """For each answer, the position of the last token of its prompt and those of its own tokens, counted through the
    rows."""


def pack_inputs(
    rows: Sequence[Sequence[Answer]], pad_id: int, length_multiple: int, shares_prompts: bool
) -> PackedRows:
    """Rows of answers to input arrays, padded on the right to a multiple.

    With `shares_prompts` all answers of a row to the same prompt follow one copy of it, and each attends to the prompt
    and itself only; its positions continue those of the prompt, see `devices.ops.document_spans`.
    """
    grouped = [_by_prompt(row) if shares_prompts else [[number] for number in range(len(row))] for row in rows]
    lengths = [
        sum(len(row[group[0]].prompt) + sum(len(row[number].ids) for number in group) for group in groups)
        for row, groups in zip(rows, grouped)
    ]
    length = -(-max(lengths) // length_multiple) * length_multiple
    input_ids = np.full([len(rows), length], pad_id, dtype="int64")
    starts = np.empty_like(input_ids)
    positions: list[np.ndarray] = []
    for i, (row, groups) in enumerate(zip(rows, grouped)):
        begin, positions_of = 0, {}
        for group in groups:
            prompt = row[group[0]].prompt
            end = begin + len(prompt)
            last = end - 1
            input_ids[i, begin:end], starts[i, begin:end] = prompt, begin
            for number in group:
                start, end = end, end + len(row[number].ids)
                input_ids[i, start:end], starts[i, start:end] = row[number].ids, start - len(prompt)
                positions_of[number] = i * length + np.array([last, *range(start, end)])
            begin = end
        starts[i, begin:] = begin
        positions += [positions_of[number] for number in range(len(row))]
    batch = {"input_ids": input_ids, "lengths": np.array(lengths)}
    return PackedRows(batch | {"document_starts": starts} if len(positions) > len(rows) else batch, positions)


def _by_prompt(answers: Sequence[Answer]) -> list[list[int]]:
    """Numbers of the answers, grouped by prompt."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(tuple(answer.prompt), []).append(number)
    return list(groups.values())


def answer_logps(model: Any, batch: Batch) -> Tensor:
    """[A], float64: log-probability of each answer given its prompt. Logits are made for the positions of answers
    only."""
    return logps_of_answers(token_nll(model, batch), batch)


def token_nll(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    """[N]: negative log-probability of each token of the answers, of logits divided by a temperature."""
    hidden = hidden_at_positions(model, batch)  # [N, D]
    if temperature != 1:
        hidden = hidden / temperature  # as logits are linear in it
    nll: Tensor = model.token_nll(hidden, paddle.to_tensor(batch["targets"]))
    return nll


def logps_of_answers(nll: Tensor, batch: Batch) -> Tensor:
    """[A], float64: log-probability of each answer, from the negative ones of its tokens, [N]."""
    is_owner = batch["owners"] == np.arange(batch["owners"][-1] + 1)[:, None]
    # losses take differences of these sums, in which the last digits of float32 would be lost
    return -paddle.mv(paddle.to_tensor(is_owner.astype("float64")), nll.astype("float64"))


@dataclasses.dataclass(frozen=True)
class Slots:
    """Places for the answers of packed rows in a program, which has as many in each row, S. One without an answer has
    the first of its row once more, and weighs 0."""

    answers: np.ndarray
    """[B, S]: the number of the answer in each."""
    is_taken: np.ndarray
    """[B, S], float32: 1 where it is that answer's own place, else 0."""

    @classmethod
    def of(cls, rows: np.ndarray, num_rows: int, size: int) -> Slots:
        """
        Args:
            rows: that of each answer, in ascending order; none is empty.
            num_rows: B.
            size: S.
        """
        counts = np.bincount(rows, minlength=num_rows)
        first, place = np.cumsum(counts) - counts, np.arange(size)
        is_taken = place < counts[:, None]
        return cls(first[:, None] + np.where(is_taken, place, 0), is_taken.astype("float32"))

    @property
    def numbers(self) -> np.ndarray:
        """[B, S], float32: which answer of its row each place has, counted from 1."""
        return (self.answers - self.answers[:, :1] + 1).astype("float32")


def slots_of(batch: Batch) -> Slots:
    """The places for the answers of a batch with "pairs_per_row", the most that there are in any row."""
    _, firsts = np.unique(batch["owners"], return_index=True)
    rows, length = batch["input_ids"].shape
    return Slots.of(batch["positions"][firsts] // length, rows, batch["pairs_per_row"])


def program_inputs(batch: Batch, length: int) -> dict[str, np.ndarray]:
    """A batch as arrays [B, length]: of each position the id, the target behind it, and which answer of its row that is
    a token of, counted from 1, or 0 for none. Of packed rows also where documents begin, and "slots", [B, S]: the
    answers whose log-probabilities are told."""
    is_packed, ids = "pairs_per_row" in batch, batch["input_ids"]
    numbers = np.ones(len(batch["targets"]), "float32")
    if is_packed:
        rows = batch["positions"] // ids.shape[1]
        firsts = np.searchsorted(rows, np.arange(len(ids)))  # the answers of a row are numbered one after the other
        numbers += batch["owners"] - batch["owners"][firsts][rows]
    found = language_model.program_inputs({**batch, "weights": numbers}, length, is_packed)
    found["answers"] = found.pop("weights")
    return {**found, "slots": slots_of(batch).numbers} if is_packed else found


def program_logps(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """`answer_logps` of `program_inputs`, [B]; of packed rows [B, S]. Logits are made for all positions, as a program
    cannot pick some."""
    starts = {"document_starts": inputs["document_starts"]} if "document_starts" in inputs else {}
    hidden, _ = model.hidden_states(inputs["input_ids"], **starts)  # [B, L, D]
    nll = model.token_nll(hidden.flatten(0, 1), inputs["targets"].flatten()).reshape(inputs["targets"].shape)
    nll, is_own = nll.astype("float64"), inputs["answers"]
    if "slots" in inputs:
        nll, is_own = nll.unsqueeze(1), is_own.unsqueeze(1) == inputs["slots"].unsqueeze(-1)  # [B, S, L]
    return -(nll * is_own.astype("float64")).sum(-1)


def log_ratios(logps: Tensor, batch: Batch) -> Tensor:
    """[A]: log-probabilities of the answers of a batch, float64, without its "reference"; the difference in float32."""
    return (logps - paddle.to_tensor(batch["reference"])).astype("float32")


def num_tokens(batch: Batch) -> np.ndarray:
    """[A]: number of tokens of each answer."""
    return np.bincount(batch["owners"]).astype("float32")
