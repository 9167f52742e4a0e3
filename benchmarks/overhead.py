"""Overhead of the engine over a hand-written training loop, with metrics, ledger, call log and watchdog on.

    python benchmarks/overhead.py              # one process
    python benchmarks/overhead.py --ranks 2    # data parallel, gradients summed

A pretraining run proceeds as usual, every step logged. Between its steps the same batch goes through the loop below, on
a model of its own with the same operations: forward, backward, summed gradients, clipping, AdamW, the loss as a number.
Reported is the median, over pairs of neighbouring steps, of the engine's time over the loop's: wall-clock time, and CPU
time, which other work on the machine changes less.

Where tensors lie in memory makes matrix products of either side a few per cent slower for the life of a process. So
there are several launches, and their range is reported as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
WARM_UP = 3
MODEL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 512, "vocab_size": 4096,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--launches", type=int, default=7, help="how often to start over, in new processes")
    parser.add_argument("--steps", type=int, default=8, help="timed pairs of steps per launch")
    arguments = parser.parse_args()
    from llmsuite.contract.registry import load_plugins
    from llmsuite.launch.launch import is_worker, launch

    if is_worker():
        return work(arguments.ranks, arguments.steps)
    backend = load_plugins().devices["cpu"].factory()
    backend.prepare_ranks()
    environment = backend.variables(arguments.ranks, 0)
    found = []
    for number in range(arguments.launches):
        with tempfile.TemporaryDirectory() as directory:
            os.environ["LLMSUITE_OVERHEAD"] = directory
            command = [sys.executable, __file__, f"--ranks={arguments.ranks}", f"--steps={arguments.steps}"]
            said = list[str]()
            logs = Path(directory) / "logs"
            code = launch(command, arguments.ranks, logs, lambda rank: environment, said.append, None, 600.0)
            if code != 0:
                sys.stderr.write("".join(said))
                return code
            found.append(json.loads((Path(directory) / "times.json").read_text()))
        say(f"launch {number + 1} of {arguments.launches}\n")
        tell(found[-1:])
    say(f"{arguments.launches} launches of {arguments.steps} pairs of steps\n")
    tell(found)
    return 0


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def work(num_ranks: int, steps: int) -> int:
    """Measure in one rank; rank 0 writes the times. Returns the exit code."""
    from llmsuite.contract.registry import load_plugins
    from llmsuite.devices.cpu import CpuBackend
    from llmsuite.devices.start import start_paddle
    from llmsuite.recipe.resolve import plan_run

    start_paddle(CpuBackend(), num_ranks, join=num_ranks > 1)
    from llmsuite.engine.checkpointer import Checkpointer
    from llmsuite.engine.trainer import run
    from llmsuite.launch import calls
    from llmsuite.stages.pretrain import PretrainStage

    calls.start()  # with one rank too
    os.environ["LLMSUITE_PLUGINS"] = ""
    registry = load_plugins()
    words = [
        f"--train.max_steps={WARM_UP + steps + 1}", f"--train.global_batch_size={4 * num_ranks}", "--data.eval=null",
        "--train.micro_batch_size=4", "--data.max_length=256", "--parallel={}", f"--launch.num_devices={num_ranks}",
        "--checkpoint.save_steps=null", f"--output_dir={os.environ['LLMSUITE_OVERHEAD']}/run", "--pretrain.split=null",
        *(f"--model.config.{key}={value}" for key, value in MODEL.items()),
    ]  # fmt: skip
    plan = plan_run(ROOT / "recipes" / "llama" / "pretrain.json", words, registry, smoke=True)
    loop = Loop(plan, num_ranks)
    times: list[tuple[Time, Time]] = []
    taken: list[Any] = []
    loss = PretrainStage.loss
    check = Checkpointer.check
    since = [Time()]

    def noted(self: Any, model: Any, batch: Any) -> Any:
        taken.append(batch)
        return loss(self, model, batch)

    def between_steps(self: Any) -> None:
        """Runs in every rank after a step, before its metrics are written: those count for the next step."""
        check(self)
        engine = since[0].until_now()
        start = Time()
        loop.step(taken.pop())
        times.append((engine, start.until_now()))
        since[0] = Time()

    PretrainStage.loss = noted  # type: ignore[method-assign]
    Checkpointer.check = between_steps
    code = run(plan, registry, resume=False)
    if os.environ["PADDLE_TRAINER_ID"] == "0":
        pairs = times[WARM_UP : WARM_UP + steps]
        found = {name: [[getattr(time, name) for time in pair] for pair in pairs] for name in ("clock", "cpu")}
        Path(os.environ["LLMSUITE_OVERHEAD"], "times.json").write_text(json.dumps(found))
    return code


class Time:
    """A moment, or the time between two: wall clock, and CPU time of all threads of this process."""

    def __init__(self, clock: float | None = None, cpu: float | None = None):
        self.clock = time.perf_counter() if clock is None else clock
        self.cpu = time.process_time() if cpu is None else cpu

    def until_now(self) -> Time:
        return Time(time.perf_counter() - self.clock, time.process_time() - self.cpu)


class Loop:
    """A training loop as one would write it by hand."""

    def __init__(self, plan: Any, num_ranks: int):
        import paddle

        self.model = plan.model.family.factory()(
            plan.model.config, plan.parallel.device.factory().ops(plan.parallel.engine.precision)
        )
        self.model.train()
        train = plan.train.section
        self._num_ranks = num_ranks
        decayed = {p.name for p in self.model.parameters() if len(p.shape) > 1}
        self.optimizer = paddle.optimizer.AdamW(
            learning_rate=train.learning_rate, parameters=self.model.parameters(), weight_decay=train.weight_decay,
            apply_decay_param_fun=decayed.__contains__, grad_clip=paddle.nn.ClipGradByGlobalNorm(train.max_grad_norm),
        )  # fmt: skip

    def step(self, batch: Any) -> float:
        import paddle
        import paddle.distributed as dist

        hidden, _ = self.model.hidden_states(paddle.to_tensor(batch["input_ids"]))
        loss = self.model.token_nll(hidden.flatten(0, 1), paddle.to_tensor(batch["targets"])).mean()
        loss.backward()
        if self._num_ranks > 1:
            with paddle.no_grad():
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad.scale_(1 / self._num_ranks)
        self.optimizer.step()
        self.optimizer.clear_grad()
        return float(loss)


def tell(launches: list[dict[str, list[list[float]]]]) -> None:
    for name in ("clock", "cpu"):
        ratios = [[engine / bare for engine, bare in launch[name]] for launch in launches]
        of_launches = sorted(statistics.median(column) for column in ratios)
        engine, bare = (statistics.median(column) for column in zip(*itertools.chain(*(x[name] for x in launches))))
        ratio = statistics.median(itertools.chain(*ratios))
        low = of_launches[0]
        high = of_launches[-1]
        among = f" ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} by launch)" if len(launches) > 1 else ""
        say(f"{name:5}  engine {engine:.4f} s  by hand {bare:.4f} s  overhead {100 * (ratio - 1):+.1f}%{among}\n")


if __name__ == "__main__":
    sys.exit(main())
