"""Answers of the planner about the plan of a run."""

from __future__ import annotations

from llmsuite.planning.call_order import OrderCheck, check_order
from llmsuite.planning.cost import Hardware
from llmsuite.planning.estimate import Estimate, estimate
from llmsuite.planning.search import Fitting, Rejected, search
from llmsuite.recipe.resolve import RunPlan


def estimated(plan: RunPlan) -> Estimate:
    """`llmsuite.planning.estimate.estimate`."""
    return estimate(plan.model, plan.data, plan.parallel, plan.train)


def searched(plan: RunPlan, limit: float, device: Hardware) -> tuple[list[Fitting], list[Rejected]]:
    """`llmsuite.planning.search.search`."""
    return search(plan.loaded, plan.model, plan.data, plan.parallel, plan.train, limit, device)


def checked_order(plan: RunPlan) -> OrderCheck | None:
    """`llmsuite.planning.call_order.check_order`."""
    return check_order(plan.loaded.name, plan.model, plan.data, plan.parallel, plan.train)
