"""Tiny models as the engine builds them for the stand-in, and what has to be true of a pass through one."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import Tensor
from llmsuite.contract.registry import PluginInfo, Registry
from llmsuite.engine.build import BuiltModel, build_model
from llmsuite.models.moe import Gate
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.conftest import registry_with
from tests.support.paths import ROOT

IDS = np.array([[1, 7, 11, 3, 2, 6, 9, 5], [4, 4, 9, 0, 5, 8, 3, 3]])
TARGETS = np.roll(IDS, -1, 1).flatten()
STARTS = np.array([[0, 0, 0, 3, 3, 3, 3, 3], [0, 0, 0, 0, 4, 4, 4, 4]])
"""Two documents in each row."""


DEVICE = os.environ.get("LLMSUITE_TEST_DEVICE", "standin")
"""Name of the device that the checks are about: the stand-in, or "sim" of `tests.device`."""


@functools.cache
def registry() -> Registry:
    """With the device of the tests among the devices."""
    module = importlib.import_module({"standin": "tests.standin", "sim": "tests.device.gpu"}[DEVICE])
    found = registry_with()
    found.add(PluginInfo(DEVICE, "tests", DEVICE, plugin=module))
    return found


def plan(recipe: str, *words: str, precision: str = "bf16", num_ranks: int = 1) -> RunPlan:
    """A recipe, made small."""
    return plan_run(
        ROOT / f"recipes/{recipe}.json",
        [f"--launch.num_devices={num_ranks}", f"--device={DEVICE}", f"--engine.precision={precision}",
         "--engine.recompute=none", *words],
        registry(), smoke=True,
    )  # fmt: skip


def built(run: RunPlan, mesh: Mesh | None = None) -> BuiltModel:
    """Its model, on this rank of a mesh; else in a process that is alone."""
    backend = run.parallel.device.factory()
    backend.activate(0)
    model = build_model(run.model, run.parallel, run.train, registry(), backend, mesh or Mesh(run.parallel.degrees, 0))
    model.part.train()
    return model


def nll(part: Any, starts: np.ndarray | None = None) -> Tensor:
    """[N], of the ids above."""
    hidden, _ = part.hidden_states(paddle.to_tensor(IDS), None if starts is None else paddle.to_tensor(starts))
    return part.token_nll(hidden.flatten(0, 1), paddle.to_tensor(TARGETS))


def dtypes(model: Any) -> dict[str, set[str]]:
    """The dtypes of what each module gives in a pass, filled by the pass."""
    found: dict[str, set[str]] = {}

    def note(name: str) -> Any:
        def hook(layer: Any, inputs: Any, output: Any) -> None:
            given = output if isinstance(output, tuple) else (output,)
            flat = [t for one in given for t in (one if isinstance(one, tuple) else (one,))]
            floats = [t for t in flat if isinstance(t, paddle.Tensor) and t.is_floating_point()]
            found.setdefault(name, set()).update(str(t.dtype).removeprefix("paddle.") for t in floats)

        return hook

    for name, module in model.named_sublayers():
        module.register_forward_post_hook(note(name))
    return found


def check(recipe: str, *words: str, precision: str = "bf16", starts: np.ndarray | None = None) -> Any:
    """A pass forward and back keeps the dtypes, and is as close to float32 as roundings are; returns the part."""
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    part = built(plan(recipe, *words, precision=precision)).part
    found = dtypes(part.model)
    gates = {name for name, module in part.model.named_sublayers() if isinstance(module, Gate)}
    of_tokens = nll(part, starts)
    wrong = {name: given for name, given in found.items() if given - {"float32" if name in gates else dtype}}
    assert not wrong, wrong
    assert len(found) > 10
    assert of_tokens.dtype == paddle.float32
    of_tokens.mean().backward()
    trained = {name: p for name, p in part.named_parameters() if not p.stop_gradient}
    assert trained
    other = {name for name, p in trained.items() if p.grad is not None and p.grad.dtype != p.dtype}
    assert not other, other
    with paddle.no_grad():
        wide = nll(built(plan(recipe, *words, precision="fp32")).part, starts).numpy()
    error = np.abs(of_tokens.numpy() - wide).mean() / wide.mean()
    # a rounding is off by 2^-9 of the value at most, and a logit is some twenty of them deep; see test_16_bit
    assert error < 20 * 2**-9, f"the loss is off by {error:.1e}"
    return part
