"""Multi-token prediction (MTP): an extra last layer that predicts the token after the next one (DeepSeek-V3, arXiv
2412.19437, section 2.2). Imports no Paddle.

The config of a family that has such layers has `num_nextn_predict_layers`, their number in the files, and `mtp`, true
where they are a part of the model. The recipe decides that by `train.mtp_loss_weight`; else they are only copied from
the source to the saved files.
"""

from __future__ import annotations

from typing import Any

from llmsuite.models.head import is_tied


def num_mtp_layers(config: Any) -> int:
    """Number of MTP layers of the model."""
    return int(config.num_nextn_predict_layers) if getattr(config, "mtp", False) else 0


def num_layers(config: Any) -> int:
    """Number of all layers of the model, MTP layers included, which come last."""
    return int(config.num_hidden_layers) + num_mtp_layers(config)


def is_embedding_shared(config: Any) -> bool:
    """True if the last pipeline stage needs the embedding too: for tied logits, or for an MTP layer."""
    return is_tied(config) or num_mtp_layers(config) > 0
