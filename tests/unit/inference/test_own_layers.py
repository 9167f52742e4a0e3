"""Layers of third parties that derive from llmsuite's keep their code wherever a faster form takes a layer's place."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.cli.main import main
from llmsuite.devices.cpu import CpuBackend
from llmsuite.errors import UserError
from llmsuite.inference import export as exporting
from llmsuite.inference import fused, refresh
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.forms import Rows, as_decoded, as_program, as_trained, first_apart, side
from llmsuite.inference.fused import (
    FusedAttention,
    FusedLayer,
    FusedMLP,
    accepts_buffer,
    fold_gains,
    fuse,
    layer_by_layer,
)
from llmsuite.inference.load import AS_TRAINED, build_model, parameter_shapes
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.inference.static_experts import make_static
from llmsuite.models.blocks import Attention, DecoderLayer, GatedMLP, RMSNorm
from llmsuite.models.deepseek.layers import Attention as LatentAttention
from llmsuite.rl.rollouts import DrawnApart
from llmsuite.specs import ModelFamily
from llmsuite.testing.family_forms import write_random_model
from llmsuite.train.forms_apart import forms_apart
from llmsuite.train.initial_values import initial_values
from llmsuite.train.rollouts import RolloutReader
from tests.paths import ROOT
from tests.tools import own_layers
from tests.tools.own_layers import FAMILIES as OWN
from tests.unit.families import FAMILIES

BACKEND = CpuBackend()
ROWS = Rows.random(512, 10)


def config_of(family: ModelFamily, **shape: Any) -> Any:
    return family.config_cls(**{**family.smoke, **shape})


def built(family: ModelFamily, stored: str | None = None, **shape: Any) -> Any:
    """A model for generation, with random values."""
    config = config_of(family, **shape)
    return build_model(family, config, BACKEND, "fp32", None, lambda model: _values(family, config), stored=stored)


def _values(family: ModelFamily, config: Any) -> Any:
    shapes = parameter_shapes(family, config)
    return lambda name, shape, index: initial_values(3, name, shapes[name], 0.15, index) + (len(shapes[name]) == 1)


def trained(family: ModelFamily, **shape: Any) -> Any:
    """The same with the operations of training."""
    config = config_of(family, **shape)
    model, read = family.factory()(config, BACKEND.ops("fp32")), _values(family, config)
    for name, parameter in model.named_parameters():
        parameter.set_value(read(name, parameter.shape, [slice(0, n) for n in parameter.shape]))
    model.train()
    return model


def decoded(model: Any) -> Any:
    return side([as_decoded(model, ModelDecoder(model).forward, ROWS)])


def as_a_program(model: Any) -> Any:
    fuse(model)
    shapes = exporting.cache_shapes(model)
    make_static(model)
    fold_gains(model)
    exporting._skip_transcription(model, BACKEND.kernel_module)
    step = exporting.DecodeStep(model)
    step.eval()
    return side([as_program(model, step, ROWS, shapes, "float32")])


@pytest.mark.parametrize("name", OWN)
def test_every_form_is_the_network_that_is_trained(name: str) -> None:
    family = OWN[name]
    model = trained(family)
    expected = side([as_trained(model, ROWS)])
    assert len(expected.outputs) > 20
    for live in None, BACKEND.ops("fp32"):
        form = built(family)
        fuse(form, live)
        assert first_apart(expected, decoded(form), form) is None
    form = built(family, AS_TRAINED)
    refreshable = RefreshableModel(form, BACKEND.ops("fp32"))
    refreshable.release()
    refreshable.refresh(model.named_parameters())
    assert first_apart(expected, decoded(form), form) is None
    form = built(family)
    assert first_apart(expected, as_a_program(form), form) is None


@pytest.mark.parametrize(
    ("name", "predicate", "base", "culprit"),
    [
        ("geglu", "is_gated_mlp", GatedMLP, "model.layers.0.mlp (GeGLU)"),
        ("own_swiglu", "is_gated_mlp", GatedMLP, "model.layers.0.mlp (GatedMLP)"),
    ],
)
def test_a_form_that_takes_anothers_place_is_named(
    name: str, predicate: str, base: type, culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was once: by what a layer derives from."""
    for module in fused, refresh:
        monkeypatch.setattr(module, predicate, lambda module: isinstance(module, base))
    expected = side([as_trained(trained(OWN[name]), ROWS)])
    form = built(OWN[name])
    fuse(form)
    assert first_apart(expected, decoded(form), form) == culprit
    form = built(OWN[name])
    assert first_apart(expected, as_a_program(form), form) == culprit
    said = forms_apart(OWN[name], config_of(OWN[name]), BACKEND, "fp32")
    assert said == f"first module that differs: {culprit}"


def test_norms_and_attentions_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = side([as_trained(trained(OWN["capped"]), ROWS)])
    monkeypatch.setattr(fused, "attentions", lambda model: [layer.self_attn for layer in model.model.layers])
    form = built(OWN["capped"])
    fuse(form)
    assert first_apart(expected, decoded(form), form) == "model.layers.0.self_attn (CappedAttention)"
    expected = side([as_trained(trained(OWN["gemma_norm"]), ROWS)])
    monkeypatch.undo()
    monkeypatch.setattr(fused, "is_rms_norm", lambda module: isinstance(module, RMSNorm))
    form = built(OWN["gemma_norm"])
    assert first_apart(expected, as_a_program(form), form) == "model.layers.0.input_layernorm (GemmaNorm)"


def _form(module: Any) -> type | None:
    return type(getattr(vars(module).get("forward"), "__self__", None))


@pytest.mark.parametrize("name", ["llama", "qwen", "ernie"])
def test_built_in_families_are_fused(name: str) -> None:
    """Layer by layer, and by the kernel for the whole decoder: as fast as ever."""
    model = built(FAMILIES[name])
    fuse(model, BACKEND.ops("fp32"))
    assert accepts_buffer(model)
    assert {"next_logits", "prompt_pass"} <= vars(model).keys()
    for layer in model.model.layers:
        forms = [_form(module) for module in (layer, layer.self_attn, layer.mlp)]
        assert forms == [FusedLayer, FusedAttention, FusedMLP]
    norms = [module for module in model.sublayers() if isinstance(module, RMSNorm)]
    assert {norm.norm for norm in norms} == {fused._rms_norm}


@pytest.mark.parametrize("name", ["qwen_moe", "ernie_moe"])
def test_built_in_families_with_experts_are_fused(name: str) -> None:
    model = built(FAMILIES[name])
    fuse(model, BACKEND.ops("fp32"))
    assert accepts_buffer(model)
    assert {_form(layer.self_attn) for layer in model.model.layers} == {FusedAttention}
    assert {_form(module) for module in model.sublayers() if isinstance(module, GatedMLP)} == {FusedMLP}


def test_deepseek_keeps_its_matrices() -> None:
    model = built(FAMILIES["deepseek"])
    fuse(model, BACKEND.ops("fp32"))
    assert all(layer.self_attn.up_keys is not None for layer in model.model.layers)
    assert {_form(module) for module in model.sublayers() if isinstance(module, GatedMLP)} == {FusedMLP}


def test_latent_attention_that_is_changed_reads_whole_keys() -> None:
    """`_absorbed` is another form of `_whole`, which somebody has changed."""

    class Bounded(LatentAttention):
        def _whole(self, *parts: Any) -> Any:
            return paddle.tanh(super()._whole(*parts))

    spec = FAMILIES["deepseek"]

    def network() -> Any:
        def build(config: Any, ops: Any) -> Any:
            model = spec.factory()(config, ops)
            for layer in model.model.layers:
                layer.self_attn = Bounded(config, ops)
            return model

        return build

    family = dataclasses.replace(spec, factory=network)
    expected, form = side([as_trained(trained(family), ROWS)]), built(family)
    fuse(form)
    assert first_apart(expected, decoded(form), form) is None


def test_one_layer_of_another_kind_leaves_all_attentions_as_they_are() -> None:
    """What they take is made for all of them together."""

    class Other(nn.Layer):
        def __init__(self, own: Any):
            super().__init__()
            self.own = own

        def forward(self, x: Any, cos: Any, sin: Any, mask: Any, past: Any = None) -> Any:
            out, cache = self.own(x, cos, sin, mask, past)
            return out * cos.mean(), cache

    model = built(FAMILIES["llama"])
    model.model.layers[1].self_attn = Other(model.model.layers[1].self_attn)
    before = decoded(model)
    fuse(model, BACKEND.ops("fp32"))
    assert not accepts_buffer(model)
    assert first_apart(before, decoded(model), model) is None


def test_gains_that_norms_share_are_folded_once() -> None:
    model = built(FAMILIES["llama"])
    layer = model.model.layers[0]
    layer.input_layernorm.weight = layer.post_attention_layernorm.weight
    before, gain = decoded(model), layer.input_layernorm.weight.numpy()
    assert first_apart(before, as_a_program(model), model) is None
    assert np.array_equal(layer.input_layernorm.weight.numpy(), gain), "others may read it"


# stored matrices


@pytest.mark.parametrize("name", ["geglu", "capped", "gemma_norm", "own_swiglu", "own_logits", "no_rotation"])
def test_matrices_are_stored_and_the_code_is_kept(name: str) -> None:
    family = OWN[name]
    expected = decoded(built(family))
    form = built(family, "int8")
    fuse(form, BACKEND.ops("fp32"))
    layer_by_layer(form)
    assert first_apart(expected, decoded(form), form, tolerance=0.1) is None


class Direct(GatedMLP):
    """Multiplies with the matrix itself."""

    def forward(self, x: Any) -> Any:
        inner = paddle.matmul(x, self.gate_proj.weight) * self.up_proj(x)
        return self.down_proj(inner)


class Doubled(nn.Embedding):
    """An embedding with code of its own."""

    def forward(self, ids: Any) -> Any:
        return 2.0 * super().forward(ids)


def _with(change: Any) -> ModelFamily:
    spec = FAMILIES["llama"]

    def build(config: Any, ops: Any) -> Any:
        model = spec.factory()(config, ops)
        change(model, config, ops)
        return model

    return dataclasses.replace(spec, factory=lambda: build)  # type: ignore[arg-type, return-value]


def test_a_matrix_that_the_authors_code_reads_is_refused_by_name() -> None:
    def change(model: Any, config: Any, ops: Any) -> None:
        model.model.layers[1].mlp = Direct(config.hidden_size, config.intermediate_size, ops)

    family = _with(change)
    assert first_apart(side([as_trained(trained(family), ROWS)]), decoded(built(family)), built(family)) is None
    form = built(family, "int8")
    fuse(form)
    with pytest.raises(UserError, match=r"reads the matrix of model\.layers\.1\.mlp\.gate_proj itself"):
        decoded(form)


def test_an_embedding_with_code_of_its_own_is_kept() -> None:
    def change(model: Any, config: Any, ops: Any) -> None:
        model.model.embed_tokens = Doubled(config.vocab_size, config.hidden_size)

    family = _with(change)
    for tied in False, True:
        expected, form = decoded(built(family, tie_word_embeddings=tied)), None
        form = built(family, "int8", tie_word_embeddings=tied)
        assert type(form.model.embed_tokens) is Doubled
        fuse(form, BACKEND.ops("fp32"))
        assert first_apart(expected, decoded(form), form, tolerance=0.1) is None


# what generation calls in the place of what training calls


def test_a_model_that_is_changed_for_training_alone_is_refused() -> None:
    class Scaled(FAMILIES["llama"].factory()):  # type: ignore[misc]
        def embed(self, *inputs: Any, **named: Any) -> Any:
            return 2.0 * super().embed(*inputs, **named)

    family = dataclasses.replace(FAMILIES["llama"], factory=lambda: Scaled)
    with pytest.raises(UserError, match="Scaled: defines embed, which training calls, and not embed_at"):
        built(family)


def test_hooks_that_are_hung_on_a_fused_layer_see_it() -> None:
    model, seen = built(FAMILIES["llama"]), []
    fuse(model)
    for name, module in model.named_sublayers():
        if isinstance(module, (Attention, GatedMLP, RMSNorm, DecoderLayer)):
            module.register_forward_post_hook(lambda module, inputs, output, name=name: seen.append(name))
    ModelDecoder(model).forward(ROWS.ids, ROWS.padding, None)
    inside = ("", ".input_layernorm", ".self_attn", ".post_attention_layernorm", ".mlp")
    names = [f"model.layers.{i}{part}" for i in range(len(model.model.layers)) for part in inside]
    assert set(seen) == {*names, "model.norm"}


def test_verify_names_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family, plugin = OWN["geglu"], ["--plugin", str(Path(own_layers.__file__))]
    write_random_model(tmp_path / "model", family, config_of(family), ROOT / "data" / "tokenizer")
    assert main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "right"), *plugin]) == 0
    assert main(["verify", str(tmp_path / "right"), *plugin]) == 0
    monkeypatch.setattr(fused, "is_gated_mlp", lambda module: isinstance(module, GatedMLP))
    assert main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "wrong"), *plugin]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "wrong"), *plugin]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"FAILED: exported logits are off by [\d.e+]+% of the largest \(fp32 tolerance 0\.001%\); "
        r"first module that differs: model\.layers\.0\.mlp \(GeGLU\)",
        said,
    ), said
    monkeypatch.undo()
    assert main(["verify", str(tmp_path / "wrong"), *plugin]) == 2
    assert "every module of a program for one device, made now, agrees: export it again" in capsys.readouterr().err


def test_a_run_that_stops_for_what_was_drawn_names_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in fused, refresh:
        monkeypatch.setattr(module, "is_gated_mlp", lambda module: isinstance(module, GatedMLP))

    class Apart:
        def after_step(self, step: int, metrics: Any) -> None:
            raise DrawnApart("step 1: apart")

    reader = RolloutReader.__new__(RolloutReader)
    told = {
        "family": OWN["geglu"],
        "model_config": config_of(OWN["geglu"]),
        "device": SimpleNamespace(factory=CpuBackend),
    }
    recipe = SimpleNamespace(engine=SimpleNamespace(precision="fp32"))
    for is_remote in False, True:
        engine = SimpleNamespace(remote=is_remote)
        vars(reader).update(_step=1, _plan=SimpleNamespace(recipe=recipe, rollout_engine=engine, **told))
        with pytest.raises(UserError) as caught:
            reader._after_step(Apart(), {})  # type: ignore[arg-type]
        named = "; first module that differs: model.layers.0.mlp (GeGLU)"
        assert str(caught.value) == "step 1: apart" + ("" if is_remote else named)
