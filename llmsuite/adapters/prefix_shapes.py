"""The parameters of prefix tuning (`llmsuite.adapters.layers.prefix`): names and shapes. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PREFIX_KEY = "prefix_k"
PREFIX_VALUE = "prefix_v"
"""Last components of the parameters' names, in the attention of a decoder layer."""
_WEIGHT = "_weight"
_BIAS = "_bias"
OUTER = tuple(f"{kind}{part}" for kind in (PREFIX_KEY, PREFIX_VALUE) for part in (_WEIGHT, _BIAS))
"""Names of the parameters with a prefix network, whose second layer computes the keys and values of each decoder
layer."""
NETWORK = "prefix_network"
"""Name in the model of the first layer of that network, which all decoder layers share."""
TABLE = "prefix_table"
INNER = "prefix_inner"
INNER_BIAS = "prefix_inner_bias"
"""Last components of its parameters' names: the embedding of the prefix, and the first layer."""
ATTENTION = "self_attn"
"""Name of the attention in its decoder layer."""
WINDOW = (
    "attention of the model has a window (sliding_window {}), which later tokens of a sequence would move past the "
    "prefix; set model.config.sliding_window to null where no sequence is longer than it, else train lora"
)
"""Reason why a model with sliding-window attention has no prefix."""


def attentions(shapes: Mapping[str, Sequence[int]], layers: str) -> dict[str, int]:
    """Names of the attention modules with per-head keys and values, in order, and the total width of their keys.

    Args:
        shapes: shapes of the model's parameters.
        layers: name of the list of its layers.
    """
    found = {}
    for name, shape in shapes.items():
        module, _, rest = name.partition(f".{ATTENTION}.")
        if rest == "k_proj.weight" and module.rpartition(".")[0] == layers:
            found[f"{module}.{ATTENTION}"] = int(shape[-1])
    return found


def prefix_shapes(tokens: int, width: int, head_size: int, network: int | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of one attention, in the order of the layer: [P, J, K] each, for P prefix tokens and J
    key-value heads of size K, where J K is `width`. With a network of width N they are [N, J, K], and a bias [J K]."""
    heads = width // head_size, head_size
    if network is None:
        return dict.fromkeys((PREFIX_KEY, PREFIX_VALUE), (tokens, *heads))
    return {kind: (network, *heads) if kind.endswith(_WEIGHT) else (width,) for kind in OUTER}


def network_shapes(tokens: int, width: int, network: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the network's embedding and first layer: [P, J K], [J K, N] and [N]."""
    return {TABLE: (tokens, width), INNER: (width, network), INNER_BIAS: (network,)}


def is_shared_by_all_ranks(parameter: str) -> bool:
    """True if every pipeline stage and tensor parallel rank has a full copy of a parameter, but computes the gradient
    only of its own layers and heads: the parameters of the prefix network, which all layers use."""
    return parameter.startswith(f"{NETWORK}.")


def with_prefixes(
    shapes: Mapping[str, Sequence[int]], layers: str, tokens: int, head_size: int, network: int | None = None
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and of its prefixes, in the order of the model.

    Args:
        shapes: shapes of the model's parameters.
        layers: name of the list of its layers.
        tokens: number of tokens of a prefix.
        head_size: size of a key or a value.
        network: width of the prefix network; None for none.
    """
    result: dict[str, tuple[int, ...]] = {}
    remaining = attentions(shapes, layers)
    widest = max(remaining.values(), default=0)
    for name, shape in shapes.items():
        module = f"{name.partition(f'.{ATTENTION}.')[0]}.{ATTENTION}"
        if (width := remaining.pop(module, None)) is not None:  # its own parameters come before its matrices
            own = prefix_shapes(tokens, width, head_size, network)
            result |= {f"{module}.{kind}": of_kind for kind, of_kind in own.items()}
        result[name] = tuple(shape)
    if network is not None:
        result |= {f"{NETWORK}.{kind}": shape for kind, shape in network_shapes(tokens, widest, network).items()}
    return result
