"""What a plugin's own tests can call."""

from llmsuite.testing.stage_contract import assert_stage_contract

__all__ = ["assert_stage_contract"]
