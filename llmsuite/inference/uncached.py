"""Generation without a cache, to check the one with it."""

from __future__ import annotations

import numpy as np
import paddle

from llmsuite.errors import UserError
from llmsuite.inference.decoder import Cache, Decoder


class Uncached:
    """A decoder without a cache of keys and values: every pass reads the whole text again."""

    def __init__(self, decoder: Decoder):
        """Raises UserError for a model with interventions: it would not know where the prompt ends."""
        if getattr(decoder, "edited_ends", None) is not None:
            raise UserError("--no_cache: the interventions (reft) of this model edit its prompts; leave it out")
        self._decoder = decoder

    @property
    def max_length(self) -> int:
        return self._decoder.max_length

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """See `Decoder`."""
        text = paddle.to_tensor(ids).unsqueeze(-1)
        if cache is not None:
            text = paddle.concat([cache[0], text], 1)
        return self._decoder.forward(text.squeeze(-1).numpy(), padding, None)[0], [text]
