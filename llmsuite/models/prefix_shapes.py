"""The parameters of prefix tuning (`llmsuite.models.prefix`): names and shapes. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PREFIX_KEY, PREFIX_VALUE = "prefix_k", "prefix_v"
"""Last words of their names, in the attention of a decoder layer."""
_WEIGHT, _BIAS = "_weight", "_bias"
OUTER = tuple(f"{kind}{part}" for kind in (PREFIX_KEY, PREFIX_VALUE) for part in (_WEIGHT, _BIAS))
"""The same with a network in front: its second layer makes keys and values of each decoder layer and head."""
NETWORK = "prefix_network"
"""Name of the first layer of that network in the model. All decoder layers share it."""
TABLE, INNER, INNER_BIAS = "prefix_table", "prefix_inner", "prefix_inner_bias"
"""Last words of its parameters: the embedding of the prefix, and the first layer."""
ATTENTION = "self_attn"
"""Name of the attention in its decoder layer."""
WINDOW = (
    "attention of the model has a window (sliding_window {}), behind which later tokens would leave a prefix; set "
    "model.config.sliding_window to null where no sequence is longer than it, else train lora"
)
"""Why such a model has no prefix."""


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


def prefix_shapes(tokens: int, width: int, head_size: int, network: int | None = None) -> dict[str, tuple[int, ...]]:
    """The parameters of one attention, in the order of the layer: [P, J, K] each, of P prefix tokens and J key-value
    heads of size K, which are `width` together. With a network of width N, [N, J, K] and a bias [J K] each."""
    heads = width // head_size, head_size
    if network is None:
        return dict.fromkeys((PREFIX_KEY, PREFIX_VALUE), (tokens, *heads))
    return {kind: (network, *heads) if kind.endswith(_WEIGHT) else (width,) for kind in OUTER}


def network_shapes(tokens: int, width: int, network: int) -> dict[str, tuple[int, ...]]:
    """The parameters of the embedding and of the first layer: [P, J K], [J K, N] and [N]."""
    return {TABLE: (tokens, width), INNER: (width, network), INNER_BIAS: (network,)}


def is_in_every_part(parameter: str) -> bool:
    """Whether every part of a pipeline has a parameter, and every rank of tensor parallel all of it, though each sees
    the gradient of its own layers and heads only: that of a network whose outputs all layers have."""
    return parameter.startswith(f"{NETWORK}.")


def with_prefixes(
    shapes: Mapping[str, Sequence[int]], layers: str, tokens: int, head_size: int, network: int | None = None
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and of its prefixes, in the order of the model.

    Args:
        shapes: of the model.
        layers: name of the list of its layers.
        tokens: of a prefix.
        head_size: of a key or a value.
        network: width of the network that makes them; None for none.
    """
    result: dict[str, tuple[int, ...]] = {}
    left = attentions(shapes, layers)
    widest = max(left.values(), default=0)
    for name, shape in shapes.items():
        module = f"{name.partition(f'.{ATTENTION}.')[0]}.{ATTENTION}"
        if (width := left.pop(module, None)) is not None:  # an attention's own parameters come before its matrices
            own = prefix_shapes(tokens, width, head_size, network)
            result |= {f"{module}.{kind}": of_kind for kind, of_kind in own.items()}
        result[name] = tuple(shape)
    if network is not None:
        result |= {f"{NETWORK}.{kind}": shape for kind, shape in network_shapes(tokens, widest, network).items()}
    return result
