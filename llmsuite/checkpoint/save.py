"""Writes a checkpoint: `checkpoints/step-N/`, a model directory with the weights and the optimizer's state.

    config.json, model-*.safetensors + index, tokenizer files    loads wherever an HF model directory loads
    optimizer-*.safetensors + index                               slots by parameter name
    critic-*.safetensors + index                                  parameters and slots of a critic, where there is one
    state.json                                                    `TrainState`: step, samples taken, loss scale …
    manifest.json                                                 size and sha256 of every file, and of every tensor
                                                                  with shape and dtype; written last

A run that trains adapters writes `adapter_dir` files instead of the model.

Several ranks write one checkpoint. Each writes its own files into `step-N.tmp` and a note of them or of its error,
`rank-0000R.json`. Rank 0 waits for the notes and commits the directory by a rename. This needs no process group, so it
can run in the background while training continues. With node-local storage, the first rank of each machine does the
same for the ranks of its machine, and `local_storage` commits the parts together.
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

from llmsuite.base.errors import UserError
from llmsuite.base.files import (
    committed_checkpoint,
    create_temporary,
    os_errors,
    read_json_file,
    remove_directory,
    temporary_path,
    write_json,
    write_text_atomic,
)
from llmsuite.base.safe_files import is_dir, is_file
from llmsuite.checkpoint.adapter_dir import Adapters
from llmsuite.checkpoint.adapter_writer import write_adapters
from llmsuite.checkpoint.directory import list_steps, load_best
from llmsuite.checkpoint.local_storage import LocalStorage, announce_kept, commit, receive_kept
from llmsuite.checkpoint.model_writer import OrderedGather, write_model
from llmsuite.checkpoint.prefix_dir import Prefixes, write_prefixes
from llmsuite.checkpoint.reft_dir import Interventions, write_interventions
from llmsuite.checkpoint.tensor_writer import ManifestPart, WriteOptions, write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.checkpoint.train_state import FORMAT, TrainState
from llmsuite.contract.specs import ModelFamily

STALL_TIMEOUT_SECONDS = 600.0
"""Longest wait of rank 0 for the other ranks while no file in the directory grows."""
_POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class GatheredTensor:
    """A tensor to be saved, which may be sharded over several ranks."""

    name: str
    shape: Sequence[int]
    dtype: str
    gather: Callable[[], Any] | None
    """Returns the full tensor of Paddle. For a sharded one it is a collective: every rank that has this function calls
    it. None on a rank that neither has a shard nor writes it."""
    writer: int = 0
    """Rank that writes it."""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, tuple(self.shape), self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.spec.num_bytes


@dataclasses.dataclass(frozen=True)
class CheckpointJob:
    """A checkpoint to be written. It is equal on all ranks, except for `rank` and the `gather` of its tensors."""

    root: Path
    """The `checkpoints` directory."""
    state: TrainState
    family: ModelFamily
    config: Any
    """Config of the model."""
    parameters: Sequence[GatheredTensor]
    """Parameters by our names, or the factors of `adapters`."""
    optimizer_state: Sequence[GatheredTensor]
    """Slots of the optimizer, named `parameter/slot`."""
    tokenizer: Path | None
    """Directory whose tokenizer is copied; None for none."""
    keep_last: int
    """Number of checkpoints to keep; older ones are deleted."""
    adapters: Adapters | Interventions | Prefixes | None = None
    """Adapters, interventions or prefixes, if only they are trained; rank 0 writes them."""
    critic: Sequence[GatheredTensor] = ()
    """Parameters and optimizer slots of the critic, if there is one."""
    rank: int = 0
    num_ranks: int = 1
    disk: LocalStorage | None = None
    """This machine, with node-local storage; None with a shared directory."""

    @property
    def own_ranks(self) -> Sequence[int]:
        """Ranks that write into the same directory as this one; the first of them is the lead rank."""
        if self.disk is None:
            return range(self.num_ranks)
        return self.disk.own_ranks

    @property
    def is_lead(self) -> bool:
        """True on the rank that makes and commits the directory."""
        return self.rank == self.own_ranks[0]

    @property
    def final(self) -> Path:
        """Final directory of the checkpoint."""
        return self.root / f"step-{self.state.step}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, over all ranks."""
        return sum(tensor.num_bytes for tensor in (*self.parameters, *self.optimizer_state, *self.critic))


def assign_writers(
    sizes: Mapping[str, int], ranks: Sequence[int], together: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Assign a rank to write each tensor: neighbours get the same rank, and all ranks get about the same bytes.

    Args:
        sizes: bytes of each tensor, in their order.
        ranks: those that may write them.
        together: group labels of a tensor; tensors with a common label are written by the same rank.
    """
    total = max(1, sum(sizes.values()))
    before = 0
    writers = {}
    writer_of: dict[str, int] = {}
    for name, size in sizes.items():
        labels = together.get(name, ())
        rank = next((writer_of[label] for label in labels if label in writer_of), ranks[before * len(ranks) // total])
        writer_of.update(dict.fromkeys(labels, rank))
        writers[name] = rank
        before = min(before + size, total - 1)
    return writers


def stage_to_cpu(job: CheckpointJob) -> CheckpointJob:
    """Return the job with its tensors copied to host memory on the ranks that write them.

    Every rank calls it, as it gathers sharded tensors by collectives.
    """
    return dataclasses.replace(
        job,
        parameters=[_staged(tensor, job.rank) for tensor in job.parameters],
        optimizer_state=[_staged(tensor, job.rank) for tensor in job.optimizer_state],
        critic=[_staged(tensor, job.rank) for tensor in job.critic],
    )


def _staged(tensor: GatheredTensor, rank: int) -> GatheredTensor:
    if tensor.gather is None:
        return tensor
    gathered = tensor.gather()  # a collective: also on ranks that do not write the tensor
    if tensor.writer != rank:
        return dataclasses.replace(tensor, gather=None)
    value = gathered.numpy()
    # a view of Paddle's memory would change with the next step
    staged = _HostTensor(value if value.flags.owndata else value.copy())
    return dataclasses.replace(tensor, gather=lambda: staged)


@dataclasses.dataclass(frozen=True)
class _HostTensor:
    """Values in host memory, with the method `numpy` of a Paddle tensor."""

    values: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.values


def begin(job: CheckpointJob) -> None:
    """Make the directory that several ranks fill with `save`. Raises UserError when it cannot be made."""
    create_temporary(job.final)


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
        with committed_checkpoint(job.final, manifest, is_created=job.num_ranks > 1) as directory:
            written = ManifestPart()
            for part in _write_own(job, directory).values():
                written.add(part)
            manifest.update(files=dict(sorted(written.files.items())), tensors=dict(sorted(written.tensors.items())))
    if job.rank == 0:
        # `latest` after the rename, and deletions last: a crash in between leaves at least one complete checkpoint
        write_text_atomic(job.root / "latest", job.final.name + "\n")
        _remove_old(job, _kept(job))
        if job.disk is not None:
            announce_kept(job.disk, [path.name for _, path in list_steps(job.root)])
        return job.final
    assert job.disk is not None
    kept = receive_kept(job.disk)
    write_text_atomic(job.root / "latest", job.final.name + "\n")
    _remove_old(job, kept)
    return None


def _write_own(job: CheckpointJob, directory: Path) -> dict[int, ManifestPart]:
    """Write the part of this lead rank, and wait for those of the other ranks of its directory.

    Returns:
        The entries of the files of each rank.
    """
    written = {job.rank: _write_tensors(job, directory)}
    written |= _collect_notes(directory, job.own_ranks[1:])
    if job.rank == 0:
        write_json(directory / "state.json", {"format": FORMAT, **dataclasses.asdict(job.state)})
    return written


def _write_tensors(job: CheckpointJob, directory: Path) -> ManifestPart:
    """Write this rank's tensors, and on rank 0 the files that describe the model."""
    read = _reader(job.parameters)
    specs = [tensor.spec for tensor in job.parameters]
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
        OrderedGather(specs, read, []).finish()  # rank 0 writes them, and its collectives need this rank
    written.add(_write_set(job, directory, "optimizer", job.optimizer_state))
    if job.critic:
        written.add(_write_set(job, directory, "critic", job.critic))
    return written


def _write_set(job: CheckpointJob, directory: Path, stem: str, tensors: Sequence[GatheredTensor]) -> ManifestPart:
    """Write this rank's part of a set of tensors under their own names."""
    specs = [tensor.spec for tensor in tensors]
    own = [t.name for t in tensors if t.writer == job.rank]
    in_order = OrderedGather(specs, _reader(tensors), own)
    options = _options(job, tensors)
    written = write_tensors(directory, stem, specs, in_order.read, {"format": "llmsuite"}, options)
    in_order.finish()
    return written


def _options(job: CheckpointJob, tensors: Sequence[GatheredTensor]) -> WriteOptions:
    return WriteOptions(rank=job.rank, writers={tensor.name: tensor.writer for tensor in tensors})


def _reader(tensors: Sequence[GatheredTensor]) -> Callable[[str], np.ndarray]:
    """Return a function that gathers the values of a tensor by name."""
    by_name = {tensor.name: tensor for tensor in tensors}

    def read(name: str) -> np.ndarray:
        gather = by_name[name].gather
        if gather is None:  # other ranks hold and write it
            return np.empty(0)
        value = gather().numpy()
        if by_name[name].dtype == "bfloat16":  # Paddle returns bfloat16 as uint16
            import ml_dtypes

            value = value.view(ml_dtypes.bfloat16)
        return value

    return read


def _write_part(job: CheckpointJob) -> None:
    """Write the part of a rank that is not the lead rank, and a note of it.

    Raises:
        UserError: it cannot be written; the lead rank reads the error in the note, if that can be written.
    """
    directory = temporary_path(job.final)
    try:
        with os_errors(job.final, "nothing of it is used"):
            written = _write_tensors(job, directory)
        write_text_atomic(_note(directory, job.rank), json.dumps(dataclasses.asdict(written)))
    except UserError as error:
        if not is_dir(directory):  # the lead rank has deleted it after an error, which it reports
            return
        with contextlib.suppress(UserError):  # on a full disk: the error of this process ends the run then
            write_text_atomic(_note(directory, job.rank), json.dumps({"error": str(error)}))
        raise


def _collect_notes(directory: Path, ranks: Sequence[int]) -> dict[int, ManifestPart]:
    """Wait until other ranks have written their parts, and remove their notes. Returns the part of each.

    Raises:
        UserError: one of them has failed, or no file has grown for `STALL_TIMEOUT_SECONDS`.
    """
    written = dict[int, ManifestPart]()
    missing = list(ranks)
    size = -1
    since = time.monotonic()
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
            size = now
            since = time.monotonic()
        elif time.monotonic() - since > STALL_TIMEOUT_SECONDS:
            raise UserError(
                f"{directory}: ranks {', '.join(map(str, missing))} have not written their part, and nothing there has "
                f"grown for {STALL_TIMEOUT_SECONDS:,.0f} s; nothing was changed. Is output_dir on a file system that "
                "all machines see?"
            )
        time.sleep(_POLL_SECONDS)
    return written


def _note(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


def _kept(job: CheckpointJob) -> list[str]:
    """Return the names of the checkpoints to keep: the newest `keep_last`, and the best one."""
    # later ones are damaged and were skipped: if they counted, the present one would be deleted first
    done = [path.name for step, path in list_steps(job.root) if step <= job.state.step]
    best = load_best(job.root)
    kept = done[-job.keep_last :]
    if best:
        kept.append(f"step-{best.step}")
    return kept


def _remove_old(job: CheckpointJob, kept: Collection[str]) -> None:
    """Delete the checkpoints up to this one that are not kept."""
    for step, old in list_steps(job.root):
        if step <= job.state.step and old.name not in kept:
            with contextlib.suppress(OSError):  # a failed deletion does not end the run
                remove_directory(old)
