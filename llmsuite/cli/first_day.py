"""The command `llmsuite doctor --first-day FILE`: the first runs on a kind of device that nobody has tried, compared
with numbers of a CPU, in one file to send back.

Each act is a command of llmsuite in a process of its own. All train the same small model from the same random values,
with SGD, whose updates do not magnify the last bits of gradients.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llmsuite import __version__
from llmsuite.base.commands import CommandTimeout, run_command
from llmsuite.base.errors import UserError, reason_of
from llmsuite.base.locks import scratch_directory
from llmsuite.base.redaction import Url
from llmsuite.base.resources import bundled
from llmsuite.base.safe_files import exists, is_dir, is_file
from llmsuite.base.supervisor import SupervisedProcess
from llmsuite.base.web.client import HttpFailure, post_json
from llmsuite.contract.registry import Registry

Size = Literal["tiny", "135m"]
REFERENCE = Path(__file__).with_name("first_day.json")
"""Losses of a CPU in fp32: size -> act -> loss of each step."""

STEPS = 4
EPSILON = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
"""Largest relative error of a number that is rounded to a precision."""
FIRST_STEP = {"fp32": 32, "bf16": 4, "fp16": 4}
LATER_STEPS = {"fp32": 320, "bf16": 16, "fp16": 16}
"""Largest relative difference of a loss in units of `EPSILON`, in the first step and after updates. In fp32, devices
sum some hundred numbers in another order. In 16 bits kernels sum in float32, and what counts is that weights and
activations are rounded, one after the other in each layer and in no common direction. An update magnifies what
gradients differ by."""
_POLL_SECONDS = 0.2
_STOP_SECONDS = 30.0
"""Time in which a server has to end."""
_SECONDS = 3600.0
_TAIL = 4000

_TRAINING = (
    f"--train.max_steps={STEPS}", "--train.lr_schedule=constant", "--train.warmup_ratio=0", "--train.optimizer=sgd",
    "--train.learning_rate=0.2", "--train.max_grad_norm=1", "--train.log_steps=1", "--data.eval=null",
    f"--checkpoint.save_steps={STEPS // 2}", "--checkpoint.keep_last=4", "--engine.recompute=none",
)  # fmt: skip
_SIZES: dict[Size, tuple[str, ...]] = {
    "tiny": ("--train.global_batch_size=8", "--train.micro_batch_size=4", "--data.max_length=64"),
    "135m": (
        "--train.global_batch_size=4", "--train.micro_batch_size=2", "--data.max_length=64",
        "--model.config.hidden_size=576", "--model.config.intermediate_size=1536",
        "--model.config.num_hidden_layers=30", "--model.config.num_attention_heads=9",
        "--model.config.num_key_value_heads=3", "--model.config.vocab_size=49152",
        "--model.config.tie_word_embeddings=true",
    ),
}  # fmt: skip
_ONE = ("--parallel={}", "--launch.num_devices=1")


@dataclasses.dataclass
class Act:
    """One of the runs, and what came of it."""

    name: str
    precision: str
    words: Sequence[str] = ()
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    peak_memory_bytes: int | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    output: str = ""
    """The end of what was printed, if anything is wrong."""


@dataclasses.dataclass(frozen=True)
class _Day:
    """The directory of the runs, and the device and size of all of them."""

    device: str
    size: Size
    directory: Path
    reference: dict[str, list[float]]
    environment: dict[str, str]

    def llmsuite(self, words: Sequence[str]) -> tuple[int, str]:
        """Run a command. Returns its exit code and output."""
        try:
            done = run_command([sys.executable, "-m", "llmsuite", *words], self.environment, _SECONDS)
        except CommandTimeout as error:
            return 124, f"does not end within {_SECONDS:.0f} s: {error}"
        return done.code, done.output + done.errors

    def train(self, act: Act, stage: str, *words: str, name: str | None = None) -> None:
        """Run a training stage into a directory of the act's name."""
        name = name or act.name
        recipe = bundled("recipes") / "llama" / f"{stage}.json"
        given = _once([*_TRAINING, *_SIZES[self.size], *_ONE, f"--engine.precision={act.precision}", *words])
        act.words = ["run", f"recipes/llama/{stage}.json", "--smoke", f"--device={self.device}", *given]
        command = ["run", str(recipe), "--smoke", f"--device={self.device}", *given]
        target = self.directory / name
        start = time.perf_counter()
        code, printed = self.llmsuite([*command, f"--output_dir={target}"])
        act.seconds = time.perf_counter() - start
        if code != 0:
            act.problems.append(f"ends with exit code {code}")
            act.output = printed[-_TAIL:]
            return
        for line in (target / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "loss" in record:
                act.losses.append(record["loss"])
                act.peak_memory_bytes = record.get("peak_memory_bytes")

    def compare(self, act: Act, stage: str) -> None:
        """Compare the losses of an act with those of the CPU."""
        if act.problems or stage not in self.reference:
            return
        expected = self.reference[stage]
        if len(act.losses) != len(expected):
            act.problems.append(f"has {len(act.losses)} steps instead of {len(expected)}")
        for step, (found, wanted) in enumerate(zip(act.losses, expected, strict=False), 1):
            limit = loss_limit(act.precision, step)
            distance = abs(found - wanted) / abs(wanted)
            if not distance <= limit:  # also where it is not a number
                act.problems.append(
                    f"loss {found:.7g} in step {step} is {distance:.1e} from the {wanted:.7g} of a CPU in fp32; at "
                    f"most {limit:.1e} was expected"
                )


def loss_limit(precision: str, step: int) -> float:
    """Largest relative difference of the loss of a step from that of a CPU in fp32."""
    return EPSILON[precision] * (FIRST_STEP if step == 1 else LATER_STEPS)[precision]


def first_day(file: str, size: Size, device: str, registry: Registry) -> int:
    """Run all acts, and write FILE. Returns the exit code: 0 if nothing is wrong.

    Raises:
        UserError: FILE is there already or cannot be written, or the device is not there.
    """
    target = Path(file)
    if exists(target):
        raise UserError(f"--first-day: {file} exists; name a new file, to which the results are written")
    backend = registry.device(device).factory()
    environment = dict(os.environ)  # before Paddle is imported here: each command has variables of its own
    from llmsuite.devices.start import start_paddle

    start_paddle(backend, 1)
    if reason := backend.unavailable(1):
        raise UserError(f"--device: {device}: {reason}")
    has_two = backend.unavailable(2) is None
    acts: list[Act] = []
    found: dict[str, Any] = {
        "llmsuite": __version__,
        "device": device,
        "size": size,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }
    # from the begin on, and after each act: they may take hours, and a day that is interrupted has those before
    _write(target, found, acts)
    with scratch_directory() as directory:
        day = _Day(device, size, directory, read_reference(size), environment)
        for act, run in _acts(day, backend.precisions_of(trains=True), has_two, backend.runs_step_programs):
            run(act)
            acts.append(act)
            _write(target, found, acts)
            seen = f"{act.seconds:.0f} s" if act.seconds else "-"
            print(f"{'BAD' if act.problems else 'ok':4}  {act.name:14} {act.precision:5} {seen:>6}", flush=True)
            for problem in act.problems:
                print(f"      {problem}", flush=True)
        if size != "tiny":
            found["doctor"] = day.llmsuite(["doctor", f"--device={device}"])[1]
            found["kernels"] = day.llmsuite(["doctor", f"--device={device}", "--kernels"])[1]
            _write(target, found, acts)
    wrong = [act.name for act in acts if act.problems]
    end = f"all {len(acts)} acts are right"
    if wrong:
        end = f"{len(wrong)} of {len(acts)} acts are wrong: {', '.join(wrong)}"
    print(f"{end}; please send us {file}")
    return 2 if wrong else 0


def _write(target: Path, found: Mapping[str, Any], acts: Sequence[Act]) -> None:
    """Write all that is known so far. Raises UserError."""
    text = json.dumps({**found, "acts": [dataclasses.asdict(act) for act in acts]}, indent=1)
    try:
        target.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--first-day: {target} cannot be written: {reason_of(error)}") from error


def read_reference(size: Size) -> dict[str, list[float]]:
    """The losses of a CPU, by stage."""
    every: dict[str, dict[str, list[float]]] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return every[size]


def _acts(
    day: _Day, precisions: Sequence[str], has_two: bool, runs_step_programs: bool
) -> list[tuple[Act, Callable[[Act], None]]]:
    """The acts in their order: later ones use what earlier ones have left."""
    acts: list[tuple[Act, Callable[[Act], None]]] = []
    for precision in precisions:
        name = "sft" if precision == "fp32" else f"sft-{precision}"
        acts.append((Act(name, precision), _training(day, "sft")))
    acts.append((Act("dpo", "fp32"), _training(day, "dpo")))
    if has_two:
        pipeline = ('--parallel={"pipeline_parallel_degree": 2}', "--launch.num_devices=2")
        acts.append((Act("pipeline", "fp32"), _training(day, "sft", *pipeline)))
    program = ("--engine.mode=to_static", f"--engine.program={'step' if runs_step_programs else 'layers'}")
    acts.append((Act("program", "fp32"), _training(day, "sft", *program)))
    acts.append((Act("resume", "fp32"), lambda act: _resume(day, act)))
    acts.append((Act("serve", "fp32"), lambda act: _serve(day, act)))
    return acts


def _training(day: _Day, stage: str, *words: str) -> Callable[[Act], None]:
    def run(act: Act) -> None:
        day.train(act, stage, *words)
        day.compare(act, stage)

    return run


def _resume(day: _Day, act: Act) -> None:
    """Continue a copy of the SFT run from the checkpoint in its middle."""
    last = day.directory / "sft" / "checkpoints" / f"step-{STEPS}"
    if not is_dir(last):
        act.problems.append("is not tried, as sft has left no checkpoint")
        return
    shutil.copytree(day.directory / "sft", day.directory / "resume", symlinks=True)
    shutil.rmtree(day.directory / "resume" / "checkpoints" / last.name)
    day.train(act, "sft", "--resume")
    day.compare(act, "sft")


def _serve(day: _Day, act: Act) -> None:
    """Ask a server for an answer of the model that SFT has trained, which `generate` has to give too."""
    model = day.directory / "sft" / "checkpoints" / f"step-{STEPS}"
    if not is_dir(model):
        act.problems.append("is not tried, as sft has left no checkpoint")
        return
    prompt = "Hello"
    answers = day.directory / "answers.jsonl"
    words = [str(model), f"--device={day.device}", "--max_new_tokens=8"]
    act.words = ["serve", *words[1:]]
    start = time.perf_counter()
    code, printed = day.llmsuite(["generate", *words, "--prompt", prompt, "--output", str(answers)])
    if code != 0 or not is_file(answers):
        act.problems.append(f"`generate` ends with exit code {code}")
        act.output = printed[-_TAIL:]
        return
    expected = json.loads(answers.read_text(encoding="utf-8"))["answers"][0]["text"]
    found, printed = _ask_server(day, words, prompt)
    act.seconds = time.perf_counter() - start
    if found is None:
        act.problems.append("the server does not answer")
        act.output = printed[-_TAIL:]
    elif found != expected:
        act.problems.append(f"the server answers {found!r}, and `generate` {expected!r}")


def _ask_server(day: _Day, words: Sequence[str], prompt: str) -> tuple[str | None, str]:
    """The answer of a server on a free port, None without one; and what the server has printed."""
    log = day.directory / "serve.log"  # not a pipe, which would be full at some time
    with log.open("wb") as output:
        command = [sys.executable, "-m", "llmsuite", "serve", *words, "--port=0", "--name=tiny"]
        process = SupervisedProcess(
            command, output=output, environment=day.environment, grace_seconds=_STOP_SECONDS
        )  # it ends with this process, even if that is killed
    answer = None
    problem = ""
    try:
        if (url := _address(process, log)) is not None:
            answer = _ask(url, prompt)
    except HttpFailure as error:
        problem = f"{error}\n"
    finally:
        process.end()
    return answer, log.read_text(encoding="utf-8", errors="replace")[-_TAIL:] + problem


def _address(process: SupervisedProcess, log: Path) -> str | None:
    """The address that a server has written to its log, once it is there; None if it ends or takes too long."""
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        has_ended = process.poll() is not None
        if (place := re.search(rb"answers on (http://[\d.]+:\d+)", log.read_bytes())) is not None:
            return place[1].decode()
        if has_ended:
            return None
        time.sleep(_POLL_SECONDS)
    return None


def _ask(url: str, prompt: str) -> str:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 8}
    answer = post_json(Url(f"{url}/v1/chat/completions"), asked, _SECONDS)
    return str(answer["choices"][0]["message"]["content"])


def _once(words: Sequence[str]) -> list[str]:
    """The last value of each key."""
    found: dict[str, str] = {}
    for word in words:
        found[word.partition("=")[0]] = word
    return list(found.values())
