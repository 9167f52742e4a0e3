"""The command `llmsuite run RECIPE`: runs the stage of a recipe."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.exits import exit_code
from llmsuite.base.locks import empty_directory, lock_directory
from llmsuite.base.safe_files import is_file
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.contract.specs import JobSpec, ModelFamily, StageSpec

if TYPE_CHECKING:
    from llmsuite.contract.schema.recipe import LaunchSection, Recipe
    from llmsuite.devices.base import DeviceBackend
    from llmsuite.launch.ends import End
    from llmsuite.launch.machines import Machines
    from llmsuite.launch.ranks import Work
    from llmsuite.launch.restarts import Restarts
    from llmsuite.recipe.load import LoadedRecipe
    from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan
    from llmsuite.recipe.resolve import RunPlan


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument(
        "--smoke", action="store_true", help="test the recipe with a tiny model and embedded data, on CPU processes"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last complete checkpoint of output_dir"
    )
    parser.epilog = (
        "Any key of the recipe can be overridden: --train.max_steps=3 --data.train FILE. "
        "`llmsuite list keys --stage dpo` shows them all."
    )


def run(args: Any, registry: Registry) -> int:
    from llmsuite.recipe.resolve import plan_run

    plan = plan_run(args.recipe, args.overrides, registry, args.smoke)
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.launch import is_worker
    from llmsuite.launch.machines import Machines
    from llmsuite.launch.membership import Membership
    from llmsuite.launch.output import tolerant_output, write_to
    from llmsuite.launch.restarts import is_restarted
    from llmsuite.observe.events import read_events
    from llmsuite.recipe.elastic import check_min_nodes
    from llmsuite.recipe.fetch import fetch_names
    from llmsuite.recipe.notes import run_notes

    check_min_nodes(plan.loaded, args.recipe, args.overrides, registry, args.smoke)
    machine, master = _machine(plan.loaded, is_smoke=plan.smoke_of is not None)
    _check(args, plan, registry, machine)
    where = plan.recipe.launch
    max_restarts = where.max_restarts
    membership = Membership(
        where.nnodes, where.spares, where.min_nnodes, where.rejoin_seconds, partial(_work_on_fewer, args, registry)
    )
    stall_seconds = where.stall_seconds
    logs = Path(where.log_dir) if where.log_dir else plan.output_dir / "logs"
    backend = plan.parallel.device.factory()
    if (numbers := where.device_numbers) is not None:
        os.environ.update(backend.select(numbers))
    if plan.parallel.engine.deterministic:
        os.environ.update(backend.deterministic_flags or {})
    starts_ranks = (plan.parallel.degrees.num_ranks > 1 or max_restarts > 0) and not is_worker()
    if starts_ranks:
        # an auto-parallel model decides the order of calls itself
        if plan.train.stage.trains and not plan.parallel.degrees.auto_parallel:
            from llmsuite.planning.call_order import check_order

            check_order(plan.loaded.name, plan.model, plan.data, plan.parallel, plan.train)
        backend.prepare_ranks()
    local_ranks = where.num_devices
    start_paddle(backend, local_ranks, join=is_worker(), fork=starts_ranks and backend.forks)
    if is_worker():
        write_to(1, 2)
        return run_rank(plan, registry, args.resume or is_restarted())

    if reason := backend.unavailable(local_ranks):
        raise RecipeError([plan.loaded.problem("device", f"{backend.name}: {reason}")])
    smoke = ""
    if args.smoke:
        smoke = _smoke_words(plan.loaded, plan.model, plan.data, plan.parallel, plan.train)
    _announce(plan.recipe, smoke, run_notes(plan.data, plan.train, plan.parallel.device.name), registry)
    plan = fetch_names(plan.loaded, registry, _print_line, args.resume)  # once, before ranks wait for each other
    plan.fetched(_print_line)
    with tolerant_output():
        if not starts_ranks:
            code = run_rank(plan, registry, args.resume)
            _print_next(plan.output_dir, plan.train.stage, code)
            return code
        machines = Machines(machine, where.nnodes, master, _shared_part(plan.recipe), membership)
        if backend.forks:
            _import_ahead(plan.train.stage, plan.model.family)
        work = _rank_work(backend, partial(run_rank, plan, registry), args.resume, sys.argv[1:])
        restarts = _restarts(plan.output_dir, plan.train.stage, max_restarts)
        num_before = len(read_events(plan.output_dir))
        end = _launch(work, backend, local_ranks, logs, stall_seconds, machines, restarts)
        has_rank_0 = plan.train.stage.trains and machine == 0
        code = _note_end(plan.output_dir, end.code, num_before, has_rank_0, end.why if end.killed else "")
        if end.killed and machine == 0:
            print(f"{end.why}; to continue, add --resume to the same command", flush=True)
        elif machine == 0:
            _print_next(plan.output_dir, plan.train.stage, code)
        return code


def _announce(recipe: Recipe, smoke: str, warnings: Sequence[str], registry: Registry) -> None:
    """Print what should be known before a run begins.

    Args:
        recipe: of the run; the code that it executes is printed.
        smoke: what a smoke run changes; empty for another run.
        warnings: to print.
        registry: plugins that do not work are printed.
    """
    from llmsuite.recipe.code import code_files

    for info in registry.plugins:
        if info.error:
            print(f"plugin {info.name} does not work; see: llmsuite plugins list", file=sys.stderr)
    if smoke:
        print(smoke, flush=True)
    for key, path in code_files(recipe):
        print(f"{key}: runs the code in {path}", flush=True)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _smoke_words(
    loaded: LoadedRecipe, model: ModelPlan, data: DataPlan, parallel: ParallelPlan, train: TrainPlan
) -> str:
    """A line with the model, the data and the mesh that a smoke run has in place of those of its recipe."""
    from llmsuite.recipe.smoke import overrides_data, overrides_reward

    reduced = f", instead of {loaded.smoke_of}" if loaded.smoke_of != parallel.degrees else ""
    mesh = f"mesh {parallel.degrees} on cpu{reduced}"
    rows = str(data.train_file) if overrides_data(loaded, train.stage) else "embedded data"
    if "reward" in train.stage.smoke and not overrides_reward(loaded):
        rows += f", reward {', '.join(train.stage.smoke['reward']['functions'])} instead of the recipe's"
    return f"smoke run of {loaded.name}: tiny {model.family.name}, {rows}, {mesh}"


def _machine(loaded: LoadedRecipe, is_smoke: bool) -> tuple[int, str]:
    """The number of this machine and host:port of machine 0, from the recipe or a scheduler; 0 and "" where nothing
    depends on them: in a run on one machine, and in a rank, which has them from its launcher.

    Raises:
        UserError: the number or the address is missing.
    """
    from llmsuite.launch.launch import is_worker
    from llmsuite.launch.scheduler import check_scheduled_machine, find_scheduled_machine

    where = loaded.recipe.launch
    if is_worker():
        return 0, ""
    place = find_scheduled_machine(os.environ)
    number = where.node_rank
    if where.nnodes == 1:
        if place is not None and number is None and not is_smoke:  # each machine would do the same run alone
            check_scheduled_machine(place, 1)
        return 0, ""
    if number is None:
        if place is None:
            raise UserError(fan_out(sys.argv[1:], where))
        check_scheduled_machine(place, where.nnodes, where.spares)
        number = place.number
    master = where.master
    if master is None:
        if place is None or place.master is None:
            message = "is required with several machines; set it to host:port of machine 0, which the others connect to"
            raise RecipeError([loaded.problem("launch.master", message)])
        master = place.master
    return number, master


def _check(args: Any, plan: RunPlan, registry: Registry, machine: int) -> None:
    """Raise UserError if files are missing, rows cannot be read, or the output directory is in use."""
    from llmsuite.launch.launch import is_worker, is_worker_of_others
    from llmsuite.stages.first_rows import check_rows

    if not is_worker():  # a rank checks the files it reads itself
        plan.check_files()
        check_rows(
            plan.loaded, plan.data, plan.train, plan.model.tokenizer, registry
        )  # before Paddle is imported and ranks are started
        first = machine == 0  # only machine 0 writes there
    else:
        first = is_worker_of_others() and os.environ["PADDLE_TRAINER_ID"] == "0"
    if first and not args.resume:
        if args.smoke and not any(word.startswith("--output_dir") for word in args.overrides):
            empty_directory(plan.output_dir)  # left by an earlier --smoke, not worth keeping
        plan.check_output()


def _launch(
    work: Work,
    backend: DeviceBackend,
    num_ranks: int,
    logs: Path,
    stall_seconds: float | None,
    machines: Machines,
    restarts: Restarts,
) -> End:
    """Start the ranks of this machine, each with this work, and wait for them; `logs` is the directory for their
    output."""
    from llmsuite.data.rendering import end_rendering
    from llmsuite.launch.launch import run_ranks

    end_rendering()  # of the first rows: forks of this process would keep its pipe open for as long as the run lasts

    def environment(local_rank: int) -> dict[str, str]:
        return {**backend.variables(num_ranks, local_rank), **backend.timeout_variables(stall_seconds)}

    return run_ranks(work, num_ranks, logs, environment, _write, machines, stall_seconds, restarts)


def _rank_work(backend: DeviceBackend, run_stage: Callable[[bool], int], resume: bool, words: Sequence[str]) -> Work:
    """The work of each rank: a function for forks, which calls `run_stage` with True to resume; else a command with the
    arguments `words`."""
    from llmsuite.launch.ranks import can_fork
    from llmsuite.launch.restarts import is_restarted

    def forked() -> int:
        backend.after_paddle()
        return exit_code(lambda: run_stage(resume or is_restarted()))

    if backend.forks and can_fork():
        return forked
    return [sys.executable, "-m", "llmsuite", *words]


def _work_on_fewer(args: Any, registry: Registry, count: int) -> Work:
    """The work of each rank once the run continues with fewer machines. Raises UserError where it cannot."""
    from llmsuite.planning.call_order import check_order
    from llmsuite.recipe.elastic import overrides_for_machines
    from llmsuite.recipe.fetch import fetch_names
    from llmsuite.recipe.resolve import plan_run

    plan = plan_run(args.recipe, overrides_for_machines(args.overrides, count), registry, args.smoke)
    if plan.train.stage.trains:
        check_order(plan.loaded.name, plan.model, plan.data, plan.parallel, plan.train)
    plan = fetch_names(plan.loaded, registry, lambda text: None, True)
    words = overrides_for_machines(sys.argv[1:], count)
    return _rank_work(plan.parallel.device.factory(), partial(run_rank, plan, registry), True, words)


def _restarts(run: Path, stage: StageSpec | JobSpec, max_restarts: int) -> Restarts:
    """The restart policy of the run in a directory, with the step that ranks resume from."""
    from llmsuite.checkpoint.directory import list_steps
    from llmsuite.launch.restarts import Decision, Restarts
    from llmsuite.observe.events import add_event

    answers = None
    if isinstance(stage, JobSpec) and stage.result:
        answers = run / stage.result

    def begins_at() -> int:
        if answers is not None:
            if is_file(answers):
                return len(answers.read_bytes().splitlines())
            return 0
        return max((step for step, _ in list_steps(run / "checkpoints")), default=0)

    def note(decision: Decision) -> None:
        run.mkdir(parents=True, exist_ok=True)
        add_event(run, "restarting", step=decision.begins_at, restart=decision.count, of=max_restarts, why=decision.why)

    return Restarts(max_restarts, begins_at, note, "step" if answers is None else "answer")


def _note_end(run: Path, code: int, num_before: int = 0, has_rank_0: bool = False, lost: str = "") -> int:
    """Record an end that rank 0 could not record itself: another rank has failed, the run hung, or rank 0 died before
    it recorded its start. Of a rank or machine that was lost, rank 0 has recorded at most the effect.

    Args:
        run: the directory of the run.
        code: the exit code of the ranks.
        num_before: events of the run before the ranks were started.
        has_rank_0: rank 0 of a training run was among them.
        lost: the rank or machine that was lost, in words; empty where none was.

    Returns:
        The exit code of the run: 0 where a signal came when it had just recorded that it ended, else that of the ranks.
    """
    from llmsuite.launch.ends import INTERRUPTED, REFUSED
    from llmsuite.launch.hang import STALLED
    from llmsuite.observe.events import add_event, read_events

    events = read_events(run)
    is_recorded = bool(events) and events[-1]["event"] in ("failed", "hung")
    if code == 0 or (is_recorded and not (lost and has_rank_0)):
        return code
    if code == INTERRUPTED:
        is_recording = has_rank_0 and len(events) > num_before
        if is_recording and events[-1]["event"] == "ended":
            return 0
        if is_recording and events[-1]["event"] != "stopped":  # it was ended immediately
            with contextlib.suppress(UserError):
                add_event(run, "stopped")
        return code
    with contextlib.suppress(UserError), contextlib.ExitStack() as locks:  # a disk that is full may be why it fails
        if not any(event["event"] in ("started", "resumed", "restarting") for event in events[num_before:]):
            had_ended = bool(events[:num_before]) and events[num_before - 1]["event"] == "ended"
            # a refused run records nothing, as in one process
            if code == REFUSED or had_ended or not has_rank_0:
                return code
            locks.enter_context(lock_directory(run))  # raises where another run uses it
        cause = {"error": lost} if lost else {}
        add_event(run, "hung" if code == STALLED else "failed", exit_code=code, **cause)
    return code


def _shared_part(recipe: Recipe) -> str:
    """The identity of a run, equal on all its machines: a digest of each section of the recipe, in the form that
    `rendezvous.differing_sections` reads."""
    shared = as_plain(recipe)
    del shared["output_dir"]  # may be on a local disk of the machine
    for of_machine in ("node_rank", "devices"):
        del shared["launch"][of_machine]
    parts = {key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()) for key, value in shared.items()}
    return " ".join(f"{key}={digest.hexdigest()}" for key, digest in parts.items())


def fan_out(words: Sequence[str], launch: LaunchSection) -> str:
    """The commands that start a run on several machines.

    Args:
        words: the words of the command line, without the program.
        launch: section of a recipe for more than one machine.
    """
    count = launch.nnodes + launch.spares
    more = [] if launch.master else ["--launch.master=HOST0:29500"]
    run = f"llmsuite {shlex.join([*words, *more])}"
    by_ssh = f"cd {shlex.quote(str(Path.cwd()))} && {run} --launch.node_rank="
    lines = [
        f"launch.node_rank: is required with {count} machines: each machine starts its own ranks, from the same files.",
        "HOST0 and so on stand for the names of the machines. With ssh, one line for each machine:",
        *(f"  ssh HOST{k} {shlex.quote(by_ssh + str(k))}" for k in range(count)),
        "with mpirun, Slurm or Kubernetes, which number the machines:",
        f"  mpirun -np {count} --map-by ppr:1:node {run}",
        f"  srun --nodes={count} --ntasks-per-node=1 llmsuite {shlex.join(words)}",
    ]
    return "\n".join(lines)


def _import_ahead(stage: StageSpec | JobSpec, family: ModelFamily) -> None:
    """Import in the parent the modules that every rank would import after the fork, to share their memory."""
    import tokenizers  # noqa: F401

    if stage.trains:
        import llmsuite.engine.trainer  # noqa: F401
    stage.factory()
    family.factory()


def run_rank(plan: RunPlan, registry: Registry, resume: bool) -> int:
    """Run the stage of a plan in this rank. Returns the exit code."""
    if not plan.train.stage.trains:
        return int(plan.train.stage.factory()(plan, registry, resume))
    from llmsuite.engine.trainer import run as run_stage

    return run_stage(plan, registry, resume)


def _print_next(run: Path, stage: StageSpec | JobSpec, code: int) -> None:
    """Print what to do next with a training run that has ended, or that the user has stopped; `run` is its directory,
    `code` its exit code."""
    from llmsuite.checkpoint.directory import list_steps
    from llmsuite.data.chat_template import tokenizer_template
    from llmsuite.launch.ends import INTERRUPTED

    saved = list_steps(run / "checkpoints")
    if not stage.trains or not saved:
        return
    if code == INTERRUPTED:
        print("to continue, add --resume to the same command", flush=True)
    if code != 0:
        return
    name = shlex.quote(str(run))
    if stage.head == "language_model":
        ask = "--prompt 'Once upon a time'" if tokenizer_template(saved[-1][1]) is None else "--chat"
        print(f"talk to it: llmsuite generate {name} {ask}")
    print(f"look at it: llmsuite report {name}", flush=True)


def _print_line(text: str) -> None:
    print(text, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
