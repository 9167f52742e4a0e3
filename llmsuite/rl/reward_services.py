"""What a reward that is scored in the process that trains may use of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from llmsuite.devices.base import DeviceBackend
from llmsuite.specs import ModelFamily


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardServices:
    """The services of a run, which a reward with `RewardSpec.needs_services` gets."""

    families: Mapping[str, ModelFamily]
    """By name."""
    device: DeviceBackend
    precision: str
