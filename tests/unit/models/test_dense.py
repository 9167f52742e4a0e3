"""Dense decoders from a description: which layers they get, and what each switch computes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices import masks, ops
from llmsuite.devices.ops import Ops
from llmsuite.inference.fusible import attentions, is_gated_mlp
from llmsuite.inference.plain_decoder import unsupported_reason
from llmsuite.models.blocks import Attention, DecoderLayer, GatedMLP, RMSNorm
from llmsuite.models.decoder_config import DenseConfig
from llmsuite.models.dense import DenseLM, OffsetRMSNorm
from llmsuite.models.dense_names import NAMES
from llmsuite.models.shape_spec import GatedMLP as GatedMLPSpec
from tests.support.families import FAMILIES, load, tiny
from tests.support.paths import REFERENCE

CAPPED = {
    "model_type": "gemma2",
    "rope_local_base_freq": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


@pytest.mark.parametrize("family", ["llama", "qwen", "ernie", "seed_oss", "phi", "internlm"])
def test_a_plain_description_has_plain_layers(family: str) -> None:
    model = tiny(family)
    assert FAMILIES[family].shape_spec(model.config).is_plain  # type: ignore[misc]
    for layer in model.model.layers:
        assert (type(layer), type(layer.self_attn), type(layer.mlp)) == (DecoderLayer, Attention, GatedMLP)
    assert type(model.model.norm) is RMSNorm


@pytest.mark.parametrize(
    ("family", "shape"),
    [("gemma", {}), ("gemma", CAPPED), ("granite", {}), ("smollm3", {}), ("olmo", {}), ("glm", {}), ("cohere", {})],
)
def test_no_fused_form_is_taken_for_other_layers(family: str, shape: dict[str, Any]) -> None:
    model = tiny(family, **shape)
    assert not FAMILIES[family].shape_spec(model.config).is_plain  # type: ignore[misc]
    assert attentions(model) == []
    assert unsupported_reason(model) is not None
    assert any(is_gated_mlp(layer.mlp) for layer in model.model.layers) == (family != "gemma")


def test_scores_that_are_capped_or_have_sinks_take_plain_masks() -> None:
    """Kernels of attention have masks of their own form, which the plain form cannot add to scores."""

    def of_a_kernel(*arguments: Any) -> None:
        return None

    given = Ops(causal_mask=of_a_kernel, document_mask=of_a_kernel)  # type: ignore[arg-type]
    cases = (("gemma", {}, of_a_kernel), ("gemma", CAPPED, masks.causal_mask), ("gpt_oss", {}, masks.causal_mask))
    for name, shape, expected in cases:
        family = FAMILIES[name]
        with paddle.LazyGuard():
            model = family.factory()(family.config_cls(**{**family.smoke, **shape}), given)
        assert model.ops.causal_mask is expected


@pytest.mark.parametrize(
    "case",
    [
        *("gemma/gemma2", "gemma/gemma3", "smollm3/tied", "granite/tied", "glm/partial", "phi/window_tied"),
        *("cohere/tied", "starcoder/window_without_biases", "ministral/grown_window_tied"),
        *("gpt_oss/oss_yarn", "gpt_oss/full_tied"),
    ],
)
def test_documents_in_a_row_are_as_if_they_were_alone(case: str) -> None:
    """Each kind of attention has its own rotation, window and mask."""
    model = load(REFERENCE / case)
    ids = np.random.default_rng(0).integers(0, 60, [1, 16])
    starts = np.array([[0] * 9 + [9] * 7])
    with paddle.no_grad():
        together, _ = model.hidden_states(paddle.to_tensor(ids), document_starts=paddle.to_tensor(starts))
        alone = [model.hidden_states(paddle.to_tensor(part))[0].numpy() for part in (ids[:, :9], ids[:, 9:])]
    np.testing.assert_allclose(together.numpy(), np.concatenate(alone, 1), atol=2e-5)


def test_queries_grow_with_their_position_in_their_document() -> None:
    model = tiny("ministral")
    starts = paddle.to_tensor([[0] * 20 + [20] * 20])
    inputs = model.layer_inputs(0, 40, "float32", starts)
    factors = np.tile(1 + 0.1 * np.log(1 + np.arange(20) // 16), 2).reshape(1, 40, 1, 1)
    assert factors.max() > 1.06
    for of_keys, of_queries in zip(inputs[:2], inputs[3:], strict=True):
        np.testing.assert_allclose(of_queries.numpy(), of_keys.numpy() * factors, rtol=1e-6)


@pytest.mark.parametrize("heads_first", [False, True])
def test_scores_are_capped_before_the_mask(heads_first: bool) -> None:
    generator = np.random.default_rng(0)
    q, k, v = (generator.normal(size=[2, 5, heads, 8]).astype("float32") for heads in (4, 2, 2))
    mask = masks.causal_mask(5, 5, "float32")
    given = [paddle.to_tensor(x) for x in (q, k, v)]
    if heads_first:
        given[1:] = [x.transpose([0, 2, 1, 3]) for x in given[1:]]
    found = ops.scored_attention(2, 0.5, heads_first, *given, mask).numpy()
    k, v = (x.repeat(2, 2) for x in (k, v))
    scores = 0.5 * np.tanh(np.einsum("blhk,bshk->bhls", q, k) / 8**0.5 / 0.5) + mask.numpy()
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("bhls,bshk->blhk", weights, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_sink_is_one_more_term_of_the_denominator(heads_first: bool) -> None:
    generator = np.random.default_rng(0)
    q, k, v = (generator.normal(size=[2, 5, heads, 8]).astype("float32") for heads in (4, 2, 2))
    sinks = generator.normal(size=4).astype("float32")
    mask = masks.causal_mask(5, 5, "float32", 3)
    given = [paddle.to_tensor(x) for x in (q, k, v)]
    if heads_first:
        given[1:] = [x.transpose([0, 2, 1, 3]) for x in given[1:]]
    found = ops.scored_attention(2, None, heads_first, *given, mask, paddle.to_tensor(sinks)).numpy()
    k, v = (x.repeat(2, 2) for x in (k, v))
    weights = np.exp(np.einsum("blhk,bshk->bhls", q, k) / 8**0.5 + mask.numpy())
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks).reshape(1, 4, 1, 1)
    np.testing.assert_allclose(found, np.einsum("bhls,bshk->blhk", weights, v), rtol=1e-5, atol=1e-6)


def test_a_gain_of_one_and_a_weight_keeps_its_digits_in_16_bits() -> None:
    norm = OffsetRMSNorm(4, 1e-6, Ops())
    norm.weight.set_value(paddle.full([4], 1e-3))
    x = paddle.to_tensor([[1.0, -1.0, 1.0, -1.0]])
    np.testing.assert_allclose(norm(x).numpy(), x.numpy() * 1.001, rtol=1e-5)
    assert norm(x.astype("bfloat16")).dtype == paddle.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(DenseConfig):
    """A description that needs another network than it names."""

    def shape_spec(self) -> Any:
        mlp = GatedMLPSpec(width=self.intermediate_size)
        return self.decoder(self.layer(self.grouped_query(), mlp), logit_scale=2.0)


def test_a_description_that_the_network_lacks_is_no_silent_one() -> None:
    sizes: dict[str, Any] = {**FAMILIES["llama"].smoke, "num_hidden_layers": 1}
    with pytest.raises(AssertionError, match=r"Scaled.network has to be ScaledLM"):
        DenseLM(Scaled(**sizes), Ops())


def test_joined_matrices_are_parts_of_one() -> None:
    config = FAMILIES["glm"].config_cls(**FAMILIES["glm"].smoke)
    gate, up = (NAMES.hf_tensors(f"model.layers.3.mlp.{part}_proj.weight", config) for part in ("gate", "up"))
    assert gate.names == up.names == ("model.layers.3.mlp.gate_up_proj.weight",)
    width = config.intermediate_size
    assert (gate.columns, up.columns) == (slice(0, width), slice(width, 2 * width))


def test_parts_of_a_joined_matrix_have_sizes_of_their_own() -> None:
    config = FAMILIES["phi"].config_cls(**FAMILIES["phi"].smoke)
    queries, rest = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    q, k, v = (NAMES.hf_tensors(f"model.layers.0.self_attn.{part}_proj.weight", config) for part in "qkv")
    assert q.names == k.names == v.names == ("model.layers.0.self_attn.qkv_proj.weight",)
    starts = [0, queries, queries + rest, queries + 2 * rest]
    assert [part.columns for part in (q, k, v)] == [slice(a, b) for a, b in itertools.pairwise(starts)]
