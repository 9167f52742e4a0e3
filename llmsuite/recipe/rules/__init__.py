"""What is refused before anything starts: every combination of keys that makes no run, with its reason and an example.

`llmsuite validate` asks these rules, and the table in docs/reference/rules.md is made of them.
"""

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.recipe.rules.stages import STAGE_RULES, UNTRAINED_STAGE_RULES
from llmsuite.recipe.rules.strategy import GENERAL_RULES, STRATEGY_RULES

__all__ = ["RULES", "UNTRAINED_RULES", "RuleContext"]

RULES = (*STRATEGY_RULES, *STAGE_RULES)
"""Between sections, the model's shape and the device."""

UNTRAINED_RULES = (*GENERAL_RULES, *UNTRAINED_STAGE_RULES)
"""The same, for a stage that does not train."""
