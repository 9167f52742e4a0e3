"""Next-token prediction with a weight for every token, shared by pre-training and supervised fine-tuning.

Shapes: B sequences, L length, D hidden, N tokens with a weight above 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import Tensor
from llmsuite.engine.batch import as_tokens, flat_targets, tensor, total
from llmsuite.engine.stage import Batch, LossTerms


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedTokens:
    """A sequence of one document, or of several that are concatenated."""

    ids: np.ndarray
    """[length], int32."""
    weights: np.ndarray
    """[length], float32: weight of each token in the loss; 0 for a masked token, and for the first one of a
    document."""
    begins: tuple[int, ...] = (0,)
    """Start positions of the documents in `ids`."""

    @property
    def num_inputs(self) -> int:
        """Number of positions in a row: the last token of a document is only a target."""
        return len(self.ids) - len(self.begins)


def join(samples: Sequence[WeightedTokens]) -> WeightedTokens:
    """Concatenate sequences to one with the documents of all."""
    starts = itertools.accumulate((len(sample.ids) for sample in samples[:-1]), initial=0)
    begins = tuple(start + begin for start, sample in zip(starts, samples) for begin in sample.begins)
    ids = np.concatenate([s.ids for s in samples])
    weights = np.concatenate([s.weights for s in samples])
    return WeightedTokens(ids, weights, begins)


def collate(
    samples: Sequence[WeightedTokens],
    pad_id: int,
    length_multiple: int,
    has_mtp: bool = False,
    has_prompt_lengths: bool = False,
) -> Batch:
    """Sequences to arrays, padded on the right to a multiple; the last token of each document is only a target.

    With several documents in a sequence the batch has "document_starts" for `CausalLM.hidden_states`; the padding is
    then a separate document. With `has_mtp` the batch has the inputs of `mtp_nll`. With `has_prompt_lengths` it has
    "prompt_lengths" [B, L]: for each token, the number of tokens of its document before the first supervised one.
    """
    longest = max(sample.num_inputs for sample in samples)
    length = -(-longest // length_multiple) * length_multiple
    input_ids = np.full([len(samples), length], pad_id, dtype="int64")
    starts = np.empty([len(samples), length], dtype="int64")
    next_ids = np.full_like(input_ids, pad_id)
    prompt_lengths = np.zeros_like(input_ids)
    positions = []
    targets = []
    weights = []
    depths = []
    for i, sample in enumerate(samples):
        begins = np.array(sample.begins)
        assert not sample.weights[begins].any(), "nothing predicts the first token of a document"
        shift = np.arange(len(begins))  # the inputs leave out the last token of each earlier document
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
    if not any(map(len, targets)):  # kernels and collective calls need a target; this one has no weight
        positions[0] = np.array([samples[0].num_inputs - 1])
        targets[0] = samples[0].ids[-1:]
        weights[0] = np.zeros([1], "float32")
        depths[0] = np.ones([1], "int64")
    batch: Batch = {}
    if any(len(sample.begins) > 1 for sample in samples):
        batch["document_starts"] = starts
    if has_mtp:
        # a token is predicted two positions before its own, so the first two tokens of a document are no targets
        (deep,) = np.nonzero(np.concatenate(depths) > 1)
        picked = [np.concatenate(rows)[deep] for rows in (positions, targets, weights)]
        batch |= mtp_inputs(next_ids, *picked)
    if has_prompt_lengths:
        batch["prompt_lengths"] = prompt_lengths
    # the float32 weights of the loss, summed in float64, so that the sum hardly depends on the batch
    weight = float(np.concatenate(weights).astype("float32").sum(dtype="float64"))
    return batch | {
        "input_ids": input_ids,
        "positions": np.concatenate(positions),
        "targets": np.concatenate(targets).astype("int64"),
        "weights": np.concatenate(weights).astype("float32"),
        "weight": weight,
        "lengths": np.array([sample.num_inputs for sample in samples]),
        "num_tokens": sum(len(sample.ids) for sample in samples),
        "num_supervised": sum(int((of_sample > 0).sum()) for of_sample in weights),
    }


def hidden_at_positions(model: Any, batch: Batch) -> Tensor:
    """Hidden states of the model at the "positions" of a batch, which index its flattened rows [B L]: [N, D]. At all
    positions where a batch has none, as in programs: [B L, D]."""
    hidden = hidden_states(model, batch).flatten(0, 1)
    if "positions" not in batch:
        return hidden
    return pick_rows(hidden, tensor(batch, "positions"))


def pick_rows(hidden: Tensor, positions: Tensor) -> Tensor:
    """The rows of hidden states [M, D] at positions [N], with a gradient: [N, D]."""
    # not `index_select`: on GPUs one thread adds up its whole gradient (`FLAGS_cudnn_deterministic`, Paddle 3.3.1)
    return paddle.gather(hidden, positions, 0)


def hidden_states(model: Any, batch: Batch) -> Tensor:
    """Hidden states of the model for a batch, [B, L, D]. With "document_starts" each token attends only to its own
    document."""
    arguments = {}
    if "document_starts" in batch:
        arguments["document_starts"] = tensor(batch, "document_starts")
    hidden, _ = model.hidden_states(tensor(batch, "input_ids"), **arguments)
    return hidden


def mtp_inputs(next_ids: np.ndarray, positions: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Batch:
    """The part of a batch for `mtp_nll`: targets of multi-token prediction (MTP).

    Args:
        next_ids: the token after each input, [B, L].
        positions: positions of the tokens before the targets, as indices of the flattened rows [B L], [M].
        targets: ids of tokens with at least two tokens of their document before them, [M].
        weights: of the targets, [M].
    """
    if not len(targets):  # every rank has to run the layer, whose collective calls the others make
        positions = np.ones([1], "int64")
        targets = np.zeros([1], "int64")
        weights = np.zeros([1], "float32")
    return {
        "next_ids": next_ids,
        "mtp_positions": positions - 1,
        "mtp_targets": targets.astype("int64"),
        "mtp_weights": weights.astype("float32"),
    }


def nll_and_greedy_match(model: Any, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Negative log-probabilities of targets, [N]; in an evaluation also 1 where greedy decoding picks the target, else
    0, [N]; in training None, as it takes another pass over the logits, which may be sharded.
    """
    if model.training:
        return model.token_nll(hidden, targets), None
    nll, is_picked = model.token_nll_and_greedy_match(hidden, targets)
    return nll, is_picked


def mtp_nll(model: Any, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """The MTP loss of a batch together with the results of `nll_and_greedy_match`.

    Args:
        model: the trained model.
        hidden: its hidden states, [B, L, D].
        batch: with "targets" and the entries of `mtp_inputs`.

    Returns:
        Negative log-probabilities of the targets [N]; the weighted sum of those of the MTP targets; and 1 where greedy
        decoding picks a target, else 0 [N], or None in training.
    """
    mtp_hidden = model.mtp_hidden_states(hidden, tensor(batch, "next_ids"))  # [B, L, D]
    # one product with the output projection for both. They are concatenated before positions are picked: the
    # gradient of the picked rows is a sum over tensor parallel ranks, which Paddle would split in the backward pass of
    # a concatenation
    both = paddle.concat([hidden.flatten(0, 1), mtp_hidden.flatten(0, 1)])
    num_inputs = batch["next_ids"].size
    positions = tensor(batch, "positions") if "positions" in batch else paddle.arange(num_inputs, dtype="int64")
    picked = paddle.concat([positions, tensor(batch, "mtp_positions") + num_inputs])
    targets = paddle.concat([tensor(batch, "targets"), tensor(batch, "mtp_targets")])
    nll, is_picked = nll_and_greedy_match(model, pick_rows(both, picked), targets)
    count = len(batch["targets"])
    mtp_loss = (nll[count:] * tensor(batch, "mtp_weights")).sum()
    if is_picked is not None:
        is_picked = is_picked[:count]
    return nll[:count], mtp_loss, is_picked


def add_mtp_loss(terms: LossTerms, mtp_loss: Tensor, mtp_weight: float) -> LossTerms:
    """Add the MTP loss, which is a sum, to the loss. It is divided by the same weight, as in DeepSeek-V3 (arXiv
    2412.19437, eq. 24 and 25)."""
    sums = {**terms.sums, "mtp_loss": (mtp_loss, terms.weight)}
    return LossTerms(terms.total + mtp_weight * mtp_loss, terms.weight, sums)


def weighted_loss(
    model: Any, batch: Batch, mtp_weight: float = 0.0, has_shares: bool = True, is_dft: bool = False
) -> LossTerms:
    """Sum over the tokens of weight times negative log-probability. Logits are computed only at positions with a
    target; in a program at all positions, as its shapes are static.

    With `mtp_weight` the loss includes the MTP loss; then the batch has `mtp_inputs`.

    With `has_shares` the metric `tokens/likely` is the share of tokens with a probability above 1/2. Greedy decoding
    certainly picks these, so it is a lower bound of `tokens/accuracy`, the share that greedy decoding picks, which only
    evaluations compute.

    With `is_dft` the loss of a token is `dft` of its negative log-probability, and the metric `nll` is the mean of the
    latter. The MTP loss stays as it is.
    """
    mtp_loss = is_picked = None
    if mtp_weight:
        nll, mtp_loss, is_picked = mtp_nll(model, hidden_states(model, batch), batch)
    else:
        picked = hidden_at_positions(model, batch)  # [N, D]
        targets = flat_targets(batch)
        if has_shares:
            nll, is_picked = nll_and_greedy_match(model, picked, targets)
        else:
            nll = model.token_nll(picked, targets)
    nll = as_tokens(nll, batch)
    weights = tensor(batch, "weights")
    weight = total(batch, "weight")
    shares = {}
    if has_shares:
        shares["tokens/likely"] = (nll.detach() < math.log(2.0)).astype("float32")
        if is_picked is not None:
            shares["tokens/accuracy"] = is_picked
    sums = {name: ((share * weights).sum(), weight) for name, share in shares.items()}
    losses = nll
    if is_dft:
        losses = dft(nll)
        sums["nll"] = (nll.detach() * weights).sum(), weight
    terms = LossTerms((losses * weights).sum(), weight, sums)
    return terms if mtp_loss is None else add_mtp_loss(terms, mtp_loss, mtp_weight)


def dft(nll: Tensor) -> Tensor:
    """p (-log p), with no gradient through the factor p: Wu et al. 2025, dynamic fine-tuning, arXiv 2508.05629, eq. 9.

    Args:
        nll: negative log-probabilities -log p of tokens, of any shape.
    """
    return nll * (-nll.detach()).exp()
