"""Writes a model as `paddle.distributed.save_state_dict` does, for `dist.load_state_dict` of any number of ranks.

Tensors are not split; they have PaddleNLP's names below "model", as its auto-parallel trainer saves them: `0_0.distcp`,
`1_0.distcp` … and `0.metadata`, which lists the file of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import paddle
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata

from llmsuite.base.files import committed_directory, write_json
from llmsuite.checkpoint.convert.rewrite import Rewrite
from llmsuite.checkpoint.finite import count_nonfinite
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.checkpoint.tokenizer_files import check_tokenizer, copy_tokenizer
from llmsuite.devices.tensors import tensor_of

_SAVE = 0
"""Number of the save in its directory; a new directory has only this one."""


def write_distcp(rewrite: Rewrite, target: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> int:
    """Write a model; the tensors of one file at a time are in memory.

    Args:
        rewrite: the model, in PaddleNLP's layout.
        target: the directory, which must not exist.
        progress: receives the number of bytes written.

    Returns:
        The number of files with tensors.

    Raises:
        UserError: there is not enough room, or a value does not fit its new dtype or is not finite.
    """
    rewrite.check_room(target)
    check_tokenizer(rewrite.model.tokenizer_directory)  # refused before anything is written
    metadata = Metadata(state_dict_metadata={}, storage_metadata={}, flat_mapping={})
    count = 0
    with committed_directory(target, {"format": 1}) as directory:
        for count, specs in enumerate(_files(rewrite.specs, rewrite.max_file_bytes), start=1):
            name = f"{count - 1}_{_SAVE}.distcp"
            values = {}
            for spec in specs:
                key = f"model.{spec.name}"
                _describe(metadata, key, spec, name)
                values[key] = _tensor(rewrite, spec)
                progress(spec.num_bytes)
            paddle.save(values, str(directory / name))
        paddle.save(metadata, str(directory / f"{_SAVE}.metadata"))
        write_json(directory / "config.json", rewrite.config())
        copy_tokenizer(rewrite.model.tokenizer_directory, directory)
    return count


def _files(specs: Sequence[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    """Tensors in their order, grouped in files of at most `limit` bytes; a larger tensor has a file of its own."""
    taken: list[TensorSpec] = []
    for spec in specs:
        if taken and sum(s.num_bytes for s in taken) + spec.num_bytes > limit:
            yield taken
            taken = []
        taken.append(spec)
    yield taken


def _describe(metadata: Metadata, key: str, spec: TensorSpec, file: str) -> None:
    """Add the location of a full tensor to the metadata."""
    shape = tuple(spec.shape)
    offset = (0,) * len(spec.shape)
    metadata.state_dict_metadata[key] = [LocalTensorMetadata(offset, shape, spec.dtype, shape)]
    metadata.storage_metadata[LocalTensorIndex(key, offset, local_shape=shape)] = file
    metadata.flat_mapping[key] = ("model", spec.name)


def _tensor(rewrite: Rewrite, spec: TensorSpec) -> paddle.Tensor:
    value = rewrite.read(spec.name)
    if rewrite.on_nonfinite is not None:
        count = count_nonfinite(value)
        if count:
            rewrite.on_nonfinite(spec.name, count, value.size)
    if spec.dtype == "bfloat16":  # Paddle reads bits in uint16 as bfloat16
        return tensor_of(value.view("uint16"), place=paddle.CPUPlace())
    return tensor_of(value, place=paddle.CPUPlace())
