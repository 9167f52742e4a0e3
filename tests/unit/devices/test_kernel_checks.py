"""Comparison of a device's operations with their plain forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llmsuite.base.typing import Tensor
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.kernel_checks import CASES, KernelCase, check_kernels, unchecked

FEW = [case for case in CASES if case.name in ("head 64, documents", "head 64", "width 64", "width 1536")]


class Wrong(CpuBackend):
    """A CPU whose swiglu has a wrong gradient, whose norm is another one each time, and whose rotation fails."""

    def loaded_kernels(self, precision: str) -> dict[str, Callable[..., Any]]:
        return {"swiglu": swiglu, "rms_norm": rms_norm, "rotary": rotary}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    import paddle.nn.functional as F

    return F.silu(gate) * up.detach() + 0.0 * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from llmsuite.devices import ops

    _times.append(None)
    return ops.rms_norm(x, weight, eps) * (1.0 + 1e-6 * len(_times))


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    raise ValueError("no such kernel")


_times: list[None] = []


@pytest.mark.parametrize("case", FEW, ids=lambda case: f"{case.operation}, {case.name}")
def test_the_cpu_without_kernels_is_its_own_plain_form(case: KernelCase) -> None:
    (result,) = check_kernels(CpuBackend().with_kernels(), "fp32", [case])
    assert result.faults(is_deterministic=True) == []
    assert result.forward == 0
    assert not result.is_fused
    assert result.milliseconds > 0


def test_wrong_kernels_are_named() -> None:
    faults = [fault for result in check_kernels(Wrong(), "fp32", FEW) for fault in result.faults(True)]
    texts = sorted(fault.partition(" off by")[0] for fault in faults)
    assert texts == [
        "rms_norm (width 64, fp32): a second run gives other bits",
        "rotary (head 64, fp32): ValueError: no such kernel",
        "swiglu (width 1536, fp32): gradients",
    ]


def test_a_number_that_is_none_is_a_failure() -> None:
    (result,) = check_kernels(CpuBackend().with_kernels(), "fp32", FEW[-1:])
    assert dataclasses.replace(result, forward=float("nan")).faults(False)
    assert not dataclasses.replace(result, is_repeatable=False).faults(False)


def test_operations_without_a_case_are_listed() -> None:
    class Other(CpuBackend):
        def loaded_kernels(self, precision: str) -> dict[str, Callable[..., Any]]:
            found: Mapping[str, Any] = {"pack": print, "rotary": print}
            return dict(found)

    assert unchecked(Other(), "fp32") == ["pack"]
