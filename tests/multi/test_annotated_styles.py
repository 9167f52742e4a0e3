"""Models as users of Paddle's auto-parallel write them, each with one kind of annotation, trained by the stage of
docs/guide/auto-parallel.md: layers without arguments, on meshes of the module, with parameters of plain Paddle."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.support.annotated_page import LIMIT, Page
from tests.support.annotated_styles import STYLES, alone, plugin


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Page:
    return Page(tmp_path_factory.mktemp("page"), runner)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("style", STYLES)
def test_each_style_equals_one_process_without_annotations(page: Page, style: str, optimizer: str) -> None:
    (count, model), found = STYLES[style], list[tuple[Any, Any]]()
    # with the usual epsilon the rounding of a gradient near zero decides where a step goes
    words = (
        ("--train.adam_epsilon=1e-4",) if optimizer == "adamw" else ("--train.optimizer=sgd", "--train.weight_decay=0")
    )
    parameters = '["w0.weight", "w0.bias", "w1.weight", "w1.bias"]' if "Linear" in model else '["w0", "w1"]'
    label = re.sub(r"\W", "_", f"{style}_{optimizer}")
    for processes, text in (1, alone(model)), (count, model):
        assert processes > 1 or "dist.reshard" not in text
        name = f"{label}_{processes}"
        file = plugin(page.directory / f"style_{name}.py", text, parameters)
        page.run(
            name, file, f"--launch.num_devices={processes}", "--train.max_steps=3", "--train.max_grad_norm=0.2", *words
        )
        found.append((page.runner.metrics(name), page.runner.weights(name, 3)))
    (records, weights), (others, other_weights) = found
    for record, wanted in zip(others, records, strict=True):
        for key in ("loss", "grad_norm"):
            assert record[key] == pytest.approx(wanted[key], rel=LIMIT)
    for key, value in other_weights.items():
        np.testing.assert_allclose(value, weights[key], rtol=0, atol=LIMIT, err_msg=key)


def test_a_run_without_the_ranks_of_a_mesh_is_refused(page: Page) -> None:
    """Half of the rows would be learnt from, without a word."""
    file = plugin(page.directory / "alone_on_a_mesh.py", STYLES["rows"][1])
    said = page.run("alone-on-a-mesh", file, "--launch.num_devices=1", expect=2)
    assert "dist.shard_tensor: the mesh is on ranks [0, 1], and the run has 1: set launch.num_devices" in said
