"""`llmsuite run RECIPE`: train, or what else its stage does."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.cli.exits import exit_code
from llmsuite.errors import RecipeError, UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.schema.section import as_plain
from llmsuite.specs import Command


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
    from llmsuite.launch.launch import is_worker, launch
    from llmsuite.launch.machines import Machines
    from llmsuite.launch.ranks import can_fork

    if not is_worker():  # a rank looks for what it reads itself
        plan.check_files()
    where = plan.recipe.launch
    stall_seconds = where.stall_seconds  # read in every rank, or it would be a key without effect
    if where.nnodes > 1 and where.node_rank is None:
        raise UserError(fan_out(sys.argv[1:], plan))
    if where.nnodes > 1 and where.master is None:
        message = "is required with several machines: host:port of machine 0, where the others find it"
        raise RecipeError([plan.loaded.problem("launch.master", message)])
    if not args.resume and not where.node_rank:  # machine 0 looks and writes
        if args.smoke and not any(word.startswith("--output_dir") for word in args.overrides):
            shutil.rmtree(plan.output_dir, ignore_errors=True)  # made by --smoke, for nobody to keep
        plan.check_output()
    from llmsuite.devices.start import start_paddle

    backend = plan.device.factory()
    num_ranks, local_ranks = plan.degrees.num_ranks, where.num_devices
    starts_ranks = num_ranks > 1 and not is_worker()
    if starts_ranks:
        if plan.stage.trains:
            from llmsuite.planning.order import check_order

            check_order(plan)
        backend.prepare_ranks()
    start_paddle(backend, local_ranks, join=is_worker(), fork=starts_ranks and backend.forks)
    if is_worker():
        return _work(plan, registry, args.resume)

    for info in registry.plugins:
        if info.error:
            print(f"plugin {info.name} does not work; see: llmsuite plugins list", file=sys.stderr)
    reason = backend.unavailable(plan.recipe.launch.num_devices)
    if reason is not None:
        raise RecipeError([plan.loaded.problem("device", f"{backend.name}: {reason}")])
    if args.smoke:
        whole = f", in place of {plan.smoke_of}" if plan.smoke_of != plan.degrees else ""
        mesh = f"mesh {plan.degrees} on cpu{whole}"
        print(f"smoke run of {args.recipe}: tiny {plan.family.name}, embedded data, {mesh}", flush=True)
    plan.fetched(print)  # once, before ranks wait for each other
    if num_ranks == 1:
        return _work(plan, registry, args.resume)

    def environment(local_rank: int) -> dict[str, str]:
        return {**backend.environment(local_ranks), **backend.rank_environment(local_rank)}

    def forked() -> int:
        backend.after_paddle()
        return exit_code(lambda: _work(plan, registry, args.resume))

    if backend.forks:
        _import_ahead(plan)
    work = forked if backend.forks and can_fork() else [sys.executable, "-m", "llmsuite", *sys.argv[1:]]
    machines = Machines(where.node_rank or 0, where.nnodes, where.master or "", _shared_part(plan))
    logs = plan.output_dir / "logs"
    code = launch(work, local_ranks, logs, environment, _write, machines, stall_seconds)
    _note_end(plan.output_dir, code)
    return code


def _note_end(run: Path, code: int) -> None:
    """What rank 0 could not write down itself: that another one has failed, or that all hung."""
    from llmsuite.launch.hang import STALLED
    from llmsuite.launch.launch import INTERRUPTED
    from llmsuite.observe.events import add_event, read_events

    events = read_events(run)
    if code in (0, INTERRUPTED) or not events or events[-1]["event"] in ("failed", "hung"):
        return
    add_event(run, "hung" if code == STALLED else "failed", exit_code=code)


def _shared_part(plan: RunPlan) -> str:
    """What has to be equal on all machines of a run."""
    recipe = as_plain(plan.recipe)
    del recipe["launch"]["node_rank"]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def fan_out(words: Sequence[str], plan: RunPlan) -> str:
    """What to type to start a run on several machines.

    Args:
        words: of the command line, without the program.
        plan: with more than one machine.
    """
    count, more = plan.recipe.launch.nnodes, [] if plan.recipe.launch.master else ["--launch.master=HOST0:29500"]
    run = f"cd {shlex.quote(str(Path.cwd()))} && llmsuite {shlex.join([*words, *more])} --launch.node_rank="
    lines = [
        f"launch.node_rank: is required with {count} machines, for each starts its own ranks, in a directory that all",
        "of them see. HOST0 and so on stand for their names. By ssh, one line a machine:",
        *(f"  ssh HOST{k} {shlex.quote(run + str(k))}" for k in range(count)),
        "by mpirun:",
        f"  mpirun -np {count} --map-by ppr:1:node bash -c {shlex.quote(run + '$OMPI_COMM_WORLD_RANK')}",
        "by Slurm:",
        f"  srun --nodes={count} --ntasks-per-node=1 bash -c {shlex.quote(run + '$SLURM_NODEID')}",
    ]
    return "\n".join(lines)


def _import_ahead(plan: RunPlan) -> None:
    """In a process whose forks will be ranks: what each of them would import otherwise, which it does not run yet."""
    import tokenizers  # noqa: F401

    if plan.stage.trains:
        import llmsuite.train.trainer  # noqa: F401
    plan.stage.factory()
    plan.family.factory()


def _work(plan: RunPlan, registry: Registry, resume: bool) -> int:
    if not plan.stage.trains:
        return int(plan.stage.factory()(plan, registry, resume))
    from llmsuite.train.trainer import run as run_stage

    return run_stage(plan, registry, resume)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


COMMAND = Command(
    name="run",
    help="do what a recipe says: train, or answer prompts",
    add_arguments=add_arguments,
    run=run,
    takes_overrides=True,
)
