"""The command `llmsuite rehearse RECIPE`: the recipe's own training step at its true size, without a device."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.base.commands import run_command
from llmsuite.base.errors import UserError
from llmsuite.base.files import os_errors
from llmsuite.base.locks import scratch_directory
from llmsuite.base.safe_files import exists
from llmsuite.contract.registry import PluginInfo, Registry
from llmsuite.recipe.fetch import fetch_names
from llmsuite.recipe.load import REMOVE
from llmsuite.recipe.plans import ModelPlan, ParallelPlan, TrainPlan
from llmsuite.recipe.resolve import RunPlan, plan_run

if TYPE_CHECKING:
    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.engine.rehearsal import Routing
    from llmsuite.planning.cost import Hardware

_DIRECTORY = "LLMSUITE_REHEARSE_DIRECTORY"
"""Environment variable by which the process of a rank knows where its report goes."""
_STEPS_ONLY = {
    "train.num_epochs": REMOVE,
    "train.eval_steps": REMOVE,
    "train.early_stopping": REMOVE,
    "train.loss_watchdog": REMOVE,
    "data.eval": REMOVE,
    "checkpoint": REMOVE,
    "loggers": REMOVE,
}
"""Keys of the recipe that a rehearsal replaces or leaves out."""
_NUM_STEPS = 3
"""Steps of a rehearsal, as in `rank`, which imports Paddle."""
_DEVICE = "virtual_gpu"


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument(
        "--ranks",
        type=str,
        default=None,
        help="the ranks to rehearse, such as 0,5; stages: one of each pipeline stage (default: one of the first and of "
        "the last)",
    )
    parser.add_argument(
        "--hardware",
        type=str,
        default=None,
        help="h100, h800, h200, a100 or a800: the memory that a rank may take, and the figures for its times",
    )
    parser.add_argument(
        "--trace", type=str, default=None, help="write the step in time for chrome://tracing; needs --hardware"
    )
    parser.add_argument(
        "--routing",
        choices=("balanced", "worst"),
        default="balanced",
        help="tokens of experts: as many for each, or all for the same ones (default: balanced)",
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.epilog = "Any key of the recipe can be overridden, as with `llmsuite run`."


def run(args: Any, registry: Registry) -> int:
    plan = plan_to_rehearse(args.recipe, args.overrides, registry)
    if is_rank():
        return run_rank_of(plan, registry, args.routing, args.hardware)
    if args.trace is not None and args.hardware is None:
        raise UserError("--trace: shows times, which need --hardware")
    degrees = plan.parallel.degrees
    ranks = ranks_to_rehearse(args.ranks, degrees)
    memory = None if args.hardware is None else int(figures_of(args.hardware).memory)
    plan = fetch_names(plan.loaded, registry, lambda text: print(text, file=sys.stderr), loads_model=False)
    plan.check_files(loads_model=False)
    plan.parallel.device.factory().rank_environment(0)  # builds the device once, and says so
    with scratch_directory("llmsuite-rehearse-") as scratch:
        reports = rehearse_ranks(plan.parallel, ranks, scratch, memory)
        if args.trace is not None:
            _write_trace(Path(args.trace), scratch, ranks)
    if args.hardware is not None:
        from llmsuite.plugins.rehearse.predictions import predict

        predict(reports, plan.model, plan.data, plan.parallel, plan.train, figures_of(args.hardware))
    shown = [report for report in reports if report["rank"] in ranks]
    for report in shown:
        report.pop("sent", None)  # no results, but for other ranks
        report.pop("times", None)
    from llmsuite.plugins.rehearse.show import show_rank

    if args.json:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        for report in shown:
            for line in show_rank(report, str(degrees), memory):
                print(line)
    return 1 if any("error" in report for report in reports) else 0


def is_rank() -> bool:
    """True in the process of a rank that is rehearsed."""
    return _DIRECTORY in os.environ


def plan_to_rehearse(recipe: str, overrides: Sequence[str], registry: Registry) -> RunPlan:
    """The run to rehearse, on the virtual device. Raises UserError where it cannot be."""
    from llmsuite.plugins.rehearse import device

    if _DEVICE not in registry.devices:
        registry.require(PluginInfo(_DEVICE, "llmsuite", device.__name__, plugin=device))
    plan = plan_run(recipe, overrides, registry)
    plan.check_trains("rehearse")
    refuse(plan.model, plan.parallel, plan.train)
    # three rollouts, where a rollout has several steps
    steps = {**_STEPS_ONLY, "train.max_steps": _NUM_STEPS * max(1, plan.train.profile.updates)}
    if plan.train.profile.on_policy < 1:
        steps[f"{plan.train.stage.section_name}.on_policy"] = 1.0  # each step with a rollout, which takes more
    if plan.train.stage.name == "pretrain":
        steps["pretrain.split"] = REMOVE  # it holds samples back for evaluations
    return plan_run(recipe, [*overrides, f"--device={_DEVICE}"], registry, layers=[("rehearse", steps)])


def refuse(model: ModelPlan, parallel: ParallelPlan, train: TrainPlan) -> None:
    """Raise UserError for what cannot be rehearsed yet."""
    engine = parallel.engine
    if parallel.degrees.auto_parallel:
        raise UserError(
            f"rehearse: family {model.family.name} places its parameters in its own code, which cannot be rehearsed "
            "yet; start it with --train.max_steps=2"
        )
    if engine.compiles_steps:
        raise UserError("engine.program: is step, which cannot be rehearsed yet; set it to layers")
    teacher = train.teacher
    if teacher is not None and teacher.shard_plan.gates:
        raise UserError(f"{teacher.key}: is a model with experts, which cannot be rehearsed as a teacher yet")


def figures_of(name: str) -> Hardware:
    """The figures of a device. Raises UserError where it is not known."""
    from llmsuite.planning.cost import hardware

    found = hardware(name)
    assert found is not None
    return found


def rehearse_ranks(
    plan: ParallelPlan,
    ranks: list[int],
    scratch: Path,
    memory: int | None,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Rehearse ranks one after the other, each in a process that runs the command of this one.

    Args:
        plan: of the run.
        ranks: to rehearse.
        scratch: directory for their files, each in a directory of its number.
        memory: bytes that a rank may take; None for any number.
        environment: further variables of their processes.

    Returns:
        Their reports, and those of ranks that send to them.
    """
    reports: list[dict[str, Any]] = []
    for rank in ranks_in_order(ranks, plan.degrees):
        print(f"rank {rank} of {plan.degrees.num_ranks}", file=sys.stderr, flush=True)
        sent = sent_to(reports, rank, plan.degrees)
        reports.append(_rehearse(plan, rank, scratch / str(rank), memory, sent, environment or {}))
    return reports


def ranks_to_rehearse(given: str | None, degrees: Degrees) -> list[int]:
    """The ranks to rehearse, in order. Raises UserError for one that is not there."""
    each = degrees.num_ranks // degrees.pp  # stages are the outermost axis
    if given is None:
        return sorted({0, degrees.num_ranks - each})
    if given == "stages":
        return list(range(0, degrees.num_ranks, each))
    words = given.split(",")
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UserError(f"--ranks: is {given!r}; give numbers of ranks with commas between, such as 0,5, or stages")
    ranks = sorted({int(word) for word in words})
    if ranks[-1] >= degrees.num_ranks:
        raise UserError(f"--ranks: {ranks[-1]} is none of the {degrees.num_ranks} ranks of {degrees}, counted from 0")
    return ranks


def first_stage_rank(rank: int, degrees: Degrees) -> int:
    """The rank of the first pipeline stage in the pipeline of a rank: stages are the outermost axis."""
    return rank % (degrees.num_ranks // degrees.pp)


def ranks_in_order(ranks: list[int], degrees: Degrees) -> list[int]:
    """Ranks to rehearse one after the other: a later pipeline stage needs what the first one sends."""
    return sorted({*ranks, *(first_stage_rank(rank, degrees) for rank in ranks)})


def sent_to(reports: list[dict[str, Any]], rank: int, degrees: Degrees) -> dict[str, Any]:
    """The numbers that the first rank of a rank's pipeline has sent, see `engine.rehearsal.Sent`; none for that rank
    itself."""
    first = first_stage_rank(rank, degrees)
    if rank == first:
        return {"headers": [], "numbers": []}
    report = next(report for report in reports if report["rank"] == first)
    if "error" in report:
        raise UserError(f"rank {first}, which sends to rank {rank}, failed: {report['error']['text']}")
    found: dict[str, Any] = report["sent"]
    return found


def _rehearse(
    plan: ParallelPlan,
    rank: int,
    directory: Path,
    memory: int | None,
    sent: dict[str, Any],
    more: Mapping[str, str],
) -> dict[str, Any]:
    """Run one rank in a process of its own; returns its report."""
    from llmsuite.plugins.rehearse.backend import MEMORY

    directory.mkdir()
    (directory / "sent.json").write_text(json.dumps(sent), encoding="utf-8")
    degrees = plan.degrees
    local_rank = rank % plan.devices_per_machine
    backend = plan.device.factory()
    # also where a variable is set already: it is for another device
    of_device = {**backend.environment(1), **backend.rank_environment(local_rank)}
    environment = {**os.environ, **of_device, **more, _DIRECTORY: str(directory)}
    if memory is not None:
        environment[MEMORY] = str(memory)
    if degrees.num_ranks > 1:
        nobody = "127.0.0.1:1"  # connects to nothing
        environment |= {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(degrees.num_ranks),
            "PADDLE_LOCAL_RANK": str(local_rank),
            "PADDLE_CURRENT_ENDPOINT": nobody,
            "PADDLE_TRAINER_ENDPOINTS": ",".join([nobody] * degrees.num_ranks),
            "PADDLE_MASTER": nobody,
        }
    process = run_command([sys.executable, "-m", "llmsuite", *sys.argv[1:]], environment)  # ends with this process
    try:
        report: dict[str, Any] = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    except OSError as error:
        printed = process.output + process.errors
        raise UserError(f"{printed}rehearse: rank {rank} ended with exit code {process.code}") from error
    return report


def _write_trace(path: Path, scratch: Path, ranks: list[int]) -> None:
    """Join the traces of ranks, each in its directory below `scratch`; those that failed have none."""
    events: list[Any] = []
    for rank in ranks:
        if exists(scratch / str(rank) / "trace.json"):
            events += json.loads((scratch / str(rank) / "trace.json").read_text(encoding="utf-8"))
    with os_errors(path, "name another file for --trace"):
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def run_rank_of(plan: RunPlan, registry: Registry, routing: Routing, hardware: str | None) -> int:
    """Rehearse the rank of this process.

    Args:
        plan: from `plan_to_rehearse`.
        registry: registered stages and model families.
        routing: of tokens to experts.
        hardware: name of the device by whose figures times are predicted; None for no times.
    """
    from llmsuite.devices.start import start_paddle

    directory = Path(os.environ[_DIRECTORY])
    start_paddle(plan.parallel.device.factory(), 1, join=True)
    from llmsuite.engine.rehearsal import Sent, StepObserver, rehearse_steps
    from llmsuite.plugins.rehearse.rank import NUM_STEPS, run_rank

    sent = Sent.from_json(json.loads((directory / "sent.json").read_text(encoding="utf-8")))
    # nothing is written into the directory of the recipe: a run may lie there
    plan = dataclasses.replace(plan, output_dir=directory / "output")

    def rehearse(observer: StepObserver) -> Sent:
        return rehearse_steps(plan, registry, NUM_STEPS, observer, sent, routing)

    device = None
    if hardware is not None:
        device = figures_of(hardware)
    return run_rank(rehearse, plan.model, plan.parallel, plan.train, directory, routing, device)
