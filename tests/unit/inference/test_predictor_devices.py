"""A predictor computes on the device of its backend, or is refused: never on the CPU without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.gpu import GpuBackend
from llmsuite.devices.xpu import XpuBackend
from llmsuite.inference.exported_readme import predictor_calls
from llmsuite.inference.predictor import Predictor
from tests.support.written_family import write_family

PLUGIN = """
import llmsuite
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu import CpuBackend
from llmsuite.contract.specs import DeviceSpec


class Silent(DeviceBackend):
    name, collectives, precisions, install = "silent", "gloo", ("fp32",), ""

    def unavailable(self, num_devices):
        return None

    def activate(self, local_rank):
        pass

    def peak_memory_bytes(self):
        return 0


class Told(Silent):
    name = "described"
    configured = []

    def configure_predictor(self, config, number, num_threads):
        self.configured.append((number, num_threads))
        config.disable_gpu()
        config.set_cpu_math_library_num_threads(num_threads)


@llmsuite.hookimpl
def llmsuite_register_devices():
    return [DeviceSpec(name=cls.name, help="", factory=cls) for cls in (Silent, Told)]
"""
SAID = "--device silent: its backend does not define how Paddle Inference computes on it, which would use the CPU; "


class Plugged(DeviceBackend):
    """A device of Paddle's CustomDevice interface, whose backend says nothing about predictors."""

    name = "plugged"
    collectives = "xccl"
    precisions = ("fp32",)
    install = ""

    def unavailable(self, num_devices: int) -> str | None:
        return None

    def activate(self, local_rank: int) -> None:
        raise AssertionError

    def peak_memory_bytes(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("backend", "calls"),
    [
        (
            CpuBackend(),
            ["config.disable_gpu()", "config.disable_mkldnn()", "config.set_cpu_math_library_num_threads(2)"],
        ),
        (GpuBackend(), ["config.enable_use_gpu(512, 0)"]),
        (XpuBackend(), ["config.enable_xpu()", "config.set_xpu_device_id(0)"]),
    ],
    ids=lambda value: value.name if isinstance(value, DeviceBackend) else "",
)
def test_the_calls_of_a_device(backend: DeviceBackend, calls: list[str]) -> None:
    comment, *lines = predictor_calls(backend).splitlines()
    assert comment.startswith(f"# to compute on {backend.name}; ")
    assert lines == calls


def test_a_device_of_paddles_own_interface_needs_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^--device plugged: its backend does not define how"):
        predictor_calls(Plugged())
    monkeypatch.setattr(paddle.device, "get_device", lambda: "npu:3")
    monkeypatch.setattr(paddle.device, "get_all_custom_device_type", lambda: ["npu"])
    assert predictor_calls(Plugged()).splitlines()[1:] == ["config.enable_custom_device('npu', 0)"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, its program and a plugin with two devices."""
    directory = tmp_path_factory.mktemp("devices")
    model = directory / "model"
    program = directory / "static"
    plugin = directory / "plugin.py"
    write_family(model, "llama")
    plugin.write_text(PLUGIN)
    assert main(["export", str(model), "-o", str(program)]) == 0
    return model, program, plugin


@pytest.mark.parametrize("command", ["export", "deploy", "verify", "generate"])
def test_a_device_that_does_not_say_how_is_refused(
    pair: tuple[Path, Path, Path], command: str, tmp_path: Path, capsys: Any
) -> None:
    model, program, plugin = pair
    words = {
        "export": [str(model), "-o", str(tmp_path / "new")],
        "deploy": [str(model), "-o", str(tmp_path / "new")],
        "verify": [str(program)],
        "generate": [str(program), "--engine", "static", "--prompt", "Hello", "--max_new_tokens", "2"],
    }[command]
    assert main(["--plugin", str(plugin), command, *words, "--device", "silent"]) == 2
    message = capsys.readouterr()
    assert SAID in message.err
    assert "[1/3]" not in message.out
    assert not list(tmp_path.iterdir())


def test_a_device_that_says_how(pair: tuple[Path, Path, Path], tmp_path: Path, capsys: Any) -> None:
    model, _, plugin = pair
    target = tmp_path / "static"
    on = ["--device", "described"]
    assert main(["--plugin", str(plugin), "export", str(model), "-o", str(target), *on]) == 0
    readme = (target / "README.md").read_text()
    assert "# to compute on described; " in readme
    assert "config.disable_gpu()\nconfig.set_cpu_math_library_num_threads(2)\npredictor = create" in readme
    assert main(["--plugin", str(plugin), "verify", str(target), *on]) == 0
    assert "greedy tokens are the same" in capsys.readouterr().out


def test_a_predictor_asks_the_backend_for_each_program(pair: tuple[Path, Path, Path]) -> None:
    class Counting(CpuBackend):
        name = "counting"
        asked: list[tuple[int, int]] = []  # noqa: RUF012  (one test has it)

        def configure_predictor(self, config: Any, number: int, num_threads: int) -> None:
            self.asked.append((number, num_threads))
            super().configure_predictor(config, number, num_threads)

    predictor = Predictor(pair[1], Counting(), num_threads=3)
    logits, _ = predictor.forward(np.array([[5, 6, 7]]), np.zeros(1, "int64"), None)
    assert np.isfinite(logits).all()
    assert Counting.asked == [(0, 3), (0, 3)]


def test_a_device_that_is_not_there_is_refused(pair: tuple[Path, Path, Path]) -> None:
    with pytest.raises(UserError, match=r"^--device gpu: this Paddle \(.*\) is built without CUDA"):
        Predictor(pair[1], GpuBackend())
