"""Completions of batches as ragged rows of tokens, one array for each: what advantages by token are made of.

T tokens of the C completions of a batch, one completion after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmsuite.rl.advantages import Tokens, token_rewards
from llmsuite.train.stage import Batch

Total = Callable[[Sequence[float]], list[float]]
"""Adds up numbers over the data ranks of a run."""


def rows_of(batch: Batch, values: np.ndarray) -> Tokens:
    """Values [T] as a row for each completion, float64."""
    ends = np.cumsum(batch["completion_lengths"])[:-1]
    return np.split(np.asarray(values, "float64"), ends)


def is_counted(batch: Batch) -> np.ndarray:
    """[C], bool: the completions that are learnt from."""
    return np.array([row[0] > 0 for row in rows_of(batch, batch["weights"])])


def rewards_by_token(batch: Batch, beta: float) -> Tokens:
    """The rewards of the tokens of each completion: its own on the last one, and on each -beta x k1."""
    kl = divergence(batch) if beta else np.zeros(len(batch["drawn"]))
    return token_rewards(batch["rewards"], rows_of(batch, kl), beta)


def divergence(batch: Batch) -> np.ndarray:
    """[T], k1: the logarithm of how much likelier each token was than for the reference, by the weights before the
    update where a pre-pass has asked these, else as it was drawn."""
    found: np.ndarray = np.asarray(batch.get("old", batch["drawn"]), "float64") - batch["reference"]
    return found


def put_tokens(batches: Sequence[Batch], name: str, rows: Tokens) -> None:
    """Rows of tokens, one for each completion of the batches, into these, [T] float32."""
    given = iter(rows)
    for batch in batches:
        batch[name] = np.concatenate([next(given) for _ in batch["completion_lengths"]]).astype("float32")
