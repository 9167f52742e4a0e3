"""`llmsuite plan RECIPE`: the memory, traffic and time a run will take. Needs no Paddle and no device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmsuite.cli.amounts import Unit, parse_amount
from llmsuite.errors import UserError
from llmsuite.extras import check_plot
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.load import load
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.schema.degrees import launch_of
from llmsuite.specs import Command

_MOST = 10


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument("--smoke", action="store_true", help="plan the small run that --smoke makes of it")
    parser.add_argument("--devices", type=int, default=None, help="so many devices, eight a machine, instead of launch")
    parser.add_argument("--memory", type=str, default=None, help="of a device, such as 80GiB: does it fit?")
    parser.add_argument("--plot", type=str, default=None, help="draw the pipeline's schedule into a .png or .svg")
    parser.add_argument("--search", action="store_true", help="which strategies fit, the fastest first")
    parser.add_argument("--hardware", type=str, default=None, help="h100, h800, h200, a100 or a800: figures for times")
    parser.add_argument("--flops", type=str, default=None, help="peak of a device, such as 989TFLOPS")
    parser.add_argument("--bandwidth", type=str, default=None, help="between machines, a device, such as 50GB/s")
    parser.add_argument("--local_bandwidth", type=str, default=None, help="between devices of a machine")
    parser.add_argument("--memory_bandwidth", type=str, default=None, help="of a device's memory, for rollouts")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.planning.cost import hardware
    from llmsuite.planning.estimate import estimate
    from llmsuite.planning.order import check_order, summary
    from llmsuite.planning.plot import plot_schedule
    from llmsuite.planning.search import search
    from llmsuite.planning.show import show_plan, show_search

    if args.plot is not None:
        if args.search:
            raise UserError("--plot: draws one plan, not a search; plan its strategy by itself, or leave this out")
        check_plot(Path(args.plot))
    words = [*_devices(args.devices), *args.overrides]
    free = args.search and not args.smoke
    plan = _for_search(args.recipe, words, registry) if free else plan_run(args.recipe, words, registry, args.smoke)
    plan.check_trains("plan")
    if plan.degrees.own_meshes:
        raise UserError(
            f"plan: family {plan.family.name} places its parameters in its own code, which this command does not run; "
            "start it with --train.max_steps=2, and look at peak_memory_bytes in metrics.jsonl"
        )
    amounts = {
        "memory": _amount("--memory", args.memory, "bytes"),
        "flops": _amount("--flops", args.flops, "FLOPS"),
        "network": _amount("--bandwidth", args.bandwidth, "bytes/s"),
        "local": _amount("--local_bandwidth", args.local_bandwidth, "bytes/s"),
        "memory_bandwidth": _amount("--memory_bandwidth", args.memory_bandwidth, "bytes/s"),
    }
    device = hardware(args.hardware, **amounts)
    memory = amounts["memory"] or (device.memory if device is not None and args.hardware else None)
    if args.search:
        if memory is None or device is None:
            raise UserError("--search: needs a device: --hardware, or --memory, --flops and --bandwidth")
        fitting, rejected = search(plan, memory, device)
        for line in show_search(fitting, rejected, _MOST):
            print(line)
        return 0 if fitting else 3
    found = estimate(plan)
    for line in show_plan(found, memory, device):
        print(line)
    if plan.degrees.num_ranks > 1:
        print(summary(check_order(plan), plan))
    if args.plot is not None:
        plot_schedule(found.timeline, Path(args.plot))
        print(f"the schedule is drawn in {args.plot}")
    return 0 if memory is None or found.peak <= memory else 3


def _for_search(recipe: str, words: list[str], registry: Registry) -> RunPlan:
    """The plan of a recipe for one device, that knows of all of them: degrees are looked for, so those of the recipe
    need not fit the devices."""
    launch = load(recipe, words, registry).recipe.launch
    plan = plan_run(recipe, [*words, "--parallel={}", "--launch={}"], registry)
    whole = dataclasses.replace(plan.recipe, launch=launch)
    return dataclasses.replace(plan, loaded=dataclasses.replace(plan.loaded, recipe=whole))


def _devices(count: int | None) -> list[str]:
    """The overrides that set the number of devices."""
    if count is None:
        return []
    if count < 1:
        raise UserError(f"--devices: is {count}; it has to be 1 or more")
    return [f"--launch.{key}={value}" for key, value in {"nnodes": 1, **launch_of(count)}.items()]


def _amount(option: str, text: str | None, unit: Unit) -> float | None:
    return None if text is None else parse_amount(option, text, unit)


COMMAND = Command(
    name="plan",
    help="what a run will take: memory, traffic, time; without devices",
    add_arguments=add_arguments,
    run=run,
    takes_overrides=True,
)
