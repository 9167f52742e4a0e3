"""The CPU's attention of inputs that are rounded to bfloat16, against the plain form."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices import masks, ops
from llmsuite.devices.cpp_library import build_library
from llmsuite.inference.attention import grouped_attention, rounded_grouped_attention
from llmsuite.plugins.cpu_kernels import kernels, libraries
from tests.support.kernel_inputs import (
    HEADS,
    ROWS_OF_DOCUMENTS,
    check_cached_attention,
    check_equal,
    leaf,
    random,
    rounded,
)
from tests.support.paths import ROOT


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    kernels.load()


ROUNDED_LIMIT = 2.0**-7
"""Weights and gradients of scores are rounded by up to 2^-9; sums of such errors stay below this part of the largest
sum."""


@pytest.mark.parametrize("heads", [*HEADS, (4, 2, 64), (2, 1, 80)])
@pytest.mark.parametrize(("queries", "keys"), [(2, 2), (5, 5), (64, 64), (131, 131), (320, 320), (1, 70), (70, 133)])
def test_attention_of_rounded_inputs_is_causal(heads: tuple[int, int, int], queries: int, keys: int) -> None:
    num_queries, num_keys, size = heads
    q = rounded(random(2, queries, num_queries, size, seed=1))
    k, v = (rounded(random(2, keys, num_keys, size, seed=seed)) for seed in (2, 3))
    mask = masks.causal_mask(queries, keys, paddle.float32)
    plain = lambda *x: ops.attention(*x, mask)  # noqa: E731
    check_equal(lambda *x: kernels.bf16_attention(*x, None), plain, q, k, v, limit=ROUNDED_LIMIT)


@pytest.mark.parametrize("name", ROWS_OF_DOCUMENTS)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_of_rounded_inputs_sees_its_document_only(heads: tuple[int, int, int], name: str) -> None:
    num_queries, num_keys, size = heads
    lengths, begins = zip(*(zip(*row) for row in ROWS_OF_DOCUMENTS[name]))
    document_starts = paddle.to_tensor(np.stack([np.repeat(*row) for row in zip(begins, lengths)]))
    length = document_starts.shape[1]
    q = rounded(random(2, length, num_queries, size, seed=1))
    k, v = (rounded(random(2, length, num_keys, size, seed=seed)) for seed in (2, 3))
    mask = masks.document_mask(document_starts, paddle.float32)
    given = kernels.spans(document_starts, paddle.float32)
    plain = lambda *x: ops.attention(*x, mask)  # noqa: E731
    check_equal(lambda *x: kernels.bf16_attention(*x, given), plain, q, k, v, limit=ROUNDED_LIMIT)


def check_rounded_once(function: Callable[..., Any], *inputs: np.ndarray) -> None:
    """Outputs and gradients of bfloat16 numbers equal those of the same numbers in float32, rounded: bit for bit."""
    found = []
    for dtype in ("float32", "bfloat16"):
        leaves = [leaf(values).astype(dtype) for values in inputs]
        for tensor in leaves:
            tensor.retain_grads()
        output = function(*leaves)
        gradient = paddle.to_tensor(rounded(random(*output.shape, seed=9)))
        paddle.autograd.backward([output], [gradient.astype(dtype)])
        tensors = [output, *(tensor.grad for tensor in leaves)]
        assert {str(tensor.dtype) for tensor in tensors} == {f"paddle.{dtype}"}
        found.append([tensor.astype("float32").numpy() for tensor in tensors])
    for whole, half in zip(*found, strict=True):
        assert np.array_equal(half, rounded(whole))
        assert not np.array_equal(half, whole)


@pytest.mark.parametrize("heads", [*HEADS, (4, 2, 64), (2, 2, 80)])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (131, 131), (1, 70), (70, 133)])
def test_attention_takes_and_gives_bfloat16(heads: tuple[int, int, int], queries: int, keys: int) -> None:
    num_queries, num_keys, size = heads
    q = rounded(random(2, queries, num_queries, size, seed=1))
    k, v = (rounded(random(2, keys, num_keys, size, seed=seed)) for seed in (2, 3))
    check_rounded_once(lambda *x: kernels.bf16_attention(*x, None), q, k, v)


@pytest.mark.parametrize("name", [*ROWS_OF_DOCUMENTS, "a window"])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_within_documents_takes_and_gives_bfloat16(heads: tuple[int, int, int], name: str) -> None:
    num_queries, num_keys, size = heads
    if name == "a window":
        given = kernels.no_mask(150, 150, paddle.float32, 40)
        length = 150
    else:
        lengths, begins = zip(*(zip(*row) for row in ROWS_OF_DOCUMENTS[name]))
        document_starts = paddle.to_tensor(np.stack([np.repeat(*row) for row in zip(begins, lengths)]))
        given = kernels.spans(document_starts, paddle.float32)
        length = document_starts.shape[1]
    q = rounded(random(2, length, num_queries, size, seed=1))
    k, v = (rounded(random(2, length, num_keys, size, seed=seed)) for seed in (2, 3))
    check_rounded_once(lambda *x: kernels.bf16_attention(*x, given), q, k, v)


@pytest.mark.parametrize("rows", [1, 3])
def test_rotary_takes_and_gives_bfloat16(rows: int) -> None:
    angles = random(rows, 9, 1, 20, seed=1)
    cos = paddle.to_tensor(np.cos(angles))
    sin = paddle.to_tensor(np.sin(angles))
    check_rounded_once(lambda x: kernels.rotary(x, cos, sin), rounded(random(3, 9, 4, 40)))


@pytest.mark.parametrize("heads", HEADS)
def test_generation_attends_as_training_in_bf16(heads: tuple[int, int, int]) -> None:
    """Beside the order of sums nothing differs: few weights are rounded to another side."""
    num_queries, num_keys, size = heads
    q = random(2, 70, num_queries, size, seed=1)
    k, v = (random(2, 70, num_keys, size, seed=seed) for seed in (2, 3))
    found = kernels.bf16_attention(*(paddle.to_tensor(x) for x in (q, k, v)), None).numpy()
    first = [paddle.to_tensor(x) for x in (q, k.transpose([0, 2, 1, 3]), v.transpose([0, 2, 1, 3]))]
    mask = paddle.to_tensor(np.triu(np.full([1, 1, 70, 70], -1e9, "float32"), 1))
    other = rounded_grouped_attention(kernels.round_to_bf16_in_float32, *first, mask).numpy()
    rounding = np.abs(found - grouped_attention(*first, mask).numpy()).max()
    assert rounding > 1e-3
    assert np.abs(found - other).max() <= rounding / 8


@pytest.mark.parametrize("heads", HEADS)
def test_the_newest_tokens_of_a_cache_see_what_they_see_in_one_pass(heads: tuple[int, int, int]) -> None:
    check_cached_attention(kernels.bf16_cached_attention, kernels.bf16_attention, heads, "two prompts", ROUNDED_LIMIT)


def test_attention_rounds_its_inputs() -> None:
    """A key of 1 + 2^-9 is rounded to 1, and so is its query; the weights of equal scores are exact."""
    q = k = np.full((1, 2, 1, 8), 1 + 2.0**-9, "float32")
    v = np.array([1 + 2.0**-9, 3], "float32").reshape(1, 2, 1, 1) * np.ones((1, 1, 1, 8), "float32")
    found = kernels.bf16_attention(*(paddle.to_tensor(x) for x in (q, k, v)), None).numpy()
    assert np.array_equal(found, np.array([1, 2], "float32").reshape(1, 2, 1, 1) * np.ones((1, 1, 1, 8)))


def run_alone(program: str) -> str:
    """Output of a program that runs in a separate process."""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def check_attention_of_rounded_inputs() -> None:
    """By whatever library is loaded."""
    for heads in HEADS:
        for queries, keys in ((64, 64), (131, 131), (70, 133)):
            test_attention_of_rounded_inputs_is_causal(heads, queries, keys)
            test_attention_takes_and_gives_bfloat16(heads, queries, keys)
        test_attention_of_rounded_inputs_sees_its_document_only(heads, "two prompts")
        test_attention_within_documents_takes_and_gives_bfloat16(heads, "two prompts")


_LINES = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
_FLAGS = next((line.split() for line in _LINES if line.startswith("flags")), [])


@pytest.mark.further
@pytest.mark.parametrize(
    "processor",
    [
        pytest.param(
            ("-march=x86-64-v4", "-mavx512bf16"),
            marks=pytest.mark.skipif("avx512_bf16" not in _FLAGS, reason="it has no products of bfloat16"),
        ),
        ("-march=x86-64",),
    ],
    ids=["avx512_bf16", "x86-64"],
)
def test_attention_of_rounded_inputs_on_processors_with_less(processor: tuple[str, ...]) -> None:
    """The kernels are built for the processor at hand; here for one without AMX, and for one without AVX."""
    whole = libraries.KERNELS
    used = ("bf16_attention.cc", "attention.h", "common.h", "packing.h", "rounding.h", "tiles.h")
    less = dataclasses.replace(
        whole,
        name=f"bf16-attention{'-'.join(processor)}",
        sources=tuple(whole.sources[0].with_name(name) for name in used),
        options=(*whole.options, *processor),
        is_for_this_cpu=False,
    )
    program = (
        "from tests.unit.plugins.cpu_kernels import test_bf16_attention as tests\n"
        "import paddle\n"
        f"paddle.utils.cpp_extension.load_op_meta_info_and_register_op({str(build_library(less))!r})\n"
        "tests.check_attention_of_rounded_inputs()\n"
        "print('all are equal')\n"
    )
    assert "all are equal" in run_alone(program)


def test_without_memory_attention_raises() -> None:
    """It asks for keys of 128 MiB, where 64 are left; of one thread, as others would want their stacks of it."""
    program = """
import os
import resource
os.environ["OMP_NUM_THREADS"] = "1"
import paddle
from llmsuite.plugins.cpu_kernels import kernels

assert kernels.load()
query, keys = paddle.ones([1, 1, 1, 8]), paddle.ones([1, 1 << 21, 1, 8])
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), resource.RLIM_INFINITY))
try:
    kernels.bf16_attention(query, keys, keys, None)
except OSError as error:
    print(error)
"""
    assert "there is no memory for" in run_alone(program)
