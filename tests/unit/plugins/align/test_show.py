"""What `llmsuite align` shows of a comparison: sentences, a table and a plot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llmsuite.observe.activations.compare import compare
from llmsuite.plugins.align.show import plot, shown_rows, summary_lines, table
from tests.support.sides import MODULES, NAMES, changed, side


def test_the_sentences_name_the_first_difference() -> None:
    assert list(summary_lines(compare(side(), side(), ("a", "b")))) == ["no difference above 1e-05 (relative)"]
    for kind, name in (("outputs", "layers.1.up"), ("parameters", "head.weight")):
        report = compare(side(), changed(kind, name), ("a", "b"))
        assert name in next(summary_lines(report))


def test_the_sentences_name_a_factor_of_all_gradients() -> None:
    twice = {name: dataclasses.replace(s, values=2 * s.values, norm=2 * s.norm)
             for name, s in side().parameter_gradients.items()}  # fmt: skip
    report = compare(side(), side(parameter_gradients=twice), ("a", "b"))
    assert "every gradient of a parameter in b is 2 times that in a" in list(summary_lines(report))


def test_the_sentences_name_other_tokens() -> None:
    report = compare(side(), side(tokens=NAMES[1:]), ("a", "b"))
    start = "first difference: the tokens. 5 contexts are in both, 1 in a only"
    assert next(summary_lines(report)).startswith(start)


def test_the_table_opens_the_layer_of_the_first_difference() -> None:
    report = compare(side(), changed("outputs", "layers.1.up"), ("a", "b"))
    assert [row.module for row in shown_rows(report, every=False)] == [
        "embed", "layers.0", "layers.1.up", "layers.1", "norm", "head",
    ]  # fmt: skip
    assert len(shown_rows(report, every=True)) == len(MODULES) + 1
    folded = next(row for row in shown_rows(report, every=False) if row.module == "layers.0")
    assert set(folded.parameters) == {"layers.0.weight", "layers.0.up.weight"}
    assert table(report).row_count == 6


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_a_plot(tmp_path: Path, name: str) -> None:
    plot(compare(side(), changed("outputs", "layers.1.up"), ("a", "b")), tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000
