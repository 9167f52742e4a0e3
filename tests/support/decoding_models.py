"""Models of each family that decode, and what they are asked."""

from __future__ import annotations

from typing import Any

from llmsuite.inference.attention import grouped_attention, with_cached_attention
from llmsuite.inference.sampling import Sampling
from llmsuite.models.initial_values import initial_values
from tests.support.families import FAMILIES

PROMPTS = [[3], [1, 7, 2, 11, 5], [9, 9], [4, 4, 8, 1, 1, 6, 2, 10, 3], [12, 5, 7]]
SAMPLINGS = [
    Sampling(max_new_tokens=9, min_new_tokens=4),
    Sampling(max_new_tokens=9, min_new_tokens=4, temperature=1.0, seed=3),
    Sampling(1.5, 0, 0.9, 0.0, 1.3, 0.2, seed=5, max_new_tokens=9, min_new_tokens=4),
]


def family_model(name: str, attention: Any = grouped_attention) -> Any:
    """The smoke shape of a family with random weights, large enough to tell tokens apart."""
    from llmsuite.devices.ops import Ops

    spec = FAMILIES[name]
    config = spec.config_cls(**{**spec.smoke, "vocab_size": 32})
    ops = with_cached_attention(Ops()) if attention is grouped_attention else Ops(attention=attention)
    model = spec.factory()(config, ops)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.set_value(initial_values(1, parameter_name, parameter.shape, 0.25))
    model.eval()
    return model
