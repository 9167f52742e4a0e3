"""`llmsuite align A B`: two strategies or two models side by side, module by module; the first difference is named."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmsuite.cli.exits import exit_code
from llmsuite.errors import UserError
from llmsuite.extras import check_plot
from llmsuite.locks import scratch_directory
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.load import REMOVE
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.recipe.source import parse_json
from llmsuite.regular import is_dir
from llmsuite.specs import Command

if TYPE_CHECKING:
    from llmsuite.align.compare import Report
    from llmsuite.align.merge import Side

_SIDE, _DIRECTORY = "LLMSUITE_ALIGN_SIDE", "LLMSUITE_ALIGN_DIRECTORY"
"""Variables by which a rank that is a process of its own knows what it records."""
_ONE_PROCESS = {"launch": {"num_devices": 1}, "parallel": {}}
_ONE_STEP = {
    "train.max_steps": 1,
    "train.num_epochs": REMOVE,
    "train.max_grad_norm": None,  # a part that differs would change all gradients
    "train.on_nonfinite": "skip",  # the record says where it is from
    "train.spike_factor": REMOVE,
    "train.on_spike": REMOVE,
    "train.eval_steps": REMOVE,
    "data.eval": REMOVE,
    "checkpoint": REMOVE,
    "loggers": REMOVE,
}
_DIFFERENT = 3


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveFloat, PositiveInt

    parser.add_argument("a", type=str, help="a recipe, or a run, checkpoint or model directory, or an adapter")
    parser.add_argument("b", type=str, nargs="?", default=None, help="another; without it: the recipe on one process")
    parser.add_argument(
        "--against",
        type=str,
        default=None,
        help='instead of B: the keys in which the second side differs, as JSON: {"parallel": {…}}',
    )
    parser.add_argument("--smoke", action="store_true", help="both sides as `llmsuite run --smoke` makes them")
    parser.add_argument("--tokens", type=PositiveInt, default=4096, help="activations are compared at so many or fewer")
    parser.add_argument(
        "--tolerance", type=PositiveFloat | None, default=None, help="relative difference that is none; by precision"
    )
    parser.add_argument("--every", action="store_true", help="show all modules, not only those around a difference")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--plot", type=str, default=None, help="draw the differences into a .png or .svg")
    parser.add_argument(
        "--precision",
        type=Literal["fp32", "bf16", "fp16"] | None,
        default=None,
        help="of two models (default: fp32); recipes have engine.precision",
    )
    parser.add_argument(
        "--device", type=str | None, default=None, help="of both sides; default: of models cpu, of recipes their own"
    )
    parser.epilog = "Recipe keys are set for both sides: --train.global_batch_size=8."


def run(args: Any, registry: Registry) -> int:
    if args.plot is not None:
        check_plot(Path(args.plot))
    if is_dir(Path(args.a)):
        (a, b), names = _models(args, registry), (args.a, args.b)
    else:
        plans = _plans(args, registry)
        every = max(1, _most_tokens(plans[0]) // args.tokens)
        if _SIDE in os.environ:
            return _rank(plans[int(os.environ[_SIDE])], registry, every)
        with scratch_directory("llmsuite-align-") as scratch:
            a, b = (_recorded(i, plan, registry, scratch, every) for i, plan in enumerate(plans))
        second = args.b or (f"with {args.against}" if args.against else "one process")
        names = (args.a, second)
    from llmsuite.align.compare import compare

    report = compare(a, b, names, args.tolerance)
    _print(report, args)
    return 0 if report.is_equal else _DIFFERENT


def _print(report: Report, args: Any) -> None:
    from llmsuite.align.show import plot, table, verdict

    if args.plot is not None:
        plot(report, Path(args.plot))
    if args.json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    # as wide as it is where nobody looks at it on a terminal
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(table(report, args.every))
    print(f"A: {report.names[0]}\nB: {report.names[1]}")
    for name, (ours, theirs) in report.metrics.items():
        print(f"{name}: {ours:.8g} and {theirs:.8g}")
    print(f"activations at {report.num_compared} contexts of {report.num_tokens[0]}")
    for line in verdict(report):
        print(line)
    if args.plot is not None:
        print(f"drawn in {args.plot}")


# two strategies


def _plans(args: Any, registry: Registry) -> list[RunPlan]:
    """The two runs to compare. Raises UserError when one of them cannot be."""
    if args.precision is not None:
        raise UserError("align: --precision is of two models; of recipes set --engine.precision")
    if args.b is not None and args.against is not None:
        raise UserError("align: give B or --against, not both")
    if args.b is not None and is_dir(Path(args.b)):
        raise UserError(f"align: {args.b} is a directory and {args.a} is not; name two recipes or two models")
    changes: Any = _ONE_PROCESS
    if args.against is not None:
        changes = parse_json(args.against, "--against").value
    if not isinstance(changes, dict):
        raise UserError('--against: expected an object of recipe keys, such as {"parallel": {}}')
    more = [] if args.b is not None else [f"--{key}={json.dumps(value)}" for key, value in changes.items()]
    keys = tuple(f"{word.partition('=')[0]}{end}" for word in more for end in "=.")
    both = [*args.overrides, *([f"--device={args.device}"] if args.device is not None else [])]
    given = [word for word in both if not word.startswith(keys)]
    plans = []
    for path, words in ((args.a, both), (args.b or args.a, [*given, *more])):
        plan = plan_run(path, words, registry, args.smoke, layers=[("align", _ONE_STEP)])
        plan.check_trains("align")
        if plan.recipe.launch.nnodes > 1:
            raise UserError(f"align: {path} runs on several machines; add --smoke, or --launch.nnodes=1")
        plans.append(plan)
    return plans


def _most_tokens(plan: RunPlan) -> int:
    """Tokens that a step has at most."""
    recipe = plan.recipe
    return int(recipe.train.global_batch_size * recipe.data.max_length * plan.stage.rows_per_sample)


def _rank(plan: RunPlan, registry: Registry, every: int) -> int:
    """Record a step in this rank, which is a process of its own."""
    from llmsuite.devices.start import start_paddle

    start_paddle(plan.device.factory(), plan.recipe.launch.num_devices, join=True)
    return _record(plan, registry, Path(os.environ[_DIRECTORY]), every)


def _record(plan: RunPlan, registry: Registry, directory: Path, every: int) -> int:
    from llmsuite.train.sides import record_step

    _ = plan.recipe.launch.stall_seconds, plan.recipe.launch.log_dir  # keys without a meaning for one step
    return record_step(plan, registry, directory, every)


def _recorded(number: int, plan: RunPlan, registry: Registry, scratch: Path, every: int) -> Side:
    """Run one step in the ranks of a side, and read what they have recorded."""
    from llmsuite.align.merge import read_side
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.launch import launch
    from llmsuite.launch.ranks import can_fork

    plan.check_files()
    directory, where = scratch / f"side-{number}", plan.recipe.launch
    directory.mkdir()
    plan = dataclasses.replace(plan, output_dir=directory / "run")
    backend, num_ranks = plan.device.factory(), plan.degrees.num_ranks
    if (devices := where.device_numbers) is not None:
        os.environ.update(backend.select(devices))
    if plan.recipe.engine.deterministic:
        os.environ.update(backend.deterministic_flags or {})
    if num_ranks > 1:
        backend.prepare_ranks()
    start_paddle(backend, num_ranks, fork=backend.forks)
    if reason := backend.unavailable(num_ranks):
        raise UserError(f"{plan.loaded.name}: device {backend.name}: {reason}")
    plan.fetched(lambda message: print(message, file=sys.stderr))
    print(f"side {'AB'[number]}: a step on {plan.degrees}", file=sys.stderr, flush=True)

    def forked() -> int:
        backend.after_paddle()
        return exit_code(lambda: _record(plan, registry, directory, every))

    def environment(local_rank: int) -> dict[str, str]:
        ours = {_SIDE: str(number), _DIRECTORY: str(directory)}
        return {**backend.variables(num_ranks, local_rank), **backend.patience(where.stall_seconds), **ours}

    said: list[str] = []
    work = forked if backend.forks and can_fork() else [sys.executable, "-m", "llmsuite", *sys.argv[1:]]
    code = launch(work, num_ranks, directory / "logs", environment, said.append, stall_seconds=where.stall_seconds)
    if code != 0:
        raise UserError("".join(said) + f"align: side {'AB'[number]} ended with exit code {code}")
    return read_side(directory, num_ranks, plan.recipe.engine.precision)


# two models


def _models(args: Any, registry: Registry) -> Sequence[Side]:
    """Passes of two models over the same random ids."""
    if args.b is None or not is_dir(Path(args.b)) or args.against is not None or args.overrides or args.smoke:
        raise UserError("align: A is a directory; name another as B, without recipe keys and --smoke")
    device, precision = args.device or "cpu", args.precision or "fp32"
    if device not in registry.devices:
        raise UserError(registry.unknown("device", device))
    backend = registry.devices[device].factory()
    from llmsuite.devices.start import start_paddle

    start_paddle(backend, 1)
    if reason := backend.unavailable(1):
        raise UserError(f"--device {device}: {reason}")
    backend.activate(0)
    from llmsuite.cli.export import find_program, find_weights
    from llmsuite.inference.exported import is_exported
    from llmsuite.inference.load import open_any
    from llmsuite.train.sides import random_ids, record_model

    for name in (args.a, args.b):
        if is_exported(find_program(Path(name))) and find_weights(Path(name)) == Path(name):
            raise UserError(f"{name}: is a program, whose modules cannot be seen; use `llmsuite verify`")
    sources = [open_any(find_weights(Path(name)), registry.models) for name in (args.a, args.b)]
    vocabulary = min(source.config.vocab_size for source in sources)
    length = min(source.config.max_position_embeddings for source in sources)
    ids = random_ids(vocabulary, length)
    return [record_model(source, backend, precision, ids) for source in sources]


COMMAND = Command(
    name="align",
    help="two strategies or two models, module by module: the first difference",
    add_arguments=add_arguments,
    run=run,
    takes_overrides=True,
)
