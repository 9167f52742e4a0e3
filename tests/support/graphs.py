"""The graph that a loss is differentiated through."""

from __future__ import annotations

from typing import Any

SLOW_ON_GPUS = {"IndexSelectGradNode"}
"""Nodes that no loss may have. One thread of a GPU computes the gradient of `index_select`, if
`FLAGS_cudnn_deterministic` is set (Paddle 3.3.1)."""


def gradient_nodes(result: Any) -> set[str]:
    """Names of all nodes of Paddle's autograd behind a tensor."""
    names = set()
    left = [result.grad_fn]
    seen = set()
    while left:
        node = left.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        names.add(node.name())
        left += node.next_functions
    return names
