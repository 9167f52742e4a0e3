"""The list of Paddle's kernels."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import UserError
from llmsuite.devices import custom
from llmsuite.devices.device_checks import _NEEDED
from llmsuite.devices.registered_kernels import kernel_dtypes
from llmsuite.devices.vendors import backend_of, find_vendor


def test_kernels_of_the_cpu() -> None:
    assert {"float32", "float64"} <= kernel_dtypes("matmul", "cpu")
    assert kernel_dtypes("matmul", "npu") == set()
    assert kernel_dtypes("no_such_operation", "cpu") == set()


def test_a_precision_without_a_matrix_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = find_vendor("gcu")
    assert vendor is not None
    backend = backend_of(vendor)
    monkeypatch.setattr(custom, "kernel_dtypes", lambda operation, device: {"float32", "float16"})
    backend.check_precision("fp16")
    with pytest.raises(UserError, match="no matrix product in bfloat16; use fp32 or fp16"):
        backend.check_precision("bf16")
    monkeypatch.setattr(custom, "kernel_dtypes", lambda operation, device: set())
    backend.check_precision("bf16")  # the plug-in computes in its own way


@pytest.mark.parametrize("operation", _NEEDED)
def test_every_operation_of_a_step_is_known(operation: str) -> None:
    """Else a device that lacks it would not be named."""
    assert "float32" in kernel_dtypes(operation, "cpu")
