"""LoRA with a mixer between the factors: what its layer computes."""

from __future__ import annotations

import numpy as np
import paddle

from llmsuite.adapters.layers.lora import LoraLinear
from llmsuite.adapters.methods import adapter_config
from llmsuite.plugins.adapters_extra.layers.mixer import MixerLinear
from tests.support.lora_layers import filled, linear


def test_a_mixer_computes_what_paddlenlp_computes() -> None:
    layer = filled(MixerLinear(linear(6, 10), adapter_config("mixer", rank=3, alpha=5.0)))
    x = paddle.randn([2, 4, 6])
    theirs = LoraLinear.__mro__[2].forward(layer, x)
    np.testing.assert_allclose(layer(x).numpy(), theirs.numpy(), rtol=1e-5, atol=1e-5)
