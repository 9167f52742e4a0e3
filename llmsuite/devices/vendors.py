"""Accelerators of vendors: which plug-ins of Paddle there are, and the backend of any of them. Needs no Paddle.

A vendor's plug-in adds a device to Paddle's CPU wheel (CustomDevice). All of them are used by `CustomBackend`; the
table here has only what Paddle does not know: the package, and the variable that selects devices.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from llmsuite.base.commands import CommandTimeout, run_command
from llmsuite.devices.custom import CustomBackend

_FOUND = "LLMSUITE_CUSTOM_DEVICES"
"""Environment variable for the ranks of a run: a directory of plug-ins, and the devices that Paddle found there."""
_ROOT = "CUSTOM_DEVICE_ROOT"
_SECONDS = 300.0
_ASK = "import json, paddle; print(json.dumps(list(paddle.device.get_all_custom_device_type() or [])))"


@dataclasses.dataclass(frozen=True)
class Vendor:
    """A device of Paddle's CustomDevice interface."""

    name: str
    """Paddle's name of the type of device, and the value of the recipe key `device`."""
    help: str
    install: str
    """Command that installs the plug-in."""
    visible_devices: tuple[str, ...] = ()
    """Value of `DeviceBackend.visible_devices`."""


def _package(name: str, directory: str) -> str:
    return f"pip install {name} -i https://www.paddlepaddle.org.cn/packages/stable/{directory}/"


_SOURCE = "the sources in backends/{} of https://github.com/PaddlePaddle/PaddleCustomDevice"

VENDORS: tuple[Vendor, ...] = (
    Vendor("npu", "Ascend NPUs", _package("paddle-custom-npu", "npu"), ("ASCEND_RT_VISIBLE_DEVICES",)),
    Vendor("mlu", "Cambricon MLUs", _package("paddle-custom-mlu", "mlu"), ("MLU_VISIBLE_DEVICES",)),
    Vendor("gcu", "Enflame GCUs", _package("paddle-custom-gcu", "gcu"), ("TOPS_VISIBLE_DEVICES",)),
    Vendor("iluvatar_gpu", "Iluvatar CoreX GPUs", _package("paddle-iluvatar-gpu", "ixuca"), ("CUDA_VISIBLE_DEVICES",)),
    Vendor("metax_gpu", "MetaX GPUs", _package("paddle-metax-gpu", "maca"), ("CUDA_VISIBLE_DEVICES",)),
    Vendor("intel_hpu", "Intel Gaudi", _SOURCE.format("intel_hpu")),
    Vendor("sdaa", "Tecorigin SDAA", _SOURCE.format("sdaa")),
)
"""Devices whose plug-in is known by name. Any other one that Paddle finds is known too, see `find_vendor`."""


def find_vendor(name: str) -> Vendor | None:
    """The accelerator of a name: of `VENDORS`, or one whose plug-in is installed; None for any other name."""
    known = next((vendor for vendor in VENDORS if vendor.name == name), None)
    if known is not None:
        return known
    if name in plug_in_devices():
        return Vendor(name, "a plug-in of Paddle's", "the plug-in of its vendor")
    return None


def backend_of(vendor: Vendor) -> CustomBackend:
    """A `CustomBackend` for an accelerator."""

    class Backend(CustomBackend):
        name = vendor.name
        install = vendor.install
        visible_devices = vendor.visible_devices

    return Backend()


def plug_in_devices() -> Sequence[str]:
    """Names of the devices whose plug-ins Paddle loads. Imports no Paddle here: a process of its own asks it, only if
    there are plug-ins, and once for all ranks of a run."""
    directory = _plug_in_directory()
    if directory is None or not any(directory.glob("*.so")):
        return ()
    known = os.environ.get(_FOUND, "")
    if not known.startswith(f"{directory}:"):
        known = f"{directory}:{','.join(_ask_paddle())}"
        os.environ[_FOUND] = known
    return [name for name in known.removeprefix(f"{directory}:").split(",") if name]


def _plug_in_directory() -> Path | None:
    """The directory that Paddle loads all plug-ins from; None where there is none."""
    given = os.environ.get(_ROOT)
    if given is None:
        paddle = importlib.util.find_spec("paddle")
        if paddle is None or paddle.origin is None:
            return None
        given = str(Path(paddle.origin).parent.parent / "paddle_custom_device")
    return Path(given) if given else None


def _ask_paddle() -> list[str]:
    try:
        done = run_command([sys.executable, "-c", _ASK], seconds=_SECONDS)
        found = json.loads(done.output.splitlines()[-1]) if done.code == 0 else []
    except (CommandTimeout, IndexError, ValueError):  # a plug-in that does not work, which doctor names
        return []
    return [str(name) for name in found]
