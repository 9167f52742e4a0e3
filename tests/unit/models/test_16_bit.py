"""A 16-bit model without autocast: everything between layers has 16 bits, and what has to be float32 says so itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.adapters.add import add_adapters
from llmsuite.adapters.layers.reft import add_interventions
from llmsuite.adapters.methods import adapter_config
from llmsuite.models.block_quant import CODES, BlockFormat, is_quantised_part
from llmsuite.models.blocks import keeps_state
from llmsuite.models.experts import GroupedLinear
from llmsuite.models.initial_values import initial_values
from llmsuite.models.moe import Gate
from llmsuite.models.qat import FakeQuantLinear, fake_quantize_layers
from llmsuite.models.quantised import quantise_matrices
from llmsuite.models.token_context import tokens
from llmsuite.parallel.materialize import materialize
from tests.standin.passes import dtypes
from tests.support import alone
from tests.support.families import FAMILIES, tiny
from tests.support.low_precision import emulate

IDS = np.array([[1, 7, 11, 3, 2, 6], [4, 4, 9, 0, 5, 8]])
STARTS = np.array([[0, 0, 0, 3, 3, 3], [0, 0, 0, 0, 4, 4]])
"""Two documents in each row."""
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("qwen", {}),
    ("mixtral", {}),
    ("qwen_moe", {}),
    ("qwen_hybrid", {}),
    ("qwen_hybrid_moe", {}),
    ("ernie", {}),
    ("gemma", {}),
    ("gemma", {"model_type": "gemma2", "rope_local_base_freq": None, "attn_logit_softcapping": 50.0}),
    ("phi", {"partial_rotary_factor": 0.75}),
    ("granite", {}),
    ("smollm3", {}),
    ("hunyuan", {}),
    ("glm_moe", {}),
    ("olmo", {}),
    ("glm", {}),
    ("cohere", {}),
    ("starcoder", {}),
    ("internlm", {"qkv_bias": True, "bias": True}),
    ("ministral", {}),
    ("granite_moe", {}),
    ("minimax", {}),
    ("gpt_oss", {}),
    ("ernie_moe", {}),
    ("deepseek", {}),
    ("gpt", {}),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("autocast decides by itself what is 16 bit")

    monkeypatch.setattr(paddle.amp, "auto_cast", never)
    emulate(monkeypatch)


def _fill(model: Any, family: str, dtype: str) -> Any:
    plan = FAMILIES[family].shard_plan
    assert plan is not None

    def read(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if is_quantised_part(name):
            return np.ones(shape, "uint8" if name.endswith(CODES) else "float32")[tuple(index)]
        return (initial_values(0, name, list(shape), 0.15) + (len(shape) == 1))[tuple(index)]

    materialize(model, plan, alone.MESH, read, dtype)
    model.train()
    return model


def _loss(model: Any) -> Any:
    hidden, _ = model.hidden_states(paddle.to_tensor(IDS), document_starts=paddle.to_tensor(STARTS))
    return model.token_nll(hidden.flatten(0, 1), paddle.to_tensor(np.roll(IDS, -1, 1).flatten()))


def _check(model: Any, dtype: str) -> None:
    found = dtypes(model)
    gates = {name for name, module in model.named_sublayers() if isinstance(module, Gate)}
    nll = _loss(model)
    assert nll.dtype == paddle.float32
    layers = [name for name, module in model.named_sublayers() if keeps_state(module)]
    states = {name: {dtype, "float32"} for layer in layers for name in (layer, f"{layer}.self_attn")}
    others = {name: kinds for name, kinds in found.items() if kinds != {dtype}}
    assert others == {**{name: {"float32"} for name in gates}, **states}
    assert len(found) > 10
    nll.mean().backward()
    trained = {name: p for name, p in model.named_parameters() if not p.stop_gradient}
    assert trained
    assert {name for name, p in trained.items() if p.grad is None or p.grad.dtype != p.dtype} == set()


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_all_between_modules_has_16_bits(family: str, shape: dict[str, Any]) -> None:
    _check(_fill(tiny(family, **shape), family, "bfloat16"), "bfloat16")


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_float16_too(family: str) -> None:
    _check(_fill(tiny(family), family, "float16"), "float16")


@pytest.mark.parametrize("family", ["llama", "qwen", "gpt"])
def test_its_loss_is_that_of_float32_but_for_rounding(family: str) -> None:
    """A rounding to bfloat16 is off by 2^-9 of the value at most, and a logit is some twenty of them deep, whose errors
    add up to twenty times that if all have one sign. With experts a token may be routed to another one."""
    low, wide = (_loss(_fill(tiny(family), family, dtype)).numpy() for dtype in ("bfloat16", "float32"))
    error = np.abs(low - wide).mean() / wide.mean()
    assert 0 < error < 20 * 2**-9


@pytest.mark.parametrize("method", ["lora", "mixer", "dora", "vera", "mora", "lokr", "pissa"])
def test_adapters_keep_the_dtype(method: str) -> None:
    model = tiny("llama")
    config = adapter_config("lora", "pissa", rank=2) if method == "pissa" else adapter_config(method, rank=2)
    add_adapters(model, ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"], config)
    _check(_fill(model, "llama", "bfloat16"), "bfloat16")


@pytest.mark.parametrize(("family", "module"), [("llama", "model.embed_tokens"), ("deepseek", "up_proj")])
def test_adapters_of_embeddings_and_experts_keep_it_too(family: str, module: str) -> None:
    model = tiny(family)
    names = [name for name, found in model.named_sublayers() if name == module or type(found) is GroupedLinear]
    add_adapters(model, names, adapter_config(rank=2))
    _check(_fill(model, family, "bfloat16"), "bfloat16")


@pytest.mark.parametrize("family", ["llama", "qwen_moe"])
def test_quantised_matrices_give_it(family: str) -> None:
    model = tiny(family)
    modules = [name for name, found in model.named_sublayers() if name.endswith("_proj")]
    with paddle.LazyGuard():
        add_adapters(model, modules, adapter_config(rank=2))
        quantise_matrices(model, modules, BlockFormat("nf4", 8))
    _check(_fill(model, family, "bfloat16"), "bfloat16")


def test_interventions_keep_the_dtype() -> None:
    model = tiny("llama")
    add_interventions(model, (0, 1), 2, (1, 1))
    _fill(model, "llama", "bfloat16")
    with tokens(paddle.ones(IDS.shape, "int32")):
        _check(model, "bfloat16")


def test_fake_quantised_layers_keep_the_dtype() -> None:
    model = _fill(tiny("llama"), "llama", "bfloat16")
    fake_quantize_layers(model, ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"], True)
    for module in model.sublayers():
        if isinstance(module, FakeQuantLinear):
            module.input_scale = 0.05
    _check(model, "bfloat16")


def test_what_is_alike_on_a_device_is_refused_here() -> None:
    """The stand-in notices what it is for."""
    low = paddle.ones([2, 2], "bfloat16")
    wide = paddle.ones([2, 2])
    with pytest.raises(AssertionError, match="matmul of"):
        paddle.matmul(low, wide)
    assert (low + wide).dtype == paddle.float32
    assert (low + low).dtype == paddle.matmul(low, low).dtype == paddle.bfloat16
    model = _fill(tiny("llama"), "llama", "bfloat16")
    norm = model.model.layers[1].input_layernorm
    norm.norm = lambda x, weight, eps: x.astype("float32") * weight.astype("float32")
    with pytest.raises(AssertionError, match=r"(matmul|linear) of"):
        _loss(model)
