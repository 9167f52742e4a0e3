"""The parameters of interventions on hidden states (`llmsuite.models.reft`): names and shapes. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

ROTATION, SOURCE, BIAS = "reft_rotation", "reft_source", "reft_bias"
"""Last words of their names; pyreft's `rotate_layer.weight`, `learned_source.weight` and `learned_source.bias`."""
MODULE = "reft"
"""Name of an intervention in its decoder layer."""


def reft_shapes(size: int, rank: int) -> dict[str, tuple[int, ...]]:
    """The parameters of one intervention on hidden states of a size, in the order of the layer."""
    return {ROTATION: (size, rank), SOURCE: (size, rank), BIAS: (rank,)}


def intervened_layers(layers: Sequence[int] | None, num_layers: int) -> list[int]:
    """The numbers of the layers that have an intervention: those of `reft.layers`, by default all."""
    return list(range(num_layers)) if layers is None else sorted(layers)


def with_interventions(
    shapes: Mapping[str, Sequence[int]], prefix: str, layers: Collection[int], size: int, rank: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and of interventions, in the order of the model.

    Args:
        shapes: of the model.
        prefix: name of the list of its layers.
        layers: numbers of those with an intervention.
        size: of a hidden state.
        rank: of an intervention.
    """
    result: dict[str, tuple[int, ...]] = {}
    last = {}
    for name in shapes:
        number = name.removeprefix(f"{prefix}.").partition(".")[0] if name.startswith(f"{prefix}.") else ""
        if number.isdigit() and int(number) in layers:
            last[number] = name
    ends = {name: number for number, name in last.items()}
    for name, shape in shapes.items():
        result[name] = tuple(shape)
        if name in ends:
            own = reft_shapes(size, rank)
            result |= {f"{prefix}.{ends[name]}.{MODULE}.{kind}": of_kind for kind, of_kind in own.items()}
    return result
