"""Merging of the records of all ranks to one side of a comparison. It does not import Paddle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.observe.activations.samples import Sample


@dataclasses.dataclass(frozen=True)
class TokenVectors:
    """A vector for each selected token."""

    names: np.ndarray
    """[T], uint64, ascending: the contexts of the tokens."""
    values: np.ndarray
    """[T, F], float32."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A recorded step of one run, or the passes of one model."""

    modules: Sequence[str]
    """In the order of execution."""
    outputs: Mapping[str, TokenVectors]
    gradients: Mapping[str, TokenVectors]
    """Gradients of the loss, summed over the batch, with respect to the outputs."""
    parameters: Mapping[str, Sample]
    parameter_gradients: Mapping[str, Sample]
    metrics: Mapping[str, float]
    """Metrics of the step, such as "loss" and "grad_norm"."""
    tokens: np.ndarray
    """Contexts of all tokens, with repetitions."""
    is_exact: bool
    """True where padding is known, and so not among the tokens."""
    precision: str
    inputs: Mapping[str, TokenVectors] = dataclasses.field(default_factory=dict)
    """The first input of each module."""
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The class of each module."""


def read_side(directory: Path, num_ranks: int, precision: str) -> Side:
    """Read a side from the files of its ranks, which `llmsuite.engine.step_recording` has written."""
    ranks = []
    for rank in range(num_ranks):
        about = json.loads((directory / f"rank-{rank}.json").read_text(encoding="utf-8"))
        with np.load(directory / f"rank-{rank}.npz") as stored:
            ranks.append((about, dict(stored)))
    return build_side(ranks, json.loads((directory / "metrics.json").read_text(encoding="utf-8")), precision)


def build_side(
    ranks: Sequence[tuple[dict[str, Any], dict[str, np.ndarray]]], metrics: Mapping[str, float], precision: str
) -> Side:
    """A side from the records of all its ranks: `about` and `arrays` of each `activations.RankRecord`."""
    order: dict[str, tuple[int, int]] = {}
    for about, _ in ranks:
        for name, module in about["modules"].items():
            order.setdefault(name, tuple(module["order"]))
    samples: dict[str, dict[str, Sample]] = {"parameters": {}, "parameter_gradients": {}}
    for kind, found in samples.items():
        for about, arrays in ranks:
            for name, stored in about.get(kind, {}).items():  # of tied parameters that of the first pipeline stage
                found.setdefault(name, Sample(arrays[f"{kind}|{name}"], stored["norm"], tuple(stored["shape"])))
    tokens_of_data_ranks = []
    for about, arrays in ranks:
        if about["coordinate"]["pp"] + about["coordinate"]["tp"] == 0:
            tokens_of_data_ranks.append(arrays["tokens"])
    tokens = np.concatenate(tokens_of_data_ranks)
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
) -> dict[str, TokenVectors]:
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
        merged = [_over_tp(sorted(parts, key=lambda part: part[0])) for parts in by_group.values()]
        names, values = (np.concatenate(arrays) for arrays in zip(*merged))
        found[name] = merge_contexts(names, values, adds_up)
    return found


def _over_tp(parts: Sequence[tuple[int, str, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Names and values of a tensor parallel group, from the parts of its ranks in order."""
    _, part, names, values = parts[0]
    if part == "columns":
        return names, np.concatenate([values for *_, values in parts], 1)
    if part == "tokens":
        return np.concatenate([own for _, _, own, _ in parts]), np.concatenate([values for *_, values in parts])
    if part == "sum":
        # summed in float64: so the order of ranks does not matter
        return names, np.sum([values for *_, values in parts], 0, dtype="float64").astype("float32")
    return names, values


def merge_contexts(names: np.ndarray, values: np.ndarray, adds_up: bool) -> TokenVectors:
    """One vector for each context: where a context occurs several times, the first vector, or the sum of all."""
    unique, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    if not adds_up:
        return TokenVectors(unique, values[first])
    total = np.zeros([len(unique), values.shape[1]], "float64")
    np.add.at(total, inverse, values)
    return TokenVectors(unique, total.astype("float32"))
