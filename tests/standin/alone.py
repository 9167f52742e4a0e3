"""Checks on one process that stands in for a GPU: each ends with an error where a cast or a layout is missing.

    python -m tests.tools.launched 1 LOGS tests.standin.alone FILE [NUMBER...]

runs the checks of these removals (else of all), then takes each away, and leaves what came of it in FILE, as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.adapters.layers.reft import orthonormal
from llmsuite.models import qat
from llmsuite.models.dropout import TokenDropout
from llmsuite.models.qat import FakeQuantLinear, fake_quantized, observing
from llmsuite.models.token_context import tokens
from tests.standin import numbers, passes
from tests.standin.numbers import BF16, near, random, wide
from tests.standin.passes import STARTS, built, check, nll, plan
from tests.standin.removals import tell
from tests.standin.table import ALONE


def main(file: str, *chosen: str) -> int:
    """What the process does."""
    passes.registry().devices[passes.DEVICE].factory().activate(0)
    tell(Path(file), CHECKS, ALONE, chosen)
    return 0


def llama() -> None:
    """Rows of one document, and of several."""
    check("llama/sft", "--parallel={}")
    check("llama/sft", "--parallel={}", starts=STARTS)


def qwen() -> None:
    """Norms of heads."""
    check("qwen/sft", "--parallel={}", starts=STARTS)


def qwen_moe() -> None:
    """Gate and experts."""
    check("qwen_moe/sft", "--parallel={}")


def deepseek() -> None:
    """Its own attention, with a plain mask, and the balance of experts, which padding is none of."""
    part = check("deepseek/sft", "--parallel={}", starts=STARTS)
    assert part.model is not None


def deepseek_in_one_document() -> None:
    check("deepseek/sft", "--parallel={}")


def tied() -> None:
    check("llama/sft", "--parallel={}", "--model.config.tie_word_embeddings=true")


def _adapted(recipe: str, *words: str, precision: str = "bf16") -> None:
    check(recipe, "--parallel={}", *words, precision=precision)


def dora() -> None:
    _adapted("llama/lora", "--lora.method=dora")


def dora_of_embeddings() -> None:
    _adapted("llama/lora", "--lora.method=dora", '--lora.target_modules=["embed_tokens"]')


def dora_of_experts() -> None:
    _adapted("deepseek/lora", "--lora.method=dora", '--lora.target_modules=["experts.*"]')


def _small_weights(recipe: str, *words: str) -> None:
    """In fp16, the squares of small weights are zeros, and their lengths are not."""
    part = built(plan(recipe, "--parallel={}", *words, precision="fp16")).part
    with paddle.no_grad():
        for name, parameter in part.named_parameters():
            if any(kind in name for kind in ("proj.weight", "experts", "embed", "lora_magnitude")):
                parameter.scale_(2.0**-12)
        found, _ = part.hidden_states(paddle.to_tensor(passes.IDS))  # Paddle's loss of NaN is a number on CPUs
    assert bool(paddle.isfinite(found).all()), "a length is zero"
    assert any("magnitude" in name for name, _ in part.named_parameters())


def dora_of_small_weights() -> None:
    _small_weights("llama/lora", "--lora.method=dora")


def dora_of_small_embeddings() -> None:
    _small_weights("llama/lora", "--lora.method=dora", '--lora.target_modules=["embed_tokens"]')


def dora_of_small_experts() -> None:
    _small_weights("deepseek/lora", "--lora.method=dora", '--lora.target_modules=["experts.*"]')


def dropout() -> None:
    run = plan("llama/lora", "--parallel={}", "--lora.dropout=0.5")
    part = built(run).part
    part.step = 1
    found = passes.dtypes(part.model)
    nll(part).mean().backward()
    assert all(given == {"bfloat16"} for given in found.values() if given), found
    x = random(2, 8, 16)
    x.stop_gradient = False
    layer = TokenDropout(0.5, "any", 0, 16)
    with tokens(paddle.ones([2, 8], "int32")):
        y = layer(x)
    seen: list[Any] = []
    x.register_hook(lambda gradient: seen.append(gradient.dtype))
    y.backward(paddle.ones_like(y))
    assert seen == [paddle.bfloat16], seen


def interventions() -> None:
    part = built(plan("llama/reft", "--parallel={}")).part
    found = passes.dtypes(part.model)
    part.prompt_lengths = np.full(passes.IDS.shape, 6)
    with tokens(paddle.ones(passes.IDS.shape, "int32")):
        nll(part).mean().backward()
    assert all(given == {"bfloat16"} for given in found.values() if given), found

    basis = orthonormal(random(64, 4))
    assert basis.dtype == paddle.float32, basis.dtype
    near(paddle.matmul(basis, basis, transpose_x=True) + 1.0, np.eye(4) + 1.0, 1e-5)


def prefix() -> None:
    part = built(plan("llama/prefix", "--parallel={}")).part
    found = passes.dtypes(part.model)
    nll(part).mean().backward()
    assert all(given == {"bfloat16"} for given in found.values() if given), found


def qlora() -> None:
    check("llama/qlora", "--parallel={}")


def qlora_of_experts() -> None:
    check("deepseek/lora", "--parallel={}", "--lora.base_dtype=nf4")


def observed() -> None:
    """The largest inputs are kept in float32."""
    part = built(plan("gpt/gpt-345m-pretrain-qat", "--parallel={}")).part
    layers = [layer for _, layer in fake_quantized(part.model)]
    with observing(layers), paddle.no_grad():
        nll(part)
    assert layers
    assert all(layer.largest is None or layer.largest.dtype == paddle.float32 for layer in layers)


def fake_quantised() -> None:
    part = check("gpt/gpt-345m-pretrain-qat", "--parallel={}")
    layers = [module for module in part.model.sublayers() if isinstance(module, FakeQuantLinear)]
    assert layers
    for layer in layers:
        layer.input_scale = 0.05
    found = passes.dtypes(part.model)
    nll(part).mean().backward()
    assert all(given == {"bfloat16"} for given in found.values() if given), found
    x = random(4, 8)
    weight = random(8, 6, seed=1)
    near(qat.weight_scale(weight), np.abs(wide(weight)).max(0) / 127, 1e-6, paddle.float32)
    s = np.float32(0.0123)
    near(qat.fake_quantize(x, float(s)), np.clip(np.round(wide(x) / s), -127, 127) * s, BF16, paddle.bfloat16)


CHECKS: dict[str, Callable[[], None]] = numbers.CHECKS | {
    check.__name__: check
    for check in (
        llama, qwen, qwen_moe, deepseek, deepseek_in_one_document, tied, dora, dora_of_embeddings, dora_of_experts,
        dora_of_small_weights, dora_of_small_embeddings, dora_of_small_experts,
        dropout, interventions, prefix, qlora, qlora_of_experts, observed, fake_quantised,
    )
}  # fmt: skip
