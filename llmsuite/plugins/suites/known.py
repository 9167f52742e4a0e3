"""All suites whose files can be converted."""

from __future__ import annotations

import dataclasses

from llmsuite.plugins.suites.axolotl import AXOLOTL
from llmsuite.plugins.suites.llamafactory import LLAMA_FACTORY
from llmsuite.plugins.suites.paddleformers import PADDLE_FORMERS
from llmsuite.plugins.suites.suite import Suite
from llmsuite.plugins.suites.swift import SWIFT
from llmsuite.plugins.suites.swift_megatron import MEGATRON
from llmsuite.plugins.suites.trl import TRL

SUITES: dict[str, Suite] = {
    "from-llamafactory": LLAMA_FACTORY,
    "from-trl": TRL,
    "from-paddleformers": PADDLE_FORMERS,
    "from-axolotl": AXOLOTL,
    "from-swift": dataclasses.replace(SWIFT, programs={"megatron": MEGATRON}),
}
"""Suites by the action of `llmsuite recipe`."""
