"""Writes a checkpoint: `checkpoints/step-N/`, a model directory with the optimizer's state beside the weights.

    config.json, model-*.safetensors + index, tokenizer files    loads wherever an HF model directory loads
    optimizer-*.safetensors + index                               slots by parameter name
    critic-*.safetensors + index                                  parameters and slots of a critic, where there is one
    state.json                                                    `TrainState`: step, samples taken, loss scale …
    manifest.json                                                 size and sha256 of every file, and of every tensor
                                                                  with shape and dtype; written last

A run that trains adapters writes `adapter_dir` files in place of the model.

Several ranks write one checkpoint. Each writes files of its own into `step-N.tmp` and leaves a note of them there,
`rank-0000R.json`, or of its error. Rank 0 waits for the notes and commits the directory. This needs no process group,
so it can be done in the background while training goes on. Where machines share no directory, the first rank of each
does what rank 0 does, for the ranks of its machine; `own_disks` has how they agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_dir import Adapters
from llmsuite.checkpoint.adapter_writer import write_adapters
from llmsuite.checkpoint.directory import list_steps, load_best
from llmsuite.checkpoint.model_writer import OrderedGather, write_model
from llmsuite.checkpoint.own_disks import OwnDisk, commit, hear, tell
from llmsuite.checkpoint.prefix_dir import Prefixes, write_prefixes
from llmsuite.checkpoint.reft_dir import Interventions, write_interventions
from llmsuite.checkpoint.tensor_writer import ManifestPart, WriteOptions, write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.checkpoint.train_state import FORMAT, TrainState
from llmsuite.errors import UserError
from llmsuite.files import (
    begin_directory,
    committed_directory,
    os_errors,
    read_json_file,
    remove_directory,
    temporary_of,
    write_json,
    write_text_atomic,
)
from llmsuite.regular import is_dir, is_file
from llmsuite.specs import ModelFamily

PATIENCE_SECONDS = 600.0
"""How long rank 0 waits for the other ranks while nothing in the directory grows."""
_POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class GatheredTensor:
    """A tensor to be saved, which may lie in parts on several ranks."""

    name: str
    shape: Sequence[int]
    dtype: str
    gather: Callable[[], Any] | None
    """Returns the whole tensor of Paddle; where it lies in parts, every rank that has this function calls it. None on a
    rank that neither has a part nor writes it."""
    writer: int = 0
    """The rank that writes it."""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, tuple(self.shape), self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.spec.num_bytes


@dataclasses.dataclass(frozen=True)
class CheckpointJob:
    """A checkpoint to be written. Every rank has the same one but for `rank` and what its tensors can gather."""

    root: Path
    """The `checkpoints` directory."""
    state: TrainState
    family: ModelFamily
    config: Any
    """The config of the model."""
    parameters: Sequence[GatheredTensor]
    """Parameters by our names, or the factors of `adapters`."""
    optimizer_state: Sequence[GatheredTensor]
    """Slots of the optimizer, named `parameter/slot`."""
    tokenizer: Path | None
    """Directory whose tokenizer is copied along."""
    keep_last: int
    """How many checkpoints are kept; older ones are deleted."""
    adapters: Adapters | Interventions | Prefixes | None = None
    """The adapters, interventions or prefixes, where they are all that is trained; rank 0 writes them."""
    critic: Sequence[GatheredTensor] = ()
    """Parameters and optimizer slots of the critic, where there is one."""
    rank: int = 0
    num_ranks: int = 1
    disk: OwnDisk | None = None
    """This machine, where machines share no directory."""

    @property
    def own_ranks(self) -> Sequence[int]:
        """The ranks that write into the directory that this one sees; the first of them leads."""
        return range(self.num_ranks) if self.disk is None else self.disk.own_ranks

    @property
    def is_lead(self) -> bool:
        """Whether this rank begins and commits the directory."""
        return self.rank == self.own_ranks[0]

    @property
    def final(self) -> Path:
        """The directory that the checkpoint becomes."""
        return self.root / f"step-{self.state.step}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, over all ranks."""
        return sum(tensor.num_bytes for tensor in (*self.parameters, *self.optimizer_state, *self.critic))


def assign_writers(
    sizes: Mapping[str, int], ranks: Sequence[int], together: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """The rank that writes each tensor: neighbours go to the same rank, and each rank gets about as many bytes.

    Args:
        sizes: bytes of each tensor, in their order.
        ranks: those that may write them.
        together: marks of a tensor; two tensors with a common mark are written by the same rank.
    """
    total, before, writers = max(1, sum(sizes.values())), 0, {}
    writer_of: dict[str, int] = {}
    for name, size in sizes.items():
        marks = together.get(name, ())
        rank = next((writer_of[mark] for mark in marks if mark in writer_of), ranks[before * len(ranks) // total])
        writer_of.update(dict.fromkeys(marks, rank))
        writers[name] = rank
        before = min(before + size, total - 1)
    return writers


def stage_to_cpu(job: CheckpointJob) -> CheckpointJob:
    """The same job, its tensors copied to host memory where this rank writes them. Every rank calls it."""
    return dataclasses.replace(
        job,
        parameters=[_staged(tensor, job.rank) for tensor in job.parameters],
        optimizer_state=[_staged(tensor, job.rank) for tensor in job.optimizer_state],
        critic=[_staged(tensor, job.rank) for tensor in job.critic],
    )


def _staged(tensor: GatheredTensor, rank: int) -> GatheredTensor:
    if tensor.gather is None:
        return tensor
    gathered = tensor.gather()
    if tensor.writer != rank:
        return dataclasses.replace(tensor, gather=None)
    value = gathered.numpy()
    staged = _HostTensor(value if value.flags.owndata else value.copy())
    return dataclasses.replace(tensor, gather=lambda: staged)


@dataclasses.dataclass(frozen=True)
class _HostTensor:
    """Values in host memory, handed out as a Paddle tensor does."""

    values: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.values


def begin(job: CheckpointJob) -> None:
    """Make the directory that several ranks fill by `save`. Raises UserError when it cannot be made."""
    begin_directory(job.final)


def save(job: CheckpointJob) -> Path | None:
    """Write a checkpoint, or this rank's part of it.

    Every rank calls this; where there are several, those with `CheckpointJob.is_lead` have called `begin` before any of
    them. On return on rank 0 the checkpoint is on disk, and older ones beyond `keep_last` are deleted; the others
    return when their part is done.

    Returns:
        The checkpoint on rank 0, None on the others.

    Raises:
        UserError: it cannot be written; the older ones are untouched.
    """
    if not job.is_lead:
        _write_part(job)
        return None
    manifest: dict[str, Any] = {"format": FORMAT, "step": job.state.step}
    if job.disk is not None:
        commit(job.final, manifest, job.disk, lambda directory: _write_own(job, directory))
    else:
        with committed_directory(job.final, manifest, is_begun=job.num_ranks > 1) as directory:
            written = ManifestPart()
            for part in _write_own(job, directory).values():
                written.add(part)
            manifest.update(files=dict(sorted(written.files.items())), tensors=dict(sorted(written.tensors.items())))
    if job.rank == 0:
        write_text_atomic(job.root / "latest", job.final.name + "\n")
        _remove_old(job, _kept(job))
        if job.disk is not None:
            tell(job.disk, [path.name for _, path in list_steps(job.root)])
        return job.final
    assert job.disk is not None
    kept = hear(job.disk)
    write_text_atomic(job.root / "latest", job.final.name + "\n")
    _remove_old(job, kept)
    return None


def _write_own(job: CheckpointJob, directory: Path) -> dict[int, ManifestPart]:
    """Write what lies in this rank's directory: its own part, and wait for those of the others. Returns the entries of
    the files of each rank."""
    written = {job.rank: _write_tensors(job, directory)}
    written |= _collect_notes(directory, job.own_ranks[1:])
    if job.rank == 0:
        write_json(directory / "state.json", {"format": FORMAT, **dataclasses.asdict(job.state)})
    return written


def _write_tensors(job: CheckpointJob, directory: Path) -> ManifestPart:
    """Write this rank's tensors, and on rank 0 the files that describe the model."""
    read, specs = _reader(job.parameters), [tensor.spec for tensor in job.parameters]
    options = _options(job, job.parameters)
    if job.adapters is None:
        written = write_model(directory, job.family, job.config, read, specs, tokenizer=job.tokenizer, options=options)
    elif job.rank == 0 and isinstance(job.adapters, Interventions):
        written = write_interventions(directory, job.adapters, read, specs, tokenizer=job.tokenizer)
    elif job.rank == 0 and isinstance(job.adapters, Prefixes):
        written = write_prefixes(directory, job.adapters, read, specs, tokenizer=job.tokenizer)
    elif job.rank == 0:
        assert isinstance(job.adapters, Adapters)
        written = write_adapters(directory, job.adapters, job.family, job.config, read, specs, tokenizer=job.tokenizer)
    else:
        written = ManifestPart()
        OrderedGather(specs, read, []).finish()
    written.add(_write_set(job, directory, "optimizer", job.optimizer_state))
    if job.critic:
        written.add(_write_set(job, directory, "critic", job.critic))
    return written


def _write_set(job: CheckpointJob, directory: Path, stem: str, tensors: Sequence[GatheredTensor]) -> ManifestPart:
    """Write this rank's part of tensors under their own names."""
    specs, own = [tensor.spec for tensor in tensors], [t.name for t in tensors if t.writer == job.rank]
    in_order = OrderedGather(specs, _reader(tensors), own)
    options = _options(job, tensors)
    written = write_tensors(directory, stem, specs, in_order.read, {"format": "llmsuite"}, options)
    in_order.finish()
    return written


def _options(job: CheckpointJob, tensors: Sequence[GatheredTensor]) -> WriteOptions:
    return WriteOptions(rank=job.rank, writers={tensor.name: tensor.writer for tensor in tensors})


def _reader(tensors: Sequence[GatheredTensor]) -> Callable[[str], np.ndarray]:
    """Gathers the values of a tensor by name."""
    by_name = {tensor.name: tensor for tensor in tensors}

    def read(name: str) -> np.ndarray:
        gather = by_name[name].gather
        if gather is None:  # other ranks gather it
            return np.empty(0)
        value = gather().numpy()
        if by_name[name].dtype == "bfloat16":  # Paddle hands bfloat16 out as the bits
            import ml_dtypes

            value = value.view(ml_dtypes.bfloat16)
        return value

    return read


def _write_part(job: CheckpointJob) -> None:
    """Write the part of a rank that does not lead, and leave a note of it.

    Raises:
        UserError: it cannot be written; the rank that leads finds the error in the note, if that can be written.
    """
    directory = temporary_of(job.final)
    try:
        with os_errors(job.final, "nothing of it is used"):
            written = _write_tensors(job, directory)
        write_text_atomic(_note(directory, job.rank), json.dumps(dataclasses.asdict(written)))
    except UserError as error:
        if not is_dir(directory):  # it has given it up, and reports why
            return
        with contextlib.suppress(UserError):  # on a full disk: then this process ends by its error, and the run with it
            write_text_atomic(_note(directory, job.rank), json.dumps({"error": str(error)}))
        raise


def _collect_notes(directory: Path, ranks: Sequence[int]) -> dict[int, ManifestPart]:
    """Wait until other ranks have written their parts, and remove their notes. Returns the part of each.

    Raises:
        UserError: one of them has failed, or nothing has grown for `PATIENCE_SECONDS`.
    """
    written, missing = dict[int, ManifestPart](), list(ranks)
    size, since = -1, time.monotonic()
    while missing:
        rank = missing[0]
        if is_file(_note(directory, rank)):
            note = read_json_file(_note(directory, rank))
            if "error" in note:
                raise UserError(f"rank {rank}: {note['error']}")
            written[rank] = ManifestPart(**note)
            _note(directory, rank).unlink()
            missing.pop(0)
            continue
        now = sum(path.stat().st_size for path in directory.iterdir() if path.suffix != ".tmp")
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE_SECONDS:
            raise UserError(
                f"{directory}: ranks {', '.join(map(str, missing))} have not written their part, and nothing there has "
                f"grown for {PATIENCE_SECONDS:,.0f} s; nothing was changed. Is output_dir on a file system that all "
                "machines see?"
            )
        time.sleep(_POLL_SECONDS)
    return written


def _note(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


def _kept(job: CheckpointJob) -> list[str]:
    """Names of the checkpoints that stay: the newest `keep_last`, and the best one."""
    # later ones are damaged and were passed over: they must not count, or this one would be the first to go
    done = [path.name for step, path in list_steps(job.root) if step <= job.state.step]
    best = load_best(job.root)
    return [*done[-job.keep_last :], *([f"step-{best.step}"] if best else [])]


def _remove_old(job: CheckpointJob, kept: Collection[str]) -> None:
    """Delete the checkpoints up to this one that do not stay."""
    for step, old in list_steps(job.root):
        if step <= job.state.step and old.name not in kept:
            with contextlib.suppress(OSError):  # one that cannot be deleted is no reason to end the run
                remove_directory(old)
