"""Memory of the last norm, the head and the loss: what they keep for the backward pass, and their temporaries."""

from __future__ import annotations

import dataclasses

from llmsuite.models.shape_spec import ShapeSpec
from llmsuite.planning.activations import INDEX_BYTES, ActivationSettings, MicroBatch, norm_kept
from llmsuite.planning.layout import Layout


def head_kept_bytes(shape_spec: ShapeSpec, batch: MicroBatch, settings: ActivationSettings, scores: bool) -> float:
    """Bytes that the last norm, the head and the loss keep; `scores` for a head with one value a sequence."""
    norm = norm_kept(
        shape_spec.norm, shape_spec.hidden, batch, dataclasses.replace(settings, fused=settings.fused_outside)
    )
    in_chunks = not scores and _chunk_size(batch, settings) < batch.supervised
    is_read = scores or in_chunks or not settings.keeps_trained_only or "lm_head" in settings.keeps_inputs
    width = 0
    if is_read:
        width = settings.num_bytes if in_chunks else settings.input_bytes or settings.num_bytes
    picked = batch.supervised * (shape_spec.hidden * width + INDEX_BYTES)
    if scores:
        return norm + picked
    if in_chunks:
        return norm + picked + batch.supervised * 4
    return norm + picked + batch.supervised * (_logits_bytes(shape_spec, settings) + 3 * 4)


def temporaries(
    shape_spec: ShapeSpec, batch: MicroBatch, settings: ActivationSettings, largest_gradient: float
) -> float:
    """Bytes of temporaries of the logits in their backward pass. `largest_gradient` is that of a parameter outside of
    the layers, in bytes."""
    # forward: float32 logits in addition to the softmax; backward: its gradient; a fused kernel works in place
    wide = 4
    # in the backward pass of a cap there are two gradients, too
    if "cross_entropy" in settings.fused and settings.tp == 1 and not settings.entropy and shape_spec.logit_cap is None:
        wide = 0
    wide += 4 if settings.entropy else 0  # the gradient of the exponentials, in addition to that of the logits
    wide += 4 * _COMPARED if settings.compares else 0
    # 16-bit logits are freed when their float32 copy is there; their gradient replaces what is wide, which is freed
    # before the product that makes the gradient of the head's matrix
    narrow = settings.num_bytes if settings.num_bytes < 4 else 0
    has_copies = settings.entropy or settings.compares
    local_vocabulary = shape_spec.vocabulary / settings.tp
    each = local_vocabulary * (wide + narrow if has_copies else max(wide, narrow))
    expanded = 0.0
    if settings.expands_sum_gradients:  # then this rank's part of it, of both sums over the vocabulary
        expanded = 4 * shape_spec.vocabulary * (1 + 2 / settings.tp)
    chunk = _chunk_size(batch, settings)
    if chunk == batch.supervised:
        in_product = chunk * local_vocabulary * (narrow or wide) + largest_gradient
        return max(chunk * each, in_product, chunk * expanded)
    each = max(each, expanded)
    # the sum over earlier chunks, and the gradient of this one
    return chunk * (each + _logits_bytes(shape_spec, settings)) + 2 * largest_gradient


_COMPARED = 8
"""Tensors of the size of the logits that a divergence needs while it is computed: probabilities and log-probabilities
of both models and of their mixture, logits of the teacher, and terms of a sum."""


def recomputes_logits(layout: Layout, batch: MicroBatch, has_several_losses: bool) -> bool:
    """True where a loss in chunks recomputes its logits in the backward pass: the head is trained, or two numbers of
    each token have gradients (`parallel.chunked_loss`)."""
    is_trained = layout.trains_head or "lm_head" in layout.adapted
    is_vector = not is_trained and not has_several_losses
    chunk = layout.parallel_plan.engine.loss_chunk_tokens
    return chunk is not None and chunk < batch.supervised and not is_vector


def _chunk_size(batch: MicroBatch, settings: ActivationSettings) -> int:
    if settings.loss_chunk is None:
        return batch.supervised
    return min(batch.supervised, settings.loss_chunk)


def _logits_bytes(shape_spec: ShapeSpec, settings: ActivationSettings) -> float:
    """Bytes that the loss keeps of the logits of a token: float32 logits, or the output of their softmax; for the
    entropy shifted logits and exponentials; over tp these, and the mask of the target."""
    times = 2 if settings.entropy else 1
    if settings.tp > 1:
        times = 3
    if settings.compares:  # keeps the gradient of the divergence
        times = 1 + (times if settings.compares_nll else 0)
    capped = 0 if shape_spec.logit_cap is None else settings.num_bytes  # the output of its tanh
    return (times * 4 + capped) * shape_spec.vocabulary / settings.tp
