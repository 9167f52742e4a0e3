"""The CPU's products of inputs that are rounded to bfloat16, or split into three parts of that type, against those of
float64: built for the processor at hand, and for some with less.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from llmsuite.devices.cpp_library import build_library
from llmsuite.plugins.cpu_kernels import kernels
from llmsuite.plugins.cpu_kernels.libraries import PRODUCTS, can_be_built
from tests.support.kernel_inputs import random, rounded
from tests.support.paths import ROOT

SIZES = [
    (1, 1, 1), (1, 576, 3), (32, 32, 32), (33, 31, 65), (64, 512, 512), (77, 1001, 45), (130, 2048, 96), (5, 16, 700),
    (700, 40, 5), (48, 70, 16), (600, 1100, 1050),
]  # fmt: skip
"""M, K and N of [M, K] [K, N]: with and without a rest, of one block and of several, whose right side stays or not."""


THREADS = {
    "one": {"OMP_NUM_THREADS": "1"},
    "three": {"OMP_NUM_THREADS": "3"},
    "fewer than are asked for": {"OMP_NUM_THREADS": "3", "OMP_THREAD_LIMIT": "2"},
}


@pytest.mark.skipif(not can_be_built(PRODUCTS), reason="there is no compiler")
@pytest.mark.parametrize("processor", [(), ("-march=x86-64-v4", "-mavx512bf16"), ("-march=x86-64",)], ids=str)
@pytest.mark.parametrize("threads", THREADS)
def test_products_equal_those_of_rounded_factors(processor: tuple[str, ...], threads: str) -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    if "-mavx512bf16" in processor and "avx512_bf16" not in next(x for x in lines if x.startswith("flags")).split():
        pytest.skip("it has no products of bfloat16")
    products = dataclasses.replace(
        PRODUCTS,
        name=f"products{''.join(processor)}",
        options=(*PRODUCTS.options, *processor),
        is_for_this_cpu=not processor,
    )
    program = (
        "import paddle\n"
        "from llmsuite.plugins.cpu_kernels import kernels\n"
        "from tests.unit.plugins.cpu_kernels import test_bf16_products as tests\n"
        f"paddle.utils.cpp_extension.load_op_meta_info_and_register_op({str(build_library(products))!r})\n"
        "assert kernels.load()\n"
        f"tests.check({threads!r})\n"
        "print('all are equal')\n"
    )
    environment = {**os.environ, **THREADS[threads]}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "all are equal" in found.stdout, found.stderr


def check(threads: str) -> None:
    """By whatever library is loaded. One thread checks every turn of each size, the others one of four."""
    number = [*THREADS].index(threads)
    for index, size in enumerate(SIZES):
        for turns in range(4):
            if number == 0 or (index + turns) % 4 == number:
                check_product(size, bool(turns & 1), bool(turns & 2))
                check_split_product(size, bool(turns & 1), bool(turns & 2))
    check_rows_alone()
    check_parts()
    check_split_linear()
    check_rows_with_a_matrix_each()


def check_product(size: tuple[int, int, int], turns_left: bool, turns_right: bool) -> None:
    """With float32 and bfloat16 outputs, with a right side that is rounded already, and with the sum of three
    products."""
    m, k, n = size
    pairs = []
    expected = np.zeros([m, n])
    most = np.zeros([m, n])
    for seed, depth in enumerate((k, k, 16)):
        left = random(m, depth, seed=seed)
        right = random(depth, n, seed=3 + seed)
        expected = expected + rounded(left).astype("float64") @ rounded(right).astype("float64")
        most = most + np.abs(rounded(left)) @ np.abs(rounded(right))
        limit = (2 * k + 16) * 2.0**-24 * most  # of the sums of so many products, in whatever order
        x, y = (
            paddle.to_tensor(np.ascontiguousarray(matrix.T if turned else matrix))
            for matrix, turned in ((left, turns_left), (right, turns_right))
        )
        given = kernels.round_to_bf16(y) if seed == 1 else y
        if seed == 0:
            assert (np.abs(kernels.bf16_matmul(x, y, turns_left, turns_right).numpy() - expected) <= limit).all()
        if turns_left:
            continue
        pairs.append((x, given))
        assert (np.abs(kernels.bf16_sum_matmul(pairs, turns_right).numpy() - expected) <= limit).all()
        half = kernels.bf16_rounded_output_matmul(pairs, turns_right).astype("float32").numpy()
        assert (np.abs(half - expected) <= limit + 2.0**-8 * np.abs(expected)).all()


def check_split_product(size: tuple[int, int, int], turns_left: bool, turns_right: bool) -> None:
    """With one pair and with three; sums have no more rounding than those of float32 products in any order."""
    m, k, n = size
    pairs = []
    expected = np.zeros([m, n])
    most = np.zeros([m, n])
    for seed, depth in enumerate((k, k, 16)):
        left = random(m, depth, seed=seed)
        right = random(depth, n, seed=3 + seed)
        expected = expected + left.astype("float64") @ right.astype("float64")
        most = most + np.abs(left) @ np.abs(right)
        x, y = (
            paddle.to_tensor(np.ascontiguousarray(matrix.T if turned else matrix))
            for matrix, turned in ((left, turns_left), (right, turns_right))
        )
        pairs.append((x, y))
        sums = kernels._run("split_product", *kernels._sides(pairs), turns_left, turns_right)[0].numpy()
        limit = (2 * k + 16) * 2.0**-24 * most
        assert (np.abs(sums - expected) <= limit).all()
        typical = np.sqrt(np.mean((sums - expected) ** 2) / np.mean(most**2))
        assert typical <= 4 * 2.0**-24, typical


def check_parts() -> None:
    """All six products of parts are there: each is more than the limit for some of the numbers."""
    x = random(500, 1)
    y = random(1, 500, seed=1)
    product = kernels._run("split_product", *kernels._sides([(paddle.to_tensor(x), paddle.to_tensor(y))]), False, False)
    exact = x.astype("float64") @ y.astype("float64")
    # five sums are rounded; what is left out of nine products is below 2^-26
    assert (np.abs(product[0].numpy() - exact) <= 6 * 2.0**-24 * np.abs(exact)).all()
    kinds = paddle.to_tensor([[np.nan], [np.inf], [-np.inf], [3.4e38], [1e-45]], "float32").expand([5, 64])
    found = kernels._run("split_product", [kinds.contiguous()], [paddle.ones([64, 64])], False, False)[0].numpy()
    assert not np.isfinite(found[:4]).any()
    assert (np.abs(found[4]) < 2.0**-110).all()


def check_split_linear() -> None:
    """The form for programs: its gradients are products of the same kind."""
    for turned in (False, True):
        x = random(2, 40, 70)
        w = random(*((90, 70) if turned else (70, 90)), seed=1)
        d_y = random(2, 40, 90, seed=2)
        given = [paddle.to_tensor(t, stop_gradient=False) for t in (x, w)]
        y = kernels.split_linear(*given, turned)
        y.backward(paddle.to_tensor(d_y))
        matrix = (w.T if turned else w).astype("float64")
        of_matrix = x.reshape(-1, 70).T.astype("float64") @ d_y.reshape(-1, 90)
        expected = (x @ matrix, d_y @ matrix.T, of_matrix.T if turned else of_matrix)
        for found, exact in zip((y, *(t.grad for t in given)), expected, strict=True):
            assert np.abs(found.numpy() - exact).max() <= 1e-5 * np.abs(exact).max()


def check_rows_with_a_matrix_each() -> None:
    """Equal to float32 products of rounded inputs, with gradients; frozen matrices have none."""
    counts = paddle.to_tensor([30, 0, 41, 1], dtype="int64")
    x = random(75, 70)
    w = random(4, 70, 45, seed=1)
    d_y = random(75, 45, seed=2)
    for trains in (True, False):
        found = []
        for product in (kernels.rounded_grouped_matmul, kernels.bf16_grouped_matmul):
            rows = paddle.to_tensor(x, stop_gradient=False)
            matrices = paddle.to_tensor(w, stop_gradient=not trains)
            y = product(rows, matrices, counts)
            y.backward(paddle.to_tensor(d_y))
            found.append([y, rows.grad, *([matrices.grad] if trains else [])])
            assert not y.numpy()[72:].any()
        for expected, mine in zip(*found, strict=True):
            assert np.abs((mine - expected).numpy()).max() <= 1e-6 * np.abs(expected.numpy()).max()


def check_rows_alone() -> None:
    """A row's numbers do not depend on other rows and columns, to the last bit."""
    x = random(300, 1100)
    y = random(1100, 530, seed=1)
    whole = kernels.bf16_matmul(paddle.to_tensor(x), paddle.to_tensor(y)).numpy()
    for rows, columns in ((slice(0, 1), slice(0, 530)), (slice(37, 150), slice(200, 231)), (slice(299, 300), slice(1))):
        part = [paddle.to_tensor(np.ascontiguousarray(t)) for t in (x[rows], y[:, columns])]
        assert np.array_equal(kernels.bf16_matmul(*part).numpy(), whole[rows, columns])
