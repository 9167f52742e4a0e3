"""Models that place their parameters themselves, in programs of whole steps."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.support.annotated_page import CLIPPED, LIMIT, OPTIMIZERS, Page, assert_equal
from tests.support.annotated_styles import STYLES, alone, plugin

STEP = "--engine.mode=to_static", "--engine.program=step"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Page:
    return Page(tmp_path_factory.mktemp("page"), runner)


CASES: dict[str, tuple[str, Any]] = {
    "pipeline and matrices": ("_4", None),
    "rows and matrices": ("_4", ([[3, 0], [1, 2]], [[3, 0], [1, 2]])),
}


@pytest.mark.parametrize(("case", "optimizer"), [("pipeline and matrices", "adamw"), ("rows and matrices", "sgd")])
def test_programs_equal_one_process_and_go_on_in_the_other_mode(page: Page, case: str, optimizer: str) -> None:
    """With accumulation and clipping. The second half of the run is op by op, on one process."""
    count, ranks = CASES[case]
    name = re.sub(r"\W", "_", case)
    words = (CLIPPED, *OPTIMIZERS[optimizer])
    whole = page.plugin("annotated_mlp")
    page.run(f"alone-{optimizer}", whole, "--launch.num_devices=1", *words)
    wanted = page.runner.metrics(f"alone-{optimizer}")
    assert all(record["grad_norm"] > 0.2 for record in wanted[:2]), "it is clipped"
    file = whole if ranks is None else page.plugin(name, **{count: ranks})
    page.run(name, file, f"--launch.num_devices={count[1:]}", *STEP, *words)
    assert_equal(page, name, f"alone-{optimizer}", wanted)

    checkpoints = page.runner.directory / name / "checkpoints"
    (checkpoints / "latest").write_text("step-4\n")
    for path in (checkpoints / "step-8").iterdir():
        path.unlink()
    (checkpoints / "step-8").rmdir()
    page.run(name, whole, "--launch.num_devices=1", *words, "--resume")
    assert_equal(page, name, f"alone-{optimizer}", wanted)


@pytest.mark.parametrize(
    "style", ["rows", "matrices", "a pipeline", "an irregular mesh", "layers of Paddle, by shard_layer"]
)
def test_each_style_equals_one_process_without_annotations(page: Page, style: str) -> None:
    (count, model), found = STYLES[style], list[tuple[Any, Any]]()
    parameters = '["w0.weight", "w0.bias", "w1.weight", "w1.bias"]' if "Linear" in model else '["w0", "w1"]'
    words = "--train.adam_epsilon=1e-4", "--train.max_steps=3", "--train.max_grad_norm=0.2"
    for processes, text, mode in (1, alone(model), ()), (count, model, STEP):
        name = f"{re.sub(r'[^a-z]', '_', style)}_{processes}"
        file = plugin(page.directory / f"style_{name}.py", text, parameters)
        page.run(name, file, f"--launch.num_devices={processes}", *words, *mode)
        found.append((page.runner.metrics(name), page.runner.weights(name, 3)))
    (records, weights), (others, other_weights) = found
    for record, wanted in zip(others, records, strict=True):
        for key in ("loss", "grad_norm"):
            assert record[key] == pytest.approx(wanted[key], rel=LIMIT)
    for key, value in other_weights.items():
        np.testing.assert_allclose(value, weights[key], rtol=0, atol=LIMIT, err_msg=key)


def test_meshes_that_share_some_ranks_are_named(page: Page) -> None:
    file = page.plugin("other_way_round", _2=([[1, 0]], [[0, 1]]))
    said = page.run("other-way-round", file, "--launch.num_devices=2", *STEP, expect=2)
    assert "dist.reshard: from the mesh [[1, 0]] to [[0, 1]], which engine.program step does not have" in said


def test_rows_that_ranks_do_not_divide_are_named(page: Page) -> None:
    file = page.plugin("uneven", _2=([[0], [1]], [[0], [1]]))
    sizes = "--train.micro_batch_size=3", "--train.global_batch_size=9"
    said = page.run("uneven", file, "--launch.num_devices=2", *STEP, *sizes, expect=2)
    assert "2 ranks cut a tensor of [3, 4, 16] along dim 0, and engine.program step takes equal parts of 3" in said
