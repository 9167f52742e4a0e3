"""`llmsuite run RECIPE`: run the stage of a recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.cli.exits import exit_code
from llmsuite.errors import RecipeError, UserError
from llmsuite.locks import empty_directory, lock_directory
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.recipe.smoke import names_own_data, names_own_reward
from llmsuite.regular import is_file
from llmsuite.schema.section import as_plain
from llmsuite.specs import Command

if TYPE_CHECKING:
    from llmsuite.launch.machines import Machines
    from llmsuite.launch.ranks import Work
    from llmsuite.launch.restarts import Restarts


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shape, embedded data, CPU processes: does this recipe run?"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last complete checkpoint of output_dir"
    )
    parser.epilog = (
        "Any key of the recipe can be overridden: --train.max_steps=3 --data.train FILE. "
        "`llmsuite list keys --stage dpo` shows them all."
    )


def run(args: Any, registry: Registry) -> int:
    plan = plan_run(args.recipe, args.overrides, registry, args.smoke)
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.launch import is_worker
    from llmsuite.launch.machines import Machines
    from llmsuite.launch.output import lasting_output, write_to
    from llmsuite.launch.restarts import is_restarted
    from llmsuite.launch.seats import Seats
    from llmsuite.recipe.code import code_files
    from llmsuite.recipe.fetch import fetch_names
    from llmsuite.recipe.fewer import check_fewest
    from llmsuite.recipe.notes import endless_warm_up, few_rows, held_out

    check_fewest(plan, args.recipe, args.overrides, registry, args.smoke)
    machine, master = _machine(plan)
    _check(args, plan, registry, machine)
    where = plan.recipe.launch
    # read in every rank, or they would be keys without effect
    max_restarts = where.max_restarts
    seats = Seats(
        where.nnodes, where.spares, where.min_nnodes, where.rejoin_seconds, partial(_on_fewer, args, registry)
    )
    stall_seconds, logs = where.stall_seconds, Path(where.log_dir) if where.log_dir else plan.output_dir / "logs"
    backend = plan.device.factory()
    if (numbers := where.device_numbers) is not None:
        os.environ.update(backend.select(numbers))
    if plan.recipe.engine.deterministic:
        os.environ.update(backend.deterministic_flags or {})
    starts_ranks = (plan.degrees.num_ranks > 1 or max_restarts > 0) and not is_worker()
    if starts_ranks:
        if plan.stage.trains and not plan.degrees.own_meshes:  # whose order is the model's own
            from llmsuite.planning.order import check_order

            check_order(plan)
        backend.prepare_ranks()
    local_ranks = where.num_devices
    start_paddle(backend, local_ranks, join=is_worker(), fork=starts_ranks and backend.forks)
    if is_worker():
        write_to(1, 2)
        return _work(plan, registry, args.resume or is_restarted())

    for info in registry.plugins:
        if info.error:
            print(f"plugin {info.name} does not work; see: llmsuite plugins list", file=sys.stderr)
    if reason := backend.unavailable(local_ranks):
        raise RecipeError([plan.loaded.problem("device", f"{backend.name}: {reason}")])
    if args.smoke:
        reduced = f", in place of {plan.smoke_of}" if plan.smoke_of != plan.degrees else ""
        mesh = f"mesh {plan.degrees} on cpu{reduced}"
        data = str(plan.train_file) if names_own_data(plan.loaded, plan.stage) else "embedded data"
        if "reward" in plan.stage.smoke and not names_own_reward(plan.loaded):
            data += f", reward {', '.join(plan.stage.smoke['reward']['functions'])} in place of the recipe's"
        print(f"smoke run of {args.recipe}: tiny {plan.family.name}, {data}, {mesh}", flush=True)
    for key, path in code_files(plan.recipe):
        print(f"{key}: runs the code in {path}", flush=True)
    for note in [*few_rows(plan), *held_out(plan), *endless_warm_up(plan)]:
        print(f"warning: {note}", file=sys.stderr)
    plan = fetch_names(plan, registry, _say, args.resume)  # once, before ranks wait for each other
    plan.fetched(_say)
    with lasting_output():
        if not starts_ranks:
            return _work(plan, registry, args.resume)
        machines = Machines(machine, where.nnodes, master, _shared_part(plan), seats)
        return _launch(plan, registry, args.resume, logs, stall_seconds, machines)


def _machine(plan: RunPlan) -> tuple[int, str]:
    """The number of this machine, and host:port of machine 0, by the recipe or a scheduler; 0 and "" where nothing
    depends on them: in a run on one machine, and in a rank, which its launcher has told.

    Raises:
        UserError: a machine is not named.
    """
    from llmsuite.launch.launch import is_worker
    from llmsuite.launch.scheduler import check_place, find_place

    where = plan.recipe.launch
    number, master = where.node_rank, where.master  # read in every rank, or they would be keys without effect
    if is_worker():
        return 0, ""
    place = find_place(os.environ)
    if where.nnodes == 1:
        if place is not None and number is None and plan.smoke_of is None:  # each would do the same run by itself
            check_place(place, 1)
        return 0, ""
    if number is None:
        if place is None:
            raise UserError(fan_out(sys.argv[1:], plan))
        check_place(place, where.nnodes, where.spares)
        number = place.number
    if master is None:
        if place is None or place.master is None:
            message = "is required with several machines; set it to host:port of machine 0, which the others connect to"
            raise RecipeError([plan.loaded.problem("launch.master", message)])
        master = place.master
    return number, master


def _check(args: Any, plan: RunPlan, registry: Registry, machine: int) -> None:
    """Raise UserError if files are missing, rows cannot be read, or the output directory is in use."""
    from llmsuite.launch.launch import is_worker, is_worker_of_others
    from llmsuite.stages.first_rows import check_rows

    if not is_worker():  # a rank checks the files it reads itself
        plan.check_files()
        check_rows(plan, registry)  # before Paddle is imported and ranks are started
        first = machine == 0  # only machine 0 writes there
    else:
        first = is_worker_of_others() and os.environ["PADDLE_TRAINER_ID"] == "0"
    if first and not args.resume:
        if args.smoke and not any(word.startswith("--output_dir") for word in args.overrides):
            empty_directory(plan.output_dir)  # left by an earlier --smoke, not worth keeping
        plan.check_output()


def _launch(
    plan: RunPlan, registry: Registry, resume: bool, logs: Path, stall_seconds: float | None, machines: Machines
) -> int:
    """Start the ranks of this machine and wait for them; `logs` is where their output goes."""
    from llmsuite.data.rendering import end_rendering
    from llmsuite.launch.launch import launch
    from llmsuite.observe.events import read_events

    end_rendering()  # of the first rows: forks of this process would keep its pipe open for as long as the run lasts
    backend, where = plan.device.factory(), plan.recipe.launch

    def environment(local_rank: int) -> dict[str, str]:
        return {**backend.variables(where.num_devices, local_rank), **backend.patience(stall_seconds)}

    if backend.forks:
        _import_ahead(plan)
    work = _rank_work(plan, registry, resume, sys.argv[1:])
    restarts = _restarts(plan)
    num_before = len(read_events(plan.output_dir))
    code = launch(work, where.num_devices, logs, environment, _write, machines, stall_seconds, restarts)
    _note_end(plan.output_dir, code, num_before, plan.stage.trains and machines.number == 0)
    return code


def _rank_work(plan: RunPlan, registry: Registry, resume: bool, words: Sequence[str]) -> Work:
    """What each rank does: by these words of a command line, where it is no fork."""
    from llmsuite.launch.ranks import can_fork
    from llmsuite.launch.restarts import is_restarted

    backend = plan.device.factory()

    def forked() -> int:
        backend.after_paddle()
        return exit_code(lambda: _work(plan, registry, resume or is_restarted()))

    return forked if backend.forks and can_fork() else [sys.executable, "-m", "llmsuite", *words]


def _on_fewer(args: Any, registry: Registry, count: int) -> Work:
    """What each rank does once the run goes on with fewer machines. Raises UserError where it cannot."""
    from llmsuite.planning.order import check_order
    from llmsuite.recipe.fetch import fetch_names
    from llmsuite.recipe.fewer import words_for

    plan = plan_run(args.recipe, words_for(args.overrides, count), registry, args.smoke)
    if plan.stage.trains:
        check_order(plan)
    plan = fetch_names(plan, registry, lambda text: None, True)
    # what this launcher has read of the recipe as it was holds; unread they would be keys without effect
    for section in (plan.recipe.launch, plan.recipe.engine):
        for key in dataclasses.fields(section):
            getattr(section, key.name)
    return _rank_work(plan, registry, True, words_for(sys.argv[1:], count))


def _restarts(plan: RunPlan) -> Restarts:
    """When the ranks of this run are started again, and what they then go on from."""
    from llmsuite.checkpoint.directory import list_steps
    from llmsuite.launch.restarts import Decision, Restarts
    from llmsuite.observe.events import add_event

    run, most = plan.output_dir, plan.recipe.launch.max_restarts
    answers = run / plan.stage.result if not plan.stage.trains and plan.stage.result else None

    def begins_at() -> int:
        if answers is not None:
            return len(answers.read_bytes().splitlines()) if is_file(answers) else 0
        return max((step for step, _ in list_steps(run / "checkpoints")), default=0)

    def note(decision: Decision) -> None:
        run.mkdir(parents=True, exist_ok=True)
        add_event(run, "restarting", step=decision.begins_at, restart=decision.count, of=most, why=decision.why)

    return Restarts(most, begins_at, note, "step" if answers is None else "answer")


def _note_end(run: Path, code: int, num_before: int = 0, has_rank_0: bool = False) -> None:
    """Record an end that rank 0 could not record itself: another rank has failed, the run hung, or rank 0 died before
    it could say that it began.

    Args:
        run: the directory of the run.
        code: the exit code of the ranks.
        num_before: events that it had before they were started.
        has_rank_0: whether rank 0 of a training was among them.
    """
    from llmsuite.launch.ends import INTERRUPTED, REFUSED
    from llmsuite.launch.hang import STALLED
    from llmsuite.observe.events import add_event, read_events

    events = read_events(run)
    if code == 0 or (events and events[-1]["event"] in ("failed", "hung")):
        return
    if code == INTERRUPTED:
        begun = [event["event"] for event in events[num_before:]]
        if has_rank_0 and begun and begun[-1] not in ("stopped", "ended"):  # it was ended at once
            with contextlib.suppress(UserError):
                add_event(run, "stopped")
        return
    with contextlib.suppress(UserError), contextlib.ExitStack() as locks:  # a disk that is full may be why it fails
        if not any(event["event"] in ("started", "resumed", "restarting") for event in events[num_before:]):
            had_ended = bool(events[:num_before]) and events[num_before - 1]["event"] == "ended"
            # what is refused changes nothing, as in one process
            if code == REFUSED or had_ended or not has_rank_0:
                return
            locks.enter_context(lock_directory(run))  # which another run may have
        add_event(run, "hung" if code == STALLED else "failed", exit_code=code)


def _shared_part(plan: RunPlan) -> str:
    """What has to be equal on all machines of a run: a digest of each section of the recipe, as `meeting.differing`
    reads them."""
    recipe = as_plain(plan.recipe)
    del recipe["output_dir"]  # which may be a disk of the machine
    for of_machine in ("node_rank", "devices"):
        del recipe["launch"][of_machine]
    parts = {key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()) for key, value in recipe.items()}
    return " ".join(f"{key}={digest.hexdigest()}" for key, digest in parts.items())


def fan_out(words: Sequence[str], plan: RunPlan) -> str:
    """The commands that start a run on several machines.

    Args:
        words: the words of the command line, without the program.
        plan: a run on more than one machine.
    """
    launch = plan.recipe.launch
    count, more = launch.nnodes + launch.spares, [] if launch.master else ["--launch.master=HOST0:29500"]
    run = f"llmsuite {shlex.join([*words, *more])}"
    by_ssh = f"cd {shlex.quote(str(Path.cwd()))} && {run} --launch.node_rank="
    lines = [
        f"launch.node_rank: is required with {count} machines: each starts its own ranks, where the same files",
        "are. HOST0 and so on stand for their names. By ssh, one line for each machine:",
        *(f"  ssh HOST{k} {shlex.quote(by_ssh + str(k))}" for k in range(count)),
        "by mpirun, Slurm or Kubernetes, whose numbers of machines are found:",
        f"  mpirun -np {count} --map-by ppr:1:node {run}",
        f"  srun --nodes={count} --ntasks-per-node=1 llmsuite {shlex.join(words)}",
    ]
    return "\n".join(lines)


def _import_ahead(plan: RunPlan) -> None:
    """Import in the parent what every rank would import after the fork; nothing of it runs yet."""
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


def _say(text: str) -> None:
    print(text, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


COMMAND = Command(
    name="run",
    help="run a recipe: train, or answer prompts",
    add_arguments=add_arguments,
    run=run,
    takes_overrides=True,
)
