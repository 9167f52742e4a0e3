"""Checkpoints of a run: `checkpoints/step-N/` is a model directory with the optimizer's state beside the weights.

    config.json, model-*.safetensors + index, tokenizer files    loads wherever an HF model directory loads
    optimizer-*.safetensors + index                               slots by parameter name
    state.json                                                    step, samples taken, digest of the recipe, loss scale
    manifest.json                                                 size and sha256 of every file, and of every tensor
                                                                  with shape and dtype; written last

Of a run that trains adapters it has those in the place of the model, see `adapter_dir`.

`checkpoints/latest` names the newest whole one, `checkpoints/best` the one with the best value of the metric that the
recipe watches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_dir import CONFIGS, Adapters, write_adapters
from llmsuite.checkpoint.model_dir import write_model
from llmsuite.checkpoint.share import collect_notes, write_part
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.checkpoint.write import ManifestEntry, OrderedGather, write_tensors
from llmsuite.errors import UserError
from llmsuite.files import (
    begin_directory,
    broken_file,
    committed_directory,
    read_json_file,
    remove_directory,
    write_json,
    write_text_atomic,
)
from llmsuite.specs import ModelFamily

FORMAT = 1
_STEP = re.compile(r"step-(\d+)")


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The small part of a checkpoint."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Position in the stream of training samples."""
    seed: int
    recipe_sha256: str
    """Of the keys that decide what is learnt; resuming with others is refused."""
    loss_scale: float | None = None
    """Of fp16."""
    good_steps: int = 0
    """Steps without overflow since the loss scale changed."""
    rounded: dict[str, list[float]] | None = None
    """Of quantisation-aware training: each fake-quantised layer by name, with what the moving average of its inputs is
    made of (`engine.quantisation`), empty where inputs are not rounded."""
    norms: tuple[float, ...] = ()
    """Gradient norms that later ones are compared with, where spikes are looked for."""
    bad_steps: int = 0
    """Steps not learnt from since `furthest`."""
    furthest: int = 0
    """The furthest step that was learnt from, where steps may be skipped; a run that went back to a checkpoint has been
    there before."""


@dataclasses.dataclass(frozen=True)
class GatheredTensor:
    """A tensor to be saved, which may lie in parts on several ranks."""

    name: str
    shape: Sequence[int]
    dtype: str
    gather: Callable[[], Any] | None
    """Gives all of it, as a Paddle tensor; where it lies in parts, every rank that has this calls it. None on a rank
    that neither has a part nor writes it."""
    writer: int = 0
    """The rank that writes it."""

    @property
    def num_bytes(self) -> int:
        return TensorSpec(self.name, tuple(self.shape), self.dtype).num_bytes


def save(
    root: Path,
    state: TrainState,
    family: ModelFamily,
    config: Any,
    parameters: Sequence[GatheredTensor],
    optimizer_state: Sequence[GatheredTensor],
    tokenizer: Path | None,
    keep_last: int,
    adapters: Adapters | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> Path | None:
    """Write a checkpoint, or this rank's part of it.

    Every rank calls this with the same tensors; where there are several, rank 0 has called `begin` before any of them.
    On its return on rank 0 the checkpoint is on disk, and older ones beyond `keep_last` are gone; the others return
    when they have done their part.

    Args:
        root: the `checkpoints` directory.
        state: step and position.
        family: of the model.
        config: its shape.
        parameters: by our names.
        optimizer_state: by `parameter/slot`.
        tokenizer: directory whose tokenizer is copied along.
        keep_last: how many checkpoints stay.
        adapters: given, the parameters are theirs; rank 0 writes them.
        rank: this one.
        num_ranks: how many write.

    Returns:
        The checkpoint, on rank 0.

    Raises:
        UserError: it cannot be written; the older ones are untouched.
    """
    final = root / f"step-{state.step}"
    manifest: dict[str, Any] = {"format": FORMAT, "step": state.step}

    def write(directory: Path) -> ManifestEntry:
        read, specs, writers = _reader(parameters), _specs(parameters), {t.name: t.writer for t in parameters}
        if adapters is None:
            written = write_model(
                directory, family, config, read, specs, tokenizer=tokenizer, rank=rank, writers=writers
            )
        elif rank == 0:
            written = write_adapters(directory, adapters, family, config, read, specs, tokenizer=tokenizer)
        else:
            written = ManifestEntry()
            OrderedGather(specs, read, []).finish()
        slots, writers = _specs(optimizer_state), {t.name: t.writer for t in optimizer_state}
        in_turn = OrderedGather(slots, _reader(optimizer_state), [n for n, writer in writers.items() if writer == rank])
        metadata = {"format": "llmsuite"}
        written.add(write_tensors(directory, "optimizer", slots, in_turn.read, metadata, rank=rank, writers=writers))
        in_turn.finish()
        return written

    if rank:
        write_part(final, rank, write)
        return None
    with committed_directory(final, manifest, is_begun=num_ranks > 1) as directory:
        written = write(directory)
        written.add(collect_notes(directory, num_ranks))
        manifest.update(files=dict(sorted(written.files.items())), tensors=dict(sorted(written.tensors.items())))
        write_json(directory / "state.json", {"format": FORMAT, **dataclasses.asdict(state)})
    write_text_atomic(root / "latest", final.name + "\n")
    # later ones are damaged and were passed over: they must not count, or this one would be the first to go
    done = [path for step, path in list_steps(root) if step <= state.step]
    best = load_best(root)
    for old in done[:-keep_last]:
        if best is None or old.name != f"step-{best.step}":
            with contextlib.suppress(OSError):  # one that cannot be deleted is no reason to end the run
                remove_directory(old)
    return final


@dataclasses.dataclass(frozen=True)
class Best:
    """The checkpoint with the best value of a metric so far; it stays, besides the last ones."""

    step: int
    metric: str
    value: float


def save_best(root: Path, best: Best) -> None:
    """Name the best checkpoint; it is there. Raises UserError when it cannot be written."""
    write_text_atomic(root / "best", json.dumps(dataclasses.asdict(best)) + "\n")


def load_best(root: Path) -> Best | None:
    """What `save_best` wrote, as long as that checkpoint is there."""
    if not (root / "best").is_file():
        return None
    try:
        best = Best(**read_json_file(root / "best"))
    except TypeError as error:
        raise UserError(f"{root / 'best'}: has not step, metric and value: {error}") from error
    return best if (root / f"step-{best.step}").is_dir() else None


def begin(root: Path, step: int) -> None:
    """Make the place that several ranks fill by `save`. Raises UserError when it cannot be made."""
    begin_directory(root / f"step-{step}")


def on_host(tensors: Sequence[GatheredTensor], rank: int = 0) -> list[GatheredTensor]:
    """The same tensors, those that this rank writes with a copy of their present values. Every rank calls it."""
    held = []
    for tensor in tensors:
        gather = None
        if tensor.gather is not None:
            found = tensor.gather()
            if tensor.writer == rank:
                value = found.numpy()
                gather = functools.partial(_Held, value if value.flags.owndata else value.copy())
        held.append(dataclasses.replace(tensor, gather=gather))
    return held


@dataclasses.dataclass(frozen=True)
class _Held:
    """Values as Paddle hands them out."""

    values: np.ndarray

    def numpy(self) -> np.ndarray:
        return self.values


def find_latest(root: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; each newer one that is not is reported and passed over."""
    for _, path in reversed(list_steps(root)):
        fault = broken_file(path)
        if fault is None:
            return path
        report(f"checkpoint {path} is damaged and passed over: {fault}")
    return None


def remove_unfinished(root: Path) -> None:
    """Delete what a killed run left half written, and bring back what it was about to replace."""
    for path in root.glob("step-*.old"):
        whole = path.with_name(path.name.removesuffix(".old"))
        shutil.rmtree(path) if whole.exists() else path.rename(whole)
    for path in root.glob("step-*.tmp"):
        shutil.rmtree(path)


def load_state(path: Path) -> TrainState:
    """Step and position of a checkpoint. Raises UserError when it was written by a newer llmsuite."""
    data = read_json_file(path / "state.json")
    if data.pop("format", None) != FORMAT:
        raise UserError(f"{path}: is of another checkpoint format; this llmsuite reads format {FORMAT}")
    return TrainState(**{**data, "norms": tuple(data.get("norms", ()))})


def is_run(path: Path) -> bool:
    """Whether this is the directory of a run that has saved something."""
    return (path / "checkpoints" / "latest").is_file()


def find_model(path: Path) -> Path:
    """A model directory; for the directory of a run, its newest checkpoint that has all its files.

    Raises:
        UserError: it is neither.
    """
    if is_run(path):
        whole = (p for _, p in reversed(list_steps(path / "checkpoints")) if broken_file(p, check_hashes=False) is None)
        found = next(whole, None)
        if found is None:
            raise UserError(f"{path}: none of its checkpoints is whole; see: llmsuite checkpoints list {path}")
        return found
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: is neither a model directory (no config.json) nor a run (no checkpoints/latest)")
    return path


def find_adapter(path: Path) -> Path | None:
    """The directory of LoRA adapters: the one given, or of a run its newest whole checkpoint; None for a model."""
    found = find_model(path) if is_run(path) else path
    return found if any((found / name).is_file() for name in CONFIGS) else None


def prune(root: Path, keep: int, report: Callable[[str], None]) -> list[Path]:
    """Delete all but the newest `keep` whole checkpoints, the best one and the one `latest` names; returns what it did.

    Whether one is whole is told by its hashes, so damaged ones neither count nor stay.
    """
    best = load_best(root)
    named = {f"step-{best.step}"} if best else set()
    if (root / "latest").is_file():
        named.add((root / "latest").read_text().strip())
    kept, removed = 0, []
    for _, path in reversed(list_steps(root)):
        fault = broken_file(path) if kept < keep else None
        if fault is not None:
            report(f"{path} is damaged: {fault}")
        elif kept < keep or path.name in named:
            kept += 1
            continue
        remove_directory(path)
        removed.append(path)
    return removed


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step, oldest first, whole or not."""
    found = [(int(m[1]), p) for p in root.glob("step-*") if p.is_dir() and (m := _STEP.fullmatch(p.name))]
    return sorted(found)


def _specs(tensors: Sequence[GatheredTensor]) -> list[TensorSpec]:
    return [TensorSpec(t.name, tuple(t.shape), t.dtype) for t in tensors]


def _reader(tensors: Sequence[GatheredTensor]) -> Callable[[str], np.ndarray]:
    by_name = {tensor.name: tensor for tensor in tensors}

    def read(name: str) -> np.ndarray:
        gather = by_name[name].gather
        if gather is None:  # others see to it
            return np.empty(0)
        value = gather().numpy()
        if by_name[name].dtype == "bfloat16":  # Paddle hands bfloat16 out as the bits
            import ml_dtypes

            value = value.view(ml_dtypes.bfloat16)
        return value

    return read
