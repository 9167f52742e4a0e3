"""The command `llmsuite validate RECIPE…`: checks recipes, without Paddle and without a device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.cli.tables import JSON_HELP, print_json
from llmsuite.contract.registry import Registry

if TYPE_CHECKING:
    from llmsuite.recipe.plans import ParallelPlan, TrainPlan


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipes", type=str, nargs="+", help="recipe files (.json, .jsonc or .yaml)")
    parser.add_argument("--smoke", action="store_true", help="check the reduced run of --smoke")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = "Overrides such as --train.max_steps=3 apply to every recipe."


def run(args: Any, registry: Registry) -> int:
    from llmsuite.recipe.elastic import check_min_nodes
    from llmsuite.recipe.notes import all_notes
    from llmsuite.recipe.resolve import plan_run
    from llmsuite.stages.first_rows import check_rows

    found: list[dict[str, Any]] = []
    for path in args.recipes:
        try:
            plan = plan_run(path, args.overrides, registry, args.smoke)
            check_min_nodes(plan.loaded, path, args.overrides, registry, args.smoke)
            unchecked = check_rows(plan.loaded, plan.data, plan.train, plan.model.tokenizer, registry)
        except UserError as error:
            found.append({"recipe": path, "valid": False, "problems": _problems(error)})
            if not args.json:
                print(error, file=sys.stderr)
            continue
        made = (
            f"{plan.train.stage.name}, {plan.model.family.name}, {plan.parallel.degrees} on {plan.parallel.device.name}"
        )
        made += _batch(plan.train, plan.parallel) if plan.train.stage.trains else ""
        notes = []
        try:
            plan.check_files()
        except RecipeError as error:
            notes = error.problems
        more = all_notes(plan.recipe, plan.data, plan.train, plan.parallel.device.name)
        texts = [str(note) for note in (*notes, *unchecked, *more)]
        found.append({"recipe": path, "valid": True, "run": made, "notes": texts})
        if not args.json:
            print(f"{path}: ok ({made})")
            print("".join(f"  note: {text}\n" for text in texts), end="")
    if args.json:
        print_json(found)
    return 0 if all(checked["valid"] for checked in found) else 2


def _problems(error: UserError) -> list[dict[str, str]]:
    """The problems of a recipe as data: where it is, the key and the message of each."""
    if not isinstance(error, RecipeError):
        return [{"where": "", "key": "", "message": str(error)}]
    return [{"where": each.where, "key": each.key, "message": each.message} for each in error.problems]


def _batch(train_plan: TrainPlan, parallel_plan: ParallelPlan) -> str:
    train = train_plan.section
    each = f"{train.micro_batch_size} x {parallel_plan.accumulate_steps} micro-batches"
    if train.micro_batch_tokens is not None:
        each = f"micro-batches of up to {train.micro_batch_tokens} tokens"
    batch = f"; {train.global_batch_size} samples per step = {each} x {parallel_plan.degrees.num_data_ranks} data ranks"
    return batch + _rollout_size(train_plan)


def _rollout_size(train_plan: TrainPlan) -> str:
    """The words for the completions that a rollout samples."""
    updates = train_plan.profile.updates
    size = train_plan.section.global_batch_size
    if not updates:
        return ""
    each = train_plan.rollout.num_generations
    longest = train_plan.rollout.max_completion_length
    steps = f"{updates} steps" if updates > 1 else "step"
    return f"; before each {steps}: {size * updates} prompts x {each} completions of up to {longest} tokens"
