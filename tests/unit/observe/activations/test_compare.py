"""Records of ranks are merged to full tensors, and the first difference is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.observe.activations.compare import Difference, compare
from llmsuite.observe.activations.merge import merge_contexts, read_side
from llmsuite.observe.activations.samples import MAX_VALUES, sample_of
from tests.support.sides import NAMES, changed, side


def test_a_side_equals_itself() -> None:
    report = compare(side(), side(), ("a", "b"))
    assert report.is_equal
    assert {row.output for row in report.rows} == {0.0, None}, "the head has no output to compare"


@pytest.mark.parametrize(
    ("kind", "name", "first"),
    [
        ("outputs", "layers.1.up", Difference("output", "layers.1.up", pytest.approx(0.01 / 1.01, rel=1e-3))),
        (
            "parameters",
            "layers.1.up.weight",
            Difference("parameter", "layers.1.up.weight", pytest.approx(0.0099, 0.01)),
        ),
        ("parameters", "head.weight", Difference("parameter", "head.weight", pytest.approx(0.0099, 0.01))),
    ],
)
def test_the_first_difference_of_the_forward_pass(kind: str, name: str, first: Difference) -> None:
    report = compare(side(), changed(kind, name), ("a", "b"))
    assert (report.first_forward, report.first_backward) == (first, None)


def test_the_earliest_difference_is_named() -> None:
    b = side(outputs=changed("outputs", "layers.0").outputs, parameters=changed("parameters", "norm.weight").parameters)
    first = compare(side(), b, ("a", "b")).first_forward
    assert first is not None
    assert (first.kind, first.name) == ("output", "layers.0")


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        ("gradients", "layers.0.up", "output gradient"),
        ("parameter_gradients", "layers.0.up.weight", "parameter gradient"),
    ],
)
def test_the_first_difference_of_the_backward_pass(kind: str, name: str, what: str) -> None:
    report = compare(side(), changed(kind, name), ("a", "b"))
    assert report.first_forward is None
    assert report.first_backward is not None
    assert (report.first_backward.kind, report.first_backward.name) == (what, name)
    assert report.scale is None


def test_a_factor_of_all_gradients_is_reported() -> None:
    twice = {name: dataclasses.replace(s, values=2 * s.values, norm=2 * s.norm)
             for name, s in side().parameter_gradients.items()}  # fmt: skip
    report = compare(side(), side(parameter_gradients=twice), ("a", "b"))
    assert report.scale == pytest.approx(2.0)


def test_a_difference_of_the_loss_only() -> None:
    first = compare(side(), side(metrics={"loss": 2.1}), ("a", "b")).first_forward
    assert first == Difference("loss", "", pytest.approx(0.1 / 2.1))


@pytest.mark.parametrize(("is_exact", "differs"), [(True, True), (False, False)])
def test_sides_with_other_tokens(is_exact: bool, differs: bool) -> None:
    """Where padding is unknown, it may be the reason."""
    report = compare(side(is_exact=is_exact), side(tokens=NAMES[1:], is_exact=is_exact), ("a", "b"))
    assert (report.first_forward is not None) == differs
    assert report.num_tokens == (5, 1, 0)


def test_what_is_no_number_differs() -> None:
    report = compare(side(), changed("outputs", "norm", np.nan), ("a", "b"))
    assert report.first_forward == Difference("output", "norm", np.inf)
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["first_forward"]["relative"] is None


def test_a_gradient_that_is_rounding_only_does_not_count() -> None:
    tiny = [sample_of(np.full([4], value, "float32")) for value in (1e-9, -1e-9)]
    a, b = (side(parameter_gradients={**side().parameter_gradients, "layers.0.up.bias": value}) for value in tiny)
    assert compare(a, b, ("a", "b")).is_equal


def test_other_parameters_are_named() -> None:
    parameters = dict(side().parameters)
    del parameters["head.weight"]
    parameters["embed.weight"] = sample_of(np.zeros([4, 3], "float32"))
    report = compare(side(), side(parameters=parameters), ("a", "b"))
    assert report.missing == ["embed.weight", "head.weight"]
    assert not report.is_equal


def test_lower_precisions_are_allowed_more() -> None:
    a = side()
    b = changed("outputs", "norm")
    assert not compare(a, b, ("a", "b")).is_equal
    assert compare(a, dataclasses.replace(b, precision="bf16"), ("a", "b")).is_equal
    assert compare(a, b, ("a", "b"), tolerance=0.1).is_equal


def test_a_large_tensor_is_sampled_at_places_that_its_size_decides() -> None:
    values = np.random.default_rng(0).normal(size=[MAX_VALUES + 7]).astype("float32")
    found = sample_of(values)
    assert found.values.size == MAX_VALUES
    assert (found.values == sample_of(values.copy()).values).all()
    assert found.norm == pytest.approx(np.linalg.norm(values))


# ranks


def write_rank(directory: Path, rank: int, place: dict[str, int], data_rank: int, pieces: dict[str, Any]) -> None:
    """Write files as `StepRecording` does; `pieces`: module -> (part, names, values), for outputs and gradients."""
    arrays: dict[str, np.ndarray] = {"tokens": NAMES}
    modules: dict[str, Any] = {}
    for number, (name, (part, names, values)) in enumerate(pieces.items()):
        modules[name] = {"order": (place["pp"], number), "outputs": part, "gradients": part}
        for kind in ("outputs", "gradients"):
            arrays |= {
                f"{kind}|{name}": np.asarray(values, "float32"),
                f"{kind}|{name}|names": np.asarray(names, "uint64"),
            }
    np.savez(directory / f"rank-{rank}.npz", **arrays)
    about = {"coordinate": place, "data_rank": data_rank, "modules": modules, "is_exact": True,
             "parameters": {}, "parameter_gradients": {}}  # fmt: skip
    (directory / f"rank-{rank}.json").write_text(json.dumps(about))
    (directory / "metrics.json").write_text('{"loss": 1.0}')


def test_parts_of_ranks_come_together(tmp_path: Path) -> None:
    whole = np.arange(8.0).reshape(4, 2)
    for data_rank in (0, 1):
        names = [2 * data_rank + 1, 2 * data_rank + 2]
        mine = whole[2 * data_rank : 2 * data_rank + 2]
        for tp in (0, 1):
            pieces = {
                "columns": ("columns", names, mine[:, tp : tp + 1]),
                "terms": ("sum", names, mine * (0.25, 0.75)[tp]),
                "cut": ("tokens", names[tp : tp + 1], mine[tp : tp + 1]),
                "same": ("whole", names, mine),
            }
            rank = 2 * data_rank + tp
            write_rank(tmp_path, rank, {"pp": 0, "dp": data_rank, "sharding": 0, "tp": tp}, data_rank, pieces)
    found = read_side(tmp_path, 4, "fp32")
    assert list(found.modules) == ["columns", "terms", "cut", "same"]
    for name in found.modules:
        assert found.outputs[name].names.tolist() == [1, 2, 3, 4]
        assert found.outputs[name].values.tolist() == whole.tolist()


def test_modules_of_a_pipeline_are_in_its_order(tmp_path: Path) -> None:
    for rank, names in enumerate((("b", "a"), ("c",))):
        pieces = {name: ("whole", [1], [[1.0]]) for name in names}
        write_rank(tmp_path, rank, {"pp": rank, "dp": 0, "sharding": 0, "tp": 0}, 0, pieces)
    found = read_side(tmp_path, 2, "fp32")
    assert list(found.modules) == ["b", "a", "c"]
    assert found.tokens.tolist() == NAMES.tolist(), "those of the first pipeline stage, once"


def test_gradients_of_one_context_add_up() -> None:
    names = np.array([7, 3, 7], "uint64")
    values = np.array([[1.0], [2.0], [4.0]], "float32")
    assert merge_contexts(names, values, adds_up=True).values.tolist() == [[2.0], [5.0]]
    assert merge_contexts(names, values, adds_up=False).values.tolist() == [[2.0], [1.0]]
