"""The rollout engine `openai`: servers draw the completions, and get new weights through a directory.

The first rank writes the weights of each version, tells the servers, and asks for completions: token ids go in and come
out. A thread does that in the order in which it was asked for, so that a server never gets the weights of a later
version before it has drawn what belongs to an earlier one, and the run can train meanwhile.

What a server is asked for is a function of the weights and the keys of the prompts, so after a failure it is asked
again: a server that was started anew gets the weights once more. When no try is left the run ends; its checkpoints
stay as they are.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.model_dir import without_carried
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.files import MANIFEST, committed_directory, remove_directory, sha256_of
from llmsuite.inference.load import parameter_shapes
from llmsuite.models.shard_plan import WHOLE
from llmsuite.rl.drawing import Drawing, Drawn, Request
from llmsuite.rl.engine import EngineContext, Pending
from llmsuite.rl.rollout_server import RolloutServer, Version
from llmsuite.rl.vllm_server import VllmServer
from llmsuite.threads import run_all
from llmsuite.typing import Tensor

_MOST = 4096
"""Completions that a server draws in one request."""


class RemoteEngine:
    """Servers that draw. Only the rank that makes requests writes weights and knows of servers."""

    def __init__(self, context: EngineContext):
        plan, section, self._draws = context.plan, context.section, context.draws
        urls, timeout, retries = section.urls, section.timeout, section.retries
        self._root = Path(section.weights_dir or plan.output_dir / "weights").absolute()
        self._closing = threading.Event()
        kind = {"llmsuite": RolloutServer, "vllm": VllmServer}[section.dialect]
        vocab_size = plan.model_config.vocab_size
        self._servers = [kind(url, timeout, retries, self._closing, vocab_size) for url in urls]
        self._family, self._config = plan.family, without_carried(plan.model_config)
        self._dtype = context.backend.parameter_dtype(plan.recipe.engine.precision)
        self._shapes = parameter_shapes(self._family, self._config) if self._draws else {}
        self._version: Version | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def refresh(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine`: write them into a directory, for the servers to read when completions are asked for next.

        Raises:
            UserError: it cannot be written.
        """
        values = iter(weights)
        if self._draws:
            place = self._root / f"version-{version}"
            with committed_directory(place) as directory:
                self._write(directory, values)
            self._version = Version(version, place, sha256_of(place / MANIFEST))
        for _ in values:  # gathered by all ranks
            pass

    def _write(self, directory: Path, values: Iterator[tuple[str, Tensor]]) -> None:
        early: dict[str, np.ndarray] = {}

        def read(name: str) -> np.ndarray:
            while name not in early:  # layers with adapters may have their parameters in another order
                found, value = next(values)
                early[found] = _array(value)
            return early.pop(name)

        specs = [TensorSpec(name, shape, self._dtype_of(name)) for name, shape in self._shapes.items()]
        write_model(directory, self._family, self._config, read, specs)

    def _dtype_of(self, name: str) -> str:
        """As `llmsuite.train.whole_weights` gives it."""
        return "float32" if (self._family.shard_plan or WHOLE).is_gate_bias(name) else self._dtype

    def begin(self, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]) -> Pending:
        """See `Engine`."""
        if not self._draws:
            assert not requests, "another rank makes the requests"
            return list
        assert self._version is not None, "there are no weights yet"
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()
        job = _Job(self._version, requests, drawing, stop_ids)
        self._jobs.put(job)
        return job.result

    def close(self) -> None:
        """See `Engine`: nothing is asked for any more. The newest weights stay."""
        self._closing.set()
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            try:
                job.drawn = self._drawn(job)
                self._remove_before(job.version)
            except BaseException as error:  # raised again where the result is waited for
                job.error = error
            job.done.set()

    def _drawn(self, job: _Job) -> list[list[Drawn]]:
        """The completions of a job, each server's part by a thread of its own."""
        most = min(job.drawing.batch_size, _MOST)
        size = max(1, most // job.drawing.num_generations)
        parts = [job.requests[i : i + size] for i in range(0, len(job.requests), size)]
        found: list[list[list[Drawn]]] = [[] for _ in parts]

        def task(number: int, server: RolloutServer) -> Callable[[], None]:
            def work() -> None:
                for i in range(number, len(parts), len(self._servers)):
                    found[i] = server.draw(job.version, parts[i], job.drawing, job.stop_ids)

            return work

        run_all((task(i, server) for i, server in enumerate(self._servers)), len(self._servers))
        return [group for part in found for group in part]

    def _remove_before(self, version: Version) -> None:
        """Delete the weights of earlier versions, which no job needs any more."""
        for place in self._root.glob("version-*"):
            number = place.name.removeprefix("version-")
            if number.isdigit() and int(number) < version.number:
                remove_directory(place)


def _array(value: Tensor) -> np.ndarray:
    array = np.asarray(value.numpy())
    if array.dtype != np.uint16:
        return array
    import ml_dtypes  # Paddle hands bfloat16 out as the bits

    return array.view(ml_dtypes.bfloat16)


@dataclasses.dataclass(eq=False)
class _Job:
    """Completions that were asked for."""

    version: Version
    requests: Sequence[Request]
    drawing: Drawing
    stop_ids: Collection[int]
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    drawn: list[list[Drawn]] = dataclasses.field(default_factory=list)
    error: BaseException | None = None

    def result(self) -> list[list[Drawn]]:
        """Wait for them. Raises what drawing them has raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.drawn
