"""Multi-token prediction: a layer behind the others that predicts the token after the next one (DeepSeek-V3, arXiv
2412.19437, section 2.2). Imports no Paddle.

A config of a family that has such layers has `num_nextn_predict_layers`, their number in its files, and `mtp`, whether
they are a part of the model. The recipe decides that, by `train.mtp_loss_weight`; otherwise they are carried along.
"""

from __future__ import annotations

from typing import Any

from llmsuite.models.head import is_tied


def num_mtp_layers(config: Any) -> int:
    """Layers of the model that predict further tokens."""
    return int(config.num_nextn_predict_layers) if getattr(config, "mtp", False) else 0


def num_layers(config: Any) -> int:
    """All layers of the model: the last of them may predict further tokens."""
    return int(config.num_hidden_layers) + num_mtp_layers(config)


def is_embedding_shared(config: Any) -> bool:
    """Whether the end of the model needs the embedding too: for logits, or for a layer that predicts further tokens."""
    return is_tied(config) or num_mtp_layers(config) > 0
