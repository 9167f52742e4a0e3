"""Kills runs of all stages on all kinds of meshes, and commands, at random moments; all have to come to the same end.

python -m tests.tools.kills_anywhere [--kills N] [--seconds S] [--seed SEED]

A rank or the launcher gets SIGKILL while data is read, the model built, the reference passed, completions are drawn, a
step is made, a checkpoint is written, an evaluation is under way or the run is about to end; `import` while it fetches
from a hub; `data index`, `merge` and `export` at any time. Then the same command goes on: by itself
(launch.max_restarts), or given again, a run with --resume. Counted are those that lost something (metrics, checkpoints
or results that are not those of one that was never killed), orphans (processes that outlive it) and what is stale
(locks and temporary files that stay).
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.files import broken_file
from llmsuite.checkpoint.directory import list_steps
from tests.conftest import PluginSite
from tests.multi.conftest import Runner, learnt
from tests.support.moments import MESHES, PLUGIN, STAGES, STEPS, Case, Kill, draw_kill
from tests.support.paths import ROOT
from tests.tools.faults import MARK, Wrong, wait_for_all
from tests.tools.hub_server import HubServer

MOST_SECONDS = 300.0
KILLS_OF_A_RUN = 4
COMMAND_SHARE = 0.2
"""Of the rounds, those that kill a command and no run."""
_CORPUS_ROWS = 4000
_MADE = "exists; choose another --output"
"""What a command says that was killed when all it makes was there; it is compared like any other."""


class Rounds:
    """The state of a series of kills."""

    def __init__(self, directory: Path, seed: int):
        self.runner = Runner(directory)
        self.chance = random.Random(seed)
        self.seed = seed
        self.directory = directory
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        site = directory / "plugin"
        site.mkdir()
        PluginSite(site).install("moments", PLUGIN)
        path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {"PYTHONPATH": path, "LLMSUITE_PLUGINS": "moments", "TMPDIR": str(self.temporary)}
        self.seconds: dict[str, dict[str, float]] = {}
        self.done: collections.Counter[str] = collections.Counter()
        self.hub = HubServer()

    def start(self, words: list[str], place: Path, **more: str) -> tuple[subprocess.Popen[str], str]:
        """Start a command, all of whose processes carry a mark; returns it and the mark."""
        mark = uuid.uuid4().hex
        place.mkdir(parents=True, exist_ok=True)
        environment = {**self.environment, "MOMENTS": str(place), MARK: mark, **more}
        return self.runner.start(*words, **environment), mark

    def age_leftovers(self) -> None:
        """Let what killed launchers have left in the temporary directory look as if some time had passed."""
        for path in (*self.temporary.glob("llmsuite-*"), *self.directory.glob("indexed/*.tmp")):
            os.utime(path, (time.time() - 3600,) * 2)

    def whole(self, case: Case) -> Path:
        """The directory of the run that is not killed, and how long its moments took."""
        run = self.directory / f"whole-{case.name}"
        if case.name not in self.seconds:
            place = self.directory / f"moments-{case.name}"
            process, mark = self.start(case.words(run), place)
            output = wait_for_all(process, mark, MOST_SECONDS)
            if process.returncode != 0:
                raise Wrong(f"lost: exit code {process.returncode} of a run that was not killed\n{output}")
            found = collections.defaultdict[str, list[float]](list)
            for line in (place / "seconds.jsonl").read_text().splitlines():
                found[json.loads(line)[0]].append(json.loads(line)[1])
            self.seconds[case.name] = {moment: sum(times) / len(times) for moment, times in found.items()}
        return run

    # kinds of rounds; each returns how many kills there were

    def run_round(self, number: int, most: int) -> int:
        """Kill one run until it gets to its end, or `most` times, and compare it."""
        case = Case(self.chance.choice(list(STAGES)), self.chance.choice(list(MESHES)))
        whole = self.whole(case)
        run = self.directory / f"run-{number}"
        restarts = ["--launch.max_restarts=3"] if self.chance.random() < 0.4 else []
        kills = 0
        attempts = 0
        while True:
            attempts += 1
            kill = draw_kill(case, self.seconds[case.name], self.chance) if attempts <= most else None
            place = self.directory / f"moments-{number}-{attempts}"
            self.age_leftovers()
            words = [*case.words(run), *restarts, *(["--resume"] if run.exists() else [])]
            told = {"KILL": json.dumps(vars(kill))} if kill else {}
            process, mark = self.start(words, place, **told)
            output = wait_for_all(process, mark, MOST_SECONDS)
            was_killed = (place / "done").exists()
            kills += was_killed
            if was_killed:
                assert kill is not None
                self.done[kill.moment] += 1
                self.done[case.stage] += 1
                how = _check_killed(kill, process.returncode, output, bool(restarts), case)
                print(f"  {case.name}: {kill}: {how}", flush=True)
                _check_checkpoints(run)
            if process.returncode == 0:
                break
            if not was_killed:
                raise Wrong(f"lost: exit code {process.returncode} when it was not killed\n{output}")
        _compare(run, whole)
        self.check_nothing_stale(run)
        shutil.rmtree(run)
        return kills

    def command_round(self, number: int, most: int) -> int:
        """Kill a command at any time, give it again, and compare what it makes."""
        makers = (self.indexed, self.merged, self.exported, self.fetched)
        name, words, result, begin = self.chance.choice(makers)(number)
        kills = 0
        for attempt in range(most + 1):
            self.age_leftovers()
            process, mark = self.start(words, self.directory / "moments-of-commands", **begin)
            if attempt < most:
                self.wait_for_request(name)
                time.sleep(self.chance.uniform(0, self.seconds["commands"].get(name, 3.0)))
                process.kill()
            output = wait_for_all(process, mark, MOST_SECONDS)
            if process.returncode == 0 or (attempt and _MADE in output):
                break
            if process.returncode != -9:
                raise Wrong(f"lost: {name} ended with exit code {process.returncode}\n{output}")
            kills += 1
            self.done[name] += 1
            print(f"  {name}: killed", flush=True)
        self.compare_result(name, result)
        return kills

    def wait_for_request(self, name: str) -> None:
        """Of what fetches from a hub: wait until it does."""
        deadline = time.monotonic() + 60
        while name == "download" and not self.hub.asked and time.monotonic() < deadline:
            time.sleep(0.01)

    def base(self) -> Path:
        """A run whose model commands take."""
        return self.whole(Case("sft", "alone"))

    def indexed(self, number: int) -> tuple[str, list[str], Path, dict[str, str]]:
        corpus = self.directory / "corpus.jsonl"
        target = self.directory / "indexed" / "corpus"
        if not corpus.exists():
            rows = (
                json.dumps({"text": f"row {n} of a corpus, which is long enough " * 8}) for n in range(_CORPUS_ROWS)
            )
            corpus.write_text("\n".join(rows) + "\n")
        words = ["data", "index", str(corpus), "-o", str(target), "--tokenizer", "data/tokenizer", "--workers", "2"]
        return "tokenise", words, target.parent, {}

    def merged(self, number: int) -> tuple[str, list[str], Path, dict[str, str]]:
        target = self.directory / "merged"
        return "merge", ["merge", str(self.base()), "-o", str(target)], target, {}

    def exported(self, number: int) -> tuple[str, list[str], Path, dict[str, str]]:
        target = self.directory / "exported"
        return "export", ["export", str(self.base()), "-o", str(target)], target, {}

    def fetched(self, number: int) -> tuple[str, list[str], Path, dict[str, str]]:
        model = next(path for _, path in reversed(list_steps(self.base() / "checkpoints")))
        if not self.hub.models:
            names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
            kept = [p for p in model.iterdir() if p.name.startswith("model") or p.name in names]
            self.hub.add("org/model", {path.name: path.read_bytes() for path in kept})
            self.hub.slow = {path.name: 0.1 for path in kept if path.suffix == ".safetensors"}
        self.hub.asked.clear()
        home = self.directory / f"hub-{number}"
        target = home / "imported"
        return "download", ["import", "hf:org/model", "-o", str(target)], target, {
            "HF_ENDPOINT": self.hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip

    def compare_result(self, name: str, result: Path) -> None:
        """What a command has made, with what it makes when nobody kills it: kept from the first time."""
        known = self.directory / f"whole-of-{name}"
        ours = {str(p.relative_to(result)): p.read_bytes() for p in sorted(result.rglob("*")) if p.is_file()}
        if not ours:
            raise Wrong(f"lost: {name} has made nothing")
        if known.exists():
            theirs = {str(p.relative_to(known)): p.read_bytes() for p in sorted(known.rglob("*")) if p.is_file()}
            differing = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
            if differing:
                raise Wrong(f"lost: {name}: not as of the one that was not killed: {differing}")
        else:
            shutil.copytree(result, known)
        shutil.rmtree(result)
        stale = [p.name for p in result.parent.iterdir() if p.name.startswith(f"{result.name}.")]
        if stale:
            raise Wrong(f"stale: {name} leaves {stale}")

    def time_commands(self) -> None:
        """How long commands take and what they make, when nobody kills them."""
        times = self.seconds["commands"] = {}
        for maker in (self.indexed, self.merged, self.exported, self.fetched):
            name, words, result, begin = maker(0)
            started = time.monotonic()
            process, mark = self.start(words, self.directory / "moments-of-commands", **begin)
            output = wait_for_all(process, mark, MOST_SECONDS)
            if process.returncode != 0:
                raise Wrong(f"lost: {name}: exit code {process.returncode}\n{output}")
            times[name] = time.monotonic() - started
            print(f"  {name} takes {times[name]:.1f} s", flush=True)
            self.compare_result(name, result)

    def check_nothing_stale(self, run: Path) -> None:
        """Raise Wrong where a run that has ended leaves a lock that is held, or files that only a writer needs."""
        patterns = ("*.tmp", "*.llmsuite-old", "*.fetched", "*.part", ".machine-*")
        stale = [str(path.relative_to(run)) for pattern in patterns for path in run.rglob(pattern)]
        stale += [path.name for path in self.temporary.glob("llmsuite-*") if time.time() - path.stat().st_mtime > 1800]
        with open(run / ".lock", "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stale.append("a lock that is held")
        if stale:
            raise Wrong(f"stale: {stale}")


def _check_killed(kill: Kill, code: int, output: str, restarts: bool, case: Case) -> str:
    """How a run went on after a kill; raises Wrong where it did otherwise than it should."""
    if kill.launcher or (case.num_ranks == 1 and not restarts):
        return "ended" if code else "was about to end"
    if f"rank {kill.rank} was killed by SIGKILL" not in output and code:
        raise Wrong(f"lost: rank {kill.rank} was killed and is not named\n{output}")
    if restarts and code:
        raise Wrong(f"lost: exit code {code} in place of a restart\n{output}")
    return "begun again by itself" if restarts else "ended"


def _check_checkpoints(run: Path) -> None:
    damaged = [fault for _, path in list_steps(run / "checkpoints") if (fault := broken_file(path)) is not None]
    if damaged:
        raise Wrong(f"lost: a checkpoint is not whole: {damaged}")


def _compare(run: Path, whole: Path) -> None:
    """Raise Wrong unless all that was learnt is the same, bit by bit."""
    ours, theirs = (learnt(_records(path / "metrics.jsonl")) for path in (run, whole))
    if ours != theirs:
        raise Wrong(f"lost: its metrics are not those of a run that was never killed\n{ours}\n{theirs}")
    files = [
        json.loads((path / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text()) for path in (run, whole)
    ]
    if files[0]["files"] != files[1]["files"]:
        raise Wrong("lost: its last checkpoint is not that of a run that was never killed")
    drawn = [path / "completions.jsonl" for path in (run, whole)]
    if drawn[1].exists() and drawn[0].read_bytes() != drawn[1].read_bytes():
        raise Wrong("lost: its completions are not those of a run that was never killed")
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])["event"]
    if last != "ended":
        raise Wrong(f"stale: its last event is {last}")


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(kills: int, seconds: float, seed: int) -> int:
    """Report each kill; returns how many rounds went wrong."""
    bad = collections.Counter[str]()
    done = 0
    number = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        rounds = Rounds(Path(directory), seed)
        rounds.time_commands()
        while done < kills and time.monotonic() - began < seconds:
            number += 1
            is_command = rounds.chance.random() < COMMAND_SHARE
            one: Callable[[int, int], int] = rounds.command_round if is_command else rounds.run_round
            try:
                done += one(number, min(kills - done, KILLS_OF_A_RUN))
            except Wrong as error:
                bad[str(error).partition(":")[0]] += 1
                print(f"seed {seed}, round {number}: {error}", flush=True)
            print(f"{done} of {kills} kills, {time.monotonic() - began:.0f} s", flush=True)
        rounds.hub.stop()
    seen: Mapping[str, int] = rounds.done
    print(f"{done} kills (seed {seed}) in {number} rounds: " + ", ".join(f"{n} {what}" for what, n in seen.items()))
    print(", ".join(f"{bad[what]} {what}" for what in ("lost", "orphan", "stale")))
    return sum(bad.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after so many")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    sys.exit(1 if main(given.kills, given.seconds, given.seed) else 0)
