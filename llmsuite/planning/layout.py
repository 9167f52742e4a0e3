"""The parameters of each rank of a run, as the engine will place them.

Every decision is read from the engine's own tables: the split of the pipeline, the family's shard plan, the pieces of
sharding, the dtypes. Nothing here needs Paddle.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence

from llmsuite.adapters.parameters import is_transposed, shard_dim, with_adapters
from llmsuite.adapters.prefix_shapes import is_shared_by_all_ranks, with_prefixes
from llmsuite.adapters.reft_shapes import intervened_layers, with_interventions
from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.models.block_quant import CODES
from llmsuite.models.head import OUTPUT, is_tied
from llmsuite.models.mtp import is_embedding_shared, num_layers, num_mtp_layers
from llmsuite.models.protocols import HasShapes
from llmsuite.models.targets import adaptable_modules, frozen_matrices, linear_modules, pick_modules, quantised_modules
from llmsuite.parallel.block_layout import BlockLayout, num_blocks
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import (
    OPTIMIZER_SLOTS,
    SHARDING_STAGES,
    Partition,
    ShardRange,
    gradient_buckets,
    has_block_moments,
    has_master,
    local_slice,
    moment_dtype,
    shard_range,
    sharding_stage_of,
)
from llmsuite.parallel.pipeline_split import layer_costs, layer_of, part_bounds, parts_with
from llmsuite.recipe.plans import ModelPlan, ParallelPlan

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}


@dataclasses.dataclass(slots=True, eq=False)  # frozen would be four times slower to make: a search makes 100,000
class LocalParameter(Partition):
    """A parameter on one rank: the full parameter, or the rank's slice of it."""

    name: str
    part: int
    """Part of the pipeline that it belongs to."""
    layer: int | None
    """Decoder layer that it belongs to; None outside of the layers."""
    local_shape: tuple[int, ...]
    """Shape on this rank before sharding over data ranks: sliced by tensor and expert parallel."""
    num_bytes: int
    """Bytes of an element."""
    num_values: int
    """Number of model parameters in it: more than elements where a byte has two codes, none for their scales."""
    full_shape: tuple[int, ...]
    """Shape of the full parameter."""
    is_transposed: bool
    """True where PyTorch stores its matrices transposed."""
    is_codes: bool
    """True for the codes of a quantised matrix."""
    is_expert: bool
    is_trained: bool
    has_gradient: bool
    is_sent: bool
    """True where there is a gradient, and other data ranks to reduce it with."""

    @property
    def owned_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that this rank's optimizer updates: flat, where ranks own shards."""
        if self.num_shards > 1:
            return (self.num_owned,)
        return self.local_shape

    # bytes that live between two steps; of a gradient, until the last micro-batch is done

    @property
    def parameter_bytes(self) -> int:
        if self.is_stored_sharded:
            return self.num_owned * self.num_bytes
        return self.size * self.num_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of the float32 master, or under sharding of the shard that the optimizer updates."""
        if not self.has_own_copy:
            return 0
        return self.num_owned * self.gradient_width

    @property
    def gradient_width(self) -> int:
        """Bytes of an element of a gradient that is accumulated and reduced."""
        if self.has_master:
            return 4
        return self.num_bytes

    @property
    def gradient_bytes(self) -> int:
        if not self.has_gradient:
            return 0
        if self.reduces_each_pass:
            return self.gradient_width * self.shard_size
        return self.gradient_width * self.size

    def moment_bytes(self, train: TrainSection) -> int:
        """Bytes of the optimizer's moments; the powers of AdamW's decay rates are single numbers on the host."""
        if not self.has_gradient:
            return 0
        if has_block_moments(train.optimizer, self.name, self.full_shape):
            return num_moments(train.optimizer) * (self.num_owned + 4 * self._block_layout.max_own_blocks)
        return num_moments(train.optimizer) * _BYTES[moment_dtype(train)] * self.num_owned

    def exchanged_blocks(self, optimizer: str) -> int:
        """Number of the blocks of 8-bit moments whose largest magnitudes ranks exchange, see `block_moments`."""
        if self.is_trained and has_block_moments(optimizer, self.name, self.full_shape):
            layout = self._block_layout
            return layout.num_blocks if layout.is_cut else 0
        return 0

    @property
    def _block_layout(self) -> BlockLayout:
        """Layout of the blocks on the first rank, which never has fewer elements than others."""
        offsets = (0,) * len(self.full_shape)
        return BlockLayout(self.full_shape, self.is_transposed, self.local_shape, offsets, slice(0, self.num_owned))


class ModelParameters:
    """The parameters of the full model: the part of a `Layout` that is the same under every strategy."""

    def __init__(
        self, model_plan: ModelPlan, parallel_plan: ParallelPlan, shapes: Mapping[str, Sequence[int]] | None = None
    ):
        """
        Args:
            model_plan: of the run.
            parallel_plan: of the run, for the precision of its device; the strategy does not matter.
            shapes: of the model's parameters without adapters; the family's own if not given.
        """
        self.shard_plan = model_plan.shard_plan
        config = model_plan.config
        lora = model_plan.lora
        self.num_layers = num_layers(config)
        self.tied = is_tied(config)
        self.embedding_shared = is_embedding_shared(config)
        self.model_shapes = shapes = model_shapes(model_plan) if shapes is None else shapes
        if lora.rank is not None:
            adapted = pick_modules(adaptable_modules(shapes, self.shard_plan), self.shard_plan, lora.target_modules)
            shapes = with_adapters(shapes, adapted, lora.rank, lora.adapter_method)
        reft = model_plan.reft
        self.intervened: Sequence[int] = ()
        """Numbers of the layers with an intervention."""
        if reft.rank is not None:
            self.intervened = intervened_layers(reft.layers, config.num_hidden_layers)
            size = config.hidden_size
            layers = self.shard_plan.layers
            shapes = with_interventions(shapes, layers, self.intervened, size, reft.rank)
        prefix = model_plan.prefix
        if prefix.tokens is not None:
            layers = self.shard_plan.layers
            shapes = with_prefixes(shapes, layers, prefix.tokens, config.head_size, model_plan.prefix_network_size)
        self.adapted: frozenset[str] = frozenset(adapted if lora.rank is not None else ())
        qat = model_plan.qat
        rounded: Sequence[str] = ()
        if qat.weight_bits is not None:
            mtp_layers = range(config.num_hidden_layers, self.num_layers)  # generation does not use these
            found = linear_modules(shapes, self.shard_plan)
            found = [name for name in found if layer_of(f"{name}.weight", self.shard_plan) not in mtp_layers]
            rounded = pick_modules(found, self.shard_plan, qat.target_modules)
        self.rounded = frozenset(rounded)
        """Modules whose weights are rounded, and with `qat.activation_bits` their inputs too."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.stored: dict[str, dict[str, tuple[int, ...]]] = {}
        """Shapes of the codes and scales of each matrix that is stored quantised."""
        self.part_bytes: dict[str, int] = {}
        """Bytes of an element of each part of such a matrix, by its name."""
        if lora.rank is not None and lora.base_format is not None:
            self.part_bytes = {part: _BYTES[dtype] for part, dtype in lora.base_format.dtypes.items()}
            for name in (f"{module}.weight" for module in quantised_modules(self.model_shapes, self.shard_plan)):
                parts = lora.base_format.shapes(self.shapes[name])
                self.stored[name] = {f"{name}.{part}": shape for part, shape in parts.items()}
        self.trained = {n for n in shapes if model_plan.trains(n)}
        names = model_plan.family.names()
        self.transposed = {name for name in self.trained if is_transposed(name, names)}
        """Names of the trained parameters that PyTorch stores transposed."""
        self.bf16_frozen: Collection[str] = frozenset()
        """Names of the frozen parameters that are bfloat16 where others are float32."""
        if model_plan.keeps_frozen_bf16(parallel_plan):
            self.bf16_frozen = frozen_matrices(shapes, self.shard_plan, self.trained)
        self._parts: dict[tuple[int, ...], list[list[str]]] = {}
        """Names by part, by the number of stages and the bounds."""

    @functools.cached_property
    def costs(self) -> list[int]:
        """Number of parameters of each layer, see `pipeline_split.layer_costs`."""
        return layer_costs(self.shapes, self.shard_plan, self.num_layers, self.embedding_shared)

    @functools.cached_property
    def layers(self) -> dict[str, int | None]:
        """The layer of every parameter."""
        return {name: layer_of(name, self.shard_plan) for name in self.shapes}

    def by_part(self, bounds: Sequence[int], num_stages: int) -> list[list[str]]:
        """The names of the parameters in each part of a pipeline."""
        key = (num_stages, *bounds)
        if key not in self._parts:
            self._parts[key] = [[] for _ in bounds[1:]]
            for name in self.shapes:
                for part in parts_with(name, self.shard_plan, bounds, self.embedding_shared, num_stages):
                    self._parts[key][part].append(name)
        return self._parts[key]


class Layout:
    """The parameters of a run and of each of its ranks."""

    def __init__(self, model_plan: ModelPlan, parallel_plan: ParallelPlan, model: ModelParameters | None = None):
        """
        Args:
            model_plan: of the run.
            parallel_plan: of the run.
            model: its parameters, if they are already computed: a search makes them once for all strategies.
        """
        self.model_plan = model_plan
        self.parallel_plan = parallel_plan
        self.model = ModelParameters(model_plan, parallel_plan) if model is None else model
        self.shard_plan = self.model.shard_plan
        self.tied = self.model.tied
        self.adapted = self.model.adapted
        self.rounded = self.model.rounded
        self.intervened = self.model.intervened
        self.model_shapes = self.model.model_shapes
        self.shapes = self.model.shapes
        self.trained = self.model.trained
        self.num_layers = self.model.num_layers
        pp = parallel_plan.degrees.pp
        self.bounds = [0, self.num_layers]
        if pp > 1:
            cut = parallel_plan.section.pipeline_cut
            self.bounds = part_bounds(cut, self.model.costs, pp * parallel_plan.num_chunks)
        self._parameters: dict[int, list[LocalParameter]] = {}
        self.sharding = SHARDING_STAGES[parallel_plan.section.sharding]
        self._bucket_bytes = parallel_plan.gradient_bucket_bytes

    @property
    def num_mtp_layers(self) -> int:
        """Number of MTP layers (multi-token prediction), at the end of the last part."""
        return num_mtp_layers(self.model_plan.config)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the full model with its adapters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_trained(self) -> int:
        return sum(math.prod(self.shapes[name]) for name in self.trained)

    @property
    def has_plain_linears(self) -> bool:
        """True where the linear layers are plain matrices, or matrices with low-rank adapters (`models.linear_ops`)."""
        lora = self.model_plan.lora
        is_low_rank = lora.adapter_method.is_plain and not lora.dropout and lora.base_format is None
        return not self.rounded and (is_low_rank or not self.adapted)

    @functools.cached_property
    def uses_device_matmul(self) -> bool:
        """True where eager products are operations of the device (`models.linear_ops`)."""
        engine = self.parallel_plan.engine
        return engine.mode == "dynamic" and "matmul" in self.parallel_plan.device.factory().fused(engine.precision)

    @functools.cached_property
    def fuses_projections(self) -> bool:
        """True where such products of one input are one operation also over ranks, unless they have adapters."""
        fused = self.parallel_plan.device.factory().fused(self.parallel_plan.engine.precision)
        return self.uses_device_matmul and "round_activation" in fused

    @property
    def adapts_embedding(self) -> bool:
        return self.shard_plan.embedding in self.adapted

    @property
    def trains_embedding(self) -> bool:
        """True where the rows of the embedding are trained themselves."""
        return f"{self.shard_plan.embedding}.weight" in self.trained

    @property
    def trains_head(self) -> bool:
        """True where the matrix that makes logits is trained itself."""
        if self.tied:
            return self.trains_embedding
        return OUTPUT in self.trained

    @property  # not cached: a search sets plans that differ in recompute
    def unreached(self) -> frozenset[int]:
        """Numbers of the layers that no backward pass reaches: nothing in or before them is trained except the
        intervention on their output, and nothing is recomputed."""
        if not self.intervened:
            return frozenset()
        engine = self.parallel_plan.engine
        first = min(self.intervened)
        again = [number for number in range(first + 1) if engine.recomputes_layer(number)]
        # activations that a part has received have a gradient
        return frozenset(range(min([first + 1, self.bounds[1], *again])))

    def layers_of(self, part: int) -> range:
        """The numbers of a part's layers."""
        return range(self.bounds[part], self.bounds[part + 1])

    def parts_of(self, stage: int) -> range:
        """The parts of the model on a pipeline stage: its chunks."""
        return range(stage, len(self.bounds) - 1, self.parallel_plan.degrees.pp)

    def parameters(self, mesh: Mesh) -> list[LocalParameter]:
        """The parameters of a rank, in the order of its parts."""
        if mesh.rank not in self._parameters:
            self._parameters[mesh.rank] = self._make_parameters(mesh)
        return self._parameters[mesh.rank]

    def buckets(self, mesh: Mesh) -> list[list[LocalParameter]]:
        """The gradients that a rank reduces over data ranks, grouped by the collective call they share."""
        found: list[list[LocalParameter]] = []
        for part in self.parts_of(mesh.coordinate["pp"]):
            inside = [parameter for parameter in self.parameters(mesh) if parameter.part == part]
            found += gradient_buckets(inside, lambda parameter: parameter.is_expert, self._bucket_bytes)
        return found

    def _make_parameters(self, mesh: Mesh) -> list[LocalParameter]:
        of_device = self.parallel_plan.parameter_dtype
        # layers are alike: the slice of a parameter is computed once for all parameters sliced like it
        known: dict[tuple[object, ...], tuple[tuple[int, ...], int, ShardRange]] = {}
        embedding = f"{self.shard_plan.embedding}.weight"
        names = self.model.by_part(self.bounds, mesh.degrees.pp)
        result = []
        for part in self.parts_of(mesh.coordinate["pp"]):
            stored = [
                (n, s, of) for of in names[part] for n, s in self.model.stored.get(of, {of: self.shapes[of]}).items()
            ]
            for name, shape, of in stored:
                expert = self.shard_plan.is_expert(name)
                dim = shard_dim(self.shard_plan, name)
                trained = name in self.trained
                stage = sharding_stage_of(name, self.sharding)
                key = shape, expert, dim, trained, stage
                own_mesh = mesh.expert_mesh if expert else mesh
                if key not in known:
                    local = tuple(s.stop - s.start for s in local_slice(name, shape, self.shard_plan, mesh))
                    size = math.prod(local)
                    known[key] = local, size, shard_range(size, own_mesh, stage, not trained)
                local, size, owned = known[key]
                bias = self.shard_plan.is_gate_bias(name)
                dtype = of_device
                if name in self.model.bf16_frozen:
                    dtype = "bfloat16"
                if bias:
                    dtype = "float32"
                codes = name.endswith(f".{CODES}")
                num_bytes = _BYTES[dtype]
                if of != name:  # a part of a quantised matrix
                    num_bytes = self.model.part_bytes[name.rpartition(".")[2]]
                result.append(
                    LocalParameter(
                        name=name,
                        part=part,
                        layer=self.model.layers[of],
                        local_shape=local,
                        size=size,
                        full_shape=tuple(shape),
                        is_transposed=name in self.model.transposed,
                        num_bytes=num_bytes,
                        num_values=size * math.prod(self.shapes[of]) // math.prod(shape) if codes or of == name else 0,
                        is_codes=codes,
                        num_shards=owned.num_shards,
                        shard_size=owned.size,
                        num_owned=owned.num_owned,
                        stage=stage,
                        is_expert=expert,
                        is_trained=trained,
                        has_gradient=trained and not bias,
                        is_sent=trained and not bias and own_mesh.degrees.num_data_ranks > 1,
                        has_master=has_master(dtype, not trained, self.parallel_plan.master_weights),
                        is_shared=is_shared_by_all_ranks(name),
                        is_tied=self.model.embedding_shared and mesh.degrees.pp > 1 and name == embedding,
                    )
                )
        return result


def element_bytes(parallel_plan: ParallelPlan) -> int:
    """Bytes of an element of parameters and activations."""
    return _BYTES[parallel_plan.parameter_dtype]


def state_bytes(train: TrainSection, name: str, shape: Sequence[int]) -> int:
    """Bytes of the moments of a full parameter in a checkpoint."""
    if has_block_moments(train.optimizer, name, shape):
        return num_moments(train.optimizer) * (math.prod(shape) + 4 * num_blocks(shape))
    return num_moments(train.optimizer) * _BYTES[moment_dtype(train)] * math.prod(shape)


def num_moments(optimizer: str) -> int:
    """Number of moments that an optimizer keeps of each parameter; each is as large as the parameter."""
    return sum(slot.startswith("moment") for slot in OPTIMIZER_SLOTS[optimizer])


def model_shapes(model_plan: ModelPlan) -> Mapping[str, Sequence[int]]:
    """The shape of every parameter of the model, without adapters.

    Raises:
        UserError: the family does not provide them.
    """
    names = model_plan.family.names()
    if not isinstance(names, HasShapes):
        raise UserError(
            f"model.family: the names of {model_plan.family.name} have no `parameter_shapes(config)`, without which "
            "nothing can be planned; see docs/reference/plugins.md"
        )
    return names.parameter_shapes(model_plan.config)


def ranks(degrees: Degrees) -> list[Mesh]:
    """One rank of each pipeline stage: its first data and tensor parallel rank, which never holds less than others."""
    each = degrees.num_ranks // degrees.pp
    return [Mesh(degrees, stage * each) for stage in range(degrees.pp)]
