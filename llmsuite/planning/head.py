"""Memory of the last norm, the head and the loss: what they keep for the backward pass, and their temporaries."""

from __future__ import annotations

import dataclasses

from llmsuite.models.anatomy import Anatomy
from llmsuite.planning.activations import INDEX_BYTES, ActivationSettings, MicroBatch, norm_kept
from llmsuite.planning.layout import Layout


def kept_behind(anatomy: Anatomy, batch: MicroBatch, settings: ActivationSettings, scores: bool) -> float:
    """Bytes that the last norm, the head and the loss keep; `scores` for a head with one value a sequence."""
    norm = norm_kept(anatomy.norm, anatomy.hidden, batch, dataclasses.replace(settings, fused=settings.fused_outside))
    in_chunks = not scores and _num_at_once(batch, settings) < batch.supervised
    is_read = scores or in_chunks or not settings.keeps_trained_only or "lm_head" in settings.reading
    width = (settings.num_bytes if in_chunks else settings.input_bytes or settings.num_bytes) if is_read else 0
    picked = batch.supervised * (anatomy.hidden * width + INDEX_BYTES)
    if scores:
        return norm + picked
    if in_chunks:
        return norm + picked + batch.supervised * 4
    return norm + picked + batch.supervised * (_logits_bytes(anatomy, settings) + 3 * 4)


def temporaries(anatomy: Anatomy, batch: MicroBatch, settings: ActivationSettings, largest_gradient: float) -> float:
    """Bytes that logits take in their backward pass, besides what is kept; `largest_gradient` in bytes, of a parameter
    that is in no layer."""
    # forward: logits besides the softmax; backward: its gradient; a fused kernel works in place. 16-bit logits are
    # copied to float32 first
    wide = 0 if "cross_entropy" in settings.fused and settings.tp == 1 and not settings.entropy else 4
    wide += 4 if settings.entropy else 0  # the gradient of the exponentials beside that of the logits
    wide += settings.num_bytes if settings.num_bytes < 4 else 0
    each = anatomy.vocabulary / settings.tp * wide
    if (at_once := _num_at_once(batch, settings)) == batch.supervised:
        return at_once * each + largest_gradient
    # the sum of the chunks before, and the gradient of this one
    return at_once * (each + _logits_bytes(anatomy, settings)) + 2 * largest_gradient


def makes_logits_again(layout: Layout, batch: MicroBatch) -> bool:
    """Whether a loss in chunks makes its logits in the backward pass again: the head is trained, or the entropy has a
    gradient (`parallel.chunked_loss`)."""
    recipe = layout.plan.recipe
    is_vector = recipe.freezes_model and "lm_head" not in layout.adapted and not layout.plan.profile.entropy
    chunk = recipe.engine.loss_chunk_tokens
    return chunk is not None and chunk < batch.supervised and not is_vector


def _num_at_once(batch: MicroBatch, settings: ActivationSettings) -> int:
    return batch.supervised if settings.loss_chunk is None else min(batch.supervised, settings.loss_chunk)


def _logits_bytes(anatomy: Anatomy, settings: ActivationSettings) -> float:
    """What the loss keeps of the logits of a token: float32 logits, or the output of their softmax; for the entropy
    shifted logits and exponentials; over tp these, and which one is the target."""
    times = 3 if settings.tp > 1 else 2 if settings.entropy else 1
    return times * 4 * anatomy.vocabulary / settings.tp
