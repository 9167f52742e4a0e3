"""What a step's time goes to: the events of a profile put into parts. Needs no Paddle."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

LAYERS = "products of the layers"
HEAD = "products of the head"
PRODUCTS = (LAYERS, HEAD)
ROUNDING = "rounding to bfloat16"
ATTENTION = "attention"
ROTATION = "rotation"
NORMS = "norms"
SWIGLU = "SwiGLU"
LOSS = "cross-entropy"
EMBEDDING = "embedding"
OTHER = "other operations"
GRADIENTS = "norm and clipping of the gradient"
OPTIMIZER = "optimizer"
ROWS = "rows to batches"
PYTHON = "Python, calls and metrics"
PARTS = (
    LAYERS, HEAD, ROUNDING, ATTENTION, ROTATION, NORMS, SWIGLU, LOSS, EMBEDDING, OTHER, GRADIENTS, OPTIMIZER, ROWS,
    PYTHON,
)  # fmt: skip
OF_KERNELS = {
    "attention": ATTENTION, "bf16_attention": ATTENTION, "rotary": ROTATION, "rms_norm": NORMS, "swiglu": SWIGLU,
    "cross_entropy": LOSS, "round_activation": ROUNDING,
}  # fmt: skip
"""Parts of the operations that have kernels of ours, and of those whose gradients have other
names."""
WHOLE = "whole: "
WITHIN = "within: "
"""How events are named that a part is told by: all of their time is the part's, or what no event within them says."""
STEP = f"{WITHIN}{PYTHON}"
_KERNEL_GRADIENT = re.compile(r"CustomOpGradNode: llmsuite_(\w+)_grad")
_PRODUCT = re.compile(r"(matmul|linear|linear_v2) dygraph|Global_(Matmul|Linear|LinearV2)GradNode")
_EMBEDDING = re.compile(r"embedding dygraph|Global_EmbeddingGradNode")
_BACKWARD = "Gradient Backward"
_LAUNCH = " kernel launch"


class Event(Protocol):
    """Of Paddle's profiler: something that took time, and what was called in it."""

    name: str
    start_ns: int
    end_ns: int
    children_node: Sequence[Event]


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product."""

    left: tuple[int, int]
    right: tuple[int, int]
    """Both as they lie in memory."""
    transpose_left: bool = False
    transpose_right: bool = False
    dtypes: tuple[str, str] = ("float32", "float32")
    is_of_head: bool = False

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        rows, inner = reversed(self.left) if self.transpose_left else self.left
        return 2 * rows * inner * (self.right[0] if self.transpose_right else self.right[1])

    @property
    def rounded(self) -> Product:
        """The same of matrices that are in bfloat16 already."""
        return dataclasses.replace(self, dtypes=("bfloat16", "bfloat16"))

    @property
    def part(self) -> str:
        """One of `PRODUCTS`."""
        return HEAD if self.is_of_head else LAYERS


def forward_and_back(
    rows: int, matrix: tuple[int, int], transposed: bool, of_input: bool, of_matrix: bool, head: bool
) -> Iterator[Product]:
    """The products of so many rows with a matrix, [inputs, outputs] unless it is transposed, in float32, and those of
    the gradients that are wanted."""
    inputs, outputs = reversed(matrix) if transposed else matrix
    yield Product((rows, inputs), matrix, transpose_right=transposed, is_of_head=head)
    if of_input:
        yield Product((rows, outputs), matrix, transpose_right=not transposed, is_of_head=head)
    if of_matrix:
        x = (rows, inputs)
        gradient = (rows, outputs)
        left, right = (gradient, x) if transposed else (x, gradient)
        yield Product(left, right, transpose_left=True, is_of_head=head)


def attention_flops(pairs: int, heads: int, head_size: int, value_size: int, has_gradient: bool) -> int:
    """Of attention over so many pairs of a query and a key that it sees: two products, and four more for its gradients.
    That a kernel computes scores again in its backward pass is not counted."""
    return 2 * pairs * heads * (head_size + value_size) * (3 if has_gradient else 1)


class Seconds:
    """Seconds of a step by part, whose sum is the step's time."""

    def __init__(self, step: Event):
        self.parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.others: collections.Counter[str] = collections.Counter()
        """Those of `OTHER`, by operation."""
        self.num_passes_back = 0
        self._head_is_next = False
        self._walk(step, PYTHON)

    def _walk(self, event: Event, inside: str) -> None:
        part, is_whole = self._part(event.name, inside)
        seconds = (event.end_ns - event.start_ns) / 1e9
        if not is_whole:
            for child in event.children_node:
                seconds -= (child.end_ns - child.start_ns) / 1e9
                self._walk(child, part)
        self.parts[part] += seconds
        if part == OTHER:
            self.others[event.name.removesuffix(_LAUNCH)] += seconds

    def _part(self, name: str, inside: str) -> tuple[str, bool]:
        """The part of an event within a part, and whether all of the event's time is its."""
        for prefix, is_whole in ((WHOLE, True), (WITHIN, False)):
            if name.startswith(prefix):
                return name.removeprefix(prefix), is_whole
        if name == _BACKWARD:  # which begins at the loss: the first product on the way is the head's
            self.num_passes_back += 1
            self._head_is_next = True
        elif found := _KERNEL_GRADIENT.search(name):
            return OF_KERNELS[found[1]], True
        elif _PRODUCT.fullmatch(name):
            is_first = self._head_is_next
            self._head_is_next = False
            return (HEAD if (is_first and "GradNode" in name) or inside == HEAD else LAYERS), True
        elif _EMBEDDING.fullmatch(name):
            return EMBEDDING, True
        elif name.endswith(_LAUNCH):
            return (OTHER if inside == PYTHON else inside), True
        return inside, False
