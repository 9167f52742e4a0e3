"""AdamW whose moments are stored in 8 bits, a block at a time (Dettmers et al. 2022, arXiv 2110.02861).

The first moment is stored by the signed dynamic map, the second by the unsigned one, as bitsandbytes' AdamW8bit does.
Blocks belong to the full parameter, see `block_layout`, whatever part of it a rank holds: so the largest magnitude of a
block is a maximum over ranks, and codes, scales and updates are those of one process.

An update has two passes over the gradients. The first one updates the parameters, by the exact new moments, and finds
the largest magnitudes of their blocks. Between them these are exchanged, in one call for all parameters. The second one
computes the moments again, and stores them. So no moment is in memory in float32 for more than a chunk.

Numbers are float32, and operations come in the order of bitsandbytes' kernel for CUDA: weight decay after the update. A
bfloat16 parameter without a master is rounded twice, after the update and after weight decay, as there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import paddle

from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.models.dynamic_map import BLOCK, dynamic_map
from llmsuite.parallel import collective
from llmsuite.parallel.block_layout import BlockLayout, Box
from llmsuite.parallel.partition import CODE_OF_ZERO
from llmsuite.parallel.sharding import ParameterShard

_CHUNK = 1 << 22
"""Elements whose moments are in float32 at a time, unless a line of a box has more."""
_LOWEST = -128
"""A code of the dynamic map is stored as an int8, less 128."""
MOMENTS = ("moment1", "moment2")
_POWERS = ("beta1_pow_acc", "beta2_pow_acc")


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Some lines of a box. Its values are flat, in the order of blocks."""

    box: Box
    lines: slice
    numbers: Tensor
    """Numbers of the values' blocks among those of the rank, [N], ascending."""
    first_number: int
    """The first of them, which the host knows: to read it would wait for the device."""

    def values(self, flat: Tensor) -> Tensor:
        """Its values [N] of a flat tensor of the shard."""
        box = self.box
        matrix = flat[box.start : box.start + box.rows * box.columns].reshape([box.rows, box.columns])
        if box.is_transposed:
            return matrix[:, self.lines].t().flatten()
        return matrix[self.lines].flatten()

    def as_matrix(self, values: Tensor) -> Tensor:
        """Its values [N] as a part of the box, [rows, columns]."""
        lines = values.reshape([-1, self.box.line_size])
        return lines.t() if self.box.is_transposed else lines


class Blocks:
    """The blocks of a full parameter that the elements of this rank's shard belong to."""

    def __init__(self, layout: BlockLayout):
        """
        Args:
            layout: of the shard.
        """
        self.layout = layout
        self._host_ids = self._own_ids()
        self.ids = tensor_of(self._host_ids)
        """Numbers of the blocks that this rank has elements of, ascending."""

    def _own_ids(self) -> np.ndarray:
        if not self.layout.is_cut:
            return np.arange(self.layout.num_blocks)
        found = [np.zeros(0, "int64")]
        for box in self.layout.boxes:
            starts = box.first + box.pitch * np.arange(box.num_lines)
            first = starts // BLOCK
            last = (starts + box.line_size - 1) // BLOCK
            ids = first[:, None] + np.arange((last - first).max() + 1)
            found.append(ids[ids <= last[:, None]])
        # padding of a vocabulary, which is always zero, may reach beyond the last block
        return np.unique(np.concatenate(found).clip(max=self.layout.num_blocks - 1))

    def chunks(self) -> Iterator[list[_Chunk]]:
        """The elements of this rank: chunks by box, in the order of the shard."""
        for box in self.layout.boxes:
            step = max(1, _CHUNK // box.line_size)
            yield [self._chunk(box, first, min(first + step, box.num_lines)) for first in range(0, box.num_lines, step)]

    def _chunk(self, box: Box, first: int, last: int) -> _Chunk:
        starts = box.first + box.pitch * paddle.arange(first, last)
        found = (starts.unsqueeze(1) + paddle.arange(box.line_size)).flatten() // BLOCK
        last_block = self.layout.num_blocks - 1  # padding of a vocabulary may reach beyond it, as in `_own_ids`
        numbers = paddle.searchsorted(self.ids, found.clip(max=last_block))
        first_block = min((box.first + box.pitch * first) // BLOCK, last_block)
        return _Chunk(box, slice(first, last), numbers, int(np.searchsorted(self._host_ids, first_block)))

    def spread(self, values: Tensor) -> Tensor:
        """Values of this rank's blocks, as values of all blocks, with zeros for the others."""
        full = paddle.zeros([self.layout.num_blocks], values.dtype)
        return paddle.scatter(full, self.ids, values) if self.layout.num_owned else full

    def own(self, values: Tensor) -> Tensor:
        """Values of this rank's blocks among those of all blocks."""
        return paddle.gather(values, self.ids) if self.layout.num_owned else paddle.zeros([0], values.dtype)

    def gather(self, values: Tensor) -> Tensor:
        """Values of all blocks, from those of this rank's blocks. Every rank of the pipeline stage calls it."""
        return exchange_largest(self.spread(values)) if self.layout.is_cut else self.spread(values)


def exchange_largest(values: Tensor) -> Tensor:
    """The element-wise maximum over all ranks that hold parts of the same parameters."""
    mesh = collective.mesh()
    for group in (mesh.data_group, mesh.tensor_group):
        collective.max_in_group(values, group)
    return values


def _joined(boxes: Sequence[Sequence[tuple[_Chunk, Tensor]]], shape: Sequence[int]) -> Tensor:
    """A tensor of this shape from the values of its chunks, by box."""
    found = []
    for chunks in boxes:
        axis = 1 if chunks[0][0].box.is_transposed else 0
        found.append(paddle.concat([chunk.as_matrix(values) for chunk, values in chunks], axis).flatten())
    return paddle.concat(found).reshape(shape)


@dataclasses.dataclass
class BlockState:
    """The state of a parameter."""

    blocks: Blocks
    codes: dict[str, Tensor]
    """int8 codes of the moments of this rank's elements, by the slot; shaped as `main_param`."""
    absmax: dict[str, Tensor]
    """Largest magnitudes of this rank's blocks, float32, by the slot."""
    powers: list[float]
    """The decay rates to the power of the next update's number, rounded to float32 as Paddle's are."""


class BlockAdamW:
    """AdamW of the parameters whose moments are stored in blocks."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        shapes: Mapping[str, Sequence[int]],
        is_transposed: Callable[[str], bool],
        train: TrainSection,
    ):
        """
        Args:
            shards: of these parameters.
            shapes: of the full parameters without padding, by name.
            is_transposed: returns True for the name of a parameter that PyTorch stores transposed.
            train: section of the recipe.
        """
        self._shards = list(shards)
        self._train = train
        self.states: dict[str, BlockState] = {}
        for shard in self._shards:
            local = tuple(shard.local_shape)
            transposed = is_transposed(shard.name)
            layout = BlockLayout(tuple(shapes[shard.name]), transposed, local, shard.offsets, shard.range)
            self.states[shard.name] = self._first_state(shard, Blocks(layout))

    @functools.cached_property
    def _betas(self) -> tuple[float, float]:
        """Both decay rates, rounded to float32. No optimizer without blocks reads these keys."""
        return float(np.float32(self._train.adam_beta1)), float(np.float32(self._train.adam_beta2))

    def _first_state(self, shard: ParameterShard, blocks: Blocks) -> BlockState:
        codes = {slot: paddle.full(shard.main_param.shape, CODE_OF_ZERO[slot], "int8") for slot in MOMENTS}
        absmax = {slot: paddle.zeros(blocks.ids.shape, "float32") for slot in MOMENTS}
        return BlockState(blocks, codes, absmax, list(self._betas))

    @paddle.no_grad()
    def update(self, gradients: Mapping[ParameterShard, Tensor], factor: float, rate: float) -> None:
        """Update the parameters that have a gradient. Every rank calls it, with a gradient or without.

        Args:
            gradients: of shards.
            factor: that gradients are multiplied by first.
            rate: learning rate, of parameters without a factor of their own.
        """
        largest: dict[str, list[Tensor]] = {}
        for shard in self._shards:
            state = self.states[shard.name]
            if shard in gradients:
                largest[shard.name] = self._update(shard, state, gradients[shard], factor, rate)
            else:
                largest[shard.name] = [state.absmax[slot] for slot in MOMENTS]
        self._exchange(largest)
        for shard in self._shards:
            if shard in gradients:
                state = self.states[shard.name]
                self._store(state, gradients[shard], factor, largest[shard.name])
                state.powers = [float(np.float32(power * beta)) for power, beta in zip(state.powers, self._betas)]

    def slots(self, state: BlockState) -> dict[str, Tensor]:
        """The state of a parameter by the names of its slots in a checkpoint."""
        found = {slot: tensor_of([power], "float32") for slot, power in zip(_POWERS, state.powers)}
        for slot in MOMENTS:
            found |= {slot: state.codes[slot], f"{slot}_absmax": state.absmax[slot]}
        return found

    def load(self, state: BlockState, slot: str, value: Tensor) -> None:
        """Load a slot: codes of this rank's elements, the magnitudes of all blocks, or a power."""
        if slot in _POWERS:
            state.powers[_POWERS.index(slot)] = float(array_of(value).reshape(-1)[0])
        elif slot in MOMENTS:
            state.codes[slot].copy_(value.astype("int8"), False)  # padding comes as float32
        else:
            state.absmax[slot.removesuffix("_absmax")].copy_(state.blocks.own(value), False)

    def _exchange(self, largest: dict[str, list[Tensor]]) -> None:
        """Replace the magnitudes of this rank's blocks by the largest ones of all ranks."""
        cut = [(name, self.states[name].blocks) for name in largest if self.states[name].blocks.layout.is_cut]
        if not cut:
            return
        spread = [blocks.spread(values) for name, blocks in cut for values in largest[name]]
        joined = exchange_largest(paddle.concat(spread))
        parts = iter(joined.split([part.shape[0] for part in spread]))
        for name, blocks in cut:
            largest[name] = [blocks.own(next(parts)) for _ in MOMENTS]

    def _update(
        self, shard: ParameterShard, state: BlockState, gradient: Tensor, factor: float, rate: float
    ) -> list[Tensor]:
        """Update a parameter; return the largest magnitudes of its new moments in this rank's blocks."""
        power1, power2 = state.powers
        rate *= shard.main_param.optimize_attr["learning_rate"]
        decay = decay_factor(shard, rate, self._train.weight_decay)
        root = math.sqrt(1 - power2)
        step = rate * root / (1 - power1)
        epsilon = self._train.adam_epsilon * root
        flat = shard.main_param.detach().flatten()
        largest = [paddle.zeros(state.blocks.ids.shape, "float32") for _ in MOMENTS]
        changed = []
        for chunks in state.blocks.chunks():
            of_box = []
            for chunk in chunks:
                moments = self._moments(state, chunk, gradient, factor)
                moment1, moment2 = moments
                values = _cast(chunk.values(flat), paddle.float32) - moment1 / (moment2.sqrt() + epsilon) * step
                values = _cast(values, flat.dtype)
                if decay is not None:
                    values = _cast(_cast(values, paddle.float32) * decay, flat.dtype)
                of_box.append((chunk, values))
                for found, moment in zip(largest, moments):
                    _raise_to(found, moment.abs(), chunk)
            changed.append(of_box)
        shard.main_param.copy_(_joined(changed, shard.main_param.shape), False)
        return largest

    def _store(self, state: BlockState, gradient: Tensor, factor: float, largest: Sequence[Tensor]) -> None:
        """Store the new moments, which are computed again."""
        codes: dict[str, list[list[tuple[_Chunk, Tensor]]]] = {slot: [] for slot in MOMENTS}
        for chunks in state.blocks.chunks():
            for of_slot in codes.values():
                of_slot.append([])
            for chunk in chunks:
                moments = self._moments(state, chunk, gradient, factor)
                for slot, moment, absmax in zip(MOMENTS, moments, largest):
                    new = _codes(moment, paddle.gather(absmax, chunk.numbers), slot == "moment1")
                    codes[slot][-1].append((chunk, new))
        for slot, absmax in zip(MOMENTS, largest):
            state.codes[slot] = _joined(codes[slot], state.codes[slot].shape)
            state.absmax[slot] = absmax

    def _moments(self, state: BlockState, chunk: _Chunk, gradient: Tensor, factor: float) -> list[Tensor]:
        """The new moments of a chunk."""
        new = chunk.values(gradient.flatten()).astype("float32") * factor
        found = []
        for slot, beta in zip(MOMENTS, self._betas):
            index = chunk.values(state.codes[slot].flatten()).astype("int32") - _LOWEST
            old = paddle.gather(tensor_of(dynamic_map(slot == "moment1")), index)
            old = old * paddle.gather(state.absmax[slot], chunk.numbers)
            # 1 - beta in float32, as in the kernel: in the first steps it is also the correction's denominator
            added = new * float(np.float32(1) - np.float32(beta))
            found.append(old * beta + (added if slot == "moment1" else added * new))
        return found


def _cast(x: Tensor, dtype: paddle.dtype) -> Tensor:
    """A tensor in a dtype; the tensor itself where it has that."""
    return x if x.dtype == dtype else x.astype(dtype)


def decay_factor(shard: ParameterShard, rate: float, weight_decay: float) -> float | None:
    """The factor of a parameter for weight decay; None for vectors, which do not decay, and without decay.

    Args:
        shard: of the parameter.
        rate: its learning rate.
        weight_decay: `train.weight_decay`.
    """
    if not weight_decay or not shard.decays:
        return None
    return 1 - rate * weight_decay


def _raise_to(largest: Tensor, magnitudes: Tensor, chunk: _Chunk) -> None:
    """Replace the magnitudes of blocks by larger ones of some elements, in place.

    Args:
        largest: by block.
        magnitudes: of the elements of the chunk, [N].
        chunk: has the numbers of their blocks.
    """
    first = chunk.first_number
    # zeros for blocks between without elements
    found = paddle.geometric.segment_max(magnitudes, chunk.numbers - first)
    last = first + found.shape[0]
    largest[first:last] = paddle.maximum(largest[first:last], found)


def _codes(moment: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Codes of a moment, less 128, in int8. One of the first moment keeps its sign, as in bitsandbytes."""
    scaled = moment / paddle.where(absmax > 0, absmax, paddle.ones_like(absmax))
    codes = paddle.searchsorted(tensor_of(_kernel_thresholds(signed)), scaled, out_int32=True)
    if signed:
        zero = CODE_OF_ZERO["moment1"] - _LOWEST
        codes = codes - ((codes == zero) & (moment < 0)).astype("int32")
    return (codes + _LOWEST).astype("int8")


@functools.cache
def _kernel_thresholds(signed: bool) -> np.ndarray:
    """The code of a value is the number of these, [255], that it is above.

    They are the middles between values of the map. The search of the kernel for CUDA ends at an even code, and keeps it
    for a value in the middle of it and a neighbour: so the middle of an odd code and the next belongs to the next.
    """
    values = dynamic_map(signed)
    middles = (values[:-1] + values[1:]) * np.float32(0.5)
    middles[1::2] = np.nextafter(middles[1::2], np.float32(-np.inf))
    return middles
