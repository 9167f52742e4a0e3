"""Rules that reject a recipe before anything starts: combinations of keys that cannot run, each with its reason.

`llmsuite validate` checks these rules, and docs/reference/rules.md is generated from them.
"""

from llmsuite.recipe.rules.auto_parallel import AUTO_PARALLEL_RULES, INFERENCE_AUTO_PARALLEL_RULES
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.recipe.rules.critic import CRITIC_RULES
from llmsuite.recipe.rules.generation import GENERATION_RULES
from llmsuite.recipe.rules.metrics import METRIC_RULES
from llmsuite.recipe.rules.prefix import PREFIX_RULES
from llmsuite.recipe.rules.programs import PROGRAM_RULES
from llmsuite.recipe.rules.reft import REFT_RULES
from llmsuite.recipe.rules.required import INFERENCE_REQUIRED_RULES, REQUIRED_RULES
from llmsuite.recipe.rules.rollouts import ROLLOUT_RULES
from llmsuite.recipe.rules.stages import INFERENCE_STAGE_RULES, STAGE_RULES
from llmsuite.recipe.rules.strategy import GENERAL_RULES, STRATEGY_RULES
from llmsuite.recipe.rules.targets import TARGET_RULES

__all__ = ["INFERENCE_RULES", "RULES", "RuleContext"]

RULES = (
    *REQUIRED_RULES,
    *STRATEGY_RULES,
    *AUTO_PARALLEL_RULES,
    *PROGRAM_RULES,
    *STAGE_RULES,
    *REFT_RULES,
    *PREFIX_RULES,
    *TARGET_RULES,
    *GENERATION_RULES,
    *METRIC_RULES,
    *ROLLOUT_RULES,
    *CRITIC_RULES,
)
"""Rules between sections, the model's shape and the device."""

INFERENCE_RULES = (*INFERENCE_REQUIRED_RULES, *GENERAL_RULES, *INFERENCE_AUTO_PARALLEL_RULES, *INFERENCE_STAGE_RULES)
"""Rules for stages that do not train."""
