"""The suites there are."""

from __future__ import annotations

from llmsuite.recipe.suites.llamafactory import LLAMA_FACTORY
from llmsuite.recipe.suites.suite import Suite

SUITES: dict[str, Suite] = {"from-llamafactory": LLAMA_FACTORY}
"""By the action of `llmsuite recipe`."""
