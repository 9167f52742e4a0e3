"""The command `llmsuite align A B`: compares two parallel strategies or two models module by module."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.exits import exit_code
from llmsuite.base.extras import check_plot
from llmsuite.base.locks import scratch_directory
from llmsuite.base.safe_files import is_dir
from llmsuite.contract.registry import Registry
from llmsuite.recipe.load import REMOVE
from llmsuite.recipe.plans import TrainPlan
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.recipe.source import parse_json

if TYPE_CHECKING:
    from llmsuite.observe.activations.compare import Report
    from llmsuite.observe.activations.merge import Side

_SIDE = "LLMSUITE_ALIGN_SIDE"
_DIRECTORY = "LLMSUITE_ALIGN_DIRECTORY"
"""Environment variables by which a rank in a separate process knows what to record."""
_ONE_PROCESS = {"launch": {"num_devices": 1}, "parallel": {}}
_ONE_STEP = {
    "train.max_steps": 1,
    "train.num_epochs": REMOVE,
    "train.max_grad_norm": None,  # with clipping, one gradient that differs would change all of them
    "train.on_nonfinite": "skip",  # the comparison shows where it comes from
    "train.spike_factor": REMOVE,
    "train.on_spike": REMOVE,
    "train.eval_steps": REMOVE,
    "train.early_stopping": REMOVE,
    "train.loss_watchdog": REMOVE,
    "data.eval": REMOVE,
    "checkpoint": REMOVE,
    "loggers": REMOVE,
}
_DIFFERENT = 3


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveFloat, PositiveInt

    parser.add_argument("a", type=str, help="a recipe, or a run, checkpoint or model directory, or an adapter")
    parser.add_argument(
        "b", type=str, nargs="?", default=None, help="a second one (default: the same recipe on one process)"
    )
    parser.add_argument(
        "--against",
        type=str,
        default=None,
        help='instead of B: recipe keys to change for the second side, as JSON: {"parallel": {…}}',
    )
    parser.add_argument("--smoke", action="store_true", help="compare the reduced runs of `llmsuite run --smoke`")
    parser.add_argument("--tokens", type=PositiveInt, default=4096, help="most tokens at which to compare activations")
    parser.add_argument(
        "--tolerance",
        type=PositiveFloat | None,
        default=None,
        help="relative difference that counts as equal (default: depends on the precision)",
    )
    parser.add_argument("--every", action="store_true", help="show all modules, not only those around a difference")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--plot", type=str, default=None, help="plot the differences into a .png or .svg file")
    parser.add_argument(
        "--precision",
        type=Literal["fp32", "bf16", "fp16"] | None,
        default=None,
        help="precision for two models (default: fp32); recipes use engine.precision",
    )
    parser.add_argument(
        "--device",
        type=str | None,
        default=None,
        help="device for both sides (default: cpu for models, the recipe's own for recipes)",
    )
    parser.epilog = "Recipe keys such as --train.global_batch_size=8 apply to both sides."


def run(args: Any, registry: Registry) -> int:
    if args.plot is not None:
        check_plot(Path(args.plot))
    if is_dir(Path(args.a)):
        a, b = _models(args, registry)
        names = (args.a, args.b)
    else:
        plans = _plans(args, registry)
        every = max(1, _max_tokens(plans[0].train, plans[0].data.section.max_length) // args.tokens)
        if _SIDE in os.environ:  # this is a rank in a separate process
            from llmsuite.devices.start import start_paddle

            plan = plans[int(os.environ[_SIDE])]
            start_paddle(plan.parallel.device.factory(), plan.parallel.devices_per_machine, join=True)
            from llmsuite.engine.activation_recording import record_step

            return record_step(plan, registry, Path(os.environ[_DIRECTORY]), every)
        with scratch_directory("llmsuite-align-") as scratch:
            a, b = (_record_side(i, plan, registry, scratch, every) for i, plan in enumerate(plans))
        second = args.b
        if not second:
            second = "one process"
            if args.against:
                second = f"with {args.against}"
        names = (args.a, second)
    from llmsuite.observe.activations.compare import compare

    report = compare(a, b, names, args.tolerance)
    _print(report, args)
    return 0 if report.is_equal else _DIFFERENT


def _print(report: Report, args: Any) -> None:
    from llmsuite.plugins.align.show import plot, summary_lines, table

    if args.plot is not None:
        plot(report, Path(args.plot))
    if args.json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    # wide enough for the table when the output is not a terminal
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, highlight=False)
    console.print(table(report, args.every))
    print(f"A: {report.names[0]}\nB: {report.names[1]}")
    for name, (ours, theirs) in report.metrics.items():
        print(f"{name}: {ours:.8g} and {theirs:.8g}")
    print(f"activations at {report.num_compared} contexts of {report.num_tokens[0]}")
    for line in summary_lines(report):
        print(line)
    if args.plot is not None:
        print(f"plotted in {args.plot}")


# two strategies


def _plans(args: Any, registry: Registry) -> list[RunPlan]:
    """The two runs to compare. Raises UserError when one of them cannot be."""
    if args.precision is not None:
        raise UserError("align: --precision is for two models; for recipes set --engine.precision")
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
    both = [*args.overrides]
    if args.device is not None:
        both.append(f"--device={args.device}")
    given = [word for word in both if not word.startswith(keys)]
    plans = []
    for path, words in ((args.a, both), (args.b or args.a, [*given, *more])):
        plan = plan_run(path, words, registry, args.smoke, layers=[("align", _ONE_STEP)])
        plan.check_trains("align")
        if plan.recipe.launch.nnodes > 1:
            raise UserError(f"align: {path} runs on several machines; add --smoke, or --launch.nnodes=1")
        plans.append(plan)
    return plans


def _max_tokens(train_plan: TrainPlan, max_length: int) -> int:
    """The largest number of tokens of a step."""
    return train_plan.section.global_batch_size * max_length * train_plan.profile.rows_per_sample


def _record_side(number: int, plan: RunPlan, registry: Registry, scratch: Path, every: int) -> Side:
    """Run one step in the ranks of a side, and read their recordings."""
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.launch import launch
    from llmsuite.launch.ranks import can_fork
    from llmsuite.observe.activations.merge import read_side

    plan.check_files()
    directory = scratch / f"side-{number}"
    where = plan.recipe.launch
    directory.mkdir()
    plan = dataclasses.replace(plan, output_dir=directory / "run")
    backend = plan.parallel.device.factory()
    num_ranks = plan.parallel.degrees.num_ranks
    if (devices := where.device_numbers) is not None:
        os.environ.update(backend.select(devices))
    if plan.parallel.engine.deterministic:
        os.environ.update(backend.deterministic_flags or {})
    if num_ranks > 1:
        backend.prepare_ranks()
    start_paddle(backend, num_ranks, fork=backend.forks)
    if reason := backend.unavailable(num_ranks):
        raise UserError(f"{plan.loaded.name}: device {backend.name}: {reason}")
    plan.fetched(lambda message: print(message, file=sys.stderr))
    print(f"side {'AB'[number]}: a step on {plan.parallel.degrees}", file=sys.stderr, flush=True)

    def forked() -> int:
        backend.after_paddle()
        from llmsuite.engine.activation_recording import record_step

        return exit_code(lambda: record_step(plan, registry, directory, every))

    def environment(local_rank: int) -> dict[str, str]:
        ours = {_SIDE: str(number), _DIRECTORY: str(directory)}
        return {**backend.variables(num_ranks, local_rank), **backend.timeout_variables(where.stall_seconds), **ours}

    output: list[str] = []
    work = forked if backend.forks and can_fork() else [sys.executable, "-m", "llmsuite", *sys.argv[1:]]
    code = launch(work, num_ranks, directory / "logs", environment, output.append, stall_seconds=where.stall_seconds)
    if code != 0:
        raise UserError("".join(output) + f"align: side {'AB'[number]} ended with exit code {code}")
    return read_side(directory, num_ranks, plan.parallel.engine.precision)


# two models


def _models(args: Any, registry: Registry) -> Sequence[Side]:
    """Recordings of two models over the same random ids."""
    if args.b is None or not is_dir(Path(args.b)) or args.against is not None or args.overrides or args.smoke:
        raise UserError("align: A is a directory; name another as B, without recipe keys and --smoke")
    device = args.device or "cpu"
    precision = args.precision or "fp32"
    backend = registry.device(device).factory()
    from llmsuite.devices.start import start_paddle

    start_paddle(backend, 1)
    if reason := backend.unavailable(1):
        raise UserError(f"--device {device}: {reason}")
    backend.activate(0)
    from llmsuite.engine.activation_recording import random_ids, record_model
    from llmsuite.inference.export_manifest import find_program, find_weights, is_exported
    from llmsuite.inference.load import open_any

    for name in (args.a, args.b):
        if is_exported(find_program(Path(name))) and find_weights(Path(name)) == Path(name):
            raise UserError(f"{name}: is a program, whose modules cannot be seen; use `llmsuite verify`")
    sources = [open_any(find_weights(Path(name)), registry.models) for name in (args.a, args.b)]
    vocabulary = min(source.config.vocab_size for source in sources)
    length = min(source.config.max_position_embeddings for source in sources)
    ids = random_ids(vocabulary, length)
    return [record_model(source, backend, precision, ids) for source in sources]
