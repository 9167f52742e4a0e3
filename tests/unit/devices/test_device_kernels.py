"""Kernels that plugins add to a device: which are used, and what is wrong with others."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.hookspecs import hookimpl
from llmsuite.devices import paddle_kernels
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.device_kernels import DEVICE_KERNELS, DeviceKernels
from llmsuite.devices.gpu import GpuBackend
from llmsuite.devices.ops import Ops
from tests.conftest import registry_with


class Mine(DeviceKernels):
    name = "mine"
    help = "a third party's"
    device = "gpu"
    module = __name__
    in_programs = True
    weight_only_precisions = ("int2",)

    def __init__(self, **attributes: Any):
        self.loaded: list[str] = []
        for name, value in attributes.items():
            setattr(self, name, value)

    def kernels(self, precision: str) -> Mapping[str, str]:
        return {"swiglu": "swiglu", "matmul": "matmul"} if precision == "bf16" else {}

    def load(self, precision: str) -> None:
        self.loaded.append(precision)

    def matmul_backend(self, precision: str) -> str:
        return "mine"


def swiglu(*inputs: Any) -> Any:
    """Of a third party."""


def matmul(*inputs: Any) -> Any:
    """Of a third party."""


def plugin_of(*kernels: Any) -> SimpleNamespace:
    return SimpleNamespace(llmsuite_register_kernels=hookimpl(lambda: list(kernels)))


def test_added_kernels_come_before_those_of_the_device() -> None:
    mine = Mine()
    backend = GpuBackend().with_kernels(mine)
    ops = backend.ops("bf16")
    assert (ops.swiglu, ops.matmuls.matmul) == (swiglu, matmul)
    assert ops.rotary is paddle_kernels.fused_rotary, "those of the device stay"
    assert backend.ops("fp32").swiglu is paddle_kernels.fused_swiglu, "a precision that they do not support"
    assert mine.loaded == ["bf16", "fp32"]
    assert "matmul" in backend.fused("bf16")
    assert [backend.matmul_backend(precision) for precision in ("bf16", "fp32")] == ["mine", "Paddle's"]
    assert backend.weight_only_precisions == ("int2",)
    assert __name__ in backend.kernel_modules()
    assert GpuBackend().ops("bf16").swiglu is paddle_kernels.fused_swiglu


@pytest.mark.parametrize("in_programs", [True, False])
def test_programs_have_the_kernels_that_paddle_inference_has(in_programs: bool) -> None:
    ops = GpuBackend().with_kernels(Mine(in_programs=in_programs)).program_ops("bf16")
    assert ops.swiglu is (swiglu if in_programs else paddle_kernels.fused_swiglu)
    assert CpuBackend().program_ops("fp32") == Ops()


def test_two_kernels_for_an_operation_are_refused() -> None:
    backend = GpuBackend().with_kernels(Mine(), Mine(name="other"))
    with pytest.raises(UserError, match="device gpu: the kernels mine and other both compute swiglu; uninstall one"):
        backend.ops("bf16")
    backend.ops("fp32")


def test_a_plugin_registers_kernels_for_all_backends_of_the_device() -> None:
    registry = registry_with(third=plugin_of(Mine()))
    assert list(registry.kernels) == ["cpu_kernels", "mine"]
    assert registry.owner("kernels", "mine").provides == ["kernels mine"]
    assert [kernels.name for kernels in GpuBackend().added_kernels] == ["mine"]
    assert [kernels.name for kernels in CpuBackend().added_kernels] == ["cpu_kernels"]
    registry.withdraw("kernels", "mine", "it is gone")
    assert GpuBackend().added_kernels == []
    assert list(DEVICE_KERNELS) == ["cpu_kernels"]


def test_kernels_for_an_unknown_device_are_an_error_of_the_plugin() -> None:
    registry = registry_with(third=plugin_of(Mine(device="gpus")))
    registry.check_devices_of_kernels()
    assert list(registry.kernels) == ["cpu_kernels"]
    error = registry.plugins[-1].error
    assert error == (
        "device of kernels 'mine': no device is called 'gpus'; did you mean 'gpu'? registered: cpu, gpu, xpu"
    )


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"name": "my kernels"}, "kernels have the name 'my kernels'; a name has to be one word"),
        ({"device": None}, "device of kernels 'mine' has to be a text"),
        ({"weight_only_precisions": "int8"}, "weight_only_precisions of kernels 'mine' is a text; it has to be a set"),
        ({"name": "cpu_kernels"}, "is registered by both llmsuite (bundled) and third-package 1.0"),
    ],
)
def test_wrong_kernels_are_named(attributes: dict[str, Any], reason: str) -> None:
    registry = registry_with(third=plugin_of(Mine(**attributes)))
    assert reason in str(registry.plugins[-1].error)
