"""The parameters of prefix tuning (`llmsuite.models.prefix`): names and shapes. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PREFIX_KEY, PREFIX_VALUE = "prefix_k", "prefix_v"
"""Last words of their names, in the attention of a decoder layer."""
ATTENTION = "self_attn"
"""Name of the attention in its decoder layer."""


def attentions(shapes: Mapping[str, Sequence[int]], layers: str) -> dict[str, int]:
    """The attentions that have keys and values of heads, in order, and the width of the keys of all heads together.

    Args:
        shapes: of the model's parameters.
        layers: name of the list of its layers.
    """
    found = {}
    for name, shape in shapes.items():
        module, _, rest = name.partition(f".{ATTENTION}.")
        if rest == "k_proj.weight" and module.rpartition(".")[0] == layers:
            found[f"{module}.{ATTENTION}"] = int(shape[-1])
    return found


def prefix_shapes(tokens: int, width: int, head_size: int) -> dict[str, tuple[int, ...]]:
    """The parameters of one attention, in the order of the layer: [P, J, K] each, of P prefix tokens and J key-value
    heads of size K, which are `width` together."""
    return dict.fromkeys((PREFIX_KEY, PREFIX_VALUE), (tokens, width // head_size, head_size))


def with_prefixes(
    shapes: Mapping[str, Sequence[int]], layers: str, tokens: int, head_size: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and of its prefixes, in the order of the model.

    Args:
        shapes: of the model.
        layers: name of the list of its layers.
        tokens: of a prefix.
        head_size: of a key or a value.
    """
    result: dict[str, tuple[int, ...]] = {}
    left = attentions(shapes, layers)
    for name, shape in shapes.items():
        module = f"{name.partition(f'.{ATTENTION}.')[0]}.{ATTENTION}"
        if (width := left.pop(module, None)) is not None:  # an attention's own parameters come before its matrices
            own = prefix_shapes(tokens, width, head_size)
            result |= {f"{module}.{kind}": of_kind for kind, of_kind in own.items()}
        result[name] = tuple(shape)
    return result
