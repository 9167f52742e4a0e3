"""Checkpoints of a run: when one is written, which is the best, and error handling when writing fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.progress import report
from llmsuite.base.spans import span, spanned
from llmsuite.checkpoint.adapter_dir import Adapters
from llmsuite.checkpoint.background import Writer, room_for_copy
from llmsuite.checkpoint.directory import Best, load_best, save_best
from llmsuite.checkpoint.local_storage import LocalStorage
from llmsuite.checkpoint.prefix_dir import Prefixes
from llmsuite.checkpoint.reft_dir import Interventions
from llmsuite.checkpoint.save import CheckpointJob, GatheredTensor, begin, save, stage_to_cpu
from llmsuite.checkpoint.train_state import TrainState
from llmsuite.contract.schema.recipe import CheckpointSection
from llmsuite.contract.specs import ModelFamily
from llmsuite.engine.model_state import FullModelState
from llmsuite.engine.request_file import RequestFile
from llmsuite.parallel import collective


@dataclasses.dataclass(frozen=True)
class CheckpointContents:
    """Content of every checkpoint of a run."""

    family: ModelFamily
    config: Any
    """Configuration of the model."""
    tokenizer: Path | None
    """Directory of the tokenizer that is saved with the model."""
    full_state: Callable[[], FullModelState]
    """Returns the current parameters and optimizer state."""
    adapters: Adapters | Interventions | Prefixes | None = None
    """Adapters, where only these are saved."""
    critic: Callable[[], FullModelState] | None = None
    """Returns the current state of the critic, where there is one."""


class Checkpointer:
    """Writes the checkpoints of a run. Every rank has an instance and calls the same methods; each writes a part."""

    def __init__(
        self,
        output_dir: Path,
        section: CheckpointSection,
        contents: CheckpointContents,
        num_machines: int = 1,
        local_storage: LocalStorage | None = None,
        best_metric: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
    ):
        """
        Args:
            output_dir: directory of the run.
            section: section `checkpoint` of the recipe.
            contents: content of the checkpoints.
            num_machines: number of machines of the run; each copies its share of the values to its host memory.
            local_storage: this machine, where machines share no output_dir.
            best_metric: metric that selects the best checkpoint where the section names none.
            best_is: direction of that metric.
        """
        self.root = output_dir / "checkpoints"
        self._request = RequestFile(output_dir / "save-now")
        self._contents = contents
        self._num_machines = num_machines
        self._local_storage = local_storage
        self.on_saved: Callable[[int, Path], None] = lambda step, path: None
        """Called on rank 0 with step and directory of each complete checkpoint, in the thread of the caller."""
        self._keep_last = section.keep_last
        self._async = section.async_save
        self._metric = section.best_metric or best_metric
        self._highest = (best_is if section.best_metric is None else section.best_is) == "highest"
        self._best: Best | None = None
        self._last_saved = 0
        self._writer = Writer(self._async)
        self._done: list[tuple[int, Path]] = []

    def resume(self, step: int) -> None:
        """Continue after a checkpoint. A best checkpoint of a later step is dropped: the run reaches that step
        again."""
        best = load_best(self.root) if self._metric else None
        self._best = best if best and best.metric == self._metric and best.step <= step else None
        self._last_saved = step

    @property
    def last(self) -> Path:
        """Path of the last checkpoint, which all ranks have written on return. Raises UserError when there is none."""
        self.finish()
        collective.barrier()  # the other ranks have to finish their parts too
        if not self._last_saved:
            raise UserError(
                "train: a step has to be rolled back and there is no checkpoint yet; lower checkpoint.save_steps, or "
                "choose skip"
            )
        return self.root / f"step-{self._last_saved}"

    def requested(self) -> bool:
        """Return True if the user has created the file `save-now` in the directory of the run; remove the file."""
        return self._request.requested()

    @spanned("checkpoint")
    def save(self, state: TrainState, overlaps: bool = True) -> None:
        """Save this step, unless it is saved already. Waits for the previous save, and until the values are copied to
        the host; or, if training does not `overlap` with the writing, until they are written, which needs no copy."""
        if state.step == self._last_saved:
            return
        self.finish()
        self._last_saved = state.step
        contents = self._contents
        full_state = contents.full_state()
        critic_tensors: list[GatheredTensor] = []
        if contents.critic is not None:
            critic = contents.critic()
            critic_tensors = [*critic.parameters, *critic.optimizer_state]
        job = CheckpointJob(
            root=self.root,
            state=state,
            family=contents.family,
            config=contents.config,
            parameters=full_state.parameters,
            optimizer_state=full_state.optimizer_state,
            tokenizer=contents.tokenizer,
            keep_last=self._keep_last,
            adapters=contents.adapters,
            critic=critic_tensors,
            rank=collective.rank(),
            num_ranks=collective.num_ranks(),
            disk=self._local_storage,
        )
        if job.num_ranks > 1:
            if job.is_lead:
                begin(job)
            collective.barrier()  # the lead rank creates the directory before others write into it
        # copies of all ranks on this machine have to fit into its memory
        in_background = self._async and overlaps
        if in_background and not room_for_copy(job.num_bytes // self._num_machines):
            report("checkpoint.async_save: a copy does not fit into memory; training waits until it is written")
            self._async = False
            self._writer = Writer(in_background=False)
            in_background = False
        if in_background:
            job = stage_to_cpu(job)

        def write() -> None:
            with span("write checkpoint"):
                path = save(job)
            if path is not None:
                self._done.append((state.step, path))

        if in_background:
            self._writer.start(write)
        else:
            write()
        self._notify()

    def evaluated(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Keep this step if its evaluation is the best so far. Rank 0 decides: middle stages of a pipeline do not have
        all metrics."""
        if self._metric is None:
            return
        named = {f"eval/{name}": value for name, value in metrics.items()}
        value = named.get(self._metric)
        is_known, is_better = collective.broadcast_from_rank0(
            [value is not None, value is not None and self._is_better(value)]
        )
        if not is_known:
            raise UserError(
                f"checkpoint.best_metric: is {self._metric!r}; the evaluation has {', '.join(sorted(named))}"
            )
        if not is_better:
            return
        self.save(state)
        if collective.rank() == 0:
            assert value is not None  # is_known
            self._best = best = Best(state.step, self._metric, value)
            self._writer.follow(lambda: save_best(self.root, best))

    def restore_best(self, step: int, recorded: Mapping[str, float | None]) -> None:
        """Mark the checkpoint that a run resumes from as the best, if its evaluation is: the run may have been killed
        after the evaluation was recorded and before the mark was written. Called on rank 0; `recorded` has the names of
        metrics on disk."""
        value = None if self._metric is None else recorded.get(self._metric)
        if self._metric is not None and value is not None and self._is_better(value):
            self._best = Best(step, self._metric, value)
            save_best(self.root, self._best)

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value) or self._best is None:
            return math.isfinite(value)
        return value > self._best.value if self._highest else value < self._best.value

    def check(self) -> None:
        """Report checkpoints that are complete since the last call. Raises UserError when one could not be written."""
        self._writer.check()
        self._notify()

    def finish(self) -> None:
        """Wait until all writes are complete. Raises UserError as `check` does."""
        self._writer.wait()
        self._notify()

    def abort(self, error: BaseException) -> None:
        """End after an error of the run: complete the current write, and report its error too."""
        try:
            self.finish()
        except UserError as another:
            if another is not error:
                report(str(another))

    def _notify(self) -> None:
        while self._done:
            self.on_saved(*self._done.pop(0))
