"""Layers as compiled programs: the numbers of the plain layers, to the last bit, and few programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.models.dense_plan import PLAN
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.recompute import recompute_layers
from llmsuite.parallel.static import compile_layers
from tests.support import tiny_llama

ALONE = Mesh(Degrees(1, 1, 1, 1), 0)


def _model(compiled: bool) -> Any:
    model = tiny_llama.model()
    model.train()
    if compiled:
        model.programs = compile_layers(model, PLAN, ALONE, [])
    return model


def _backward(model: Any, ids: np.ndarray) -> float:
    hidden, _ = model.hidden_states(paddle.to_tensor(ids))
    nll = model.token_nll(hidden.flatten(0, 1), paddle.to_tensor(ids.flatten())).sum()
    nll.backward()
    return float(nll)


def _steps(model: Any) -> list[Any]:
    """Losses and gradients of two steps of micro-batches of three shapes."""
    optimizer = paddle.optimizer.SGD(0.001, parameters=model.parameters())
    seen: list[Any] = []
    for step in range(2):
        for batch, length in ((2, 12), (2, 7), (1, 12), (2, 12)):
            seen.append(_backward(model, np.arange(batch * length).reshape(batch, length) * (step + 3) % 19))
        seen += [None if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]
        optimizer.step()
        optimizer.clear_grad(False)
    return seen


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", ["", "self_attn", "layers.0", "embed_tokens"])
def test_equal_to_the_plain_layers(recompute: bool, frozen: str) -> None:
    results = []
    for compiled in (False, True):
        model = _model(compiled)
        if recompute:
            recompute_layers(model, PLAN, every=1)
        for name, parameter in model.named_parameters():
            parameter.stop_gradient = bool(frozen) and frozen in name
        results.append(_steps(model))
    plain, static = results
    assert len(plain) == len(static)
    for a, b in zip(plain, static):
        np.testing.assert_array_equal(a, b)


def test_layers_of_one_structure_share_a_program() -> None:
    model = _model(compiled=True)
    (program,) = model.programs
    ids = np.arange(24).reshape(2, 12) % 19
    _backward(model, ids)
    _backward(model, ids)
    assert len(program.compiled.program_cache) == 1
    _backward(model, ids[:, :5])
    assert len(program.compiled.program_cache) == 2


def test_layers_that_differ_have_programs_of_their_own() -> None:
    model = tiny_llama.model()
    model.model.layers[1].input_layernorm.eps = 1e-3
    assert len(compile_layers(model, PLAN, ALONE, [])) == 2
    model = tiny_llama.model()
    model.model.layers[0].mlp.register_forward_post_hook(lambda module, inputs, output: output)
    assert len(compile_layers(model, PLAN, ALONE, [])) == 2


def test_evaluation_runs_the_plain_layers() -> None:
    plain = _model(compiled=False)
    static = _model(compiled=True)
    ids = paddle.to_tensor(np.arange(24).reshape(2, 12) % 19)
    for model in (plain, static):
        model.eval()
    np.testing.assert_array_equal(plain(ids).numpy(), static(ids).numpy())
    assert len(static.programs[0].compiled.program_cache) == 0


def test_a_tensor_of_the_context_may_be_missing() -> None:
    """Such as the mask where the attention kernel is causal."""
    model = _model(compiled=True)
    model.ops = type(model.ops)(causal_mask=lambda queries, keys, dtype: None)
    without = _backward(model, np.arange(12).reshape(1, 12) % 19)
    model = _model(compiled=False)
    model.ops = type(model.ops)(causal_mask=lambda queries, keys, dtype: None)
    assert without == _backward(model, np.arange(12).reshape(1, 12) % 19)
