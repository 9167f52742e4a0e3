"""Generation without a KV cache, as a reference for generation with one."""

from __future__ import annotations

import numpy as np
import paddle

from llmsuite.base.errors import UserError
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.decoder import Cache, Decoder, DecoderTraits


class UncachedDecoder:
    """A decoder without a cache of keys and values: every pass reads the full text again."""

    traits = DecoderTraits()

    def __init__(self, decoder: Decoder):
        """Wrap a decoder. Raises UserError for a model with interventions, which need to know where the prompt ends."""
        if not decoder.traits.supports_chunked_prefill:
            raise UserError("--no_cache: the interventions (reft) of this model edit its prompts; leave it out")
        self._decoder = decoder

    @property
    def max_length(self) -> int:
        return self._decoder.max_length

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """Make one pass, see `Decoder.forward`; the cache [B, S, 1] has the token ids so far."""
        text = tensor_of(ids).unsqueeze(-1)
        if cache is not None:
            text = paddle.concat([cache[0], text], 1)
        return self._decoder.forward(text.squeeze(-1).numpy(), padding, None)[0], [text]
