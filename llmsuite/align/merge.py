"""One side of a comparison, whole: the records of all its ranks brought together. Imports no Paddle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.align.values import Sample


@dataclasses.dataclass(frozen=True)
class Rows:
    """A vector for each of the chosen tokens."""

    names: np.ndarray
    """[T], uint64, ascending: the contexts of the tokens."""
    values: np.ndarray
    """[T, F], float32."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A step as one side made it, or the passes of one model."""

    modules: Sequence[str]
    """In the order in which they are run."""
    outputs: Mapping[str, Rows]
    gradients: Mapping[str, Rows]
    """Gradients of the loss, summed over the batch, by the outputs."""
    parameters: Mapping[str, Sample]
    parameter_gradients: Mapping[str, Sample]
    metrics: Mapping[str, float]
    """Metrics of the step, such as "loss" and "grad_norm"."""
    tokens: np.ndarray
    """Contexts of all tokens, with repetitions."""
    is_exact: bool
    """Whether padding is known, and so not among the tokens."""
    precision: str
    inputs: Mapping[str, Rows] = dataclasses.field(default_factory=dict)
    """The first input of each module."""
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The class of each module."""


def read_side(directory: Path, num_ranks: int, precision: str) -> Side:
    """What the ranks of a run have written into a directory; see `llmsuite.train.step_recording`."""
    ranks = []
    for rank in range(num_ranks):
        about = json.loads((directory / f"rank-{rank}.json").read_text(encoding="utf-8"))
        with np.load(directory / f"rank-{rank}.npz") as stored:
            ranks.append((about, dict(stored)))
    return side_of(ranks, json.loads((directory / "metrics.json").read_text(encoding="utf-8")), precision)


def side_of(
    ranks: Sequence[tuple[dict[str, Any], dict[str, np.ndarray]]], metrics: Mapping[str, float], precision: str
) -> Side:
    """A side of the records of all its ranks: what each says about them, and their arrays; see `activations.Record`."""
    order: dict[str, tuple[int, int]] = {}
    for about, _ in ranks:
        for name, module in about["modules"].items():
            order.setdefault(name, tuple(module["order"]))
    samples: dict[str, dict[str, Sample]] = {"parameters": {}, "parameter_gradients": {}}
    for kind, found in samples.items():
        for about, arrays in ranks:
            for name, told in about.get(kind, {}).items():  # of a tied one the first pipeline stage's
                found.setdefault(name, Sample(arrays[f"{kind}|{name}"], told["norm"], tuple(told["shape"])))
    firsts = [arrays["tokens"] for about, arrays in ranks if about["coordinate"]["pp"] + about["coordinate"]["tp"] == 0]
    tokens = np.concatenate(firsts)
    return Side(
        modules=sorted(order, key=order.__getitem__),
        outputs=_rows_of_all(ranks, "outputs", adds_up=False),
        gradients=_rows_of_all(ranks, "gradients", adds_up=True),
        parameters=samples["parameters"],
        parameter_gradients=samples["parameter_gradients"],
        metrics=metrics,
        tokens=np.sort(tokens[tokens != 0]),
        is_exact=all(about["is_exact"] for about, _ in ranks),
        precision=precision,
        inputs=_rows_of_all(ranks, "inputs", adds_up=False),
        kinds={name: module.get("class", "") for about, _ in ranks for name, module in about["modules"].items()},
    )


def _rows_of_all(
    ranks: Sequence[tuple[dict[str, Any], dict[str, np.ndarray]]], kind: str, adds_up: bool
) -> dict[str, Rows]:
    """Outputs or gradients of every module."""
    groups: dict[str, dict[tuple[int, int], list[tuple[int, str, np.ndarray, np.ndarray]]]] = {}
    for about, arrays in ranks:
        place = about["coordinate"]
        for name, module in about["modules"].items():
            if kind in module:
                of_rank = place["tp"], module[kind], arrays[f"{kind}|{name}|names"], arrays[f"{kind}|{name}"]
                groups.setdefault(name, {}).setdefault((about["data_rank"], place["pp"]), []).append(of_rank)
    found = {}
    for name, by_group in groups.items():
        wholes = [_over_tp(sorted(parts, key=lambda part: part[0])) for parts in by_group.values()]
        names, values = (np.concatenate(arrays) for arrays in zip(*wholes))
        found[name] = rows_of(names, values, adds_up)
    return found


def _over_tp(parts: Sequence[tuple[int, str, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Names and values of a tensor parallel group, of the parts of its ranks in order."""
    _, part, names, values = parts[0]
    if part == "columns":
        return names, np.concatenate([values for *_, values in parts], 1)
    if part == "tokens":
        return np.concatenate([own for _, _, own, _ in parts]), np.concatenate([values for *_, values in parts])
    if part == "sum":
        return names, np.sum([values for *_, values in parts], 0, dtype="float64").astype("float32")
    return names, values


def rows_of(names: np.ndarray, values: np.ndarray, adds_up: bool) -> Rows:
    """One vector for each context: where a context occurs several times, the first one, or the sum of all."""
    unique, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    if not adds_up:
        return Rows(unique, values[first])
    total = np.zeros([len(unique), values.shape[1]], "float64")
    np.add.at(total, inverse, values)
    return Rows(unique, total.astype("float32"))
