"""`llmsuite align` of two strategies: equal ones, and ones with an error in them, which is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PluginSite
from tests.multi.conftest import Runner
from tests.support.paths import ROOT

RECIPE = "recipes/llama/dpo.json"
WORDS = (
    "--smoke", "--train.global_batch_size=8", "--train.micro_batch_size=2", "--data.max_length=64",
    "--model.config.num_hidden_layers=4", "--model.config.vocab_size=513", "--dpo.reference=none", "--dpo.loss=orpo",
)  # fmt: skip
FAULT = """
import os
import llmsuite

def fault():
    return os.environ["FAULT"] if os.environ["PADDLE_TRAINERS_NUM"] != "1" else None

def install():  # in each rank, which is a fork
    from llmsuite.parallel import parallelize
    from llmsuite.parallel.sharding import ParameterShard

    apply, finish = parallelize.apply_tensor_parallel, ParameterShard.finish_gradient

    def applied(model, *more):
        apply(model, *more)
        for name, module in model.named_sublayers():
            if name == "model.layers.3.self_attn.v_proj" and fault() == "forward":
                module.register_forward_post_hook(lambda module, inputs, output: output * 1.001)
            if name == "model.layers.2.mlp.gate_proj" and fault() == "backward":
                module.register_forward_post_hook(
                    lambda module, inputs, y: None if y.stop_gradient else y.register_hook(lambda g: g * 1.01) and None
                )

    def finished(self):
        gradient = finish(self)
        if gradient is not None and self.name == "model.layers.1.mlp.down_proj.weight" and fault() == "sum":
            gradient.scale_(2.0)
        return gradient

    parallelize.apply_tensor_parallel, ParameterShard.finish_gradient = applied, finished

os.register_at_fork(after_in_child=install)

@llmsuite.hookimpl
def llmsuite_run_end(run, step):
    pass
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    PluginSite(directory).install("fault", FAULT)
    return directory


def align(runner: Runner, *words: str, expect: int = 0, **environment: str) -> Any:
    said = runner.run("align", RECIPE, *WORDS, *words, "--json", expect=expect, **environment)
    return json.loads(said[said.index("{") :])


def test_a_strategy_that_cuts_everything_equals_one_process(runner: Runner) -> None:
    """The recipe's own mesh: tp2 pp2 sharding2, sequence parallel, recompute; packed rows, micro-batches cut in another
    way."""
    found = align(runner)
    assert found["is_equal"]
    assert found["num_tokens"][1:] == [0, 0]
    assert found["num_compared"] > 100
    modules = [row["module"] for row in found["rows"]]
    assert (
        modules.index("model.layers.1") < modules.index("model.layers.2.self_attn.q_proj") < modules.index("model.norm")
    )
    compared = [row for row in found["rows"] if row["module"] != "lm_head"]
    assert all(row["output"] is not None and row["gradient"] is not None for row in compared)
    assert 0 < max(row["gradient"] for row in compared) < found["tolerance"]
    assert all(len(row["parameter_gradients"]) == len(row["parameters"]) for row in found["rows"])


@pytest.mark.parametrize(
    ("fault", "key", "first"),
    [
        ("forward", "first_forward", {"kind": "output", "name": "model.layers.3.self_attn.v_proj"}),
        ("backward", "first_backward", {"kind": "output gradient", "name": "model.layers.2.mlp.gate_proj"}),
        ("sum", "first_backward", {"kind": "parameter gradient", "name": "model.layers.1.mlp.down_proj.weight"}),
    ],
)
def test_an_error_is_named(runner: Runner, site: Path, fault: str, key: str, first: dict[str, str]) -> None:
    environment = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "LLMSUITE_PLUGINS": "fault", "FAULT": fault}
    against = {"parallel": {}, "launch": {"num_devices": 1}}
    strategy = ("--launch.num_devices=2", '--parallel={"tensor_parallel_degree": 2}')
    found = align(runner, *strategy, f"--against={json.dumps(against)}", expect=3, **environment)
    assert {name: found[key][name] for name in first} == first
    assert found[key]["relative"] == pytest.approx({"forward": 1e-3, "backward": 1e-2, "sum": 0.5}[fault], rel=0.02)
    if fault != "forward":
        assert found["first_forward"] is None


def test_other_samples_are_named(runner: Runner) -> None:
    one = ("--launch.num_devices=1", "--parallel={}")
    found = align(runner, *one, '--against={"seed": 43}', expect=3)
    assert found["first_forward"]["kind"] == "tokens"
