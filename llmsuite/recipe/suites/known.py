"""The suites there are."""

from __future__ import annotations

from llmsuite.recipe.suites.axolotl import AXOLOTL
from llmsuite.recipe.suites.llamafactory import LLAMA_FACTORY
from llmsuite.recipe.suites.paddleformers import PADDLE_FORMERS
from llmsuite.recipe.suites.suite import Suite
from llmsuite.recipe.suites.swift import SWIFT
from llmsuite.recipe.suites.trl import TRL

SUITES: dict[str, Suite] = {
    "from-llamafactory": LLAMA_FACTORY,
    "from-trl": TRL,
    "from-paddleformers": PADDLE_FORMERS,
    "from-axolotl": AXOLOTL,
    "from-swift": SWIFT,
}
"""By the action of `llmsuite recipe`."""
