"""Comparison of two sides, module by module, with the first difference. It does not import Paddle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from llmsuite.observe.activations.merge import Side, TokenVectors
from llmsuite.observe.activations.samples import Sample

TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}
"""Relative difference, by precision, that rounding and another order of sums can cause: the norm of the difference of
two vectors by the larger norm (Euclidean)."""
Kind = Literal["tokens", "parameter", "output", "loss", "output gradient", "parameter gradient"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference above the tolerance."""

    kind: Kind
    name: str
    """The module or parameter; "" for tokens and the loss."""
    relative: float
    of: str = ""
    """The class of the module, where it is known."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Relative differences of one module; None where a side has nothing to compare."""

    module: str
    output: float | None
    gradient: float | None
    parameters: Mapping[str, float]
    parameter_gradients: Mapping[str, float]
    input: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """The comparison of two sides."""

    names: tuple[str, str]
    tolerance: float
    rows: Sequence[Row]
    """In the order of the forward pass."""
    metrics: Mapping[str, tuple[float, float]]
    num_tokens: tuple[int, int, int]
    """Number of different contexts that both sides have, and that only the first or only the second has."""
    num_compared: int
    """Number of contexts at which activations are compared."""
    first_forward: Difference | None
    """The first difference from the ids to the loss."""
    first_backward: Difference | None
    """The first difference from the loss back to the first layer."""
    scale: float | None
    """The factor between all gradients of parameters, if a single one explains their differences."""
    missing: Sequence[str]
    """Parameters that one side does not have, or has in another shape."""

    @property
    def is_equal(self) -> bool:
        """True where no difference is above the tolerance."""
        return self.first_forward is None and self.first_backward is None and not self.missing

    def as_json(self) -> dict[str, Any]:
        """The report as JSON data; a difference that is no number is null."""
        plain = dataclasses.asdict(self) | {"is_equal": self.is_equal}
        for difference in (plain["first_forward"], plain["first_backward"]):
            if difference is not None and not difference["of"]:  # known only for outputs
                del difference["of"]
        result: dict[str, Any] = _finite(plain)
        return result


def compare(a: Side, b: Side, names: tuple[str, str], tolerance: float | None = None) -> Report:
    """Compare two sides.

    Args:
        a: the first side, whose order of modules is used.
        b: the second side.
        names: their names in the report.
        tolerance: largest relative difference that counts as equal; default: `TOLERANCE` of the lower precision.
    """
    limit = tolerance if tolerance is not None else max(TOLERANCE[side.precision] for side in (a, b))
    modules = [*a.modules, *(owner for owner in _owners(a) if owner not in set(a.modules))]
    rows = [_row(a, b, module) for module in modules]
    missing = sorted((set(a.parameters) ^ set(b.parameters)) | _other_shapes(a, b))
    common = np.intersect1d(a.tokens, b.tokens)
    apart = (len(np.setdiff1d(a.tokens, common)), len(np.setdiff1d(b.tokens, common)))
    metrics = {name: (a.metrics[name], b.metrics[name]) for name in a.metrics if name in b.metrics}
    backward = next(_backward(rows, limit), None)
    scale = None
    if backward is not None:
        scale = _scale(a, b, limit)
    compared = [np.intersect1d(a.outputs[m].names, b.outputs[m].names).size for m in a.outputs if m in b.outputs]
    return Report(
        names=names,
        tolerance=limit,
        rows=rows,
        metrics=metrics,
        num_tokens=(len(common), *apart),
        num_compared=max(compared, default=0),
        first_forward=_first_forward(rows, list(_forward(rows, metrics, limit, _tokens_apart(a, b))), limit, a.kinds),
        first_backward=backward,
        scale=scale,
        missing=missing,
    )


def _row(a: Side, b: Side, module: str) -> Row:
    def between(ours: Mapping[str, TokenVectors], theirs: Mapping[str, TokenVectors]) -> float | None:
        if module in ours and module in theirs:
            return _rows_apart(ours[module], theirs[module])
        return None

    def of_parameters(ours: Mapping[str, Sample], theirs: Mapping[str, Sample], floor: float) -> dict[str, float]:
        own = (name for name in ours if name.rpartition(".")[0] == module and name in theirs)
        same = (name for name in own if ours[name].shape == theirs[name].shape)
        return {name: _samples_apart(ours[name], theirs[name], floor) for name in same}

    return Row(
        module,
        between(a.outputs, b.outputs),
        between(a.gradients, b.gradients),
        of_parameters(a.parameters, b.parameters, 0.0),
        of_parameters(a.parameter_gradients, b.parameter_gradients, _floor(a)),
        between(a.inputs, b.inputs),
    )


def _owners(side: Side) -> list[str]:
    """Modules with parameters of their own, in their order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in side.parameters))


def _other_shapes(a: Side, b: Side) -> set[str]:
    both = (name for name in a.parameters if name in b.parameters)
    return {name for name in both if a.parameters[name].shape != b.parameters[name].shape}


# differences


def _apart(ours: np.ndarray, theirs: np.ndarray, floor: float = 0.0) -> float:
    """Norm of the difference divided by the larger norm, or by `floor` where both are smaller; infinite if it is no
    number. Computed in float64, so that its own rounding is far below the tolerance."""
    x = ours.astype("float64").reshape(-1)
    y = theirs.astype("float64").reshape(-1)
    sizes = float(np.linalg.norm(x)), float(np.linalg.norm(y)), floor
    size = max(sizes)
    difference = float(np.linalg.norm(x - y))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else 0.0


def _rows_apart(ours: TokenVectors, theirs: TokenVectors) -> float | None:
    common, of_ours, of_theirs = np.intersect1d(ours.names, theirs.names, return_indices=True)
    if not len(common) or ours.values.shape[1] != theirs.values.shape[1]:
        return None
    return _apart(ours.values[of_ours], theirs.values[of_theirs])


def _samples_apart(ours: Sample, theirs: Sample, floor: float) -> float:
    share = math.sqrt(ours.values.size / max(1, math.prod(ours.shape)))
    norms = np.array([ours.norm]), np.array([theirs.norm])
    found = _apart(ours.values, theirs.values, floor * share * math.sqrt(math.prod(ours.shape)))
    return max(found, _apart(*norms, floor * math.sqrt(math.prod(ours.shape))))


def _floor(side: Side) -> float:
    """Floor for the size of a gradient's elements in relative differences, a hundredth of the largest: some gradients
    are zero except for rounding, such as that of the bias of keys."""
    sizes = [found.norm / math.sqrt(max(1, math.prod(found.shape))) for found in side.parameter_gradients.values()]
    return 1e-2 * max((size for size in sizes if math.isfinite(size)), default=0.0)


def _tokens_apart(a: Side, b: Side) -> float:
    """Share of the tokens that only one side has; 0 where padding is unknown and may be the reason."""
    if not (a.is_exact and b.is_exact):
        if np.intersect1d(a.tokens, b.tokens).size:
            return 0.0
        return 1.0
    ours = np.unique(a.tokens)
    theirs = np.unique(b.tokens)
    apart = len(np.setxor1d(ours, theirs, assume_unique=True))
    return apart / max(1, len(np.union1d(ours, theirs)))


def _forward(
    rows: Sequence[Row], metrics: Mapping[str, tuple[float, float]], limit: float, tokens: float
) -> Iterator[Difference]:
    """The differences from the ids to the loss."""
    if tokens:
        yield Difference("tokens", "", tokens)
    for row in rows:
        for name, apart in row.parameters.items():
            if apart > limit:
                yield Difference("parameter", name, apart)
        if row.output is not None and row.output > limit:
            yield Difference("output", row.module, row.output)
    if "loss" in metrics:
        ours, theirs = metrics["loss"]
        apart = _apart(np.array([ours]), np.array([theirs]))
        if apart > limit:
            yield Difference("loss", "", apart)


def _first_forward(
    rows: Sequence[Row], found: Sequence[Difference], limit: float, kinds: Mapping[str, str]
) -> Difference | None:
    """The difference that causes the others: among outputs, the first one whose input agrees, where inputs are known. A
    module that comes after a difference has an input that already differs."""
    inputs = {row.module: row.input for row in rows}

    def follows(difference: Difference) -> bool:
        if difference.kind != "output":
            return difference.kind == "loss"
        return (inputs[difference.name] or 0.0) > limit

    first = next((difference for difference in found if not follows(difference)), next(iter(found), None))
    if first is None or first.kind != "output":
        return first
    return dataclasses.replace(first, of=kinds.get(first.name, ""))


def _backward(rows: Sequence[Row], limit: float) -> Iterator[Difference]:
    """The differences from the loss back to the first layer."""
    for row in reversed(rows):
        if row.gradient is not None and row.gradient > limit:
            yield Difference("output gradient", row.module, row.gradient)
        for name, apart in row.parameter_gradients.items():
            if apart > limit:
                yield Difference("parameter gradient", name, apart)


def _scale(a: Side, b: Side, limit: float) -> float | None:
    """The factor from every gradient of the first side to that of the second; None where there is none or it is 1."""
    names = [n for n, found in a.parameter_gradients.items() if n in b.parameter_gradients and found.norm > 0]
    pairs = [(a.parameter_gradients[name], b.parameter_gradients[name]) for name in names]
    pairs = [(x, y) for x, y in pairs if x.shape == y.shape and math.isfinite(x.norm) and math.isfinite(y.norm)]
    if not pairs:
        return None
    squares = sum(float(x.values.astype("float64") @ x.values.astype("float64")) for x, _ in pairs)
    products = sum(float(x.values.astype("float64") @ y.values.astype("float64")) for x, y in pairs)
    factor = products / squares if squares else 0.0
    floor = _floor(a)
    alike = all(_apart(x.values * factor, y.values, floor * math.sqrt(x.values.size)) <= limit for x, y in pairs)
    if alike and abs(factor - 1) > limit:
        return factor
    return None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
