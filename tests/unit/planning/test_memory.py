"""The memory of a plan equals that of the engine: the same parameters, the same shards, the same bytes kept."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.lora import LORA
from llmsuite.adapters.methods import adapter_config
from llmsuite.adapters.parameters import with_adapters
from llmsuite.cli.main import main
from llmsuite.contract.registry import load_plugins
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.gpu import GpuBackend
from llmsuite.devices.kernel_table import forms
from llmsuite.devices.ops import Ops
from llmsuite.devices.optimizer_ops import OptimizerOps
from llmsuite.devices.xpu import XpuBackend
from llmsuite.engine.build import build_model
from llmsuite.models.qat import fake_quantize_layers, fake_quantized
from llmsuite.models.targets import adaptable_modules, pick_modules
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline_split import keep_part, part_bounds, parts_with
from llmsuite.parallel.recompute import recompute_attention, recompute_layers
from llmsuite.parallel.sharding import ParameterShard, ShardOptions
from llmsuite.parallel.timeline import orders, peak_held
from llmsuite.planning import activations
from llmsuite.planning.activations import ActivationSettings, MicroBatch
from llmsuite.planning.layout import Layout, ModelParameters
from llmsuite.planning.memory import memory
from llmsuite.recipe.resolve import RunPlan
from tests.support.allocated import RECIPE, allocated, run_plan
from tests.support.families import CASES, FAMILIES, config_of, tiny

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen", {}),
    ("qwen", {"model_type": "qwen2"}),
    ("mixtral", {"sliding_window": 9}),
    ("qwen_moe", {}),
    ("qwen_moe", {"model_type": "qwen2_moe", "norm_topk_prob": False, "num_key_value_heads": 4}),
    ("qwen_hybrid", {}),
    ("qwen_hybrid", {"linear_num_key_heads": 4}),
    ("qwen_hybrid_moe", {}),
    ("ernie", {"use_bias": True}),
    ("gemma", {}),
    ("gemma", {"model_type": "gemma2", "rope_local_base_freq": None, "attn_logit_softcapping": 50.0}),
    ("phi", {"partial_rotary_factor": 0.75, "sliding_window": 9}),
    ("granite", {}),
    ("smollm3", {"no_rope_layer_interval": 3}),
    ("olmo", {}),
    ("seed_oss", {}),
    ("olmo", {"model_type": "olmo3", "sliding_window": 9}),
    ("hunyuan", {}),
    ("glm_moe", {"use_qk_norm": True}),
    ("glm", {}),
    ("cohere", {"attention_bias": True}),
    ("starcoder", {"sliding_window": 9}),
    ("internlm", {}),
    ("ministral", {}),
    ("granite_moe", {"attention_bias": True}),
    ("minimax", {}),
    ("gpt_oss", {}),
    ("ernie_moe", {}),
    ("ernie_moe", {"moe_num_shared_experts": 0, "num_key_value_heads": 4}),
    ("gpt", {}),
    ("deepseek", {}),
    ("deepseek", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    ("deepseek", {"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False}),
]
IDS = [f"{family}-{'-'.join(f'{k}={v}' for k, v in shape.items())}" for family, shape in SHAPES]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Collections pass over what the tests before have made: `allocated` collects twice a call."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def trained(family: str, shape: dict[str, Any], ops: Ops) -> Any:
    """A tiny model with memory, in training."""
    spec = FAMILIES[family]
    model = spec.factory()(spec.config_cls(**{**spec.smoke, **shape}), ops)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.set_value(paddle.randn(parameter.shape) * 0.05)
    model.train()
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_family_says_the_shapes_its_model_has(case: str) -> None:
    config = config_of(case)
    spec = FAMILIES[case.split("/")[0]]
    with paddle.LazyGuard():
        model = spec.factory()(config, Ops())
    assert list(spec.names().parameter_shapes(config).items()) == [
        (name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
    ]


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=IDS)
def test_adapters_are_where_the_model_has_them(family: str, shape: dict[str, Any]) -> None:
    model = tiny(family, **shape)
    cuts = FAMILIES[family].shard_plan
    shapes = FAMILIES[family].names().parameter_shapes(model.config)
    for patterns in (None, ["o_proj"], ["*_proj"]):
        expected = adapted_modules(model, cuts, patterns)
        assert pick_modules(adaptable_modules(shapes, cuts), cuts, patterns) == expected
    with paddle.LazyGuard():
        add_adapters(model, expected, adapter_config(rank=3))
    assert with_adapters(shapes, expected, 3, LORA) == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "words", "dtype"),
    [
        ("llama", ["--lora.base_dtype=nf4"], "uint8"),
        ("llama", ["--lora.base_dtype=int8"], "int8"),
        ("llama", ["--lora.base_dtype=llm_int8"], "int8"),
        ("deepseek", ["--lora.base_dtype=llm_int8"], "int8"),
        ("deepseek", ["--lora.base_dtype=nf4"], "uint8"),
        ("llama", ["--lora.base_dtype=nf4", "--lora.base_double_quant=true"], "uint8"),
        ("deepseek", ["--lora.base_dtype=fp4", "--lora.base_double_quant=true"], "uint8"),
        ("llama", ["--engine.precision=bf16"], "bfloat16"),
        ("deepseek", ["--engine.precision=bf16"], "bfloat16"),
        ("llama", ["--engine.precision=bf16", "--lora.method=dora"], "float32"),
        ("llama", ["--engine.precision=bf16", "--lora.init=pissa"], "float32"),
        ("llama", [], "float32"),
    ],
)
def test_a_frozen_base_is_planned_as_it_is_made(family: str, words: list[str], dtype: str) -> None:
    words = ["--launch.num_devices=1", "--parallel={}", *words]
    plan = run_plan(f"recipes/{family}/lora.json", *words, smoke=True)
    built = build_model(
        plan.model,
        plan.parallel,
        plan.train,
        load_plugins(),
        CpuBackend(),
        Mesh(plan.parallel.degrees, 0),
    )
    made = dict(built.part.named_parameters())
    dtypes = {name: str(p.dtype).rpartition(".")[2] for name, p in made.items()}
    sizes = {"uint8": 1, "int8": 1, "bfloat16": 2, "float32": 4}
    planned = Layout(plan.model, plan.parallel).parameters(Mesh(plan.parallel.degrees, 0))
    assert {h.name: (list(h.local_shape), h.num_bytes) for h in planned} == {
        name: (list(p.shape), sizes[dtypes[name]]) for name, p in made.items()
    }
    assert sum(h.num_values for h in planned) == Layout(plan.model, plan.parallel).num_parameters
    assert any(h.is_codes for h in planned) is ("int" in dtype)
    assert {dtypes[n] for n in made if n.endswith(("o_proj.weight", "o_proj.weight.codes"))} == {dtype}
    assert {dtypes[n] for n in made if "norm" in n or "embed" in n or "lora" in n} == {"float32"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_part_has_the_parameters_that_are_kept_for_it(family: str, tied: bool) -> None:
    cuts = FAMILIES[family].shard_plan
    assert cuts is not None
    bounds = part_bounds("layers", [1] * 4, 3)
    for part in range(3):
        model = tiny(family, tie_word_embeddings=tied)
        names = [name for name, _ in model.named_parameters()]
        keep_part(model, cuts, part, bounds, tied)
        expected = {name for name, _ in model.named_parameters()}
        assert {name for name in names if part in parts_with(name, cuts, bounds, tied)} == expected


def _layout(plan: RunPlan, shapes: dict[str, tuple[int, ...]]) -> Layout:
    return Layout(plan.model, plan.parallel, ModelParameters(plan.model, plan.parallel, shapes))


@given(
    st.integers(1, 40),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["fp32", "bf16"]),
    st.booleans(),
    st.booleans(),
)
def test_a_shard_has_the_planned_elements(
    size: int, stage: int, parts: int, precision: str, frozen: bool, keeps_master: bool
) -> None:
    name = "model.norm.weight"
    width = 4 if precision == "fp32" else 2
    layout = _layout(ONE_DEVICE[precision], {name: (size,)})
    layout.parallel_plan = dataclasses.replace(layout.parallel_plan, master_weights=keeps_master)
    layout.sharding = stage
    layout.trained = set() if frozen else {name}
    for rank in range(parts):
        mesh = Mesh(Degrees(1, 1, parts, 1), rank)
        (held,) = layout._make_parameters(mesh)
        parameter = paddle.create_parameter(
            [size], "float32" if width == 4 else "bfloat16", default_initializer=paddle.nn.initializer.Constant(0.0)
        )
        shard = ParameterShard(
            name, parameter, mesh, None, stage, ShardOptions(is_frozen=frozen, keeps_master=keeps_master)
        )
        local = shard._stored if held.is_stored_sharded else shard.parameter
        assert held.parameter_bytes == local.numel().item() * width
        if not frozen:
            copied = shard.main_param.numel().item() * (4 if shard.has_master else width)
            assert held.master_bytes == (copied if shard.shard_is_copy else 0)
        assert held.has_master == shard.has_master
        assert held.reduce_in_backward == shard.partition.reduce_in_backward
        assert held.num_owned == (
            0 if shard.is_empty else local.numel().item() if parts == 1 else shard.main_param.size
        )


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=IDS)
def test_a_layer_keeps_what_is_planned(family: str, shape: dict[str, Any], recompute: str, is_fused: bool) -> None:
    """By the count of the allocator, byte for byte."""
    backend = CpuBackend()
    model = trained(family, shape, backend.ops("fp32") if is_fused else Ops())
    spec = FAMILIES[family]
    assert spec.shard_plan is not None
    assert spec.shape_spec is not None
    if recompute == "full":
        recompute_layers(model, spec.shard_plan, 2)
    elif recompute == "selective":
        recompute_attention(model, spec.shard_plan)
    rows = 2
    length = 37
    x = paddle.randn([rows, length, model.config.hidden_size])
    x.stop_gradient = False
    inputs = model.layer_inputs(0, length, x.dtype)
    for number in (2, 3):
        layer = model.model.layers[number]
        found = allocated(lambda layer=layer: layer.forward_train(x, *inputs))
        fused = backend.fused("fp32") if is_fused else frozenset[str]()
        how = ActivationSettings(num_bytes=4, recompute=recompute, every=2, fused=fused, fused_outside=fused)
        planned = activations.kept_by_layer(
            spec.shape_spec(model.config), number, MicroBatch(rows, length, rows * length), how
        )
        assert found == planned, number


@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=IDS)
def test_a_rounded_layer_keeps_what_is_planned(family: str, shape: dict[str, Any], rounds_inputs: bool) -> None:
    """Quantisation-aware training keeps weights and inputs on the grid of int8, byte for byte."""
    model = trained(family, shape, Ops())
    spec = FAMILIES[family]
    assert spec.shard_plan is not None
    assert spec.shape_spec is not None
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    modules = adapted_modules(model, spec.shard_plan, None)
    fake_quantize_layers(model, modules, rounds_weight=True)
    for _, module in fake_quantized(model):
        module.input_scale = 0.01 if rounds_inputs else None
    rows = 2
    length = 37
    x = paddle.randn([rows, length, model.config.hidden_size])
    x.stop_gradient = False
    inputs = model.layer_inputs(0, length, x.dtype)
    for number in (0, 3):
        layer = model.model.layers[number]
        found = allocated(lambda layer=layer: layer.forward_train(x, *inputs))
        rounded = {module: sizes[f"{module}.weight"] for module in modules}
        how = ActivationSettings(num_bytes=4, rounded=rounded, rounds_inputs=rounds_inputs)  # type: ignore[arg-type]
        batch = MicroBatch(rows, length, rows * length)
        assert found == activations.kept_by_layer(spec.shape_spec(model.config), number, batch, how), number


def test_a_pass_holds_most_where_the_schedule_does() -> None:
    """Plan of a pipeline whose chunks keep differently much."""
    for actions in orders("interleaved", 2, 4, 2):
        alive = []
        most = 0.0
        for action in actions:
            if action.forward:
                alive.append((action.chunk, action.micro_batch))
            else:
                alive.remove((action.chunk, action.micro_batch))
            most = max(most, sum(3.0 if chunk else 5.0 for chunk, _ in alive))
        assert peak_held(actions, lambda action: 3.0 if action.chunk else 5.0) == most


@pytest.mark.parametrize("backend", [CpuBackend(), GpuBackend(), XpuBackend()], ids=["cpu", "gpu", "xpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fused_kernels_are_those_that_models_get(backend: Any, precision: str) -> None:
    plain = forms(Ops(), OptimizerOps())
    found = forms(backend.ops(precision), backend.optimizer_ops(precision))
    of_masks = {"causal_mask", "document_mask"}  # these go with the attention kernel
    assert backend.fused(precision) == {name for name in found if found[name] is not plain[name]} - of_masks


def test_more_devices_and_recompute_take_less() -> None:
    none = '{"tensor_parallel_degree": 2}'
    peaks = []
    for recompute, sharding in (
        ("none", "none"),
        ("full", "none"),
        ("full", "stage1"),
        ("full", "stage2"),
        ("full", "stage3"),
    ):
        parallel = f'--parallel={none[:-1]}, "sharding": "{sharding}"}}'
        plan = run_plan(RECIPE, parallel, f"--engine.recompute={recompute}")
        assert plan.model.family.shape_spec is not None
        shape_spec = plan.model.family.shape_spec(plan.model.config)
        (stage,) = memory(
            Layout(plan.model, plan.parallel), plan.train, 2048, shape_spec, [MicroBatch(1, 2048, 2048)] * 16
        )
        peaks.append(stage.peak)
    assert peaks == sorted(set(peaks), reverse=True)


# the command


def test_a_plan_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, "--memory", "80GiB"]) == 0
    assert "fits in 80 GiB" in capsys.readouterr().out
    assert main(["plan", RECIPE, "--memory", "16GiB"]) == 3
    assert "does not fit in 16 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "much"], "--memory: 'much' is no amount"),
        (["--memory", "0"], "--memory: is 0; it has to be above 0"),
        (["--devices", "0"], "--devices: is 0"),
        (["--devices", "7"], "launch.num_devices: 7 devices cannot hold"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_needs_no_paddle() -> None:
    code = "import sys; from llmsuite.cli.main import main; main(sys.argv[1:]); assert 'paddle' not in sys.modules"
    for recipe in ("recipes/deepseek/deepseek-v3-pretrain.json", "recipes/llama/dpo.json"):
        with contextlib.redirect_stdout(None):
            subprocess.run([sys.executable, "-c", code, "plan", recipe], check=True, stdout=subprocess.DEVNULL)


ONE_DEVICE = {
    precision: run_plan(RECIPE, "--parallel={}", "--launch.num_devices=1", f"--engine.precision={precision}")
    for precision in ("fp32", "bf16")
}
