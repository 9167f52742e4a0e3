"""Writes a model as `paddle.distributed.save_state_dict` does, for `dist.load_state_dict` of any number of ranks.

Tensors are whole, by PaddleNLP's names below "model", as its auto-parallel trainer saves them: `0_0.distcp`,
`1_0.distcp` … and `0.metadata`, which says what is in which file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import paddle
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata

from llmsuite.checkpoint.finite import count_nonfinite
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.convert.rewrite import Rewrite
from llmsuite.files import committed_directory, write_json

_SAVE = 0
"""Number of the save in its directory; a new directory has only this one."""


def write_distcp(rewrite: Rewrite, target: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> int:
    """Write a model; the tensors of one file at a time are in memory.

    Args:
        rewrite: the model, in PaddleNLP's layout.
        target: the directory, which must not exist.
        progress: is told of bytes that are written.

    Returns:
        The number of files with tensors.

    Raises:
        UserError: there is not enough room, or a value does not fit its new dtype or is not finite.
    """
    rewrite.check_room(target)
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
    """Tensors in their order, as many for each file as the limit allows, in bytes; one that is larger by itself."""
    taken: list[TensorSpec] = []
    for spec in specs:
        if taken and sum(s.num_bytes for s in taken) + spec.num_bytes > limit:
            yield taken
            taken = []
        taken.append(spec)
    yield taken


def _describe(metadata: Metadata, key: str, spec: TensorSpec, file: str) -> None:
    """Say of a whole tensor where it lies."""
    shape, offset = tuple(spec.shape), (0,) * len(spec.shape)
    metadata.state_dict_metadata[key] = [LocalTensorMetadata(offset, shape, spec.dtype, shape)]
    metadata.storage_metadata[LocalTensorIndex(key, offset, local_shape=shape)] = file
    metadata.flat_mapping[key] = ("model", spec.name)


def _tensor(rewrite: Rewrite, spec: TensorSpec) -> paddle.Tensor:
    value = rewrite.read(spec.name)
    if rewrite.on_nonfinite is not None and (count := count_nonfinite(value)):
        rewrite.on_nonfinite(spec.name, count, value.size)
    if spec.dtype == "bfloat16":  # Paddle takes the bits in uint16 for one
        return paddle.to_tensor(value.view("uint16"), place="cpu")
    return paddle.to_tensor(value, place="cpu")
