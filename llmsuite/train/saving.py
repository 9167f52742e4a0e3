"""The checkpoints of a run: when one is written, which is the best, and what to do when writing fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.adapter_dir import Adapters
from llmsuite.checkpoint.background import Writer, room_for_copy
from llmsuite.checkpoint.directory import Best, load_best, save_best
from llmsuite.checkpoint.own_disks import OwnDisk
from llmsuite.checkpoint.prefix_dir import Prefixes
from llmsuite.checkpoint.reft_dir import Interventions
from llmsuite.checkpoint.save import CheckpointJob, begin, save, stage_to_cpu
from llmsuite.checkpoint.train_state import TrainState
from llmsuite.errors import UserError
from llmsuite.parallel import collective
from llmsuite.progress import report
from llmsuite.regular import exists
from llmsuite.schema.recipe import CheckpointSection
from llmsuite.specs import ModelFamily
from llmsuite.train.model_state import WholeModel

_TRIGGER = "save-now"


@dataclasses.dataclass(frozen=True)
class CheckpointContents:
    """What goes into every checkpoint of a run."""

    family: ModelFamily
    config: Any
    """Shape of the model."""
    tokenizer: Path | None
    """Directory whose tokenizer is saved along."""
    whole_model: Callable[[], WholeModel]
    """Gives parameters and optimizer state as they are at the moment."""
    adapters: Adapters | Interventions | Prefixes | None = None
    """Where only adapters are saved."""
    critic: Callable[[], WholeModel] | None = None
    """Gives those of the critic, where there is one."""


class Saver:
    """The checkpoints of one run. Every rank makes one and calls the same methods; each writes a part."""

    def __init__(
        self,
        output_dir: Path,
        section: CheckpointSection,
        contents: CheckpointContents,
        num_machines: int = 1,
        disk: OwnDisk | None = None,
    ):
        """
        Args:
            output_dir: the run's directory.
            section: `checkpoint` of the recipe.
            contents: what is saved.
            num_machines: machines of the run; they share what is copied to the host.
            disk: this machine, where machines share no output_dir.
        """
        self.root, self._trigger = output_dir / "checkpoints", output_dir / _TRIGGER
        self._contents, self._num_machines, self._disk = contents, num_machines, disk
        self.on_saved: Callable[[int, Path], None] = lambda step, path: None
        """Called on rank 0 with step and directory of each complete checkpoint, in the thread of the caller."""
        self._keep_last, self._async = section.keep_last, section.async_save
        self._metric = section.best_metric
        self._highest = self._metric is not None and section.best_is == "highest"
        self._best: Best | None = None
        self._last_saved = 0
        self._writer = Writer(self._async)
        self._done: list[tuple[int, Path]] = []

    def resume(self, step: int) -> None:
        """Go on after a checkpoint. What was best later is forgotten: it will be found again."""
        best = load_best(self.root) if self._metric else None
        self._best = best if best and best.metric == self._metric and best.step <= step else None
        self._last_saved = step

    @property
    def last(self) -> Path:
        """The last checkpoint, which all ranks have written when this returns. Raises UserError when there is none."""
        self.finish()
        collective.barrier()
        if not self._last_saved:
            raise UserError(
                "train: a step has to be rolled back and there is no checkpoint yet; lower checkpoint.save_steps, or "
                "choose skip"
            )
        return self.root / f"step-{self._last_saved}"

    def requested(self) -> bool:
        """Whether somebody has put the file `save-now` into the run's directory; it is taken away."""
        if collective.rank() != 0 or not exists(self._trigger):
            return False
        try:
            self._trigger.unlink(missing_ok=True)
        except OSError as error:  # else it would be saved after every step
            raise UserError(f"{self._trigger}: cannot be removed: {error.strerror}") from error
        return True

    def save(self, state: TrainState, overlaps: bool = True) -> None:
        """Save this step, unless it is saved. Waits for the save before, and until the values are copied; or, where
        nothing `overlaps` with the writing, until they are written, which needs no copy."""
        if state.step == self._last_saved:
            return
        self.finish()
        self._last_saved = state.step
        contents = self._contents
        whole, critic = contents.whole_model(), contents.critic() if contents.critic is not None else None
        job = CheckpointJob(
            root=self.root,
            state=state,
            family=contents.family,
            config=contents.config,
            parameters=whole.parameters,
            optimizer_state=whole.state,
            tokenizer=contents.tokenizer,
            keep_last=self._keep_last,
            adapters=contents.adapters,
            critic=[] if critic is None else [*critic.parameters, *critic.state],
            rank=collective.rank(),
            num_ranks=collective.num_ranks(),
            disk=self._disk,
        )
        if job.num_ranks > 1:
            if job.is_lead:
                begin(job)
            collective.barrier()
        # the copies of all ranks on this machine, which may be all ranks
        in_background = self._async and overlaps
        if in_background and not room_for_copy(job.num_bytes // self._num_machines):
            report("checkpoint.async_save: a copy does not fit into memory; training waits until it is written")
            self._async, self._writer, in_background = False, Writer(in_background=False), False
        if in_background:
            job = stage_to_cpu(job)

        def write() -> None:
            path = save(job)
            if path is not None:
                self._done.append((state.step, path))

        if in_background:
            self._writer.start(write)
        else:
            write()
        self._notify()

    def evaluated(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Keep this step if its evaluation is the best so far. Rank 0 decides: in the middle of a pipeline there are
        not all metrics."""
        if self._metric is None:
            return
        named = {f"eval/{name}": value for name, value in metrics.items()}
        value = named.get(self._metric)
        known, better = collective.from_first_rank([value is not None, value is not None and self._is_better(value)])
        if not known:
            raise UserError(
                f"checkpoint.best_metric: is {self._metric!r}; the evaluation has {', '.join(sorted(named))}"
            )
        if not better:
            return
        self.save(state)
        if collective.rank() == 0:
            assert value is not None  # as it is known
            self._best = best = Best(state.step, self._metric, value)
            self._writer.follow(lambda: save_best(self.root, best))

    def recall(self, step: int, recorded: Mapping[str, float | None]) -> None:
        """Name the checkpoint that a run goes on from the best, if its evaluation is: a run may be killed when that is
        recorded and the name is not written yet. On rank 0; `recorded` has the names that metrics have on disk."""
        value = None if self._metric is None else recorded.get(self._metric)
        if self._metric is not None and value is not None and self._is_better(value):
            self._best = Best(step, self._metric, value)
            save_best(self.root, self._best)

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value) or self._best is None:
            return math.isfinite(value)
        return value > self._best.value if self._highest else value < self._best.value

    def check(self) -> None:
        """Report checkpoints that have become complete. Raises UserError when one could not be written."""
        self._writer.check()
        self._notify()

    def finish(self) -> None:
        """Wait until nothing is being written any more. Raises as `check`."""
        self._writer.wait()
        self._notify()

    def abort(self, error: BaseException) -> None:
        """The run ends by an error: what is being written becomes complete, and an error of that is reported too."""
        try:
            self.finish()
        except UserError as another:
            if another is not error:
                report(str(another))

    def _notify(self) -> None:
        while self._done:
            self.on_saved(*self._done.pop(0))
