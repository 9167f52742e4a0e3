"""Losses in chunks of tokens are those of all tokens at once, and have their gradients and less memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import core

from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.models.products import Products, use_products
from llmsuite.parallel.chunked_loss import LOSSES, chunk_losses
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning import head
from llmsuite.planning.activations import ActivationSettings, MicroBatch, norm_kept
from llmsuite.planning.communication import Traffic
from llmsuite.planning.estimate import anatomy_of
from llmsuite.planning.layout import Layout
from llmsuite.schema.degrees import Degrees
from tests.unit.families import FAMILIES
from tests.unit.planning.test_memory import allocated, run_plan

NUM_TOKENS, CHUNK = 23, 5


def model_of(family: str, tied: bool, precision: str | None, chunk: int | None, trains_head: bool = True) -> Any:
    """The same weights each time."""
    paddle.seed(3)
    spec, ops = FAMILIES[family], Ops() if precision is None else CpuBackend().ops(precision)
    model = spec.factory()(spec.config_cls(**{**spec.smoke, "tie_word_embeddings": tied}), ops)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.set_value(paddle.randn(parameter.shape) * 0.05)
        parameter.stop_gradient = not trains_head
    if precision is not None:
        use_products(model, Products(ops))
    if chunk is not None:
        chunk_losses(model, chunk, Mesh(Degrees(1, 1, 1, 1), 0), [])
    model.train()
    return model


def passed(model: Any, method: str) -> list[np.ndarray]:
    """Outputs of a loss, and the gradients of what it takes and of the head."""
    random = np.random.default_rng(1)
    hidden = paddle.to_tensor(random.normal(size=[NUM_TOKENS, model.config.hidden_size]).astype("float32"))
    hidden.stop_gradient = False
    targets = paddle.to_tensor(random.integers(0, model.config.vocab_size, NUM_TOKENS))
    found = getattr(model, method)(hidden * 1, targets)
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
    whole = passed(model_of(family, tied, precision, None, trains_head), method)
    for chunk in (CHUNK, NUM_TOKENS - 1, NUM_TOKENS, 100):
        found = passed(model_of(family, tied, precision, chunk, trains_head), method)
        # what a gradient is multiplied by is rounded before it or behind it
        limit = 1e-5 if precision != "bf16" else 2.0**-7
        for one, other in zip(found, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=limit * float(np.abs(other).max()))


@pytest.mark.parametrize("trains_head", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("precision", [None, "fp32", "bf16"])
def test_chunks_take_the_memory_that_is_planned(precision: str | None, trains_head: bool) -> None:
    """By the count of the allocator: what is kept, and the most that a backward pass takes besides."""
    model = model_of("llama", False, precision, CHUNK, trains_head)
    hidden = paddle.randn([NUM_TOKENS, model.config.hidden_size])
    hidden.stop_gradient = False
    targets = paddle.to_tensor([1] * NUM_TOKENS)
    wanted = paddle.ones([NUM_TOKENS])
    kept = allocated(lambda: model.token_nll(hidden * 1, paddle.to_tensor([1] * NUM_TOKENS)))
    nll = model.token_nll(hidden * 1, targets)
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    paddle.autograd.backward([nll], [wanted])
    most = core.host_memory_stat_peak_value("Allocated", 0) - before
    spec, fused = FAMILIES["llama"], CpuBackend().fused(precision) if precision else frozenset[str]()
    assert spec.anatomy is not None
    anatomy, batch = spec.anatomy(model.config), MicroBatch(1, NUM_TOKENS, NUM_TOKENS)
    how = ActivationSettings(num_bytes=4, fused=fused, fused_outside=fused, loss_chunk=CHUNK)
    planned = head.kept_behind(anatomy, batch, how, scores=False) - norm_kept(anatomy.norm, anatomy.hidden, batch, how)
    assert 0 <= planned - kept <= (0 if trains_head else 8 * NUM_TOKENS)  # a frozen head needs no targets any more
    if precision is not None:  # what products take while they run depends on the processor
        return
    gradient = 4 * anatomy.hidden * anatomy.vocabulary
    besides = head.temporaries(anatomy, batch, how, gradient) if trains_head else 0
    assert 0 <= most - besides <= 4 * NUM_TOKENS * (anatomy.hidden + 2)  # and the gradient of the hidden states


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
    batch, mesh = MicroBatch(2, 16, supervised), Mesh(plan.degrees, 0)
    counts = Traffic(Layout(plan), anatomy_of(plan), mesh, [batch], False).counts
    sent = {message.shape[0] for message in counts if "cross-entropy" in message.why}
    assert sent == ({supervised} if given == "null" else {*chunks})
