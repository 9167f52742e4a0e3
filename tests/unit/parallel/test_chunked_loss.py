"""Losses in chunks of tokens are those of all tokens at once, and have their gradients and less memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import core

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.models.divergence import Comparison
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from llmsuite.parallel.chunked_loss import DIVERGENCES, LOSSES, ChunkedLosses
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning import head
from llmsuite.planning.activations import ActivationSettings, MicroBatch, norm_kept
from llmsuite.planning.communication import Traffic
from llmsuite.planning.estimate import shape_spec_of
from llmsuite.planning.layout import Layout
from tests.support.allocated import allocated, run_plan
from tests.support.families import FAMILIES

NUM_TOKENS = 23
CHUNK = 5


def model_of(family: str, tied: bool, precision: str | None, trains_head: bool = True) -> Any:
    """A model with the same weights each time."""
    paddle.seed(3)
    spec = FAMILIES[family]
    ops = Ops() if precision is None else CpuBackend().ops(precision)
    model = spec.factory()(spec.config_cls(**{**spec.smoke, "tie_word_embeddings": tied}), ops)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.set_value(paddle.randn(parameter.shape) * 0.05)
        parameter.stop_gradient = not trains_head
    if precision is not None:
        use_linear_ops(model, LinearOps(ops))
    model.train()
    return model


def in_chunks(model: Any, chunk: int) -> ChunkedLosses:
    return ChunkedLosses(model, chunk, Mesh(Degrees(1, 1, 1, 1), 0), [])


def passed(model: Any, method: str, chunk: int | None) -> list[np.ndarray]:
    """Outputs of a loss, in chunks or at once, and the gradients of what it takes and of the head."""
    random = np.random.default_rng(1)
    hidden = paddle.to_tensor(random.normal(size=[NUM_TOKENS, model.config.hidden_size]).astype("float32"))
    hidden.stop_gradient = False
    targets = paddle.to_tensor(random.integers(0, model.config.vocab_size, NUM_TOKENS))
    losses = model if chunk is None else in_chunks(model, chunk)
    found = getattr(losses, method)(hidden * 1, targets)
    outputs = found if isinstance(found, tuple) else (found,)
    weights = [paddle.to_tensor(random.normal(size=NUM_TOKENS).astype("float32")) for _ in outputs]
    used = len(outputs) if method == "token_nll_and_entropy" else 1
    sum((output * weight).sum() for output, weight in list(zip(outputs, weights))[:used]).backward()  # type: ignore[union-attr]
    matrix = model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
    gradients = [hidden.grad, *([] if matrix.stop_gradient else [matrix.grad])]
    return [tensor.numpy() for tensor in (*outputs, *gradients)]


@pytest.mark.parametrize("method", LOSSES)
@pytest.mark.parametrize("trains_head", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("family", "tied", "precision"),
    [("llama", False, None), ("llama", True, None), ("llama", True, "fp32"), ("llama", False, "bf16"),
     ("gpt", True, None), ("deepseek", False, "bf16")],
)  # fmt: skip
def test_chunks_change_nothing(family: str, tied: bool, precision: str | None, trains_head: bool, method: str) -> None:
    whole = passed(model_of(family, tied, precision, trains_head), method, None)
    for chunk in (CHUNK, NUM_TOKENS - 1, NUM_TOKENS, 100):
        found = passed(model_of(family, tied, precision, trains_head), method, chunk)
        # the factor of a gradient is rounded before or after the product
        limit = 1e-5 if precision != "bf16" else 2.0**-7
        for one, other in zip(found, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=limit * float(np.abs(other).max()))


@pytest.mark.parametrize("method", DIVERGENCES)
@pytest.mark.parametrize("trains_head", [True, False], ids=["trained", "frozen"])
def test_chunks_of_a_divergence_change_nothing(trains_head: bool, method: str) -> None:
    teacher = model_of("gpt", True, None)
    comparison = Comparison(teacher, 0.3, 1.5)

    def compared(chunk: int | None) -> list[np.ndarray]:
        model = model_of("llama", False, None, trains_head)
        random = np.random.default_rng(1)
        hidden, taught = (
            paddle.to_tensor(random.normal(size=[NUM_TOKENS, each.config.hidden_size]).astype("float32"))
            for each in (model, teacher)
        )
        hidden.stop_gradient = False
        targets = paddle.to_tensor(random.integers(0, model.config.vocab_size, NUM_TOKENS))
        losses = model if chunk is None else in_chunks(model, chunk)
        if method == "token_divergence":
            outputs = [losses.token_divergence(hidden * 1, taught, comparison)]
        else:
            outputs = list(losses.token_divergence_and_nll(hidden * 1, taught, targets, comparison))
        weights = [paddle.to_tensor(random.normal(size=NUM_TOKENS).astype("float32")) for _ in outputs]
        paddle.add_n([(output * weight).sum() for output, weight in zip(outputs, weights)]).backward()
        gradients = [hidden.grad, *([model.lm_head.weight.grad] if trains_head else [])]
        return [tensor.numpy() for tensor in (*outputs, *gradients)]

    whole = compared(None)
    for chunk in (CHUNK, NUM_TOKENS):
        for one, other in zip(compared(chunk), whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(np.abs(other).max()))
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("trains_head", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("precision", [None, "fp32", "bf16"])
def test_chunks_take_the_memory_that_is_planned(precision: str | None, trains_head: bool) -> None:
    """By the count of the allocator: what is kept, and the most that a backward pass takes besides."""
    model = model_of("llama", False, precision, trains_head)
    losses = in_chunks(model, CHUNK)
    hidden = paddle.randn([NUM_TOKENS, model.config.hidden_size])
    hidden.stop_gradient = False
    targets = paddle.to_tensor([1] * NUM_TOKENS)
    wanted = paddle.ones([NUM_TOKENS])
    kept = allocated(lambda: losses.token_nll(hidden * 1, paddle.to_tensor([1] * NUM_TOKENS)))
    nll = losses.token_nll(hidden * 1, targets)
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    paddle.autograd.backward([nll], [wanted])
    most = core.host_memory_stat_peak_value("Allocated", 0) - before
    spec = FAMILIES["llama"]
    fused = CpuBackend().fused(precision) if precision else frozenset[str]()
    assert spec.shape_spec is not None
    shape_spec = spec.shape_spec(model.config)
    batch = MicroBatch(1, NUM_TOKENS, NUM_TOKENS)
    how = ActivationSettings(num_bytes=4, fused=fused, fused_outside=fused, loss_chunk=CHUNK)
    planned = head.head_kept_bytes(shape_spec, batch, how, scores=False) - norm_kept(
        shape_spec.norm, shape_spec.hidden, batch, how
    )
    assert 0 <= planned - kept <= (0 if trains_head else 8 * NUM_TOKENS)  # a frozen head needs no targets any more
    if precision is not None:  # what products take while they run depends on the processor
        return
    gradient = 4 * shape_spec.hidden * shape_spec.vocabulary
    besides = head.temporaries(shape_spec, batch, how, gradient) if trains_head else 0
    assert 0 <= most - besides <= 4 * NUM_TOKENS * (shape_spec.hidden + 2)  # and the gradient of the hidden states


@pytest.mark.parametrize(("supervised", "chunks"), [(0, [0]), (CHUNK, [CHUNK]), (2 * CHUNK + 1, [CHUNK, CHUNK, 1])])
@pytest.mark.parametrize("given", ["null", str(CHUNK)])
def test_messages_of_each_chunk_are_planned(given: str, supervised: int, chunks: list[int]) -> None:
    """Also where a micro-batch has no token to learn."""
    words = (
        "--launch.num_devices=2",
        '--parallel={"tensor_parallel_degree": 2}',
        f"--engine.loss_chunk_tokens={given}",
    )
    plan = run_plan("recipes/llama/sft.json", *words, smoke=True)
    batch = MicroBatch(2, 16, supervised)
    mesh = Mesh(plan.parallel.degrees, 0)
    layout = Layout(plan.model, plan.parallel)
    counts = Traffic(layout, plan.train, shape_spec_of(plan.model), mesh, [batch], [], False).counts
    sent = {message.shape[0] for message in counts if "cross-entropy" in message.why}
    assert sent == ({supervised} if given == "null" else {*chunks})
