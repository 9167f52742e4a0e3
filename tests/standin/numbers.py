"""Numbers that have to be float32, or have to have the dtype that they are given: checks of `alone`, each on what it is
about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices import ops
from llmsuite.devices.gpu import GpuBackend
from llmsuite.devices.masks import causal_mask, document_mask
from llmsuite.engine.full_weights import full_weights
from llmsuite.models.blocks import rotation, rotation_at
from llmsuite.models.moe import Gate
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossLedger, LossTerms
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.weight_gradients import CapturedWeightGradient
from llmsuite.stages.answers import log_ratios, logps_of_answers
from tests.standin import passes
from tests.standin.passes import STARTS, built, nll, plan

BF16 = 2.0**-8
"""Largest relative error of a number that is made a bfloat16: on the CPU Paddle 3.3.1 cuts its last bits off."""


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """bfloat16 numbers."""
    return paddle.to_tensor(scale * np.random.default_rng(seed).standard_normal(shape), dtype="float32").astype(
        "bfloat16"
    )


def wide(x: Tensor) -> np.ndarray:
    """In float64."""
    return np.asarray(x.astype("float32").numpy(), "float64")


def near(found: Tensor, expected: np.ndarray, limit: float, dtype: Any = None) -> None:
    """Each number is as close as its last rounding, of `limit`, lets it be."""
    assert dtype is None or found.dtype == dtype, f"{found.dtype}, not {dtype}"
    error = np.abs(wide(found) - expected) / (np.abs(expected) + 1e-6)
    assert error.max() <= limit, f"off by {error.max():.1e}"


# numbers that have to be float32


def of_tokens() -> None:
    """Log-probabilities and entropies are those of the logits, not roundings of them."""
    part = built(plan("llama/sft", "--parallel={}")).part
    with paddle.no_grad():
        hidden, _ = part.hidden_states(paddle.to_tensor(passes.IDS))
        flat = hidden.flatten(0, 1)
        targets = paddle.to_tensor(passes.TARGETS)
        logits = wide(part.model.logits(flat))
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = -logps[np.arange(len(logps)), passes.TARGETS]
        near(part.token_nll(flat, targets), expected, 1e-5, paddle.float32)
        near(part.model.token_nll_and_greedy_match(flat, targets)[0], expected, 1e-5, paddle.float32)
        found, entropies = part.token_nll_and_entropy(flat, targets)
    near(found, expected, 1e-5, paddle.float32)
    near(entropies, -(np.exp(logps) * logps).sum(-1), 1e-5, paddle.float32)


def scores() -> None:
    part = built(plan("llama/rm", "--parallel={}")).part
    with paddle.no_grad():
        hidden, _ = part.hidden_states(paddle.to_tensor(passes.IDS))
        assert part.scores(hidden[:, -1]).dtype == paddle.float32


def plain_norm() -> None:
    """The plain form, for distributed tensors in programs."""
    x = random(5, 64, scale=30.0)
    weight = random(64, seed=1)
    normed = wide(x) / np.sqrt(np.square(wide(x)).mean(-1, keepdims=True) + 1e-5)
    near(ops.rms_norm(x, weight, 1e-5), normed * wide(weight), 2 * BF16, paddle.bfloat16)
    half = (x * 100.0).astype("float16")  # whose squares fp16 has not
    assert bool(paddle.isfinite(ops.rms_norm(half, weight.astype("float16"), 1e-5)).all())


def masks() -> None:
    """What is added to scores has their dtype."""
    starts = paddle.to_tensor(STARTS)
    for dtype in (paddle.bfloat16, paddle.float16):
        for mask in (causal_mask(8, 8, dtype), document_mask(starts, dtype)):
            assert mask.dtype == dtype, mask.dtype
            assert bool(paddle.isfinite(mask).all())


def rotations() -> None:
    """Of rows that differ, and of a few positions, as generation asks for them."""
    table = GpuBackend().ops("bf16")
    x = random(2, 8, 2, 16)
    for cos, sin in (
        rotation([1.0] * 8, 1.0, 0, 8, x.dtype),
        rotation([1.0] * 8, 1.0, 0, 8, x.dtype, paddle.to_tensor(STARTS)),
        rotation_at([1.0] * 8, 1.0, paddle.to_tensor(STARTS), x.dtype),
    ):
        assert cos.dtype == sin.dtype == x.dtype
        first, second = np.split(wide(x), 2, -1)
        c = wide(cos)
        s = wide(sin)
        expected = np.concatenate([first * c - second * s, second * c + first * s], -1)
        assert np.abs(wide(table.rotary(x, cos, sin)) - expected).max() < 4 * BF16


def routing() -> None:
    """Weights of experts are those of the logits in float32, not roundings of them, by softmax and by sigmoid."""
    for recipe, is_softmax in (("qwen_moe/sft", True), ("deepseek/deepseek-v3-sft", False)):
        part = built(plan(recipe, "--parallel={}")).part
        gate = next(module for module in part.model.sublayers() if isinstance(module, Gate))
        x = random(1, 8, gate.weight.shape[0])
        with paddle.no_grad():
            weights, chosen = gate(x)
            logits = np.einsum("bld,de->ble", wide(x), wide(gate.weight))
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) if is_softmax else 1 / (1 + np.exp(-logits))
        expected = np.take_along_axis(scores, chosen.numpy(), -1)
        if gate.spec.normed:
            expected /= expected.sum(-1, keepdims=True)
        near(weights, expected * gate.spec.factor, 1e-5, paddle.float32)


# the optimizer


def _parameter() -> tuple[Any, Any]:
    run = plan("llama/sft", "--parallel={}", "--train.optimizer=sgd", "--train.max_grad_norm=null")
    return run, built(run)


def masters() -> None:
    """What an update changes is float32, and begins as the parameter; the parameter is its rounding."""
    run, model = _parameter()
    shards = model.shards
    assert all(s.has_master and s.main_param.dtype == paddle.float32 for s in shards)
    optimizer = Optimizer(shards, run.train.section, 10)
    for is_last in (False, True):  # micro-batches
        optimizer.begin_backward(is_last)
        nll(model.part).sum().backward()
    norm = optimizer.finish_gradients(16.0)
    assert all(gradient.dtype == paddle.float32 for _, gradient in optimizer.final_gradients())
    expected = np.sqrt(sum(np.square(wide(g)).sum() for _, g in optimizer.final_gradients()))
    assert abs(norm / expected - 1) < 1e-6, norm / expected - 1
    optimizer.step(1)
    for shard in shards:
        low = shard.parameter
        master = shard.main_param
        assert low.dtype == paddle.bfloat16, low.dtype
        assert master.dtype == paddle.float32
        assert np.array_equal(wide(low), wide(master.astype("bfloat16"))), shard.name
    assert any((s.main_param.numpy().view("uint32") & 0xFFFF).any() for s in shards)


def loaded_values() -> None:
    """Values of a file become those of parameter, master and stored form, each in its dtype."""
    _, model = _parameter()
    shard = model.shards[0]
    values = np.random.default_rng(0).standard_normal(shard.local_shape).astype("float32")
    shard.load(values)
    assert shard.parameter.dtype == paddle.bfloat16
    assert shard.main_param.dtype == paddle.float32
    near(shard.parameter, values.astype("float64"), BF16)
    assert np.array_equal(wide(shard.parameter), wide(shard.main_param))
    held = shard.stored_form(values)
    assert held.dtype == paddle.bfloat16, held.dtype
    shard.swap_stored(held)


def swapped() -> None:
    """Two values of a parameter are exchanged."""
    _, model = _parameter()
    shard = model.shards[0]
    old = wide(shard.copy_of_stored())
    other = random(*shard.local_shape)
    new = wide(other)
    shard.swap_stored(other)
    assert np.array_equal(wide(other), old)
    assert np.array_equal(wide(shard.parameter), new)


def weight_gradients() -> None:
    """The gradient of a matrix that is looked at, in float32."""
    layer = nn.Linear(64, 32, bias_attr=False)
    layer.weight._set_impl(random(64, 32))
    watching = CapturedWeightGradient(layer, [64, 32], [64, 32], None, Mesh(Degrees(1, 1, 1, 1), 0))
    x = random(1, 200, 64, seed=1)
    upstream = random(1, 200, 32, seed=2)
    layer(x).backward(upstream)
    near(watching.finish(), np.einsum("bni,bno->io", wide(x), wide(upstream)), 1e-2, paddle.float32)


def _merged(*words: str) -> None:
    """Adapters are merged in float32, and the sum is rounded once: as those of a model that has the same numbers in
    float32."""
    found: dict[str, dict[str, Tensor]] = {}
    for precision, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        run = plan("llama/lora", "--parallel={}", *words, precision=precision)
        model = built(run)
        with paddle.no_grad():
            for number, (name, parameter) in enumerate(model.part.named_parameters()):
                # magnitudes and the like are lengths
                value = random(*parameter.shape, seed=number, scale=0.1).abs() + 0.5 * (".lora_" not in name)
                parameter.set_value(value.astype(parameter.dtype))
        found[dtype] = dict(full_weights(run.model, model, dtype, Mesh(run.parallel.degrees, 0)))
    adapted = {name for name in found["float32"] if name.endswith("q_proj.weight")}
    assert adapted
    for name in adapted:
        near(found["bfloat16"][name], wide(found["float32"][name]), 1.01 * BF16, paddle.bfloat16)


def merged() -> None:
    _merged()


def merged_pissa() -> None:
    _merged("--lora.init=pissa")


def merged_mora() -> None:
    _merged("--lora.method=mora")


def merged_others() -> None:
    for method in ("dora", "mixer", "vera", "lokr"):
        _merged(f"--lora.method={method}")


def ledger() -> None:
    """Sums of many micro-batches in float64."""
    book = LossLedger()
    book.add(LossTerms(paddle.to_tensor(2.0**24), 1.0))
    book.book({"loss": (1.0, 1.0)})
    assert book.reduce()[1]["loss"] * 2 == 2.0**24 + 1
    assert collective.sum_over_run([paddle.to_tensor(0.5), 0.1, paddle.to_tensor(2.0)]) == [0.5, 0.1, 2.0]


def answers() -> None:
    """Log-probabilities of answers are sums in float64; what losses take of them is float32."""
    owners = np.repeat([0, 1], 500)
    of_tokens = np.random.default_rng(0).uniform(0, 20, 1000).astype("float32")
    logps = logps_of_answers(paddle.to_tensor(of_tokens), {"owners": owners})
    expected = -np.add.reduceat(of_tokens.astype("float64"), [0, 500])
    assert logps.dtype == paddle.float64
    assert np.abs(logps.numpy() / expected - 1).max() < 1e-14
    ratio = log_ratios(logps, {"reference": expected - 1e-3})
    assert ratio.dtype == paddle.float32
    assert np.abs(ratio.numpy() - 1e-3).max() < 1e-8


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        of_tokens,
        scores,
        plain_norm,
        masks,
        rotations,
        routing,
        masters,
        loaded_values,
        swapped,
        weight_gradients,
        merged,
        merged_pissa,
        merged_mora,
        merged_others,
        ledger,
        answers,
    )
}
