"""AdamW whose moments are stored in 8 bits, a block at a time (Dettmers et al. 2022, arXiv 2110.02861).

The first moment is stored by the signed dynamic map, the second by the unsigned one, as bitsandbytes' AdamW8bit does. A
block is 256 consecutive elements of the flattened full parameter [inputs, outputs], whatever part of it a rank holds:
so the largest magnitude of a block is a maximum over ranks, and codes, scales and updates are those of one process.

An update has two passes over the gradients. The first one updates the parameters, by the exact new moments, and finds
the largest magnitudes of their blocks. Between them these are exchanged, in one call for all parameters. The second one
computes the moments again, and stores them. So no moment is in memory in float32 for more than a chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import paddle

from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.tensors import tensor_of
from llmsuite.models.dynamic_map import BLOCK, dynamic_map, thresholds
from llmsuite.parallel import collective
from llmsuite.parallel.partition import CODE_OF_ZERO, num_blocks
from llmsuite.parallel.sharding import ParameterShard

_CHUNK = 1 << 22
"""Elements whose moments are in float32 at a time."""
_LOWEST = -128
"""A code of the dynamic map is stored as an int8, less 128."""
MOMENTS = ("moment1", "moment2")
_POWERS = ("beta1_pow_acc", "beta2_pow_acc")


class Blocks:
    """The blocks of a full parameter that the elements of this rank's shard belong to."""

    def __init__(self, shard: ParameterShard, shape: Sequence[int]):
        """
        Args:
            shard: of the parameter.
            shape: of the full parameter without padding.
        """
        dim, first = shard.first_index
        self._is_cut = shard.is_cut
        inner = math.prod(shape[dim + 1 :])
        self._width = shard.local_shape[dim] * inner
        self._stride = shape[dim] * inner
        self._begin = first * inner
        self._range = shard.range
        self.size = self._range.stop - self._range.start
        self.num_blocks = num_blocks(shape)
        """Blocks of the full parameter."""
        ends = [self._ids_of(*part) for part in self._parts()]
        self.ids = tensor_of(np.unique(np.concatenate(ends)) if ends else np.zeros(0, "int64"))
        """Numbers of the blocks that this rank has elements of, ascending."""

    @property
    def is_cut(self) -> bool:
        """True where other ranks have other elements of the parameter."""
        return self._is_cut

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Ranges of the flat full parameter that this rank's elements are."""
        first = self._range.start
        while first < self._range.stop:
            row = first // self._width
            last = min(self._range.stop, (row + 1) * self._width)
            begin = self._begin + row * (self._stride - self._width)
            yield begin + first, begin + last
            first = last

    def _ids_of(self, first: int, last: int) -> np.ndarray:
        # padding of a vocabulary, which is always zero, may reach beyond the last block
        return np.minimum(np.arange(first // BLOCK, (last - 1) // BLOCK + 1), self.num_blocks - 1)

    def numbers(self, start: int, stop: int) -> Tensor:
        """For a range of this rank's elements the number of their blocks among `ids`, [N]."""
        own = paddle.arange(self._range.start + start, self._range.start + stop)
        found = (own + self._begin + own // self._width * (self._stride - self._width)) // BLOCK
        return paddle.searchsorted(self.ids, found.clip(max=self.num_blocks - 1))

    def spread(self, values: Tensor) -> Tensor:
        """Values of this rank's blocks, as values of all blocks, with zeros for the others."""
        full = paddle.zeros([self.num_blocks], values.dtype)
        return paddle.scatter(full, self.ids, values) if self.size else full

    def own(self, values: Tensor) -> Tensor:
        """Values of this rank's blocks among those of all blocks."""
        return paddle.gather(values, self.ids) if self.size else paddle.zeros([0], values.dtype)

    def gather(self, values: Tensor) -> Tensor:
        """Values of all blocks, from those of this rank's blocks. Every rank of the pipeline stage calls it."""
        return exchange_largest(self.spread(values)) if self._is_cut else self.spread(values)


def exchange_largest(values: Tensor) -> Tensor:
    """The element-wise maximum over all ranks that hold parts of the same parameters."""
    mesh = collective.mesh()
    for group in (mesh.data_group, mesh.tensor_group):
        collective.max_in_group(values, group)
    return values


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

    def __init__(self, shards: Sequence[ParameterShard], shapes: Mapping[str, Sequence[int]], train: TrainSection):
        """
        Args:
            shards: of these parameters.
            shapes: of the full parameters without padding, by name.
            train: section of the recipe.
        """
        self._shards = list(shards)
        self._betas = (train.adam_beta1, train.adam_beta2)
        self._epsilon = train.adam_epsilon
        self._decay = train.weight_decay
        self.states = {shard.name: self._first_state(shard, shapes[shard.name]) for shard in self._shards}

    def _first_state(self, shard: ParameterShard, shape: Sequence[int]) -> BlockState:
        blocks = Blocks(shard, shape)
        codes = {slot: paddle.full(shard.main_param.shape, CODE_OF_ZERO[slot], "int8") for slot in MOMENTS}
        absmax = {slot: paddle.zeros(blocks.ids.shape, "float32") for slot in MOMENTS}
        return BlockState(blocks, codes, absmax, [float(np.float32(beta)) for beta in self._betas])

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
                state.powers = [float(np.float32(power) * np.float32(b)) for power, b in zip(state.powers, self._betas)]

    def slots(self, state: BlockState) -> dict[str, Tensor]:
        """The state of a parameter by the names of its slots in a checkpoint."""
        found = {slot: tensor_of([power], "float32") for slot, power in zip(_POWERS, state.powers)}
        for slot in MOMENTS:
            found |= {slot: state.codes[slot], f"{slot}_absmax": state.absmax[slot]}
        return found

    def load(self, state: BlockState, slot: str, value: Tensor) -> None:
        """Load a slot: codes of this rank's elements, the magnitudes of all blocks, or a power."""
        if slot in _POWERS:
            state.powers[_POWERS.index(slot)] = float(value)
        elif slot in MOMENTS:
            state.codes[slot].copy_(value.astype("int8"), True)  # padding comes as float32
        else:
            state.absmax[slot.removesuffix("_absmax")].copy_(state.blocks.own(value), True)

    def _exchange(self, largest: dict[str, list[Tensor]]) -> None:
        """Replace the magnitudes of this rank's blocks by the largest ones of all ranks."""
        cut = [(name, self.states[name].blocks) for name in largest if self.states[name].blocks.is_cut]
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
        decay = 1 - rate * self._decay if len(shard.local_shape) > 1 else 1.0
        root = math.sqrt(1 - power2)
        step = rate * root / (1 - power1)
        values = shard.main_param.detach().flatten()
        largest = [paddle.zeros(state.blocks.ids.shape, "float32") for _ in MOMENTS]
        for start, stop, numbers, moments in self._moments(state, gradient, factor):
            moment1, moment2 = moments
            changed = values[start:stop] * decay - moment1 * step / (moment2.sqrt() + self._epsilon * root)
            values[start:stop] = changed
            first = int(numbers[0])
            for found, moment in zip(largest, moments):
                in_chunk = paddle.geometric.segment_max(moment.abs(), numbers - first)
                last = first + in_chunk.shape[0]
                found[first:last] = paddle.maximum(found[first:last], in_chunk)
        shard.main_param.copy_(values.reshape(shard.main_param.shape), True)
        return largest

    def _store(self, state: BlockState, gradient: Tensor, factor: float, largest: Sequence[Tensor]) -> None:
        """Store the new moments, which are computed again."""
        flat = {slot: state.codes[slot].flatten() for slot in MOMENTS}
        for start, stop, numbers, moments in self._moments(state, gradient, factor):
            for slot, moment, absmax in zip(MOMENTS, moments, largest):
                flat[slot][start:stop] = _codes(moment, paddle.gather(absmax, numbers), slot == "moment1")
        for slot, absmax in zip(MOMENTS, largest):
            state.codes[slot] = flat[slot].reshape(state.codes[slot].shape)
            state.absmax[slot] = absmax

    def _moments(
        self, state: BlockState, gradient: Tensor, factor: float
    ) -> Iterator[tuple[int, int, Tensor, list[Tensor]]]:
        """Chunk by chunk: its range, the numbers of its elements' blocks, and the new moments."""
        gradient = gradient.flatten()
        codes = {slot: state.codes[slot].flatten() for slot in MOMENTS}
        for start in range(0, state.blocks.size, _CHUNK):
            stop = min(start + _CHUNK, state.blocks.size)
            numbers = state.blocks.numbers(start, stop)
            new = gradient[start:stop].astype("float32") * factor
            found = []
            for slot, beta, added in zip(MOMENTS, self._betas, (new, new * new)):
                index = codes[slot][start:stop].astype("int32") - _LOWEST
                old = paddle.gather(tensor_of(dynamic_map(slot == "moment1")), index)
                old = old * paddle.gather(state.absmax[slot], numbers)
                found.append(old * beta + added * (1 - beta))
            yield start, stop, numbers, found


def _codes(moment: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Codes of a moment, less 128, in int8. One of the first moment keeps its sign, as in bitsandbytes."""
    scaled = moment / paddle.where(absmax > 0, absmax, paddle.ones_like(absmax))
    codes = paddle.searchsorted(tensor_of(thresholds(signed)), scaled, out_int32=True)
    if signed:
        zero = CODE_OF_ZERO["moment1"] - _LOWEST
        codes = codes - ((codes == zero) & (moment < 0)).astype("int32")
    return (codes + _LOWEST).astype("int8")
