"""The address from which plugins import the contract of a stage; the contract itself is `llmsuite.train.stage`."""

from llmsuite.train.stage import Batch, DropCounts, LossTerms, Stage, StageContext, Sums

__all__ = ["Batch", "DropCounts", "LossTerms", "Stage", "StageContext", "Sums"]
