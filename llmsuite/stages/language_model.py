"""Next-token prediction with a weight for every token: what pre-training and supervised fine-tuning share.

Shapes: B sequences, L length, D hidden, N tokens that have a weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.stages.base import Batch, LossTerms


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedTokens:
    """One sequence."""

    ids: np.ndarray
    """[length], int32."""
    weights: np.ndarray
    """[length], float32: what predicting the token from those before it counts for. The first one's is 0."""


def collate(samples: Sequence[WeightedTokens], pad_id: int, length_multiple: int) -> Batch:
    """Sequences to arrays, padded on the right to a multiple; the last token of each is only a target."""
    longest = max(len(sample.ids) for sample in samples) - 1
    length = -(-longest // length_multiple) * length_multiple
    input_ids = np.full([len(samples), length], pad_id, dtype="int64")
    positions, targets, weights = [], [], []
    for i, sample in enumerate(samples):
        assert sample.weights[0] == 0, "nothing predicts the first token"
        input_ids[i, : len(sample.ids) - 1] = sample.ids[:-1]
        (learnt,) = np.nonzero(sample.weights)
        positions.append(i * length + learnt - 1)  # a token is predicted one position before its own
        targets.append(sample.ids[learnt])
        weights.append(sample.weights[learnt])
    return {
        "input_ids": input_ids,
        "positions": np.concatenate(positions),
        "targets": np.concatenate(targets).astype("int64"),
        "weights": np.concatenate(weights).astype("float32"),
        "num_tokens": sum(len(sample.ids) for sample in samples),
        "num_supervised": sum(map(len, targets)),
    }


def weighted_loss(model: Any, batch: Batch) -> LossTerms:
    """Sum over the tokens of weight times negative log-probability. Logits are made for weighted positions only.

    The metric `tokens/likely` is the share of them that gets a probability above 1/2: greedy decoding picks them for
    certain, so it is a lower bound of the token accuracy, and costs no second look at the logits, which may be cut.
    """
    hidden, _ = model.hidden_states(paddle.to_tensor(batch["input_ids"]))  # [B, L, D]
    picked = hidden.flatten(0, 1).index_select(paddle.to_tensor(batch["positions"]), 0)  # [N, D]
    nll = model.token_nll(picked, paddle.to_tensor(batch["targets"]))  # [N]
    weights = paddle.to_tensor(batch["weights"])
    weight = float(batch["weights"].sum(dtype="float64"))
    likely = (nll.detach() < math.log(2.0)).astype("float32")
    return LossTerms((nll * weights).sum(), weight, {"tokens/likely": ((likely * weights).sum(), weight)})
