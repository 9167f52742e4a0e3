"""Sends signals to runs and commands at random moments: each ends by it, quietly, and leaves nothing.

python -m tests.tools.interrupts [--moments N] [--seed SEED] [--only NAME]

A moment lies anywhere between the first line of `llmsuite` and the end of what it does, imports included. Ctrl-C comes
once or twice, the second one up to half a second after the first; SIGTERM and SIGHUP (a terminal that is closed) stop a
run as Ctrl-C does, and end a command; SIGKILL ends either. The exit code has to be 130, that of the signal, or that of
what had ended; the last event of a run `stopped`; nothing printed that looks like a fault, no process left, no output
that is there in part. A run goes on with --resume, and a command that is given again ends well.
"""

from __future__ import annotations

import argparse
import collections
import functools
import http.server
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import uuid
from pathlib import Path

from llmsuite.base.files import broken_file
from tests.multi.conftest import Runner
from tests.support.moments import MESHES, STAGES, Case
from tests.tools.faults import MARK, Wrong, wait_for_all

INTERRUPTED = 130
MOST_SECONDS = 120.0
"""From the last signal to the end: after a single one a run finishes its step and saves."""
WHOLE_SECONDS = 900.0
"""Of a run or command that is left alone, on a machine that others use too."""
LONGEST_GAP = 0.5
"""Seconds between two signals."""
COMMAND_SHARE = 0.4
HOW = {"once": 4, "twice": 8, "SIGTERM": 3, "SIGHUP": 2, "SIGKILL": 3}
"""Signals, with the share of each."""
RESUMED_SHARE = 0.25
COMMANDS = (
    "merge", "import", "export", "deploy", "generate", "validate", "rehearse", "infer", "data index", "data prepare",
)  # fmt: skip
_ROWS = 20_000
"""Of a corpus, and of a data set to prepare."""
_FAULT = re.compile(r"Traceback|Error\b|has failed|was killed by")
_CATCHES_ALARM = 1 << (signal.SIGALRM - 1)
"""In the mask of signals that a process catches: `llmsuite.__main__` has begun to mind Ctrl-C."""


class Interrupts:
    """A series of interruptions."""

    def __init__(self, directory: Path, seed: int):
        self.runner = Runner(directory)
        self.chance = random.Random(seed)
        self.directory = directory
        self.seconds: dict[str, float] = {}
        """How long each run or command takes that is left alone."""
        self.seen: collections.Counter[str] = collections.Counter()
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        _write_corpus(directory)
        handler = functools.partial(_Quiet, directory=str(directory))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def one(self, number: int, only: str | None = None) -> str:
        """Interrupt a run or a command; returns what was done.

        Args:
            number: of the moment.
            only: the command, or "run"; None for any.

        Raises:
            Wrong: it did not end as it should.
        """
        is_run = self.chance.random() >= COMMAND_SHARE if only is None else only == "run"
        place = self.directory / f"interrupted-{number}"
        if is_run:
            case = Case(self.chance.choice(list(STAGES)), self.chance.choice(list(MESHES)))
            name = case.name
            words = case.words(place)
            self._learn(name, case.words(self.directory / f"whole-{name}"))
        else:
            name = self.chance.choice(COMMANDS) if only is None else only
            words = self._command(name, place)
            self._learn(name, self._command(name, self.directory / f"whole-{name}".replace(" ", "-")))
        delay = self.chance.uniform(0, self.seconds[name])
        (how,) = self.chance.choices(list(HOW), list(HOW.values()))
        gap = self.chance.uniform(0, LONGEST_GAP) if how == "twice" else None
        again = "" if gap is None else f" {gap:.2f} s apart"
        what = f"{name}, {how}{again}, at {delay:.2f} of {self.seconds[name]:.1f} s"
        number_of = getattr(signal, how, signal.SIGINT)
        try:
            code = self._interrupt(words, delay, gap, number_of)
            if is_run and code != -signal.SIGKILL:
                self._check_events(place, code)
            if not is_run:
                self._check_output(place, code)
            self._check_temporary(code)
            if code and self.chance.random() < RESUMED_SHARE:
                if not is_run:
                    self._repeat(words, place)
                elif place.exists():
                    self._resume(words, place)
        except Wrong as error:
            raise Wrong(f"{what}: {error}") from None
        finally:
            for path in self.directory.glob(f"{place.name}*"):
                shutil.rmtree(path, ignore_errors=True)
        self.seen["had ended" if code == 0 else how] += 1
        return f"{what}: exit code {code}"

    def _command(self, name: str, place: Path) -> list[str]:
        """The words of a command that writes to a place, most of them from the model of a run that was left alone."""
        case = Case("sft", "alone")
        run = self.directory / f"whole-{case.name}"
        self._learn(case.name, case.words(run))
        model = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
        layers = {"family": "llama", "preset": "llama-3.1-8b", "tokenizer": "data/tokenizer"}
        layers["config"] = {"num_hidden_layers": 2}
        corpus = ["data", "index", str(self.directory / "corpus.jsonl"), "--tokenizer", "data/tokenizer"]
        address = f"http://127.0.0.1:{self.server.server_address[1]}/rows.tar.gz?{place.name}"
        return {
            "merge": ["merge", str(run), "-o", str(place)],
            "import": ["import", str(model), "-o", str(place)],
            "export": ["export", str(run), "-o", str(place)],
            "deploy": ["deploy", str(run), "-o", str(place)],
            "generate": ["generate", str(run), "--prompt", "Hi", "--max_new_tokens", "8"],
            "validate": ["validate", "recipes/llama/sft.json"],
            "rehearse": [
                "rehearse", "recipes/llama/pretrain.json", f"--model={json.dumps(layers)}", "--launch.num_devices=2",
                '--parallel={"pipeline_parallel_degree": 2}', "--train.global_batch_size=8",
                "--pretrain.split=700,299,1",
            ],
            "infer": ["run", "recipes/llama/infer.json", "--smoke", f"--output_dir={place}"],
            "data index": [*corpus, "-o", str(place / "corpus"), "--workers", "2"],
            "data prepare": ["data", "prepare", "advertisegen", "-o", str(place), "--url", address],
        }[name]  # fmt: skip

    def _start(self, words: list[str]) -> tuple[subprocess.Popen[str], str]:
        """Start a command, and wait until it minds Ctrl-C; returns it and its mark."""
        mark = uuid.uuid4().hex
        process = self.runner.start(*words, **{MARK: mark, "TMPDIR": str(self.temporary)})
        status = Path(f"/proc/{process.pid}/status")
        deadline = time.monotonic() + MOST_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
            if caught is not None and int(caught[1], 16) & _CATCHES_ALARM:
                break
            time.sleep(0.001)
        return process, mark

    def _learn(self, name: str, words: list[str]) -> None:
        """Run something that is left alone, the first time."""
        if name in self.seconds:
            return
        process, mark = self._start(words)
        begun = time.monotonic()
        output = wait_for_all(process, mark, WHOLE_SECONDS)
        if process.returncode != 0:
            raise Wrong(f"lost: {name}: exit code {process.returncode} without a signal\n{output}")
        self.seconds[name] = time.monotonic() - begun

    def _interrupt(self, words: list[str], delay: float, gap: float | None, number: int) -> int:
        """The exit code of a command that gets a signal after some seconds, and another one after a gap."""
        process, mark = self._start(words)
        for seconds in (delay, gap):
            if seconds is not None:
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    process.send_signal(number)
        output = wait_for_all(process, mark, MOST_SECONDS)
        codes = (0, INTERRUPTED) if number == signal.SIGINT else (0, INTERRUPTED, -number)
        if process.returncode not in codes or _FAULT.search(output):
            raise Wrong(f"lost: exit code {process.returncode}\n{output}")
        return process.returncode

    def _check_output(self, place: Path, code: int) -> None:
        """Raise Wrong where a command has left an output in part."""
        has_whole = (place / "manifest.json").exists() or not (place / "config.json").exists()
        if code and not has_whole:
            raise Wrong(f"torn: exit code {code}, and {place} has {sorted(path.name for path in place.iterdir())}")
        if (place / "manifest.json").exists() and (fault := broken_file(place)) is not None:
            raise Wrong(f"torn: exit code {code}: {fault}")

    def _check_temporary(self, code: int) -> None:
        """Remove what is in the temporary directory. Raises Wrong where it is not empty, except after a signal that
        ends a process at once: it leaves its files to the next command that makes some."""
        left = sorted(path.name for path in self.temporary.iterdir())
        for name in left:
            shutil.rmtree(self.temporary / name)
        if code >= 0 and left:
            raise Wrong(f"stale: exit code {code}, and {self.temporary} has {left}")

    def _repeat(self, words: list[str], place: Path) -> None:
        """Give a command again. Raises Wrong where it fails, but for an output that it had written."""
        if words[0] == "run" and place.exists():  # answers that are there already are kept
            words = [*words, "--resume"]
        process, mark = self._start(words)
        output = wait_for_all(process, mark, MOST_SECONDS)
        if process.returncode != 0 and not (place.exists() and "exists" in output):
            raise Wrong(f"lost: exit code {process.returncode} when it is given again\n{output}")
        if stale := [path.name for path in self.directory.glob(f"{place.name}.*")]:
            raise Wrong(f"stale: {stale}")
        self.seen["given again"] += 1

    def _check_events(self, run: Path, code: int) -> None:
        """Raise Wrong unless the last event of a run says how it has ended. One that had not begun has none, and the
        process of one that has ended may get a signal."""
        path = run / "events.jsonl"
        events = [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []
        expected = {0: ("ended",), INTERRUPTED: ("stopped",)}.get(code, ("stopped", "ended"))
        if events and events[-1] not in expected:
            raise Wrong(f"lost: exit code {code}, and its events are {events}")

    def _resume(self, words: list[str], run: Path) -> None:
        """Let a run go on; raises Wrong where it cannot. Without a checkpoint it begins again in a new directory."""
        if not (run / "checkpoints" / "latest").exists():
            shutil.rmtree(run)
        else:
            words = [*words, "--resume"]
        process, mark = self._start(words)
        output = wait_for_all(process, mark, MOST_SECONDS)
        if process.returncode != 0:
            raise Wrong(f"lost: exit code {process.returncode} of {words[-1]}\n{output}")
        self._check_events(run, 0)
        self.seen["gone on"] += 1


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a directory without a word."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _write_corpus(directory: Path) -> None:
    """Write a corpus to index, and the archive of a data set to prepare."""
    text = "a row of a corpus, which is long enough " * 4
    rows = "".join(json.dumps({"text": f"{n}: {text}"}) + "\n" for n in range(_ROWS))
    (directory / "corpus.jsonl").write_text(rows)
    with tarfile.open(directory / "rows.tar.gz", "w:gz") as archive:
        for split in ("train", "dev"):
            file = directory / f"{split}.json"
            file.write_text("".join(json.dumps({"content": f"{n}", "summary": text}) + "\n" for n in range(_ROWS)))
            archive.add(file, f"AdvertiseGen/{split}.json")
            file.unlink()


def main(moments: int, seed: int, only: str | None = None) -> int:
    """Report each moment; returns how many went wrong."""
    bad = 0
    # a job in the background ignores Ctrl-C, and so would all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as directory:
        series = Interrupts(Path(directory), seed)
        for number in range(1, moments + 1):
            try:
                said = series.one(number, only)
            except Wrong as error:
                bad += 1
                said = f"seed {seed}: {error}"
            print(f"{number}/{moments}: {said}", flush=True)
    seen = ", ".join(f"{count} {what}" for what, count in sorted(series.seen.items()))
    print(f"{moments - bad} of {moments} moments (seed {seed}) ended well: {seen}")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", choices=("run", *COMMANDS))
    given = parser.parse_args()
    sys.exit(1 if main(given.moments, given.seed, given.only) else 0)
