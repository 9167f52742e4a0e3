"""`data.collator`: a function of the user's makes the batches, and errors in it are reported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.registry import Registry
from llmsuite.engine.batch import Batch
from llmsuite.engine.collator import collate_of
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT
from tests.support.sft_case import make_stage, samples, talk

GUIDE = (ROOT / "docs/guide/batches.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n# collators.py\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A module that no other test has imported."""
    path = tmp_path / f"collators_{tmp_path.name}.py"
    yield path
    sys.modules.pop(path.stem, None)


def batch_by(collator: str) -> Batch:
    stage = make_stage()
    found, _ = samples(stage, talk("Hi?", "Hello."))
    stage.context.data.collator = collator
    return collate_of(stage)(found)


def test_the_example_of_the_guide(file: Path) -> None:
    file.write_text(EXAMPLE)
    stage = make_stage()
    found, _ = samples(stage, talk("Hi?", "Hello, and good morning to you."), talk("1 + 1?", "2"))
    plain = stage.collate(found)
    stage.context.data.collator = f"{file}:tails_count_half"
    batch = collate_of(stage)(found)
    expected = []
    for sample in found:
        weights = sample.weights[sample.weights > 0].copy()
        weights[len(weights) * 9 // 10 :] = 0.5
        expected.append(weights)
    np.testing.assert_array_equal(batch["weights"], np.concatenate(expected))
    assert batch["weight"] == np.concatenate(expected).sum() < plain["weight"]
    np.testing.assert_array_equal(batch["input_ids"], plain["input_ids"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other = 1", "has no function 'make'"),
        ("make = 1", "make is no function"),
        ("def make(:", "SyntaxError"),
        ("def make(samples, collate): return [1]", "make has returned list; a batch is a dict of arrays"),
        ("def make(samples, collate): return {'num_tokens': 3}", "None for 'num_supervised'; it is an integer"),
        ("def make(samples, collate): return 1 / 0", r"data.collator: .*make: .*line 1, in make\n.*ZeroDivisionError"),
    ],
)
def test_a_faulty_collator_is_reported(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        batch_by(f"{file}:make")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("padded", "is 'padded'; name a function: FILE.py:FUNCTION"),
        ("no/such.py:make", "no/such.py is not a file"),
        (f"{ROOT}/tests/support/paths.py:ROUTE", "has no function 'ROUTE'; did you mean 'ROOT'?"),
    ],
)
def test_an_unknown_collator_is_refused_before_a_run(registry: Registry, value: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_run(ROOT / "recipes/llama/sft.json", [f"--data.collator={value}"], registry, smoke=True)
    assert [problem.key for problem in caught.value.problems] == ["data.collator"]
    assert message in caught.value.problems[0].message
