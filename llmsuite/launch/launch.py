"""Starts the ranks of a run on this machine and watches them: the first failure is reported, the others are stopped.
When the run hangs, it reports which rank waits for which, and ends the run.

The ranks find each other by the environment variables of `paddle.distributed.launch`, so that launcher can start them
as well. It is not used here because it writes the whole environment, secrets included, into the log directory, and
notices a dead rank only every five seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from llmsuite.base.errors import UserError
from llmsuite.base.files import os_errors
from llmsuite.base.locks import scratch_directory
from llmsuite.launch import hang
from llmsuite.launch.calls import ENVIRONMENT as CALLS
from llmsuite.launch.ends import INTERRUPTED, REFUSED, End
from llmsuite.launch.logs import LogLimit, LogReader, log_end
from llmsuite.launch.machines import Machines
from llmsuite.launch.output import DiskSpaceMonitor
from llmsuite.launch.ranks import GRACE_SECONDS, Rank, Work, is_repeated, start_rank, stop, stop_signals, wait
from llmsuite.launch.restarts import ENVIRONMENT as RESTART
from llmsuite.launch.restarts import Restarts
from llmsuite.launch.stopped import StoppedRanks

_POLL_SECONDS = 0.1
_TAIL_LINES = 40
_MAX_EXPLAINED = 4
_MACHINES_SECONDS = 60.0
_SETTLE_SECONDS = 1.0


def is_worker() -> bool:
    """True where this process is one of several ranks that a launcher has started."""
    return "PADDLE_TRAINER_ID" in os.environ


def is_worker_of_others() -> bool:
    """True where another launcher than this one has started this process as one of several ranks."""
    return is_worker() and CALLS not in os.environ


def launch(
    work: Work,
    num_ranks: int,
    log_dir: Path,
    environment: Callable[[int], Mapping[str, str]],
    write: Callable[[str], None],
    machines: Machines | None = None,
    stall_seconds: float | None = None,
    restarts: Restarts | None = None,
) -> int:
    """Run some work once per rank as `run_ranks` does, with the same arguments. Returns the exit code."""
    return run_ranks(work, num_ranks, log_dir, environment, write, machines, stall_seconds, restarts).code


def run_ranks(
    work: Work,
    num_ranks: int,
    log_dir: Path,
    environment: Callable[[int], Mapping[str, str]],
    write: Callable[[str], None],
    machines: Machines | None = None,
    stall_seconds: float | None = None,
    restarts: Restarts | None = None,
) -> End:
    """Run some work once per rank and wait; restart it from the last checkpoint when ranks are lost.

    Args:
        work: of each rank; where the run continues with fewer machines, `Machines.membership` has the work.
        num_ranks: processes to start on this machine.
        log_dir: directory for `workerlog.N`, the output of rank N.
        environment: variables of a rank, by its number on this machine; they override those that the user has set.
        write: receives the output of this machine's first rank, as it comes, and the end of the log of failed ranks;
            of ranks that fail because another one was lost, nothing.
        machines: all machines of the run; None for this one alone.
        stall_seconds: end the run when nothing has happened in any rank here for this long; see `hang.HangDetector`.
        restarts: the restart policy; None for no restarts.

    Returns:
        The end of the run. Its code is 0 when every rank succeeded, `hang.STALLED` when the run hung, else that of the
        first rank that failed.

    Raises:
        UserError: the machines do not find each other; nothing can be written to `log_dir`.
    """
    with os_errors(log_dir):
        log_dir.mkdir(parents=True, exist_ok=True)
    machines = machines or Machines()
    restarts = restarts or Restarts()
    job = _Job(work, num_ranks, log_dir, environment, write, stall_seconds)
    lost = None
    while True:
        try:
            endpoints = machines.connect(num_ranks)
        except UserError as error:
            if lost is None:
                raise
            write(f"{error}\n")
            return lost
        interrupted: list[int] = []
        try:
            end, step = _run_once(_resized(job, machines), machines, endpoints, interrupted)
            decision = restarts.after(end, step, machines.restarts)
            if interrupted:
                return end
            if restarts.max_restarts:
                decision = machines.agree(decision)
        finally:
            machines.close()
        if decision.message:
            write(f"{decision.message}\n")
        if decision.end is not None:
            return decision.end
        lost = end
        machines.restarts = decision.count
        if machines.index == 0:
            restarts.note(decision)


@dataclasses.dataclass(frozen=True)
class _Job:
    """The work of the ranks of this machine, with the other arguments of `launch`."""

    work: Work
    num_ranks: int
    log_dir: Path
    environment: Callable[[int], Mapping[str, str]]
    write: Callable[[str], None]
    stall_seconds: float | None


def _resized(job: _Job, machines: Machines) -> _Job:
    """The job for the machines that have connected; prints which they are, when some were lost."""
    membership = machines.membership
    line = membership.describe(machines.numbers)
    if not line and machines.index < 0:
        line = f"machine {machines.number} is a spare"
    if line:
        job.write(f"{line}\n")
    if machines.count == membership.nnodes:
        return job
    return dataclasses.replace(job, work=membership.work(machines.count))


def _run_once(job: _Job, machines: Machines, endpoints: Sequence[str], interrupted: list[int]) -> tuple[End, int]:
    """Start the ranks of this machine and wait for the end of all ranks of the run.

    Args:
        job: the work and its settings.
        machines: connected.
        endpoints: as returned by `Machines.connect`.
        interrupted: receives the signals that stop the run.

    Returns:
        The end of the ranks, and the training step that those of this machine were in.
    """
    store, *endpoints = endpoints
    first = machines.index * job.num_ranks
    log_dir = job.log_dir
    ranks: list[Rank] = []
    scratch = contextlib.ExitStack()
    with os_errors(Path(tempfile.gettempdir()), "set TMPDIR to a disk that has room"):
        calls = scratch.enter_context(scratch_directory())

    def forward(number: int, frame: FrameType | None) -> None:
        interrupted.append(number)
        if not is_repeated(interrupted):  # else `_watch` ends them immediately
            for process in ranks:
                process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in stop_signals()}
    watch = hang.HangDetector(calls, range(first, first + job.num_ranks), job.stall_seconds)
    gc.freeze()  # a collection in a fork would write to every object, and so copy the memory it shares with this one
    try:
        if machines.index < 0:
            return _wait_as_spare(machines, job.write, interrupted), 0
        for local in range(job.num_ranks):
            rank = first + local
            variables = {
                **os.environ,
                **job.environment(local),
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(machines.count * job.num_ranks),
                "PADDLE_LOCAL_RANK": str(local),
                "PADDLE_MASTER": store,
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                "PYTHONUNBUFFERED": "1",
                CALLS: str(calls),
                RESTART: str(machines.restarts),
            }
            hang.forget_calls(rank, log_dir)
            path = log_dir / f"workerlog.{rank}"
            with os_errors(path):
                log = open(path, "ab" if machines.restarts else "wb")  # noqa: SIM115
            if local == 0:  # opened before the rank starts, at its end: a user may delete the logs
                first_log = scratch.enter_context(contextlib.closing(LogReader(path)))
            with log:
                ranks.append(start_rank(job.work, variables, log, machines.close))
        for number in interrupted[:1]:  # a signal that arrived before the ranks were started
            for process in ranks:
                process.send_signal(number)
        end = _watch(ranks, first, log_dir, first_log, interrupted, job.write, machines, watch)
        machines.announce(end)
        return end, watch.step
    finally:
        gc.unfreeze()
        stop(ranks)
        scratch.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(
    ranks: Sequence[Rank],
    first: int,
    log_dir: Path,
    first_log: LogReader,
    interrupted: Sequence[int],
    write: Callable[[str], None],
    machines: Machines,
    watch: hang.HangDetector,
) -> End:
    """Wait for the end of the run; `first_log` is the log of the first rank, at its present end."""
    stopped = StoppedRanks(ranks, first)
    is_settled = False
    disk = DiskSpaceMonitor(log_dir, write)
    limit = LogLimit([log_dir / f"workerlog.{first + local}" for local in range(len(ranks))], write)
    while True:
        text = first_log.read()  # before the exit codes: see below
        codes = [process.poll() for process in ranks]
        elsewhere = machines.poll()
        # A rank that has no handlers yet ends by the signal itself; the others may print that it is gone, which is no
        # fault. They print it after its end, so its exit code is known when their text is read.
        if _is_any_ended_by(interrupted, codes):
            return End(INTERRUPTED, "was interrupted")
        forward = _leave_in_log if _has_lost_another(codes, elsewhere) else write
        forward(text)
        disk.check()
        limit.check()
        if interrupted:
            stopped.resume(write)
            if stopped.stay_stopped or is_repeated(interrupted):
                return End(INTERRUPTED, "was interrupted")
        failed = _order_by_cause(codes)
        code = (codes[failed[0]] or 0) if failed else 0
        if INTERRUPTED in (code, elsewhere.code if elsewhere else 0):
            wait(ranks, GRACE_SECONDS)  # the others are ending too; the first rank prints last
            write(first_log.read())
            return End(INTERRUPTED, "was interrupted")
        if code > 0 and elsewhere is None:
            elsewhere = _wait_for_remote_end(machines)
        if watch.is_stalled() or (elsewhere is not None and elsewhere.code == hang.STALLED):
            write(first_log.read())
            return _explain_stall(ranks, first, log_dir, write, machines, watch)
        if elsewhere is not None and (elsewhere.killed or not code):
            write(f"{elsewhere.why}\n")
            return End(elsewhere.code, elsewhere.why, of_machine=elsewhere.of_machine)
        if code > 0 and code != REFUSED and not is_settled:
            is_settled = True  # the rank that refused may be about to end
            wait(ranks, _SETTLE_SECONDS)
            continue
        if code:
            forward(first_log.read())
            alike = {local: c for local in failed if (c := codes[local] or 0) * code > 0}
            if code == REFUSED:  # it has printed the reason; the others fail because it ended
                alike = {local: c for local, c in alike.items() if c == REFUSED}
            end = _explain(first, alike, log_dir, write, machines)
            for text in hang.left_early(watch.calls(), [first + i for i, c in enumerate(codes) if c == 0]):
                write(f"{text}\n")
            for difference in list(hang.differences(watch.calls()))[:1]:  # this may be why it failed
                write(f"the calls of ranks differ: {difference}\n")
            return end
        if all(code == 0 for code in codes):
            return _wait_for_others(machines, write)
        time.sleep(_POLL_SECONDS)


def _is_any_ended_by(signals: Sequence[int], codes: Sequence[int | None]) -> bool:
    """True where one of these signals has ended a rank."""
    return any(code is not None and -code in signals for code in codes)


def _has_lost_another(codes: Sequence[int | None], elsewhere: End | None) -> bool:
    """True where a rank was killed, or a machine was lost, and not the first rank here: it fails because of that."""
    is_lost = any(code is not None and code < 0 for code in codes) or (elsewhere is not None and elsewhere.killed)
    return is_lost and (codes[0] or 0) >= 0


def _leave_in_log(text: str) -> None:
    """Print nothing: how a rank fails because of another one would hide the cause."""


def _order_by_cause(codes: Sequence[int | None]) -> list[int]:
    """The ranks that failed, by their number here, the likely cause first: one that was killed, then one that refused;
    the others fail because it ended."""

    def order(local: int) -> tuple[bool, bool]:
        code = codes[local] or 0
        return code > 0, code != REFUSED

    return sorted((local for local, code in enumerate(codes) if code), key=order)


def _wait_for_remote_end(machines: Machines) -> End | None:
    """Give other machines a moment to report that a rank of theirs was killed."""
    deadline = time.monotonic() + (GRACE_SECONDS if machines.count > 1 else 0)
    while time.monotonic() < deadline:
        if (elsewhere := machines.poll()) is not None:
            return elsewhere
        time.sleep(_POLL_SECONDS)
    return None


def _wait_for_others(machines: Machines, write: Callable[[str], None]) -> End:
    """Wait for the other machines, once all ranks of this one have succeeded."""
    if machines.index:
        machines.announce(End(0, ""))  # machine 0 waits for it; its own end says that all have succeeded
    while not machines.all_ended:
        time.sleep(_POLL_SECONDS)
        if (elsewhere := machines.poll()) is not None:
            write(f"{elsewhere.why}\n")
            return elsewhere
    return End(0, "")


def _wait_as_spare(machines: Machines, write: Callable[[str], None], interrupted: Sequence[int]) -> End:
    """Wait on a machine that has no ranks: for the end of the run, or of a machine that it may replace."""
    while not machines.all_ended:
        if interrupted:
            return End(INTERRUPTED, "was interrupted")
        time.sleep(_POLL_SECONDS)
        if (elsewhere := machines.poll()) is not None:
            write(f"{elsewhere.why}\n")
            return elsewhere
    return End(0, "")


def _explain(
    first: int, codes: Mapping[int, int], log_dir: Path, write: Callable[[str], None], machines: Machines
) -> End:
    """Report which ranks failed and why. All of them are named: between two polls, cause and effect look the same.

    Args:
        first: rank of the first process on this machine.
        codes: exit codes of the ranks that failed, by their number on this machine, the likely cause first.
        log_dir: directory of `workerlog.N`.
        write: see `launch`.
        machines: of the run.
    """
    first_text = log_end(log_dir / f"workerlog.{first}")
    where = ""
    if machines.count > 1:
        where = f" on machine {machines.number}"
    reasons = []
    for local, code in list(codes.items())[:_MAX_EXPLAINED]:
        log = log_dir / f"workerlog.{first + local}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reasons.append(f"rank {first + local}{where} {how}; its log: {log}")
        lines = ["\n".join(log_end(log).splitlines()[-_TAIL_LINES:])]
        if lines[0] in first_text:  # the output of the first rank is on the terminal already
            lines = []
        # a cause comes before what is known about it, an exit code after the error that led to it
        lines.insert(0 if code < 0 else len(lines), reasons[-1])
        write("".join(f"{line}\n" for line in lines))
    code = next(iter(codes.values()))
    return End(code if code > 0 else 1, reasons[0], killed=code < 0)


def _explain_stall(
    ranks: Sequence[Rank],
    first: int,
    log_dir: Path,
    write: Callable[[str], None],
    machines: Machines,
    watch: hang.HangDetector,
) -> End:
    """Report which rank waits in which collective call, and for which other ranks."""
    now = time.time()
    calls = watch.calls()
    try:
        hang.write_calls(calls, log_dir)
    except UserError as error:  # not raised: the report that follows matters more
        write(f"{error}\n")
    recording = {first + local: process for local, process in enumerate(ranks) if watch.is_recording(first + local)}
    found = hang.stacks(recording, log_dir)
    deadline = time.monotonic() + (GRACE_SECONDS if machines.count > 1 else 0)
    while len(calls) < machines.count * len(ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        machines.poll()  # sends heartbeats: the others must not count this machine as lost
        calls = {**hang.read_written(log_dir, now - _MACHINES_SECONDS), **calls}
    why = f"nothing has happened for {watch.limit:.0f} s (launch.stall_seconds)"
    lines, suspects = hang.explain(calls, now)
    for rank in suspects:
        if rank in found:
            lines += [f"stack of rank {rank}, the innermost call first:", found[rank]]
    where = f"the last calls and the output of every rank: {log_dir}/calls.N.jsonl and workerlog.N"
    write("\n".join([why, *lines, where]) + "\n")
    return End(hang.STALLED, why)
