"""The command `llmsuite plan RECIPE`: estimates memory, traffic and time of a run, without Paddle or a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.extras import check_plot
from llmsuite.cli.amounts import Unit, parse_amount
from llmsuite.cli.tables import JSON_HELP, print_json
from llmsuite.contract.registry import Registry

_MAX_SHOWN = 10


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument("--smoke", action="store_true", help="plan the reduced run of --smoke")
    parser.add_argument(
        "--devices", type=int, default=None, help="plan for this many devices, 8 per machine, instead of launch"
    )
    parser.add_argument("--memory", type=str, default=None, help="memory of a device, such as 80GiB: does the run fit?")
    parser.add_argument("--plot", type=str, default=None, help="plot the pipeline schedule into a .png or .svg file")
    parser.add_argument(
        "--search", action="store_true", help="list the parallel strategies that fit, the fastest first"
    )
    parser.add_argument(
        "--hardware", type=str, default=None, help="h100, h800, h200, a100 or a800: sets the figures below"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument("--flops", type=str, default=None, help="peak of a device, such as 989TFLOPS")
    parser.add_argument("--bandwidth", type=str, default=None, help="between machines, per device, such as 50GB/s")
    parser.add_argument("--local_bandwidth", type=str, default=None, help="between the devices of a machine")
    parser.add_argument("--memory_bandwidth", type=str, default=None, help="of the memory of a device, for rollouts")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.observe.plots import plot_schedule
    from llmsuite.planning.call_order import check_order, summary
    from llmsuite.planning.cost import MEMORY_LEFT, hardware
    from llmsuite.planning.estimate import estimate
    from llmsuite.planning.report import plan_data, show_plan, show_search
    from llmsuite.planning.search import device_words, plan_for_search, search
    from llmsuite.recipe.resolve import plan_run

    if args.json and (args.search or args.plot is not None):
        raise UserError("--json: prints one plan; leave out --search and --plot")
    if args.plot is not None:
        if args.search:
            raise UserError("--plot: shows one plan, not a search; plan one strategy without --search, or leave it out")
        check_plot(Path(args.plot))
    words = [*device_words(args.devices), *args.overrides]
    if args.search and not args.smoke:
        plan = plan_for_search(args.recipe, words, registry)
    else:
        plan = plan_run(args.recipe, words, registry, args.smoke)
    plan.check_trains("plan")
    if plan.parallel.degrees.auto_parallel:
        raise UserError(
            f"plan: family {plan.model.family.name} places its parameters in its own code, which this command does not "
            "run; start it with --train.max_steps=2, and look at peak_memory_bytes in metrics.jsonl"
        )
    amounts = {
        "memory": _amount("--memory", args.memory, "bytes"),
        "flops": _amount("--flops", args.flops, "FLOPS"),
        "network": _amount("--bandwidth", args.bandwidth, "bytes/s"),
        "local": _amount("--local_bandwidth", args.local_bandwidth, "bytes/s"),
        "memory_bandwidth": _amount("--memory_bandwidth", args.memory_bandwidth, "bytes/s"),
    }
    device = hardware(args.hardware, **amounts)
    memory = amounts["memory"]
    if memory is None and device is not None and args.hardware:
        memory = device.memory - MEMORY_LEFT
    if args.search:
        if memory is None or device is None:
            raise UserError("--search: needs a device: --hardware, or --memory, --flops and --bandwidth")
        fitting, rejected = search(plan.loaded, plan.model, plan.data, plan.parallel, plan.train, memory, device)
        for line in show_search(fitting, rejected, _MAX_SHOWN, ("engine", "recompute_every") in plan.loaded.given):
            print(line)
        return 0 if fitting else 3
    found = estimate(plan.model, plan.data, plan.parallel, plan.train)
    if args.json:
        print_json(plan_data(found, memory, device))
        return 0 if memory is None or found.peak <= memory else 3
    for line in show_plan(found, memory, device):
        print(line)
    if plan.parallel.degrees.num_ranks > 1:
        check = check_order(plan.loaded.name, plan.model, plan.data, plan.parallel, plan.train)
        print(summary(check, plan.model.family.name, plan.parallel.degrees.num_ranks))
    if args.plot is not None:
        plot_schedule(found.timeline, Path(args.plot))
        print(f"the schedule is plotted in {args.plot}")
    if memory is None or found.peak <= memory:
        return 0
    return 3


def _amount(option: str, text: str | None, unit: Unit) -> float | None:
    if text is None:
        return None
    return parse_amount(option, text, unit)
