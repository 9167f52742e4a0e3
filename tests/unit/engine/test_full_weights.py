"""Full weights with merged adapters, for generation during training."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.adapters.parameters import is_factor
from llmsuite.contract.registry import Registry
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.engine.build import build_model
from llmsuite.engine.full_weights import full_weights
from llmsuite.models.initial_values import initial_values
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT

IDS = np.array([[1, 7, 11, 3, 2], [4, 4, 9, 0, 5]])
EVERYWHERE = ["*_proj", "embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {}),
        ("llama", {"rslora": True, "target_modules": EVERYWHERE}),
        ("qwen", {"method": "mixer"}),
        ("qwen", {"method": "dora"}),
        ("qwen", {"method": "mora"}),
        ("qwen", {"method": "lokr"}),
        ("qwen", {"method": "vera"}),
        ("llama", {"init": "pissa"}),
        ("gpt", {"init": "pissa", "rslora": True}),
        ("llama", {"init": "lora_ga"}),
        ("deepseek", {"target_modules": ["*_proj"]}),
        ("qwen_moe", {"target_modules": ["self_attn.*", "experts.down_proj"]}),
        ("ernie_moe", {"target_modules": ["mlp.experts.*"]}),
        *(("deepseek", {"method": method, "target_modules": ["experts.*"]}) for method in ("dora", "mora", "lokr")),
        ("deepseek", {"init": "pissa", "target_modules": ["experts.*"]}),
        ("llama", {"method": "dora", "target_modules": EVERYWHERE}),
        ("llama", {"init": "pissa", "target_modules": EVERYWHERE}),
    ],
)
def test_merged_weights_make_the_same_logits(family: str, keys: dict[str, Any], registry: Registry) -> None:
    words = [f"--lora.{key}={json.dumps(value) if key != 'init' else value}" for key, value in keys.items()]
    words += ["--launch.num_devices=1", "--parallel={}"]
    plan = plan_run(ROOT / f"recipes/{family}/lora.json", words, registry, smoke=True)
    mesh = Mesh(plan.parallel.degrees, 0)
    built = build_model(plan.model, plan.parallel, plan.train, registry, CpuBackend(), mesh)
    (model,) = built.part.chunks
    for name, parameter in model.named_parameters():
        if is_factor(name):
            parameter.set_value(parameter + paddle.to_tensor(initial_values(1, name, parameter.shape, 0.1)))
    model.eval()
    with paddle.LazyGuard():
        plain = plan.model.family.factory()(plan.model.config, Ops())
    places = dict(plain.named_parameters())
    for name, value in full_weights(plan.model, built, "float32", mesh):
        places.pop(name).set_value(value)
    assert not places, "a parameter of the plain model has no value"
    plain.eval()
    wanted, found = (m(paddle.to_tensor(IDS)).numpy() for m in (model, plain))
    with built.part.adapters_off():
        base = built.part(paddle.to_tensor(IDS)).numpy()
    assert np.abs(base - wanted).max() > 0.01 * np.abs(wanted).max()
    # rounded to float32 with its adapter in it, a matrix moves a logit by some millionths of the largest
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4e-6 * np.abs(wanted).max())
