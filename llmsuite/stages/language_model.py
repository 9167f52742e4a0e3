"""Next-token prediction with a weight for every token: what pre-training and supervised fine-tuning share.

Shapes: B sequences, L length, D hidden, N tokens that have a weight.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.train.stage import Batch, LossTerms
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedTokens:
    """One sequence, or several documents one after the other."""

    ids: np.ndarray
    """[length], int32."""
    weights: np.ndarray
    """[length], float32: weight of each token in the loss; 0 where it is masked, and where a document begins."""
    begins: tuple[int, ...] = (0,)
    """Positions in `ids` where documents begin."""

    @property
    def num_inputs(self) -> int:
        """Positions it takes in a row: the last token of a document is only a target."""
        return len(self.ids) - len(self.begins)


def join(samples: Sequence[WeightedTokens]) -> WeightedTokens:
    """One sequence with the documents of several."""
    starts = itertools.accumulate((len(sample.ids) for sample in samples[:-1]), initial=0)
    begins = tuple(start + begin for start, sample in zip(starts, samples) for begin in sample.begins)
    ids, weights = np.concatenate([s.ids for s in samples]), np.concatenate([s.weights for s in samples])
    return WeightedTokens(ids, weights, begins)


def collate(
    samples: Sequence[WeightedTokens],
    pad_id: int,
    length_multiple: int,
    predicts_further: bool = False,
    tells_prompts: bool = False,
) -> Batch:
    """Sequences to arrays, padded on the right to a multiple; the last token of each document is only a target.

    With several documents in a sequence the batch has "document_starts", which `CausalLM.hidden_states` takes. The
    padding is a document of its own then. With `predicts_further` it has what `mtp_nll` takes, with `tells_prompts`
    "prompt_lengths" [B, L]: of each token, how many tokens of its document come before the first supervised one.
    """
    longest = max(sample.num_inputs for sample in samples)
    length = -(-longest // length_multiple) * length_multiple
    input_ids = np.full([len(samples), length], pad_id, dtype="int64")
    starts = np.empty([len(samples), length], dtype="int64")
    next_ids = np.full_like(input_ids, pad_id)
    prompt_lengths = np.zeros_like(input_ids)
    positions, targets, weights, depths = [], [], [], []
    for i, sample in enumerate(samples):
        begins = np.array(sample.begins)
        assert not sample.weights[begins].any(), "nothing predicts the first token of a document"
        shift = np.arange(len(begins))  # the inputs lack the last token of each document before
        rows = np.diff([*(begins - shift), sample.num_inputs])
        starts[i, : sample.num_inputs] = np.repeat(begins - shift, rows)
        starts[i, sample.num_inputs :] = sample.num_inputs
        input_ids[i, : sample.num_inputs] = np.delete(sample.ids, [*(begins[1:] - 1), -1])
        next_ids[i, : sample.num_inputs] = np.delete(sample.ids, begins)
        (supervised,) = np.nonzero(sample.weights)
        # a token is predicted one position before its own
        document = np.searchsorted(begins, supervised, "right")
        positions.append(i * length + supervised - document)
        depths.append(supervised - begins[document - 1])
        firsts = begins + [int(np.argmax(part > 0)) for part in np.split(sample.weights, begins[1:])]
        prompt_lengths[i, : sample.num_inputs] = np.repeat(firsts - begins, rows)
        targets.append(sample.ids[supervised])
        weights.append(sample.weights[supervised])
    batch: Batch = {"document_starts": starts} if any(len(sample.begins) > 1 for sample in samples) else {}
    if predicts_further:
        # two positions before its own: the first two tokens of a document are not predicted by two before them
        (deep,) = np.nonzero(np.concatenate(depths) > 1)
        batch |= further_targets(next_ids, *(np.concatenate(of)[deep] for of in (positions, targets, weights)))
    if tells_prompts:
        batch["prompt_lengths"] = prompt_lengths
    return batch | {
        "input_ids": input_ids,
        "positions": np.concatenate(positions),
        "targets": np.concatenate(targets).astype("int64"),
        "weights": np.concatenate(weights).astype("float32"),
        "weight": float(np.concatenate(weights).astype("float32").sum(dtype="float64")),
        "lengths": np.array([sample.num_inputs for sample in samples]),
        "num_tokens": sum(len(sample.ids) for sample in samples),
        "num_supervised": sum(map(len, targets)),
    }


def hidden_at_positions(model: Any, batch: Batch) -> Tensor:
    """[N, D]: hidden states at the "positions" of a batch, which count through its rows [B L]; see `hidden_states`."""
    return hidden_states(model, batch).flatten(0, 1).index_select(paddle.to_tensor(batch["positions"]), 0)


def hidden_states(model: Any, batch: Batch) -> Tensor:
    """[B, L, D]. With "document_starts" in the batch each token sees its own document only."""
    starts = {"document_starts": paddle.to_tensor(batch["document_starts"])} if "document_starts" in batch else {}
    hidden, _ = model.hidden_states(paddle.to_tensor(batch["input_ids"]), **starts)
    return hidden


def further_targets(next_ids: np.ndarray, positions: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Batch:
    """The part of a batch that `mtp_nll` takes.

    Args:
        next_ids: the token behind each input, [B, L].
        positions: where targets are predicted by the token before them, counted through the rows.
        targets: ids of tokens that have two tokens of their document before them, [M].
        weights: of the targets, [M].
    """
    if not len(targets):  # every rank runs the layer, for the sake of the others
        positions, targets, weights = np.ones([1], "int64"), np.zeros([1], "int64"), np.zeros([1], "float32")
    return {
        "next_ids": next_ids,
        "mtp_positions": positions - 1,
        "mtp_targets": targets.astype("int64"),
        "mtp_weights": weights.astype("float32"),
    }


def nll_and_first_choice(model: Any, hidden: Tensor, targets: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Negative log-probabilities of targets [N]; in an evaluation also 1 where greedy decoding picks them, else 0.

    Training does without, as the logits, which may be sharded, are needed once more for it.
    """
    if model.training:
        return model.token_nll(hidden, paddle.to_tensor(targets)), None
    nll, is_picked = model.token_nll_and_first_choice(hidden, paddle.to_tensor(targets))
    return nll, is_picked


def mtp_nll(model: Any, hidden: Tensor, positions: np.ndarray, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `nll_and_first_choice` tells of the targets of a batch, and between the two the sum over its further ones
    (`further_targets`), times their weights.

    Args:
        model: the one that is trained.
        hidden: its hidden states, [B, L, D].
        positions: where they predict "targets", counted through the rows [B L].
        batch: with "targets", "next_ids" and what else `further_targets` gives.
    """
    further = model.mtp_hidden_states(hidden, paddle.to_tensor(batch["next_ids"]))  # [B, L, D]
    # one product with the output projection for both; joined before they are picked, as the gradient of what is picked
    # is a sum over tensor parallel ranks, which Paddle would take apart in the backward pass of a concatenation
    both = paddle.concat([hidden.flatten(0, 1), further.flatten(0, 1)])
    picked = np.concatenate([positions, batch["next_ids"].size + batch["mtp_positions"]])
    targets = np.concatenate([batch["targets"], batch["mtp_targets"]])
    nll, is_picked = nll_and_first_choice(model, both.index_select(paddle.to_tensor(picked), 0), targets)
    count = len(positions)
    further = (nll[count:] * paddle.to_tensor(batch["mtp_weights"])).sum()
    return nll[:count], further, None if is_picked is None else is_picked[:count]


def with_mtp(terms: LossTerms, further: Tensor, mtp_weight: float) -> LossTerms:
    """The loss with the term of the further tokens, their sum: divided by the same weight, as DeepSeek-V3 does (arXiv
    2412.19437, eq. 24 and 25)."""
    sums = {**terms.sums, "mtp_loss": (further, terms.weight)}
    return LossTerms(terms.total + mtp_weight * further, terms.weight, sums)


def weighted_loss(model: Any, batch: Batch, mtp_weight: float = 0.0) -> LossTerms:
    """Sum over the tokens of weight times negative log-probability. Logits are made for weighted positions only.

    With `mtp_weight` there is the term of `with_mtp`; the batch has `further_targets`.

    The metric `tokens/likely` is the share of them that gets a probability above 1/2: greedy decoding picks them for
    certain, so it is a lower bound of `tokens/accuracy`, the share that it picks, which evaluations have.
    """
    further = None
    if mtp_weight:
        nll, further, is_picked = mtp_nll(model, hidden_states(model, batch), batch["positions"], batch)
    else:
        picked = hidden_at_positions(model, batch)  # [N, D]
        nll, is_picked = nll_and_first_choice(model, picked, batch["targets"])  # [N]
    weights = paddle.to_tensor(batch["weights"])
    weight = batch["weight"]
    likely = (nll.detach() < math.log(2.0)).astype("float32")
    shares = {"tokens/likely": likely} if is_picked is None else {"tokens/likely": likely, "tokens/accuracy": is_picked}
    sums = {name: ((share * weights).sum(), weight) for name, share in shares.items()}
    terms = LossTerms((nll * weights).sum(), weight, sums)
    return terms if further is None else with_mtp(terms, further, mtp_weight)


def program_inputs(batch: Batch, length: int, has_documents: bool) -> dict[str, np.ndarray]:
    """A batch of `collate` as arrays [B, length]: of each position the id, the target behind it, and its weight; with
    `has_documents`, where its document begins too, also for a batch in which each row is one document. And
    "row_lengths", how many tokens of each row are no padding, [B]."""
    ids = batch["input_ids"]
    at, found = np.divmod(batch["positions"], ids.shape[1]), {"row_lengths": np.asarray(batch["lengths"], "int64")}
    for name, dtype in (("targets", "int64"), ("weights", "float32")):
        found[name] = np.zeros([len(ids), length], dtype)
        found[name][at] = batch[name]
    wider = [(0, 0), (0, length - ids.shape[1])]
    found["input_ids"] = np.pad(ids, wider)  # nothing sees what is behind it
    if has_documents:
        found["document_starts"] = np.pad(batch.get("document_starts", np.zeros_like(ids)), wider, "edge")
    return found


def program_loss(model: Any, inputs: Mapping[str, Tensor], tells_likely: bool = True) -> dict[str, Tensor]:
    """`weighted_loss` of `program_inputs`. Logits are made for all positions, as a program cannot pick some."""
    starts = {"document_starts": inputs["document_starts"]} if "document_starts" in inputs else {}
    hidden, _ = model.hidden_states(inputs["input_ids"], **starts)  # [B, L, D]
    nll = model.token_nll(hidden.flatten(0, 1), inputs["targets"].flatten())  # [B L]
    weights = inputs["weights"].flatten()
    sums = {"loss": (nll * weights).sum()}
    if tells_likely:
        likely = (nll.detach() < math.log(2.0)).astype("float32")
        sums["tokens/likely"] = (likely * weights).sum()
    return sums
