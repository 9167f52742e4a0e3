"""Next-token prediction with a weight for every token: what pre-training and supervised fine-tuning share.

Shapes: B sequences, L length, D hidden, N tokens that have a weight.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.data.packing import best_fit
from llmsuite.train.stage import Batch, LossTerms


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


def pack(samples: Sequence[WeightedTokens], max_length: int) -> list[WeightedTokens]:
    """Pack samples into sequences of at most `max_length` positions; see `best_fit`."""
    packs = best_fit([sample.num_inputs for sample in samples], max_length)
    return [join([samples[i] for i in pack]) for pack in packs]


def join(samples: Sequence[WeightedTokens]) -> WeightedTokens:
    """One sequence with the documents of several."""
    starts = itertools.accumulate((len(sample.ids) for sample in samples[:-1]), initial=0)
    begins = tuple(start + begin for start, sample in zip(starts, samples) for begin in sample.begins)
    ids, weights = np.concatenate([s.ids for s in samples]), np.concatenate([s.weights for s in samples])
    return WeightedTokens(ids, weights, begins)


def collate(samples: Sequence[WeightedTokens], pad_id: int, length_multiple: int) -> Batch:
    """Sequences to arrays, padded on the right to a multiple; the last token of each document is only a target.

    With several documents in a sequence the batch has "document_starts", which `CausalLM.hidden_states` takes. The
    padding is a document of its own then.
    """
    longest = max(sample.num_inputs for sample in samples)
    length = -(-longest // length_multiple) * length_multiple
    input_ids = np.full([len(samples), length], pad_id, dtype="int64")
    starts = np.empty([len(samples), length], dtype="int64")
    positions, targets, weights = [], [], []
    for i, sample in enumerate(samples):
        begins = np.array(sample.begins)
        assert not sample.weights[begins].any(), "nothing predicts the first token of a document"
        shift = np.arange(len(begins))  # the inputs lack the last token of each document before
        rows = np.diff([*(begins - shift), sample.num_inputs])
        starts[i, : sample.num_inputs] = np.repeat(begins - shift, rows)
        starts[i, sample.num_inputs :] = sample.num_inputs
        input_ids[i, : sample.num_inputs] = np.delete(sample.ids, [*(begins[1:] - 1), -1])
        (supervised,) = np.nonzero(sample.weights)
        # a token is predicted one position before its own
        positions.append(i * length + supervised - np.searchsorted(begins, supervised, "right"))
        targets.append(sample.ids[supervised])
        weights.append(sample.weights[supervised])
    batch: Batch = {"document_starts": starts} if any(len(sample.begins) > 1 for sample in samples) else {}
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


def hidden_at_positions(model: Any, batch: Batch) -> Any:
    """[N, D]: hidden states at the "positions" of a batch, which count through its rows [B L]. With "document_starts"
    in the batch each token sees its own document only."""
    starts = {"document_starts": paddle.to_tensor(batch["document_starts"])} if "document_starts" in batch else {}
    hidden, _ = model.hidden_states(paddle.to_tensor(batch["input_ids"]), **starts)  # [B, L, D]
    return hidden.flatten(0, 1).index_select(paddle.to_tensor(batch["positions"]), 0)


def weighted_loss(model: Any, batch: Batch) -> LossTerms:
    """Sum over the tokens of weight times negative log-probability. Logits are made for weighted positions only.

    The metric `tokens/likely` is the share of them that gets a probability above 1/2: greedy decoding picks them for
    certain, so it is a lower bound of the token accuracy, and needs the logits, which may be sharded, only once.
    """
    picked = hidden_at_positions(model, batch)  # [N, D]
    nll = model.token_nll(picked, paddle.to_tensor(batch["targets"]))  # [N]
    weights = paddle.to_tensor(batch["weights"])
    weight = batch["weight"]
    likely = (nll.detach() < math.log(2.0)).astype("float32")
    return LossTerms((nll * weights).sum(), weight, {"tokens/likely": ((likely * weights).sum(), weight)})
