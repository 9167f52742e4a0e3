"""The device that recipes are rehearsed on. Only `llmsuite rehearse` registers it: it would train nothing."""

from __future__ import annotations

from llmsuite.contract.hookspecs import hookimpl
from llmsuite.contract.specs import DeviceSpec
from llmsuite.plugins.rehearse.backend import NAME, VirtualBackend


@hookimpl
def llmsuite_register_devices() -> list[DeviceSpec]:
    return [DeviceSpec(name=NAME, help="a GPU that computes nothing", factory=VirtualBackend)]
