"""Writes tests/reference/llm_int8.json: products and gradients of bitsandbytes' LLM.int8, for the test of `llm_int8`.

Run with bitsandbytes 0.50.2 and torch, which are not dependencies of llmsuite: python tests/reference/make_llm_int8.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bitsandbytes.functional as functional
import torch
from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

_ROWS, _INPUTS, _OUTPUTS = 3, 8, 5
_OUTLIERS = ((0, 2, 7.5), (1, 2, 0.25), (2, 4, -6.0))
"""Row, column and value of inputs: two columns with outliers, and a small value in one of them."""


def _numbers(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().float().tolist()


def _case(dtype: torch.dtype, has_bias: bool, outliers: Sequence[tuple[int, int, float]], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_ROWS, _INPUTS, generator=generator)
    for row, column, value in outliers:
        x[row, column] = value
    x = x.to(dtype).requires_grad_()
    weight = (torch.randn(_OUTPUTS, _INPUTS, generator=generator) * 0.1).to(dtype)
    bias = torch.randn(_OUTPUTS, generator=generator).to(dtype) if has_bias else None
    state = MatmulLtState()
    state.threshold = 6.0
    state.has_fp16_weights = False
    state.CB, state.SCB, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    output = MatMul8bitLt.apply(x, state.CB, None, bias, state)
    gradient = torch.randn(_ROWS, _OUTPUTS, generator=generator).to(dtype)
    output.backward(gradient)
    return {
        "dtype": str(dtype).rpartition(".")[2], "x": _numbers(x), "weight": _numbers(weight), "bias": _numbers(bias),
        "codes": state.CB.tolist(), "scales": _numbers(state.SCB), "output": _numbers(output),
        "output_gradient": _numbers(gradient), "input_gradient": _numbers(x.grad),
    }  # fmt: skip


def main() -> None:
    cases = []
    for dtype in (torch.bfloat16, torch.float16):
        for has_bias, outliers in ((False, ()), (False, _OUTLIERS), (True, _OUTLIERS)):
            cases.append(_case(dtype, has_bias, outliers, len(cases)))
    path = Path(__file__).with_name("llm_int8.json")
    path.write_text("[" + ",\n".join(json.dumps(case) for case in cases) + "]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
