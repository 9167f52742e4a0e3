"""Factors A that the matrices of one input share (`lora.share_first`). Imports no Paddle.

Each matrix keeps a copy of its own, so that names, shapes and files are those of LoRA. The copies start equal, and each
of them gets the sum of their gradients, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping

_FIRST: Mapping[str, str] = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Matrix -> the first one with the same input, by the last components of their names."""


def first_of(module: str) -> str:
    """The name of the first matrix that has the input of a matrix; the matrix itself where it shares it with none."""
    owner, dot, last = module.rpartition(".")
    return f"{owner}{dot}{_FIRST.get(last, last)}"
