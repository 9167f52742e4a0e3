"""The parts of a run that a reward in the training process may use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from llmsuite.contract.specs import ModelFamily
from llmsuite.devices.base import DeviceBackend


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardServices:
    """The services of a run, which are passed to a reward with `RewardSpec.needs_services`."""

    families: Mapping[str, ModelFamily]
    """Model families by name."""
    device: DeviceBackend
    precision: str
