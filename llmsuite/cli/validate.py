"""`llmsuite validate RECIPE…`: check recipes. Needs no Paddle and no device."""

from __future__ import annotations

import sys
from typing import Any

from llmsuite.errors import RecipeError, UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.fewer import check_fewest
from llmsuite.recipe.notes import endless_warm_up, few_rows, held_out, not_fetched
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.specs import Command
from llmsuite.stages.first_rows import check_rows


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipes", type=str, nargs="+", help="recipe files (.json, .jsonc or .yaml)")
    parser.add_argument("--smoke", action="store_true", help="check the small run that --smoke makes of it")
    parser.epilog = "Overrides such as --train.max_steps=3 are applied to every recipe."


def run(args: Any, registry: Registry) -> int:
    failed = False
    for path in args.recipes:
        try:
            plan = plan_run(path, args.overrides, registry, args.smoke)
            check_fewest(plan, path, args.overrides, registry, args.smoke)
            unchecked = check_rows(plan, registry)
        except UserError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        made = f"{plan.stage.name}, {plan.family.name}, {plan.degrees} on {plan.device.name}"
        print(f"{path}: ok ({made}{_batch(plan) if plan.stage.trains else ''})")
        notes = []
        try:
            plan.check_files()
        except RecipeError as error:
            notes = error.problems
        for note in [*notes, *unchecked, *not_fetched(plan), *few_rows(plan), *held_out(plan), *endless_warm_up(plan)]:
            print(f"  note: {note}")
    return 2 if failed else 0


def _batch(plan: RunPlan) -> str:
    train = plan.recipe.train
    each = f"{train.micro_batch_size} x {plan.accumulate_steps} micro-batches"
    if train.micro_batch_tokens is not None:
        each = f"micro-batches of up to {train.micro_batch_tokens} tokens"
    return (
        f"; {train.global_batch_size} samples a step = {each} x {plan.degrees.num_data_ranks} data ranks{_drawn(plan)}"
    )


def _drawn(plan: RunPlan) -> str:
    """What a rollout draws."""
    updates, size = plan.profile.updates, plan.recipe.train.global_batch_size
    if not updates:
        return ""
    recipe: Any = plan.recipe
    each, longest = recipe.rollout.num_generations, recipe.rollout.max_completion_length
    steps = f"{updates} steps" if updates > 1 else "step"
    return f"; before each {steps}: {size * updates} prompts x {each} completions of up to {longest} tokens"


COMMAND = Command(
    name="validate",
    help="check recipes without running them",
    add_arguments=add_arguments,
    run=run,
    takes_overrides=True,
)
