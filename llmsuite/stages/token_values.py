"""Values by token of the completions of batches, as ragged rows, from which token-level advantages are computed.

T tokens of the C completions of a batch, one completion after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmsuite.engine.stage import Batch
from llmsuite.rl.advantages import Tokens, token_rewards

SumOverRanks = Callable[[Sequence[float]], list[float]]
"""Sums numbers over the data ranks of a run."""


def split_by_completion(batch: Batch, values: np.ndarray) -> Tokens:
    """Split values [T] into a row for each completion, float64."""
    ends = np.cumsum(batch["completion_lengths"])[:-1]
    return np.split(np.asarray(values, "float64"), ends)


def is_trained(batch: Batch) -> np.ndarray:
    """[C], bool: True for the completions that are trained on."""
    return np.array([row[0] > 0 for row in split_by_completion(batch, batch["weights"])])


def rewards_by_token(batch: Batch, beta: float) -> Tokens:
    """The rewards of the tokens of each completion: -beta x k1 on each, plus the completion's reward on the last
    one."""
    kl = reference_kl(batch) if beta else np.zeros(len(batch["sampled_logps"]))
    return token_rewards(batch["rewards"], split_by_completion(batch, kl), beta)


def reference_kl(batch: Batch) -> np.ndarray:
    """The k1 estimate of the KL divergence from the reference, [T]: the log-ratio of each token's probability to that
    of the reference, by the weights before the update if there was a pre-pass, else by the rollout."""
    kl: np.ndarray = np.asarray(batch.get("old", batch["sampled_logps"]), "float64") - batch["reference"]
    return kl


def store_token_values(batches: Sequence[Batch], name: str, rows: Tokens) -> None:
    """Store rows of token values, one for each completion, in the batches under `name`, [T] float32."""
    given = iter(rows)
    for batch in batches:
        batch[name] = np.concatenate([next(given) for _ in batch["completion_lengths"]]).astype("float32")
