"""Replacements of a layer's code apply only to layers that are exactly llmsuite's."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.adapters.add import adapted_modules
from llmsuite.adapters.layers.prefix import add_prefixes
from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.ops import Ops, swiglu
from llmsuite.inference.rank_shards import _modules_to_sum
from llmsuite.inference.static_experts import make_static
from llmsuite.models.blocks import GatedMLP, RMSNorm
from llmsuite.models.dense_plan import PLAN
from llmsuite.models.embedding import check_embedding
from llmsuite.models.exact import has_hooks, is_exactly, is_own
from llmsuite.models.experts import Experts, check_experts
from llmsuite.models.linear import has_own_kernel, is_plain_linear
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from llmsuite.models.moe import MoELayer
from llmsuite.parallel.chunked_loss import ChunkedLosses
from llmsuite.parallel.experts import ExpertParallelDispatcher, apply_expert_parallel
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.overlap import modules_to_fuse
from llmsuite.parallel.static import _structure, compile_layers
from tests.support.families import FAMILIES, tiny
from tests.support.own_layers import NETWORKS

ALONE = Mesh(Degrees(1, 1, 1, 1), 0)


class Other(GatedMLP):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.up_proj(x))


class Same(GatedMLP):
    """Other, but not in what it computes."""


def test_a_subclass_or_a_changed_layer_is_not_exactly_the_class() -> None:
    assert is_exactly(Same(4, 8, Ops()), GatedMLP)
    assert not is_exactly(Other(4, 8, Ops()), GatedMLP)
    assert not is_exactly(RMSNorm(4, 1e-5, Ops()), GatedMLP)
    changed = GatedMLP(4, 8, Ops())
    changed.forward = lambda x: x
    assert not is_exactly(changed, GatedMLP)

    class Called(GatedMLP):
        def __call__(self, x: Any) -> Any:
            return 2.0 * super().__call__(x)

    assert not is_exactly(Called(4, 8, Ops()), GatedMLP)
    assert is_exactly(OwnExperts(2, 4, 8, Ops()), Experts)
    assert not is_exactly(OwnExperts(2, 4, 8, Ops()), Experts, "rows")


def test_functions_of_others_are_not_own() -> None:
    assert is_own(swiglu)
    assert is_own(functools.partial(functools.partial(swiglu), 1))
    assert not is_own(lambda gate, up: gate)
    assert not is_own(paddle.nn.functional.swiglu)


def test_a_layer_with_hooks_is_not_plain() -> None:
    layer = nn.Linear(2, 2)
    assert is_plain_linear(layer)
    assert not has_hooks(layer)

    def seen(*given: Any) -> None: ...

    layer.register_forward_pre_hook(seen)
    assert has_hooks(layer)
    assert not has_hooks(layer, but=(seen,))


class Scaled(nn.Linear):
    """More than its matrix."""

    def forward(self, x: Any) -> Any:
        return 3.0 * super().forward(x)


def test_adapters_take_the_place_of_plain_matrices_alone() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.up_proj = Scaled(64, 128)
    found = adapted_modules(model, PLAN, None)
    assert "model.layers.0.mlp.up_proj" not in found
    assert "model.layers.0.mlp.gate_proj" in found
    with pytest.raises(UserError, match="matches no matrix"):
        adapted_modules(model, PLAN, ["layers.0.mlp.up_proj"])


def test_linear_ops_leave_attributes_of_plugins_with_the_same_names() -> None:
    class Mine(nn.Layer):
        def matmul(self, x: Any) -> Any:
            return x

        apply_linears = "none"

    model = nn.LayerList([Mine(), nn.Linear(2, 2), Scaled(2, 2)])
    use_linear_ops(model, LinearOps(Ops()))
    mine, plain, scaled = model
    assert mine.matmul(5) == 5
    assert mine.apply_linears == "none"
    assert has_own_kernel(plain)
    assert type(scaled) is Scaled
    np.testing.assert_allclose(scaled(paddle.ones([1, 2])).numpy(), 3.0 * scaled.weight.numpy().sum(0, keepdims=True))


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_matrices_that_are_multiplied_together_are_called(kind: str) -> None:
    mlp = GatedMLP(4, 8, Ops())
    x = paddle.to_tensor(np.random.default_rng(0).normal(size=[1, 3, 4]), "float32")
    for number, layer in enumerate((mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        layer.weight.set_value(np.random.default_rng(number).normal(size=layer.weight.shape).astype("float32"))
    if kind == "pre":
        mlp.gate_proj.register_forward_pre_hook(lambda layer, given: (given[0] * 2.0,))
    else:
        mlp.gate_proj.register_forward_post_hook(lambda layer, given, output: output * 2.0)
    expected = mlp(x).numpy()
    use_linear_ops(mlp, LinearOps(Ops()))
    assert np.allclose(mlp(x).numpy(), expected, rtol=1e-6)


def test_projections_are_fused_in_llmsuites_own_modules() -> None:
    model = tiny("llama")
    assert len(modules_to_fuse(model, PLAN)) == 2 * len(model.model.layers)
    use_linear_ops(model, LinearOps(Ops()))
    assert len(modules_to_fuse(model, PLAN)) == 2 * len(model.model.layers)
    model = tiny("llama")
    model.model.layers[0].mlp = Other(64, 128, Ops())
    model.model.layers[1].mlp.up_proj.register_forward_post_hook(lambda *given: None)
    assert len(modules_to_fuse(model, PLAN)) == 2 * len(model.model.layers) - 2


def test_layers_share_a_program_only_if_they_compute_the_same() -> None:
    first, second, third = tiny("llama").model.layers[:3]
    assert _structure(first) == _structure(second)
    second.register_buffer("scale", paddle.ones([1]))
    third.register_buffer("scale", paddle.zeros([1]))
    assert _structure(second) != _structure(third)
    first, second = tiny("llama").model.layers[:2]
    first.mlp.register_forward_post_hook(lambda layer, given, output: output)
    second.mlp.register_forward_post_hook(lambda layer, given, output: 2.0 * output)
    assert _structure(first) != _structure(second)


class OwnLayer(MoELayer):
    def forward(self, *given: Any, **named: Any) -> Any:
        out, cache = super().forward(*given, **named)
        return 2.0 * out, cache


def test_half_a_layer_is_compiled_where_the_whole_is_llmsuites() -> None:
    model = tiny("qwen_moe")
    layer = next(layer for layer in model.model.layers if isinstance(layer, MoELayer))
    model.model.layers[0] = OwnLayer(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
    plan = FAMILIES["qwen_moe"].shard_plan
    assert plan is not None
    with pytest.raises(UserError, match=r"model\.layers\.0 \(OwnLayer\) has a forward pass of its own"):
        compile_layers(model, plan, ALONE, [])


class OwnExperts(Experts):
    def rows(self, *given: Any, **named: Any) -> Any:
        return 2.0 * super().rows(*given, **named)


class Routed(Experts):
    def forward(self, x: Any, weights: Any, chosen: Any) -> Any:
        return x


def _with_experts(kind: type) -> Any:
    model = tiny("qwen_moe")
    for layer in model.model.layers:
        layer.mlp.experts = kind(4, 64, 32, Ops())
    return model


def test_experts_of_another_code_are_refused_by_name() -> None:
    plan = FAMILIES["qwen_moe"].shard_plan
    assert plan is not None
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.experts \(OwnExperts\) computes its rows"):
        make_static(_with_experts(OwnExperts))
    with pytest.raises(UserError, match=r"experts \(Routed\) is not exactly llmsuite's Experts"):
        make_static(_with_experts(Routed))
    mesh = Mesh(Degrees(1, 1, 1, 2), 0)
    with pytest.raises(UserError, match=r"experts \(Routed\) is not exactly"):
        apply_expert_parallel(_with_experts(Routed), plan, mesh)


def test_experts_whose_own_forward_was_put_in_place_are_refused() -> None:
    """The dispatcher of ranks that share experts goes into a program."""
    experts = Experts(4, 64, 32, Ops())
    experts.forward = lambda x, weights, chosen: x
    with pytest.raises(UserError, match=r"it: experts \(Experts\) is not exactly"):
        check_experts("experts", experts, "it")
    shared = Experts(4, 64, 32, Ops())
    shared.dispatcher = ExpertParallelDispatcher(shared, Mesh(Degrees(1, 1, 1, 1), 0))
    check_experts("experts", shared, "it")


def test_prefixes_need_an_attention_that_is_known_to_attend_to_them() -> None:
    model = NETWORKS["capped"]()(FAMILIES["llama"].config_cls(**FAMILIES["llama"].smoke), Ops())
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn \(CappedAttention\) has a forward pass"):
        add_prefixes(model, 2)


@pytest.mark.parametrize("method", ["hidden_states", "decode"])
def test_prefixes_need_a_model_that_begins_after_them(method: str) -> None:
    spec = FAMILIES["llama"]
    kind = type("Other", (spec.factory(),), {method: lambda self, *given, **named: None})
    with pytest.raises(UserError, match=rf"prefix: Other has its own `{method}`, which need not begin after a prefix"):
        add_prefixes(kind(spec.config_cls(**spec.smoke), Ops()), 2)


def test_an_embedding_that_ranks_share_out_is_paddles() -> None:
    class Doubled(nn.Embedding):
        def forward(self, ids: Any) -> Any:
            return 2.0 * super().forward(ids)

    check_embedding("model.embed_tokens", nn.Embedding(4, 2), "tp")
    with pytest.raises(UserError, match=r"tp: model\.embed_tokens \(Doubled\) has a forward pass of its own"):
        check_embedding("model.embed_tokens", Doubled(4, 2), "tp")


def test_parts_of_ranks_are_added_up_in_front_of_what_needs_the_whole() -> None:
    layers = tiny("llama").model.layers
    layers[1].mlp = Other(64, 128, Ops())
    name = "model.layers.{}.mlp"
    assert _modules_to_sum(name.format(0), layers[0].mlp, PLAN) == [layers[0].mlp]
    assert _modules_to_sum(name.format(1), layers[1].mlp, PLAN) == [layers[1].mlp.down_proj]
    layers[1].mlp.down_proj = Scaled(128, 64)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp \(Other\) has a forward pass of its own"):
        _modules_to_sum(name.format(1), layers[1].mlp, PLAN)


def test_a_loss_in_chunks_trains_what_an_authors_logits_are_made_with() -> None:
    class Scaling(FAMILIES["llama"].factory()):  # type: ignore[misc]
        def __init__(self, config: Any, ops: Any):
            super().__init__(config, ops)
            self.factor = self.create_parameter([1], default_initializer=nn.initializer.Constant(2.0))
            self.unused = self.create_parameter([1], default_initializer=nn.initializer.Constant(2.0))

        def logits(self, hidden: Any) -> Any:
            return super().logits(hidden) * self.factor

    spec = FAMILIES["llama"]
    random = np.random.default_rng(0)
    model = Scaling(spec.config_cls(**spec.smoke), Ops())
    model.lm_head.weight.set_value(random.normal(size=model.lm_head.weight.shape).astype("float32"))
    hidden = paddle.to_tensor(random.normal(size=[10, 64]).astype("float32"), stop_gradient=False)
    targets = paddle.to_tensor(random.integers(0, 512, [10]))
    model.token_nll(hidden, targets).sum().backward()
    expected = model.factor.grad.numpy()
    model.clear_gradients()
    ChunkedLosses(model, 4, ALONE, []).token_nll(hidden, targets).sum().backward()
    assert np.allclose(model.factor.grad.numpy(), expected, rtol=1e-5)
    assert not model.unused.grad.numpy().any()
