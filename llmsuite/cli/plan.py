"""`llmsuite plan RECIPE`: what a run will take, before anything is started. Needs no Paddle and no device."""

from __future__ import annotations

import re
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.hookspecs import Command
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("kmgtp", 1)}


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (JSON)")
    parser.add_argument("--smoke", action="store_true", help="plan the small run that --smoke makes of it")
    parser.add_argument("--devices", type=int, default=None, help="so many devices, eight a machine, instead of launch")
    parser.add_argument("--memory", type=str, default=None, help="of a device, such as 80GiB: does it fit?")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.planning.estimate import estimate
    from llmsuite.planning.show import show_plan

    plan = plan_run(args.recipe, [*_devices(args.devices), *args.overrides], registry, args.smoke)
    plan.check_trains("plan")
    memory = None if args.memory is None else parse_amount("--memory", args.memory)
    found = estimate(plan)
    for line in show_plan(found, memory):
        print(line)
    return 0 if memory is None or found.peak <= memory else 3


def _devices(count: int | None) -> list[str]:
    """The overrides that ask for so many devices."""
    if count is None:
        return []
    if count < 1:
        raise UserError(f"--devices: is {count}; it has to be 1 or more")
    per_machine = 8 if count > 8 and count % 8 == 0 else count
    return [f"--launch.num_devices={per_machine}", f"--launch.nnodes={count // per_machine}"]


def parse_amount(option: str, text: str) -> float:
    """A number with a unit, such as 80GiB, 400GB/s, 989TFLOPS, 4e11.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgtp]i?|)(b|b/s|flops|flop/s)?", text.strip().lower())
    try:
        if match is None:
            raise ValueError
        value = float(match[1]) * _UNITS[match[2]]
    except ValueError:
        raise UserError(f"{option}: {text!r} is no amount; write it such as 80GiB, 400GB/s or 989TFLOPS") from None
    if value <= 0:
        raise UserError(f"{option}: is {text}; it has to be above 0")
    return value


COMMAND = Command(
    name="plan",
    help="what a run will take: memory, traffic, time; without devices",
    add_arguments=add_arguments,
    run=run,
    takes_overrides=True,
)
