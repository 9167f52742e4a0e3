"""Adapters of the embedding, for one card. paddlenlp has none; the source is HF PEFT's `Embedding` of LoRA.

Shapes: B rows, L length, V vocabulary, D hidden, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.models.adapter import Adapter, identity
from llmsuite.models.peft_configs import scale_of
from llmsuite.typing import Tensor


class LoraEmbedding(Adapter):
    """W[id] + scale A[id] B for the rows of an embedding W [V, D], with factors A [V, R] and B [R, D], and with a mixer
    M [R, R] between them. Nothing is dropped of an id: `lora_dropout` stays the identity, as in PEFT."""

    def __init__(self, embedding: nn.Embedding, config: Any):
        """
        Args:
            embedding: the layer it replaces.
            config: a `paddlenlp.peft.LoRAConfig`.
        """
        super().__init__()
        self.take(embedding)
        self.scaling, self.is_on, self._mixes = scale_of(config), True, config.lora_use_mixer
        self.look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding
        """Ids and a table to rows of it; under tensor parallel each rank has some of the rows."""
        faster = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), learning_rate=config.lora_plus_scale)
        num_rows, width = embedding.weight.shape
        with paddle.LazyGuard():
            self.lora_A = self.create_parameter([num_rows, config.r])
            if self._mixes:
                self.lora_AB = self.create_parameter([config.r, config.r])
            self.lora_B = self.create_parameter([config.r, width], attr=faster)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[B, L] to [B, L, D]."""
        y = self.look_up(input_ids, self.weight)
        return self._adapted(y, input_ids) if self.is_on else y

    def _adapted(self, y: Tensor, input_ids: Tensor) -> Tensor:
        narrow = self.look_up(input_ids, self.lora_A) * self.scaling
        if self._mixes:
            narrow = self.matmul(narrow, self.lora_AB)
        return y + self.matmul(narrow, self.lora_B)


class DoraEmbedding(LoraEmbedding):
    """(m / |V|) V[id] with V = W + scale A B, and m [D] the lengths of its columns: PEFT's `DoraEmbeddingLayer`, which
    is DoRA (Liu et al. 2024, arXiv 2402.09353) with the vocabulary as inputs. |V| has no gradient."""

    def __init__(self, embedding: nn.Embedding, config: Any):
        super().__init__(embedding, config)
        self.complete_columns: Callable[[Tensor], Tensor] = identity
        """As of `DoraLinear`."""
        with paddle.LazyGuard():
            self.lora_magnitude = self.create_parameter([embedding.weight.shape[1]])  # |W|, where values are read

    def _adapted(self, y: Tensor, input_ids: Tensor) -> Tensor:
        with paddle.no_grad():
            update = paddle.matmul(self.lora_A, self.lora_B) * self.scaling
            squares = (self.weight + update).astype("float32").square().sum(0)
            length = (self.complete_columns(squares) + 1e-12).sqrt().astype(y.dtype)
        length = length.detach()  # in a program that is being made, `no_grad` says nothing
        return super()._adapted(y, input_ids) * (self.lora_magnitude / length)


class PissaEmbedding(LoraEmbedding):
    """W[id] + scale A[id] B - scale A0[id] B0: A and B begin with the largest singular vectors of W, as A0 and B0, as
    `PissaLinear` has it."""

    def __init__(self, embedding: nn.Embedding, config: Any):
        super().__init__(embedding, config)
        num_rows, width = embedding.weight.shape
        with paddle.LazyGuard():
            self.lora_A0 = self.create_parameter([num_rows, config.r])
            self.lora_B0 = self.create_parameter([config.r, width])
        self.lora_A0.stop_gradient = self.lora_B0.stop_gradient = True

    def _adapted(self, y: Tensor, input_ids: Tensor) -> Tensor:
        start = self.matmul(self.look_up(input_ids, self.lora_A0) * self.scaling, self.lora_B0)
        return super()._adapted(y, input_ids) - start
