"""Layers of third parties that derive from llmsuite's keep their code wherever a faster form takes a layer's place."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.contract.specs import ModelFamily
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.rollout_mismatch import find_rollout_mismatch
from llmsuite.engine.rollouts import RolloutDataLoader, RolloutEngine
from llmsuite.inference import export as exporting
from llmsuite.inference import fused, refresh
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.fused import (
    FusedAttention,
    FusedMLP,
    disable_decoder_kernels,
    fold_norm_weights,
    fuse,
)
from llmsuite.inference.fusible import call_layer
from llmsuite.inference.load import AS_TRAINED, build_model, parameter_shapes
from llmsuite.inference.parity import (
    TokenRows,
    first_difference,
    record_decoding,
    record_program,
    record_training,
    side,
)
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.inference.static_experts import make_static
from llmsuite.models.blocks import Attention, DecoderLayer, GatedMLP, RMSNorm
from llmsuite.models.initial_values import initial_values
from llmsuite.models.latent_attention import LatentAttention
from llmsuite.rl.rollouts import RolloutMismatch
from llmsuite.testing.family_forms import write_random_model
from tests.support import own_layers
from tests.support.families import FAMILIES
from tests.support.own_layers import FAMILIES as OWN
from tests.support.paths import ROOT

BACKEND = CpuBackend()
ROWS = TokenRows.random(512, 10)


def config_of(family: ModelFamily, **shape: Any) -> Any:
    return family.config_cls(**{**family.smoke, **shape})


def built(family: ModelFamily, stored: str | None = None, **shape: Any) -> Any:
    """A model for generation, with random values."""
    config = config_of(family, **shape)
    return build_model(family, config, BACKEND, "fp32", None, lambda model: _values(family, config), packed=stored)


def _values(family: ModelFamily, config: Any) -> Any:
    shapes = parameter_shapes(family, config)
    return lambda name, shape, index: initial_values(3, name, shapes[name], 0.15, index) + (len(shapes[name]) == 1)


def trained(family: ModelFamily, **shape: Any) -> Any:
    """The model with the operations of training."""
    config = config_of(family, **shape)
    model = family.factory()(config, BACKEND.ops("fp32"))
    read = _values(family, config)
    for name, parameter in model.named_parameters():
        parameter.set_value(read(name, parameter.shape, [slice(0, n) for n in parameter.shape]))
    model.train()
    return model


def decoded(model: Any) -> Any:
    return side([record_decoding(model, ModelDecoder(model).forward, ROWS)])


def as_a_program(model: Any) -> Any:
    fuse(model)
    shapes = exporting.cache_shapes(model)
    make_static(model)
    fold_norm_weights(model)
    exporting._skip_transcription(model, BACKEND.kernel_module)
    step = exporting.DecodeStep(model)
    step.eval()
    return side([record_program(model, step, ROWS, shapes, "float32")])


@pytest.mark.parametrize("name", OWN)
def test_every_form_is_the_network_that_is_trained(name: str) -> None:
    family = OWN[name]
    model = trained(family)
    expected = side([record_training(model, ROWS)])
    assert len(expected.outputs) > 20
    for live in None, BACKEND.ops("fp32"):
        form = built(family)
        fuse(form, live)
        assert first_difference(expected, decoded(form), form) is None
    form = built(family, AS_TRAINED)
    refreshable = RefreshableModel(form, BACKEND.ops("fp32"))
    refreshable.release()
    refreshable.refresh(model.named_parameters())
    assert first_difference(expected, decoded(form), form) is None
    form = built(family)
    assert first_difference(expected, as_a_program(form), form) is None


def test_a_kernel_that_takes_anothers_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is chosen by the class of a layer, without a check of the functions that it computes with."""
    for module in fused, refresh:
        monkeypatch.setattr(module, "is_gated_mlp", lambda module: isinstance(module, GatedMLP))
    family = OWN["own_swiglu"]
    culprit = "model.layers.0.mlp (GatedMLP)"
    expected = side([record_training(trained(family), ROWS)])
    form = built(family)
    fuse(form)
    assert first_difference(expected, decoded(form), form) == culprit
    form = built(family)
    assert first_difference(expected, as_a_program(form), form) == culprit
    message = find_rollout_mismatch(family, config_of(family), BACKEND, "fp32")
    assert message == f"first module that differs: {culprit}"


def test_norms_and_attentions_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = side([record_training(trained(OWN["no_rotation"]), ROWS)])
    monkeypatch.setattr(fused, "attentions", lambda model: [layer.self_attn for layer in model.model.layers])
    form = built(OWN["no_rotation"])
    fuse(form)
    assert first_difference(expected, decoded(form), form) == "model.layers.1.self_attn (Attention)"
    expected = side([record_training(trained(OWN["gemma_norm"]), ROWS)])
    monkeypatch.undo()
    monkeypatch.setattr(fused, "is_rms_norm", lambda module: isinstance(module, RMSNorm))
    form = built(OWN["gemma_norm"])
    assert first_difference(expected, as_a_program(form), form) == "model.layers.0.input_layernorm (GemmaNorm)"


def test_a_kernel_takes_the_place_of_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass gets what it asks its base class for, and goes on with that."""
    expected = side([record_training(trained(OWN["capped"]), ROWS)])
    monkeypatch.setattr(fused, "attentions", lambda model: [layer.self_attn for layer in model.model.layers])
    form = built(OWN["capped"])
    fuse(form)
    assert {type(layer.self_attn.kernel) for layer in form.model.layers} == {FusedAttention}
    assert first_difference(expected, decoded(form), form) is None


@pytest.mark.parametrize("name", ["llama", "qwen", "ernie"])
def test_built_in_families_are_fused(name: str) -> None:
    """Layer by layer, and by the kernel for the full decoder: as fast as ever."""
    model = built(FAMILIES[name])
    fuse(model, BACKEND.ops("fp32"))
    assert model.decoding.accepts_buffer
    assert model.decoding.next_logits is not None
    assert model.decoding.prefill is not None
    for layer in model.model.layers:
        assert layer.call is call_layer
        assert [type(module.kernel) for module in (layer.self_attn, layer.mlp)] == [FusedAttention, FusedMLP]
    norms = [module for module in model.sublayers() if isinstance(module, RMSNorm)]
    assert {norm.norm for norm in norms} == {fused._rms_norm}


@pytest.mark.parametrize("name", ["qwen_moe", "ernie_moe"])
def test_built_in_families_with_experts_are_fused(name: str) -> None:
    model = built(FAMILIES[name])
    fuse(model, BACKEND.ops("fp32"))
    assert model.decoding.accepts_buffer
    assert {type(layer.self_attn.kernel) for layer in model.model.layers} == {FusedAttention}
    assert {type(module.kernel) for module in model.sublayers() if isinstance(module, GatedMLP)} == {FusedMLP}


def test_deepseek_keeps_its_matrices() -> None:
    model = built(FAMILIES["deepseek"])
    fuse(model, BACKEND.ops("fp32"))
    assert all(layer.self_attn.up_keys is not None for layer in model.model.layers)
    assert {type(module.kernel) for module in model.sublayers() if isinstance(module, GatedMLP)} == {FusedMLP}


def test_latent_attention_that_is_changed_reads_whole_keys() -> None:
    """`_absorbed` is another form of `_expanded`, which the subclass overrides."""

    class Bounded(LatentAttention):
        def _expanded(self, *parts: Any) -> Any:
            return paddle.tanh(super()._expanded(*parts))

    spec = FAMILIES["deepseek"]

    def network() -> Any:
        def build(config: Any, ops: Any) -> Any:
            model = spec.factory()(config, ops)
            for layer in model.model.layers:
                layer.self_attn = Bounded(config.hidden_size, ops, config.shape_spec().layers[0].attention)
            return model

        return build

    family = dataclasses.replace(spec, factory=network)
    expected = side([record_training(trained(family), ROWS)])
    form = built(family)
    fuse(form)
    assert first_difference(expected, decoded(form), form) is None


def test_one_layer_of_another_kind_leaves_all_attentions_as_they_are() -> None:
    """Their inputs are made for all of them together."""

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
    assert not model.decoding.accepts_buffer
    assert first_difference(before, decoded(model), model) is None


def test_gains_that_norms_share_are_folded_once() -> None:
    model = built(FAMILIES["llama"])
    layer = model.model.layers[0]
    layer.input_layernorm.weight = layer.post_attention_layernorm.weight
    before = decoded(model)
    gain = layer.input_layernorm.weight.numpy()
    assert first_difference(before, as_a_program(model), model) is None
    assert np.array_equal(layer.input_layernorm.weight.numpy(), gain), "others may read it"


# stored matrices


@pytest.mark.parametrize("name", ["geglu", "capped", "gemma_norm", "own_swiglu", "own_logits", "no_rotation"])
def test_matrices_are_stored_and_the_code_is_kept(name: str) -> None:
    family = OWN[name]
    expected = decoded(built(family))
    form = built(family, "int8")
    fuse(form, BACKEND.ops("fp32"))
    disable_decoder_kernels(form)
    assert first_difference(expected, decoded(form), form, tolerance=0.1) is None


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
    assert (
        first_difference(side([record_training(trained(family), ROWS)]), decoded(built(family)), built(family)) is None
    )
    form = built(family, "int8")
    fuse(form)
    with pytest.raises(UserError, match=r"reads the matrix of model\.layers\.1\.mlp\.gate_proj itself"):
        decoded(form)


def test_an_embedding_with_code_of_its_own_is_kept() -> None:
    def change(model: Any, config: Any, ops: Any) -> None:
        model.model.embed_tokens = Doubled(config.vocab_size, config.hidden_size)

    family = _with(change)
    for tied in False, True:
        expected = decoded(built(family, tie_word_embeddings=tied))
        form = None
        form = built(family, "int8", tie_word_embeddings=tied)
        assert type(form.model.embed_tokens) is Doubled
        fuse(form, BACKEND.ops("fp32"))
        assert first_difference(expected, decoded(form), form, tolerance=0.1) is None


# what generation calls in the place of what training calls


def test_a_model_that_is_changed_for_training_alone_is_refused() -> None:
    class Scaled(FAMILIES["llama"].factory()):  # type: ignore[misc]
        def embed(self, *inputs: Any, **named: Any) -> Any:
            return 2.0 * super().embed(*inputs, **named)

    family = dataclasses.replace(FAMILIES["llama"], factory=lambda: Scaled)
    with pytest.raises(UserError, match="Scaled: defines embed, which training calls, and not embed_at"):
        built(family)


def test_hooks_that_are_hung_on_a_fused_layer_see_it() -> None:
    model = built(FAMILIES["llama"])
    seen = []
    fuse(model)
    for name, module in model.named_sublayers():
        if isinstance(module, (Attention, GatedMLP, RMSNorm, DecoderLayer)):
            module.register_forward_post_hook(lambda module, inputs, output, name=name: seen.append(name))
    ModelDecoder(model).forward(ROWS.ids, ROWS.padding, None)
    inside = ("", ".input_layernorm", ".self_attn", ".post_attention_layernorm", ".mlp")
    names = [f"model.layers.{i}{part}" for i in range(len(model.model.layers)) for part in inside]
    assert set(seen) == {*names, "model.norm"}


@pytest.mark.further
def test_verify_names_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family = OWN["own_swiglu"]
    plugin = ["--plugin", str(Path(own_layers.__file__))]
    write_random_model(tmp_path / "model", family, config_of(family), ROOT / "data" / "tokenizer")
    assert main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "right"), *plugin]) == 0
    assert main(["verify", str(tmp_path / "right"), *plugin]) == 0
    monkeypatch.setattr(fused, "is_gated_mlp", lambda module: isinstance(module, GatedMLP))
    assert main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "wrong"), *plugin]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "wrong"), *plugin]) == 2
    message = capsys.readouterr().err
    assert re.search(
        r"FAILED: exported logits are off by [\d.e+]+% of the largest \(fp32 tolerance 0\.003%\); "
        r"first module that differs: model\.layers\.0\.mlp \(GatedMLP\)",
        message,
    ), message
    monkeypatch.undo()
    assert main(["verify", str(tmp_path / "wrong"), *plugin]) == 2
    assert "all modules of a newly exported program for one device agree: export it again" in capsys.readouterr().err


def test_a_run_that_stops_for_a_rollout_mismatch_names_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in fused, refresh:
        monkeypatch.setattr(module, "is_gated_mlp", lambda module: isinstance(module, GatedMLP))

    class Apart:
        def after_step(self, step: int, metrics: Any) -> None:
            raise RolloutMismatch("step 1: apart")

    reader = RolloutDataLoader.__new__(RolloutDataLoader)
    family = OWN["own_swiglu"]
    find_mismatch = functools.partial(find_rollout_mismatch, family, config_of(family), CpuBackend(), "fp32")
    for is_remote in False, True:
        engine = RolloutEngine(None, None, list, is_remote, find_mismatch=None if is_remote else find_mismatch)
        vars(reader).update(_step=1, _engine=engine)
        with pytest.raises(UserError) as caught:
            reader._after_step(Apart(), {})  # type: ignore[arg-type]
        named = "; first module that differs: model.layers.0.mlp (GatedMLP)"
        assert str(caught.value) == "step 1: apart" + ("" if is_remote else named)
