"""The rollout engine `openai`: servers sample the completions, and receive new weights through a directory.

The first rank writes the weights of each version, notifies the servers, and requests completions: token ids go in and
come out. A thread does that in the order of the requests, so a server never gets the weights of a later version before
it has sampled the completions of an earlier one, and the run can train at the same time.

The completions are a function of the weights and the keys of the prompts, so a failed request is repeated; a server
that was restarted gets the weights again. When no retry is left the run ends. Its checkpoints are not affected.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from llmsuite.base.files import MANIFEST, committed_directory, remove_directory, sha256_of
from llmsuite.base.threads import run_all
from llmsuite.base.typing import Tensor
from llmsuite.checkpoint.model_dir import without_carried
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.devices.tensors import array_of
from llmsuite.inference.group_sampling import SampledCompletion, SampleRequest, SamplingParams
from llmsuite.inference.load import parameter_shapes
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.rl.engine import EngineContext, PendingRollout
from llmsuite.rl.rollout_server import RolloutServer, Version
from llmsuite.rl.vllm_server import VllmServer

_MAX_COMPLETIONS = 4096
"""Maximum number of completions in one request to a server."""


class RemoteEngine:
    """Samples on servers. Only the rank that makes requests writes weights and connects to servers."""

    def __init__(self, context: EngineContext):
        model = context.model
        section = context.section
        self._makes_requests = context.makes_requests
        urls = section.urls
        timeout = section.timeout
        retries = section.retries
        self._root = Path(section.weights_dir or context.output_dir / "weights").absolute()
        self._closing = threading.Event()
        kind = {"llmsuite": RolloutServer, "vllm": VllmServer}[section.dialect]
        vocab_size = model.config.vocab_size
        self._servers = [kind(url, timeout, retries, self._closing, vocab_size) for url in urls]
        self._family = model.family
        self._config = without_carried(model.config)
        self._dtype = context.backend.parameter_dtype(context.precision)
        self._shapes = parameter_shapes(self._family, self._config) if self._makes_requests else {}
        self._version: Version | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def refresh(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write the weights into a directory, which the servers read before the next completions.

        Raises:
            UserError: the directory cannot be written.
        """
        values = iter(weights)
        if self._makes_requests:
            place = self._root / f"version-{version}"
            with committed_directory(place) as directory:
                self._write(directory, values)
            self._version = Version(version, place, sha256_of(place / MANIFEST))
        for _ in values:  # each step of the iterator gathers a parameter, which all ranks have to take part in
            pass

    def _write(self, directory: Path, values: Iterator[tuple[str, Tensor]]) -> None:
        early: dict[str, np.ndarray] = {}

        def read(name: str) -> np.ndarray:
            while name not in early:  # layers with adapters may have their parameters in a different order
                found, value = next(values)
                early[found] = _array(value)
            return early.pop(name)

        specs = [TensorSpec(name, shape, self._dtype_of(name)) for name, shape in self._shapes.items()]
        write_model(directory, self._family, self._config, read, specs)

    def _dtype_of(self, name: str) -> str:
        """The dtype of a parameter, the same as from `llmsuite.engine.full_weights`."""
        if (self._family.shard_plan or UNSHARDED).is_gate_bias(name):
            return "float32"
        return self._dtype

    def begin(
        self, requests: Sequence[SampleRequest], sampling_params: SamplingParams, stop_ids: Collection[int]
    ) -> PendingRollout:
        """Queue the requests for the thread that talks to the servers."""
        if not self._makes_requests:
            assert not requests, "another rank makes the requests"
            return list
        assert self._version is not None, "there are no weights yet"
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()
        job = _Job(self._version, requests, sampling_params, stop_ids)
        self._jobs.put(job)
        return job.result

    def close(self) -> None:
        """Stop the thread: no more requests are made. The newest weights stay on disk."""
        self._closing.set()
        self._jobs.put(None)

    def _work(self) -> None:
        while not self._closing.is_set():
            job = self._jobs.get()
            if job is None or self._closing.is_set():
                return
            try:
                job.groups = self._sample(job)
                self._remove_before(job.version)
            except BaseException as error:  # raised again by `_Job.result`
                job.error = error
            job.done.set()

    def _sample(self, job: _Job) -> list[list[SampledCompletion]]:
        """The completions of a job; each server samples its part in a separate thread."""
        batch_size = min(job.sampling_params.batch_size, _MAX_COMPLETIONS)
        size = max(1, batch_size // job.sampling_params.num_generations)
        parts = [job.requests[i : i + size] for i in range(0, len(job.requests), size)]
        found: list[list[list[SampledCompletion]]] = [[] for _ in parts]

        def task(number: int, server: RolloutServer) -> Callable[[], None]:
            def work() -> None:
                for i in range(number, len(parts), len(self._servers)):
                    found[i] = server.sample(job.version, parts[i], job.sampling_params, job.stop_ids)

            return work

        run_all((task(i, server) for i, server in enumerate(self._servers)), len(self._servers))
        return [group for part in found for group in part]

    def _remove_before(self, version: Version) -> None:
        """Delete the weights of earlier versions, which no job needs anymore."""
        for place in self._root.glob("version-*"):
            number = place.name.removeprefix("version-")
            if number.isdigit() and int(number) < version.number:
                remove_directory(place)


def _array(value: Tensor) -> np.ndarray:
    array = array_of(value)
    if array.dtype != np.uint16:
        return array
    import ml_dtypes  # `numpy` of Paddle returns bfloat16 as uint16 with the same bits

    return array.view(ml_dtypes.bfloat16)


@dataclasses.dataclass(eq=False)
class _Job:
    """A request for completions."""

    version: Version
    requests: Sequence[SampleRequest]
    sampling_params: SamplingParams
    stop_ids: Collection[int]
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    groups: list[list[SampledCompletion]] = dataclasses.field(default_factory=list)
    error: BaseException | None = None

    def result(self) -> list[list[SampledCompletion]]:
        """Wait for the completions. Raises the error of the thread if sampling has failed."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.groups
