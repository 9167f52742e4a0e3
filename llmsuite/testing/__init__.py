"""Functions for the tests of plugins."""

from llmsuite.testing.stage_contract import assert_stage_contract

__all__ = ["assert_stage_contract"]
