"""Statistics of a data file in a run: lengths, supervised tokens, dropped rows, padding, packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.data.lazy_sequences import lengths_of
from llmsuite.data.loader import BatchSampler, SampleOrder
from llmsuite.data.packing import best_fit
from llmsuite.engine.collator import Collate, collate_of
from llmsuite.engine.row_reader import RowReader
from llmsuite.engine.stage import DropCounts, Stage
from llmsuite.engine.supervision import supervised_sequences
from llmsuite.recipe.plans import DataPlan
from llmsuite.stages.pretrain import CorpusReader


@dataclasses.dataclass(frozen=True)
class FileStats:
    """Statistics of one file."""

    path: str
    """Path of the file, with the part of its rows where it is split."""
    counts: DropCounts | None
    """Rows read and dropped; None for text without skipped documents."""
    what: str
    """The unit of the lengths: "sequences", or "documents" of a corpus."""
    lengths: np.ndarray
    """The number of tokens of each."""
    num_samples: int
    num_tokens: int
    num_supervised: int
    num_ends: int
    """Samples in which an end-of-sequence token is supervised."""
    padding: float | None
    """Share of padding among the positions of all micro-batches; None for a corpus."""
    packed: tuple[int, float] | None
    """Number of packed samples, and the share of their positions that is filled; None for stages without packing."""


def file_stats(stage: Stage[Any], path: Path, padding_free: bool = False) -> FileStats:
    """Read a file and count.

    Args:
        stage: without a padding-free context, so that each sequence has its own row.
        path: of the file.
        padding_free: True where the run packs the sequences of a micro-batch into one row, as
        `StageContext.padding_free`.

    Raises:
        UserError: a row is invalid, or the batches of the stage have no loss mask to count.
    """
    reader = stage.reader
    samples = reader.read(path)
    counts = reader.counts.get(path)
    if isinstance(reader, CorpusReader):
        lengths = reader.document_lengths(path)
        supervised = len(samples) * stage.context.data.max_length
        return FileStats(
            str(path), counts, "documents", lengths, len(samples), int(lengths.sum()), supervised, 0, None, None
        )
    return _row_stats(stage, str(path), samples, counts, padding_free)


def data_stats(stage: Stage[Any], data_plan: DataPlan, padding_free: bool = False) -> list[FileStats]:
    """Statistics of the data of a run: of `data.train` and of the evaluation data; parameters as of `file_stats`. Rows
    that are held out, and those that are left for training, are counted apart."""
    reader = stage.reader
    data = data_plan.section
    found = []
    if isinstance(reader, RowReader) and (data.holdout is not None or data.sample is not None):
        parts, held_out = reader.read_parts(data_plan.train_path)
        for part in (parts[0], *held_out):
            name = f"{part.path}{part.counts.part}"
            found.append(_row_stats(stage, name, part.samples, part.counts, padding_free))
    else:
        found.append(file_stats(stage, data_plan.train_path, padding_free))
    return found + [file_stats(stage, path, padding_free) for path in data_plan.eval_paths.values()]


def _row_stats(
    stage: Stage[Any], path: str, samples: Sequence[Any], counts: DropCounts | None, padding_free: bool
) -> FileStats:
    collate = collate_of(stage)
    sizes = []
    tokens = []
    supervised = 0
    ends = 0
    for sample in samples:
        rows = supervised_sequences(collate([sample]))
        if rows is None:
            raise UserError(f"stage {stage.context.stage_name}: its batches do not show which tokens are supervised")
        tokens += [len(row.ids) for row in rows]
        sizes.append([len(row.ids) - len(np.unique(row.documents)) for row in rows])
        supervised += sum(int((row.weights > 0).sum()) for row in rows)
        eos = stage.context.tokenizer.eos_id
        ends += all(((row.ids == eos) & (row.weights > 0)).any() for row in rows)
    packed = None
    if stage.row_kind in ("conversation", "preference"):
        packed = _packing(stage, samples)
    return FileStats(
        path=path,
        counts=counts,
        what="sequences",
        lengths=np.array(tokens),
        num_samples=len(samples),
        num_tokens=sum(tokens),
        num_supervised=supervised,
        num_ends=ends,
        padding=_padding(stage, collate, samples, sizes, padding_free),
        packed=packed,
    )


def _padding(
    stage: Stage[Any], collate: Collate, samples: Sequence[Any], sizes: Sequence[Sequence[int]], padding_free: bool
) -> float:
    """Share of padding in the full steps of one epoch, with the micro-batches of the run."""
    context = stage.context
    multiple = context.length_multiple
    train = context.train
    order = SampleOrder(len(sizes), context.seed, context.data.shuffle)
    by_length = context.data.group_by_length or train.micro_batch_tokens is not None
    lengths = None
    if by_length:
        lengths = lengths_of(samples, stage.row_lengths)
    # one data rank: padding hardly depends on the number of data ranks
    sampler = BatchSampler(
        order,
        train.global_batch_size,
        train.micro_batch_size,
        1,
        lengths,
        train.micro_batch_tokens if lengths is not None else None,
        multiple,
    )
    used = positions = 0
    stage.context = dataclasses.replace(context, padding_free=padding_free)
    for step in range(max(1, len(sizes) // train.global_batch_size)):
        for picked in sampler.micro_batches(step * train.global_batch_size, 0):
            batch = collate([samples[at] for at in picked])
            rows = [size for at in picked for size in sizes[at]]
            if "lengths" in batch:
                rows = batch["lengths"]
            used += int(sum(rows))
            positions += int(np.size(batch["input_ids"]))
    stage.context = context
    return 1 - used / positions


def _packing(stage: Stage[Any], samples: Sequence[Any]) -> tuple[int, float] | None:
    """Number of samples that `best_fit` makes, and the share that is filled; samples that are already packed are
    counted unchanged. None for a stage without `row_lengths`."""
    data = stage.context.data
    lengths = lengths_of(samples, stage.row_lengths)
    if lengths is None:
        return None
    is_packed = data.packing != "none"
    packs = len(samples) if is_packed else len(best_fit(lengths.max(1), data.max_length))
    return packs, float(lengths.sum()) / (packs * lengths.shape[1] * data.longest_sample)


def histogram(lengths: np.ndarray, width: int = 50, num_bins: int = 16) -> list[str]:
    """A histogram as text, with a line for each bin."""
    counts, edges = np.histogram(lengths, bins=_edges(lengths, num_bins))
    most = max(int(counts.max()), 1)
    digits = len(str(int(edges[-1])))
    return [
        f"{int(low):>{digits}} to {int(high) - 1:>{digits}}  {'#' * -(-int(count) * width // most):{width}}  {count}"
        for low, high, count in zip(edges[:-1], edges[1:], counts)
    ]


def _edges(lengths: np.ndarray, num_bins: int) -> np.ndarray:
    low = int(lengths.min())
    high = int(lengths.max()) + 1
    step = -(-(high - low) // num_bins)
    return np.arange(low, high + step, step)


def plot_lengths(found: Sequence[FileStats], max_length: int, path: Path) -> None:
    """Plot the histograms of several files into an image, in a format of `extras.check_plot`. Raises UserError when it
    cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3 * len(found)), layout="constrained")
    for axes, stats in zip(figure.subplots(len(found), squeeze=False)[:, 0], found):
        axes.hist(stats.lengths, bins=_edges(stats.lengths, 50))
        axes.axvline(max_length, color="black", linestyle="--", label=f"data.max_length {max_length}")
        axes.set(title=stats.path, xlabel="tokens", ylabel=stats.what)
        axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot: {path}: cannot be written: {error.strerror}") from error
