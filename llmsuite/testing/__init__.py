"""Assertions for the tests of plugins."""

from llmsuite.testing.family_contract import assert_family_contract
from llmsuite.testing.reward_contract import assert_reward_contract
from llmsuite.testing.stage_contract import assert_stage_contract

__all__ = ["assert_family_contract", "assert_reward_contract", "assert_stage_contract"]
