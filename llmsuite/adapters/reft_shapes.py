"""The parameters of interventions on hidden states (`adapters.layers.reft`): names and shapes. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ROTATION = "reft_rotation"
SOURCE = "reft_source"
BIAS = "reft_bias"
"""Last components of their names; pyreft's `rotate_layer.weight`, `learned_source.weight` and `learned_source.bias`."""
MODULE = "reft"
"""Name of an intervention in its decoder layer."""


def reft_shapes(size: int, rank: int) -> dict[str, tuple[int, ...]]:
    """The parameters of one intervention on hidden states of a size, in the order of the layer."""
    return {ROTATION: (size, rank), SOURCE: (size, rank), BIAS: (rank,)}


def intervened_layers(layers: Sequence[int] | None, num_layers: int) -> list[int]:
    """Sorted indices of the layers that have an intervention: those of `reft.layers`, by default all."""
    return list(range(num_layers)) if layers is None else sorted(layers)


def with_interventions(
    shapes: Mapping[str, Sequence[int]], prefix: str, layers: Collection[int], size: int, rank: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and of interventions, in the order of the model.

    Args:
        shapes: shapes of the model's parameters.
        prefix: name of the list of its layers.
        layers: indices of the layers with an intervention.
        size: size of a hidden state.
        rank: rank of an intervention.
    """
    result: dict[str, tuple[int, ...]] = {}
    last = {}
    for name in shapes:
        if not name.startswith(f"{prefix}."):
            continue
        number = name.removeprefix(f"{prefix}.").partition(".")[0]
        if number.isdigit() and int(number) in layers:
            last[number] = name
    ends = {name: number for number, name in last.items()}
    for name, shape in shapes.items():
        result[name] = tuple(shape)
        if name in ends:
            own = reft_shapes(size, rank)
            result |= {f"{prefix}.{ends[name]}.{MODULE}.{kind}": of_kind for kind, of_kind in own.items()}
    return result


def orthonormal(matrix: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the columns of a matrix, as `llmsuite.adapters.layers.reft.orthonormal` does."""
    import numpy as np

    q, r = np.linalg.qr(matrix.astype("float64"))
    # a QR decomposition leaves the signs of the columns open: a positive diagonal of R makes it unique
    found: np.ndarray = (q * np.sign(np.diag(r))).astype("float32")
    return found
