"""Keys and values in bfloat16: half of the bytes, rounded once, and all that is computed with them is float32."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.cli.model import open_generator
from llmsuite.contract.registry import Registry
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.fused import FusedAttention, fuse
from llmsuite.inference.load import load_model, open_any
from llmsuite.inference.pack_model import PackedLinear
from llmsuite.inference.prefix_cache import PrefixCache
from llmsuite.inference.sampling import Sampling
from llmsuite.models.blocks import Attention
from tests.support.families import FAMILIES, load, reference
from tests.support.packed_models import COVERED, stored
from tests.support.paths import REFERENCE
from tests.support.written_family import write_family

HALF_STEP = 2.0**-8
"""Largest relative error of a number that is rounded to bfloat16, which has 8 bits."""
BF16 = "bfloat16"


def _passes(model: Any, ids: np.ndarray, prompt_len: int = 3) -> tuple[np.ndarray, Any]:
    """Logits of each of the last tokens, each from a pass of its own; and the cache."""
    decoder = ModelDecoder(model)
    padding = np.zeros(len(ids), "int64")
    logits, cache = decoder.forward(ids[:, :prompt_len], padding, None)
    found = [logits]
    for i in range(prompt_len, ids.shape[1]):
        logits, cache = decoder.forward(ids[:, i : i + 1], padding, cache)
        found.append(logits)
    return np.stack(found, 1), cache


@pytest.mark.parametrize("case", COVERED)
def test_the_kernel_keeps_and_reads_what_the_layers_do(case: str) -> None:
    """Float32 differs by the order of sums, so that few keys and values are rounded to another side; each moves what
    rounding moves by a small part."""
    ids, _ = reference(case)
    wide, _ = _passes(stored(REFERENCE / case, "bf16"), ids)
    by_kernel, cache = _passes(stored(REFERENCE / case, "bf16", cache_dtype=BF16), ids)
    layers = load_model(open_any(REFERENCE / case, FAMILIES), CpuBackend(), packed="bf16")
    fuse(layers, None, BF16)
    by_layers, _ = _passes(layers, ids)
    rounding = np.abs(by_layers - wide).max()
    assert rounding > 1e-5, "the cache is rounded"
    assert np.abs(by_kernel - by_layers).max() <= rounding / 4
    assert {tensor.dtype for tensor in cache} == {paddle.bfloat16}


@pytest.mark.parametrize("case", ["llama/grouped_query", "qwen/qwen3"])
def test_attention_is_off_by_what_rounding_explains(case: str) -> None:
    """With keys and values that are off by r = 2**-8 of themselves at most, a score is off by d = r sum |q k| / sqrt(K)
    at most, a weight of the softmax by e^(2 d) - 1 of itself, and the output by the sum of weight |v| times
    (e^(2 d) - 1) (1 + r) + r."""
    model = load(REFERENCE / case)
    attention = next(module for module in model.sublayers() if isinstance(module, Attention))
    core = attention.core
    seen = []

    def noted(q: Any, k: Any, v: Any, mask: Any) -> Any:
        out = core(q, k, v, mask)
        seen.append([tensor.numpy().astype("float64") for tensor in (q, k, v, mask, out)])
        return out

    x = paddle.to_tensor(np.random.default_rng(0).standard_normal([2, 9, model.config.hidden_size]).astype("float32"))
    positions = paddle.arange(9).expand([2, 9])
    hidden = paddle.to_tensor(np.triu(np.full([9, 9], -1e9, "float32"), 1)).expand([2, 1, 9, 9])
    fuse(model)
    attention.core = noted  # which `fuse` would leave alone
    inputs = model.input_form.layer_inputs_at(model, positions, hidden, x.dtype)
    with paddle.no_grad():
        for dtype in (None, BF16):
            _, (keys, _) = FusedAttention(attention, dtype)(x, *inputs)
    assert keys.dtype == paddle.bfloat16
    (q, k, v, mask, exact), (_, _, _, _, rounded) = seen
    group = q.shape[2] // k.shape[1]
    k, v = (np.repeat(part, group, 1) for part in (k, v))
    scores = np.einsum("blhk,bhsk->bhls", q, k) * q.shape[3] ** -0.5 + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    far = HALF_STEP * np.einsum("blhk,bhsk->bhls", np.abs(q), np.abs(k)) * q.shape[3] ** -0.5
    far = np.where(weights > 0, far, 0).max(-1)
    amount = np.einsum("bhls,bhsk->bhlk", weights, np.abs(v))
    bound = amount * ((np.expm1(2 * far) * (1 + HALF_STEP) + HALF_STEP)[..., None])
    off = np.abs(rounded - exact).transpose([0, 2, 1, 3])
    assert (off <= bound + 1e-6).all()
    assert off.max() > 1e-4


@pytest.mark.parametrize("num_tokens", [4, 100])
def test_lines_are_the_same_with_beginnings_that_are_known(num_tokens: int) -> None:
    """Lines that come and go, of which some begin alike. With blocks of 4 tokens known ones are used, with 100 none."""
    model = stored(REFERENCE / "qwen/qwen3", "bf16", cache_dtype=BF16)
    start = [3, 7, 1, 9, 4, 4, 8, 2]
    draw = np.random.default_rng(0)
    prompts = [[*start, *(int(token) for token in draw.integers(0, 32, 1 + i))] for i in range(5)]
    prefixes = PrefixCache(1 << 20, num_tokens)
    batch = Batch(ModelDecoder(model), prefix_cache=prefixes)
    sequences = [DecodingSequence(prompt, Sampling(max_new_tokens=6 + i), set()) for i, prompt in enumerate(prompts)]
    batch.advance(sequences[:2])
    batch.advance()
    batch.advance(sequences[2:])
    while batch.sequences:
        batch.advance()
    assert any(line.num_cached_tokens for line in sequences) == (num_tokens == 4)
    for prompt, line in zip(prompts, sequences):
        alone = DecodingSequence(prompt, line.sampling, set())
        by_itself = Batch(ModelDecoder(model))
        by_itself.advance([alone])
        while by_itself.sequences:
            by_itself.advance()
        assert line.ids == alone.ids
    if num_tokens == 4:
        of_block = 2 * 4 * model.config.num_key_value_heads * model.config.head_size * model.config.num_hidden_layers
        assert prefixes.num_bytes % (2 * of_block) == 0
        assert 0 < prefixes.num_bytes < 20 * 2 * of_block


@pytest.mark.parametrize(
    ("words", "of_cache", "of_matrices"),
    [
        ({"precision": "bf16"}, paddle.bfloat16, "stored"),
        ({"precision": "int8"}, paddle.float32, "stored"),
        ({"precision": "bf16", "refreshable": True}, paddle.float32, "stored"),
        ({"precision": "fp32", "refreshable": True}, paddle.float32, "float32"),
    ],
    ids=str,
)
def test_the_commands_have_it(
    words: dict[str, Any], of_cache: Any, of_matrices: str, registry: Registry, tmp_path: Path
) -> None:
    """`generate` and `serve` in bf16; `serve --rl` in bf16 computes as a model is trained, whose keys are float32."""
    more = dict.fromkeys(("base", "config", "tokenizer", "tensor_parallel_degree"))
    more |= {"allow_pickle": False, "engine": "dynamic", "pipeline_parallel_degree": 1}
    args = argparse.Namespace(
        model=str(write_family(tmp_path / "model", "llama")), device="cpu", num_devices=1,
        precision=words["precision"], **more,
    )  # fmt: skip
    model = open_generator(args, registry, refreshable=words.get("refreshable", False)).model
    _, cache = ModelDecoder(model).forward(np.array([[7, 300, 12]]), np.zeros(1, "int64"), None)
    assert {tensor.dtype for tensor in cache} == {of_cache}
    layer = model.model.layers[0].mlp.down_proj
    assert of_matrices == ("stored" if isinstance(layer, PackedLinear) else "float32")
