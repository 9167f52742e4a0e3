"""The table by which Llama is cut: complete, without contradiction, and right about which shapes it cannot cut."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.ops import Ops
from llmsuite.models.dense import DenseLM
from llmsuite.models.dense_plan import PLAN
from llmsuite.models.families.llama import PRESETS, SMOKE, LlamaConfig
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from tests.support import tiny_llama

CONFIGS = {"untied": LlamaConfig(**SMOKE), "tied": tiny_llama.tied(), "own head size": tiny_llama.CONFIG}


@pytest.fixture(params=CONFIGS, scope="module")
def model(request: pytest.FixtureRequest) -> DenseLM:
    return DenseLM(CONFIGS[request.param], Ops())


def shapes_of(model: DenseLM) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def test_each_parameter_is_cut_by_one_pattern_or_whole_on_purpose(model: DenseLM) -> None:
    for name in shapes_of(model):
        matching = [pattern for pattern, _ in PLAN.shard_dims if fnmatch.fnmatchcase(name, pattern)]
        assert len(matching) == (0 if name.endswith("norm.weight") else 1), name
        assert (PLAN.dim(name) is None) == (not matching)


# modules and parameters of latent and linear attention, and of attention with sinks, in patterns
OTHER_ATTENTION = ("q_b_proj", "kv_b_proj", "in_*_proj", "[qkv]_conv", "A_log", "dt_bias", "out_proj", "sinks")


def is_of_other_attention(pattern: str) -> bool:
    return any(f".self_attn.{part}" in pattern for part in OTHER_ATTENTION)


def test_no_pattern_is_left_over(model: DenseLM) -> None:
    names = shapes_of(model)
    for pattern, _ in PLAN.shard_dims:
        tied_away = pattern == "lm_head.weight" and model.lm_head is None
        is_without = tied_away or pattern.endswith(".bias") or is_of_other_attention(pattern)
        assert bool(fnmatch.filter(names, pattern)) != is_without, pattern


def test_no_pattern_of_a_bias_is_left_over() -> None:
    names = shapes_of(DenseLM(LlamaConfig(**{**SMOKE, "attention_bias": True, "mlp_bias": True}), Ops()))
    found = {pattern for pattern, _ in PLAN.shard_dims if fnmatch.filter(names, pattern)}
    assert found == {pattern for pattern, _ in PLAN.shard_dims if not is_of_other_attention(pattern)}


def test_matrices_that_follow_each_other_are_cut_so_that_nothing_is_exchanged_between_them(model: DenseLM) -> None:
    for i in range(model.config.num_hidden_layers):
        layer = f"model.layers.{i}"
        # [inputs, outputs]: the outputs of the first are the inputs of the second
        for first, second in (("self_attn.v_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj")):
            assert (PLAN.dim(f"{layer}.{first}.weight"), PLAN.dim(f"{layer}.{second}.weight")) == (1, 0)
        for alike in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"):
            assert PLAN.dim(f"{layer}.{alike}.weight") == 1
    # the table has one row a token, the output projection one column
    assert PLAN.dim("model.embed_tokens.weight") == 0
    assert PLAN.dim("lm_head.weight") == 1


def test_modules_it_names_are_there(model: DenseLM) -> None:
    modules = dict(model.named_sublayers())
    regions = [name for name in modules if PLAN.is_tp_region(name)]
    assert len(regions) == 2 * model.config.num_hidden_layers
    for name in regions:  # each ends with one row-parallel matrix, whose partial sums are added up after it
        inside = [PLAN.dim(f"{name}.{key}") for key, _ in modules[name].named_parameters()]
        assert inside.count(0) == 1
        assert set(inside) == {0, 1}
    assert {PLAN.embedding, PLAN.last_norm, PLAN.layers} <= set(modules)
    assert not any(PLAN.is_tp_region(name) for name in (PLAN.embedding, PLAN.last_norm, "lm_head"))


def test_each_parameter_has_its_place_in_a_pipeline(model: DenseLM) -> None:
    for name in shapes_of(model):
        places = [module for module in (PLAN.layers, *PLAN.first, *PLAN.last) if name.startswith(f"{module}.")]
        assert len(places) == 1, name


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@settings(max_examples=60)
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from([1, 2, 3, 4, 8]))
def test_what_it_lets_pass_can_be_cut(heads: int, groups: int, vocabulary: int, width: int, tp: int) -> None:
    assume(heads % groups == 0)
    config = dataclasses.replace(
        tiny_llama.CONFIG,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        intermediate_size=width,
        num_hidden_layers=1,
    )
    odd = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": width,
    }
    expected = [f"is {tp}, which does not divide {key} = {size}" for key, size in odd.items() if size % tp]
    assert list(PLAN.problems(config, tp)) == expected
    if not expected:
        for name, value in tiny_llama.values(config).items():
            dim = PLAN.dim(name)
            assert dim is None or value.shape[dim] % tp == 0 or value.shape[dim] == vocabulary, name


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_cut_as_far_as_their_heads_go(preset: str) -> None:
    config: Any = LlamaConfig(**PRESETS[preset])
    assert list(PLAN.problems(config, 1)) == []
    assert (list(PLAN.problems(config, 2)) == []) == (config.num_key_value_heads % 2 == 0)
    assert list(PLAN.problems(config, 2 * config.num_attention_heads))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_of_all_ranks_tile_a_parameter(tp: int) -> None:
    config = dataclasses.replace(tiny_llama.CONFIG, num_key_value_heads=4, vocab_size=20)
    assert list(PLAN.problems(config, tp)) == []
    for name, value in tiny_llama.values(config).items():
        counts = np.zeros(value.shape, dtype=int)
        parts = []
        for rank in range(2 * tp):
            mesh = Mesh(Degrees(pp=1, dp=2, sharding=1, tp=tp), rank)
            index = local_slice(name, value.shape, PLAN, mesh)
            counts[tuple(index)] += 1
            if mesh.coordinate["dp"] == 0:
                parts.append(value[tuple(index)])
        dim = PLAN.dim(name)
        assert (counts == (2 * tp if dim is None else 2)).all(), name
        # joined in the order of the ranks they give the whole, and all are of one size
        assert len({part.shape for part in parts}) == 1
        assert np.array_equal(parts[0] if dim is None else np.concatenate(parts, dim), value), name


def test_a_family_without_a_table_stays_whole() -> None:
    assert UNSHARDED.dim("model.layers.0.mlp.up_proj.weight") is None
    assert not UNSHARDED.is_tp_region("model.layers.0.mlp")
    assert list(UNSHARDED.problems(object(), 1)) == []
    (problem,) = UNSHARDED.problems(object(), 2)
    assert problem.startswith("is 2; this family")
