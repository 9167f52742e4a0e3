"""A method of adapters of a plugin: registered, in recipes, trained, saved, read again and merged."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from llmsuite.adapters.lora import Lora
from llmsuite.adapters.methods import BUILT_IN, METHODS
from llmsuite.adapters.parameters import is_factor, is_trained, shard_dim
from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.checks import check_adapter_method
from llmsuite.contract.registry import PluginInfo, Registry, load_plugins
from llmsuite.models.adapter_method import AdapterMethod, AdapterParameter, PaddleNlpFiles
from llmsuite.recipe.resolve import plan_run
from tests.support.adapter_models import IDS, adapted, base_of, section
from tests.support.families import FAMILIES
from tests.support.kinds import check_merged, check_read_again, written
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "plugin-models.md").read_text(encoding="utf-8")
TARGETS = ["k_proj", "v_proj", "down_proj"]


def plugin(directory: Path) -> Any:
    """The plugin of the guide, as a module."""
    (code,) = re.findall(r"```python\n# ia3.py\n(.*?)```", PAGE, re.DOTALL)
    path = directory / "ia3.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ia3", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """The built-in things and the method of the guide."""
    made = load_plugins()
    made.require(PluginInfo("ia3", "ia3 1.0", "ia3", plugin=plugin(tmp_path)))
    yield made
    if "ia3" in made.adapter_methods:
        made.withdraw("adapter method", "ia3", "the test is over")


def test_recipes_take_the_method_where_its_plugin_is(registry: Registry, write_recipe: Callable[..., Any]) -> None:
    recipe = write_recipe({"lora": {"rank": 1, "method": "ia3", "target_modules": TARGETS}})
    assert plan_run(recipe, [], registry).recipe.lora.adapter_method is METHODS["ia3"]
    with pytest.raises(RecipeError, match=r"lora\.method"):
        plan_run(recipe, [], load_plugins())
    for target, reason in (("embed_tokens", "no layer for an embedding"), ("lm_head", "ia3 does not support")):
        with pytest.raises(RecipeError, match=reason):
            plan_run(recipe, [f'--lora.target_modules=["{target}"]'], registry)


def test_its_parameters_are_known_everywhere(registry: Registry) -> None:
    assert [is_factor("q.ia3_scale"), is_trained("q.ia3_scale"), is_factor("q.ia4_scale")] == [True, True, False]
    plan = FAMILIES["llama"].shard_plan
    assert plan is not None
    layer = "model.layers.0"
    assert shard_dim(plan, f"{layer}.self_attn.k_proj.ia3_scale") == 0
    assert shard_dim(plan, f"{layer}.mlp.down_proj.ia3_scale") is None


def test_it_is_saved_read_again_and_merged(registry: Registry, tmp_path: Path) -> None:
    model, metadata = written(tmp_path, "llama", section(method="ia3", target_modules=TARGETS))
    check_merged(tmp_path, model, 5e-6)
    check_read_again(tmp_path, "llama", model, metadata)


def test_training_begins_with_the_base_and_changes_the_scales_alone(registry: Registry, tmp_path: Path) -> None:
    base_of("llama", tmp_path / "base")
    lora = section(method="ia3", target_modules=TARGETS)
    model, modules = adapted("llama", tmp_path / "base", lora)
    read = METHODS["ia3"].initial(None)  # type: ignore[arg-type]  # it is the same for every model
    parameters = {name: parameter for name, parameter in model.named_parameters() if is_factor(name)}
    assert list(parameters) == [f"{module}.ia3_scale" for module in modules]
    for name, parameter in parameters.items():
        parameter.set_value(read(name, parameter.shape, [slice(0, size) for size in parameter.shape]))
    ids = paddle.to_tensor(IDS)

    def loss() -> Any:
        logits = model(ids)
        return F.cross_entropy(logits[:, :-1].reshape([-1, logits.shape[-1]]), ids[:, 1:].reshape([-1]))

    before = loss()
    before.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(parameters)
    for parameter in parameters.values():
        parameter.set_value(parameter - 0.1 * parameter.grad)
    assert float(loss()) < float(before)
    for module in model.sublayers():
        if hasattr(module, "is_enabled"):
            module.is_enabled = False
    np.testing.assert_allclose(float(loss()), float(before), rtol=1e-6)


def test_two_plugins_with_one_name_are_refused(registry: Registry, tmp_path: Path) -> None:
    other = PluginInfo("other", "other 1.0", "other", plugin=plugin(tmp_path))
    registry.add(other)
    assert "adapter method 'ia3' is registered by both ia3 1.0 and other 1.0" in str(other.error)
    assert "ia3" not in registry.adapter_methods
    assert "ia3" not in METHODS


class _Right(Lora):
    """A method that passes the checks, for others to spoil."""

    name = "right"


class _Files(PaddleNlpFiles):
    kinds: ClassVar = {"theirs": "gain"}


class _Missing(AdapterMethod):
    name = "missing"
    help = "no methods"
    parameters: ClassVar = {"scale": AdapterParameter()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "two words"}, "a name has to be one word"),
        ({"help": None}, "help of adapter method 'right' has to be a text"),
        ({"is_init": True}, "not of lora.init"),
        ({"parameters": {}}, "has to be a mapping of names to AdapterParameter"),
        ({"parameters": {"lora_A": 0}}, "'lora_A' is a int, no AdapterParameter"),
        ({"parameters": {"weight": AdapterParameter()}}, "cannot be called 'weight'"),
        ({"parameters": {"lora_A": AdapterParameter()}}, "'lora_A' is a parameter of method lora, of another kind"),
        ({"parameters": {"gain": AdapterParameter()}}, "its parameters are gain"),
        (
            {"parameters": {"gain": AdapterParameter(by_inputs=1)}, "shapes": lambda *sizes, **named: {"gain": (3,)}},
            "by_inputs of 'gain' is 1, and its shape is",
        ),
        ({"pair_parts": {"gain": "gain"}}, "pair_parts of adapter method 'right': 'gain' is no parameter of it"),
        ({"paddlenlp": "gain.json"}, "has to be a PaddleNlpFiles or None, and is a str"),
        ({"paddlenlp": _Files()}, "kinds of paddlenlp of adapter method 'right': 'gain' is no parameter of it"),
    ],
)
def test_methods_that_are_wrong_are_refused(changes: dict[str, Any], message: str) -> None:
    check_adapter_method(_Right(), BUILT_IN)
    wrong = type("Wrong", (_Right,), changes)
    with pytest.raises(UserError, match=message):
        check_adapter_method(wrong(), BUILT_IN)


def test_a_method_without_its_functions_is_refused() -> None:
    with pytest.raises(UserError, match="_Missing has to define layers, shapes, initial, merged"):
        check_adapter_method(_Missing(), BUILT_IN)
