"""benchmarks/roofline.py: the time of a step is told by parts, and its products are counted."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT

RECIPE = ROOT / "recipes" / "llama" / "pretrain.json"
WORDS = ("--parallel={}", "--launch.num_devices=1", "--engine.recompute=none", "--model.config.vocab_size=1009")
SECOND = 10**9


@pytest.fixture(scope="module")
def benchmarks() -> tuple[ModuleType, ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers"), *sys.path])
        return importlib.import_module("roofline"), importlib.import_module("roofline_parts")


@dataclasses.dataclass
class Event:
    name: str
    start_ns: int
    end_ns: int
    children_node: list[Event] = dataclasses.field(default_factory=list)


def _event(name: str, seconds: int, *within: Event) -> Event:
    return Event(name, 0, seconds * SECOND, list(within))


def test_every_second_is_of_one_part(benchmarks: tuple[ModuleType, ModuleType]) -> None:
    _, parts = benchmarks
    forward = _event(
        parts.WITHIN + parts.HEAD, 7, _event("matmul dygraph", 5, _event("matmul kernel launch", 4)),
    )  # fmt: skip
    back = _event(
        "Gradient Backward", 30,
        _event("Global_MatmulGradNode", 6),  # the head's
        _event("Global_CustomOpGradNode: llmsuite_attention_grad", 3, _event("empty kernel launch", 1)),
        _event("Global_GradNodePyLayer__Products", 9, _event(parts.WHOLE + parts.LAYERS, 4)),
        _event("Global_MatmulGradNode", 8),
        _event("Global_AddGradNode", 3, _event("add_grad kernel launch", 2)),
    )  # fmt: skip
    updated = _event(parts.WITHIN + parts.OPTIMIZER, 12, _event("adamw dygraph", 11, _event("adamw kernel launch", 8)))
    found = parts.Seconds(_event(parts.STEP, 100, forward, back, updated))
    assert found.parts[parts.HEAD] == 7 + 6
    assert found.parts[parts.LAYERS] == 4 + 8
    assert found.parts[parts.ATTENTION] == 3
    assert found.parts[parts.OPTIMIZER] == 12
    assert found.parts[parts.OTHER] == found.others["add_grad"] == 2
    assert sum(found.parts.values()) == pytest.approx(100)
    assert found.num_passes_back == 1


def test_a_product_and_its_gradients_are_three_of_the_same_size(benchmarks: tuple[ModuleType, ModuleType]) -> None:
    _, parts = benchmarks
    for transposed in (False, True):
        matrix = (7, 5) if transposed else (5, 7)
        found = list(parts.forward_and_back(11, matrix, transposed, True, True, False))
        assert [product.flops for product in found] == [2 * 11 * 5 * 7] * 3
        assert len(list(parts.forward_and_back(11, matrix, transposed, False, False, False))) == 1
        shapes = [_shape(product) for product in found]
        assert shapes == [(11, 7), (11, 5), matrix]


def _shape(product: Any) -> tuple[int, int]:
    """Of what a product makes; its inner sizes have to be the same."""
    left = product.left[::-1] if product.transpose_left else product.left
    right = product.right[::-1] if product.transpose_right else product.right
    assert left[1] == right[0]
    return left[0], right[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_of_a_run_are_told(
    precision: str, benchmarks: tuple[ModuleType, ModuleType], registry: Registry, tmp_path: Any
) -> None:
    roofline, parts = benchmarks
    words = [*WORDS, f"--engine.precision={precision}", f"--output_dir={tmp_path / 'run'}"]
    script = str(ROOT / "benchmarks" / "roofline_steps.py")
    done = subprocess.run(
        [sys.executable, script, str(RECIPE), "--rounds=1", "--smoke", *words], capture_output=True, text=True,
        env={**os.environ, "LLMSUITE_PLUGINS": "", "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(roofline.MARK))
    told = json.loads(line.removeprefix(roofline.MARK))
    assert len(told["alone"]) == len(told["recorded"]) == 1
    (step,) = told["recorded"]
    assert sum(step["parts"].values()) == pytest.approx(step["seconds"], rel=0.05)
    kernels = {parts.ATTENTION, parts.ROTATION, parts.NORMS, parts.SWIGLU, parts.LOSS}
    assert all(step["parts"][part] > 0 for part in {*kernels, *parts.PRODUCTS, parts.OPTIMIZER, parts.GRADIENTS})
    assert (step["parts"][parts.ROUNDING] > 0) == (precision == "bf16")

    plan = plan_run(RECIPE, words, registry, smoke=True)
    config = plan.model.config
    train = plan.train.section
    data = plan.data.section
    rows = train.global_batch_size * data.max_length
    wide = config.hidden_size
    apply_layers = wide * config.head_size * 2 * (config.num_attention_heads + config.num_key_value_heads)
    apply_layers += 3 * wide * config.intermediate_size
    expected = {parts.LAYERS: apply_layers * config.num_hidden_layers, parts.HEAD: wide * config.vocab_size}
    for part, parameters in expected.items():
        assert step["products"][part]["flops"] == 3 * 2 * rows * parameters
        assert step["products"][part]["alone"] > 0
    length = data.max_length  # of a row each, causal
    micro_batches = train.global_batch_size
    pairs = micro_batches * length * (length + 1) // 2
    forward = 2 * 2 * pairs * config.num_attention_heads * config.head_size
    assert step["attention"] == 3 * forward * config.num_hidden_layers
    title = "pretraining"
    found = [roofline.Found(title, precision, told["alone"], told["recorded"])]
    lines = roofline.table_of_products(found)
    assert len({line.count("|") for line in lines}) == 1
    lines = roofline.table_of_parts(found)
    shares = [float(line.split("|")[2].strip().rstrip("%") or 0) for line in lines[2:]]
    assert len(shares) == len(parts.PARTS)
    assert sum(shares) == pytest.approx(100, abs=1)
