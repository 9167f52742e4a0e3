"""`llmsuite run RECIPE`: train."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from llmsuite.errors import RecipeError
from llmsuite.plugins.hookspecs import Command
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import RunPlan, plan_run, unsupported


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (JSON)")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shape, embedded data, CPU processes: does this recipe run?"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last whole checkpoint of output_dir")
    parser.epilog = (
        "Any key of the recipe can be overridden: --train.max_steps=3 --data.train FILE. "
        "`llmsuite list keys --stage dpo` shows them all."
    )


def run(args: Any, registry: Registry) -> int:
    plan = plan_run(args.recipe, args.overrides, registry, args.smoke)
    if problems := unsupported(plan):
        raise RecipeError(problems)
    plan.check_files()
    if not args.resume:
        if args.smoke and not any(word.startswith("--output_dir") for word in args.overrides):
            shutil.rmtree(plan.output_dir, ignore_errors=True)  # made by --smoke, for nobody to keep
        plan.check_output()
    from llmsuite.devices.start import start_paddle
    from llmsuite.engine.launch import is_worker, launch

    backend = plan.device.factory()
    num_ranks = plan.degrees.num_ranks
    if num_ranks > 1 and not is_worker():
        backend.prepare_ranks()
    start_paddle(backend, num_ranks, join=is_worker())
    if is_worker():
        return _work(plan, registry, args.resume)

    for info in registry.plugins:
        if info.error:
            print(f"plugin {info.name} does not work; see: llmsuite plugins list", file=sys.stderr)
    reason = backend.unavailable(plan.recipe.launch.num_devices)
    if reason is not None:
        raise RecipeError([plan.loaded.problem("device", f"{backend.name}: {reason}")])
    if args.smoke:
        was = plan.degrees
        print(f"smoke run of {args.recipe}: tiny {plan.family.name}, embedded data, mesh {was} on cpu", flush=True)
    if num_ranks == 1:
        return _work(plan, registry, args.resume)

    def environment(rank: int) -> dict[str, str]:
        return {**backend.environment(num_ranks), **backend.rank_environment(rank)}

    command = [sys.executable, "-m", "llmsuite", *sys.argv[1:]]
    return launch(command, num_ranks, plan.output_dir / "logs", environment, _write)


def _work(plan: RunPlan, registry: Registry, resume: bool) -> int:
    from llmsuite.stages.run import run as run_stage

    return run_stage(plan, registry, resume)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


COMMAND = Command(name="run", help="train as a recipe says", add_arguments=add_arguments, run=run, takes_overrides=True)
