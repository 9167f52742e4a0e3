"""Answers to prompts as token ids, their batches, and their log-probabilities, for stages that compare answers.

Shapes: A answers, L length, D hidden, N tokens of answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import paddle

from llmsuite.base.typing import Tensor
from llmsuite.engine.batch import Batch, ProgramBatch, as_tokens, flat_targets, sum_by_answer, tensor
from llmsuite.rl.completion import Completion
from llmsuite.stages.language_model import hidden_at_positions, hidden_states
from llmsuite.stages.reference_cache import answer_key


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to a prompt, as token ids. It ends as `data.end_of_answer` says."""

    prompt: list[int]
    ids: list[int]

    @property
    def key(self) -> str:
        """Its key in the reference cache."""
        return answer_key(self.prompt, self.ids)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.ids)


def ended(answer: list[int], eos: int, end: Literal["token", "template", "token_in_text"]) -> list[int]:
    """The answer up to and including its last end-of-sequence token, which is appended if there is none; with `end`
    "template" the answer as the template writes it.

    Args:
        answer: token ids of all that the chat template writes for an answer.
        eos: id of the end-of-sequence token.
        end: value of `data.end_of_answer`; token_in_text is refused for stages with such answers.
    """
    if end == "template":
        return answer
    if eos not in answer:
        return [*answer, eos]
    return answer[: len(answer) - answer[::-1].index(eos)]


def collate(answers: Sequence[Answer], pad_id: int, length_multiple: int) -> Batch:
    """Answers to arrays, with one answer in each row, as by `pack_rows`."""
    return pack_rows([[answer] for answer in answers], pad_id, length_multiple)


def pack_rows(
    rows: Sequence[Sequence[Answer]], pad_id: int, length_multiple: int, shares_prompts: bool = False
) -> Batch:
    """Rows of answers to arrays, padded on the right to a multiple; the last token of each answer is only a target.

    Answers are numbered consecutively over the rows; "owners" has the number of the answer of each target. With several
    answers in a row the batch has "document_starts" for `CausalLM.hidden_states`: each answer with its prompt is a
    document, and so is the padding. `pack_inputs` describes `shares_prompts`.
    """
    inputs = []
    for row in rows:
        inputs.append([Answer(answer.prompt, answer.ids[:-1]) for answer in row])
    packed = pack_inputs(inputs, pad_id, length_multiple, shares_prompts)
    targets = [answer.ids for row in rows for answer in row]
    batch = packed.batch | {
        "positions": np.concatenate(packed.positions),  # each predicts the next token
        "targets": np.concatenate(targets).astype("int64"),
        "owners": np.repeat(np.arange(len(targets)), [len(ids) for ids in targets]),
    }
    return batch | {
        # a prompt that several answers share counts for each of them
        "num_tokens": sum(len(answer) for row in rows for answer in row),
        "num_supervised": len(batch["targets"]),
    }


def drop_observed_tokens(batch: Batch, completions: Sequence[Completion]) -> None:
    """Keep as targets only the tokens that the model sampled. The tokens of an environment stay in the input.

    Args:
        batch: of `pack_rows`, whose answers are the completions.
        completions: in the order of the batch.
    """
    if not any(completion.sampled_mask for completion in completions):
        return
    masks = [completion.sampled_mask or [True] * len(completion.ids) for completion in completions]
    kept = np.concatenate([np.asarray(mask, bool) for mask in masks])
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
    """For each answer, the positions of the last token of its prompt and of its own tokens, counted through the
    rows."""


def pack_inputs(
    rows: Sequence[Sequence[Answer]], pad_id: int, length_multiple: int, shares_prompts: bool
) -> PackedRows:
    """Rows of answers to input arrays, padded on the right to a multiple.

    With `shares_prompts` all answers of a row to the same prompt follow one copy of it, and each attends only to the
    prompt and itself; its positions continue those of the prompt (`devices.masks.document_spans`).
    """
    grouped: list[list[list[int]]] = []
    lengths = []
    for row in rows:
        groups = [[number] for number in range(len(row))]
        if shares_prompts:
            groups = _by_prompt(row)
        grouped.append(groups)
        prompt_lengths = [len(row[group[0]].prompt) for group in groups]
        lengths.append(sum(prompt_lengths) + sum(len(answer.ids) for answer in row))
    length = -(-max(lengths) // length_multiple) * length_multiple
    input_ids = np.full([len(rows), length], pad_id, dtype="int64")
    starts = np.empty_like(input_ids)
    positions: list[np.ndarray] = []
    for i, (row, groups) in enumerate(zip(rows, grouped)):
        begin = 0
        positions_of = {}
        for group in groups:
            prompt = row[group[0]].prompt
            end = begin + len(prompt)
            last = end - 1
            input_ids[i, begin:end] = prompt
            starts[i, begin:end] = begin
            for number in group:
                start = end
                end = end + len(row[number].ids)
                input_ids[i, start:end] = row[number].ids
                starts[i, start:end] = start - len(prompt)
                positions_of[number] = i * length + np.array([last, *range(start, end)])
            begin = end
        starts[i, begin:] = begin
        positions += [positions_of[number] for number in range(len(row))]
    batch = {"input_ids": input_ids, "lengths": np.array(lengths)}
    if len(positions) > len(rows):
        batch["document_starts"] = starts
    return PackedRows(batch, positions)


def _by_prompt(answers: Sequence[Answer]) -> list[list[int]]:
    """Indices of the answers, grouped by prompt."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(tuple(answer.prompt), []).append(number)
    return list(groups.values())


def answer_logps(model: Any, batch: Batch) -> Tensor:
    """Log-probability of each answer given its prompt, float64: [A], in a program [B] or [B, S]. Logits are computed
    only at the positions of answers; in a program at all positions, as its shapes are static."""
    return logps_of_answers(token_nll(model, batch), batch)


def token_nll(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Negative log-probability of each token of the answers, with the logits divided by a temperature: [N], in a
    program [B, L]."""
    hidden = hidden_at_positions(model, batch)  # [N, D]
    if temperature != 1:
        hidden = hidden / temperature  # equals dividing the logits, which are linear in it
    nll: Tensor = model.token_nll(hidden, flat_targets(batch))
    return as_tokens(nll, batch)


def logps_of_answers(nll: Tensor, batch: Batch) -> Tensor:
    """Log-probability of each answer, float64, from the negative log-probabilities of its tokens."""
    # in float64: losses take differences of these sums, in which the rounding errors of float32 would be large
    return -sum_by_answer(nll.astype("float64"), batch)


def hidden_of_answers(model: Any, batch: Batch) -> Tensor:
    """Hidden states at the position of each answer, for a batch with one position for each: [A, D], in a program [B,
    D] or [B, S, D]."""
    if not isinstance(batch, ProgramBatch):
        return hidden_at_positions(model, batch)
    hidden = hidden_states(model, batch)  # [B, L, D]
    is_token = batch.mask_of_answers()
    is_packed = is_token.ndim == 3
    if not is_packed:
        is_token = is_token.unsqueeze(1)
    # a product with a mask, as the shapes of a program are static; in float32, as Paddle 3.3.1 does not place a 16-bit
    # mask of ones and zeros in a program
    picked = paddle.matmul(is_token.astype("float32"), hidden.astype("float32")).astype(hidden.dtype)
    return picked if is_packed else picked.squeeze(1)


def log_ratios(logps: Tensor, batch: Batch) -> Tensor:
    """Log-ratios of the answers of a batch to the reference model: `logps` minus its "reference". The difference is
    computed in float64 and returned in float32."""
    return (logps - tensor(batch, "reference")).astype("float32")
