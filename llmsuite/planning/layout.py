"""The parameters of each rank of a run, as the engine will place them.

Every decision is read from the engine's own tables: the split of the pipeline, the family's shard plan, the pieces of
sharding, the dtypes. Nothing here needs Paddle.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from llmsuite.errors import UserError
from llmsuite.models.block_quant import CODES
from llmsuite.models.head import is_tied
from llmsuite.models.mtp import is_embedding_shared, num_layers, num_mtp_layers
from llmsuite.models.prefix_shapes import is_in_every_part, with_prefixes
from llmsuite.models.reft_shapes import intervened_layers, with_interventions
from llmsuite.models.shard_plan import WHOLE
from llmsuite.models.targets import (
    adaptable_modules,
    frozen_matrices,
    is_trained,
    linear_modules,
    pick_modules,
    quantised_modules,
    with_adapters,
)
from llmsuite.parallel.cut import layer_costs, layer_of, part_bounds, parts_with
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import (
    OPTIMIZER_SLOTS,
    SHARDING_STAGES,
    ShardRange,
    buckets,
    has_master,
    local_slice,
    reduce_in_backward,
    shard_range,
    sharding_stage_of,
)
from llmsuite.recipe.resolve import RunPlan

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(slots=True, eq=False)  # frozen would be four times slower to make: a search makes 100,000
class LocalParameter:
    """A parameter on one rank: a whole one, or the rank's slice of it."""

    name: str
    part: int
    """The part of the pipeline it belongs to."""
    layer: int | None
    """The decoder layer it belongs to; None outside of the layers."""
    local_shape: tuple[int, ...]
    """The shape on this rank before sharding over data ranks: sliced by tensor and expert parallel."""
    size: int
    """Elements of `local_shape`."""
    num_bytes: int
    """Bytes of an element."""
    num_values: int
    """Parameters that it stands for: more than elements where a byte is two codes, none for their scales."""
    is_codes: bool
    """Whether it is the codes of a quantised matrix."""
    parts: int
    """Ranks of the sharding axis that own a piece each."""
    piece: int
    """Elements of a piece, including padding."""
    num_owned: int
    """Elements this rank's optimizer updates."""
    stage: int
    """The sharding stage, 0 to 3."""
    is_expert: bool
    is_trained: bool
    has_gradient: bool
    has_master: bool
    is_tied: bool
    """Whether both the first and the last pipeline stage have it (a shared embedding)."""

    @property
    def reduce_in_backward(self) -> bool:
        return reduce_in_backward(self.stage, self.parts, self.has_master)

    @property
    def is_stored_in_parts(self) -> bool:
        return self.stage == 3 and self.parts > 1

    @property
    def owned_shape(self) -> tuple[int, ...]:
        """The shape of what this rank's optimizer updates: flat, where ranks own pieces."""
        return (self.num_owned,) if self.parts > 1 else self.local_shape

    @property
    def reduces_each_pass(self) -> bool:
        """Whether the gradient is reduced over the sharding axis in every backward pass (stages 2 and 3)."""
        return self.stage >= 2 and self.parts > 1

    @property
    def sum_size(self) -> int:
        """Elements of the gradient as it is reduced, with the padding of its pieces."""
        return self.parts * self.piece if self.reduces_each_pass else self.size

    # bytes that live between two steps; of a gradient, until the last micro-batch is done

    @property
    def parameter_bytes(self) -> int:
        return (self.num_owned if self.is_stored_in_parts else self.size) * self.num_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of the float32 master, or under sharding of the piece that the optimizer updates."""
        if self.has_master:
            return self.num_owned * 4
        return self.num_owned * self.num_bytes if self.parts > 1 and not self.is_stored_in_parts else 0

    @property
    def gradient_bytes(self) -> int:
        if not self.has_gradient:
            return 0
        if self.reduce_in_backward:
            return 4 * (self.piece if self.reduces_each_pass else self.size)
        return self.size * self.num_bytes

    def moment_bytes(self, optimizer: str) -> int:
        """Bytes of the optimizer's moments; the powers of AdamW's decay rates are single numbers on the host."""
        return num_moments(optimizer) * 4 * self.num_owned if self.has_gradient else 0


class ModelParameters:
    """The parameters of the whole model: the part of a `Layout` that is the same under every strategy."""

    def __init__(self, plan: RunPlan, shapes: Mapping[str, Sequence[int]] | None = None):
        """
        Args:
            plan: of the run.
            shapes: of the model's parameters without adapters; the family's own if not given.
        """
        self.shard_plan, config, lora = plan.family.shard_plan or WHOLE, plan.model_config, plan.recipe.lora
        self.num_layers, self.tied = num_layers(config), is_tied(config)
        self.embedding_shared = is_embedding_shared(config)
        self.model_shapes = shapes = model_shapes(plan) if shapes is None else shapes
        if lora.rank is not None:
            adapted = pick_modules(adaptable_modules(shapes, self.shard_plan), self.shard_plan, lora.target_modules)
            shapes = with_adapters(shapes, adapted, lora.rank, lora.method, lora.init)
        reft = plan.recipe.reft
        self.intervened: Sequence[int] = ()
        """Numbers of the layers with an intervention."""
        if reft.rank is not None:
            self.intervened = intervened_layers(reft.layers, config.num_hidden_layers)
            size, layers = config.hidden_size, self.shard_plan.layers
            shapes = with_interventions(shapes, layers, self.intervened, size, reft.rank)
        prefix = plan.recipe.prefix
        if prefix.tokens is not None:
            network, layers = prefix.network_size(config.hidden_size), self.shard_plan.layers
            shapes = with_prefixes(shapes, layers, prefix.tokens, config.head_size, network)
        self.adapted: frozenset[str] = frozenset(adapted if lora.rank is not None else ())
        qat = plan.recipe.qat
        rounded: Sequence[str] = ()
        if qat.weight_bits is not None:
            further = range(config.num_hidden_layers, self.num_layers)  # nothing is generated with these
            found = linear_modules(shapes, self.shard_plan)
            found = [name for name in found if layer_of(f"{name}.weight", self.shard_plan) not in further]
            rounded = pick_modules(found, self.shard_plan, qat.target_modules)
        self.rounded = frozenset(rounded)
        """Modules whose weights are rounded, and with `qat.activation_bits` their inputs too."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.stored: dict[str, dict[str, tuple[int, ...]]] = {}
        """Shapes of the codes and scales of each matrix that is stored quantised."""
        if lora.rank is not None and lora.base_format is not None:
            for name in (f"{module}.weight" for module in quantised_modules(self.model_shapes, self.shard_plan)):
                parts = lora.base_format.shapes(self.shapes[name])
                self.stored[name] = {f"{name}.{part}": shape for part, shape in parts.items()}
        self.trained = {n for n in shapes if not plan.recipe.freezes_model or is_trained(n)}
        self.narrow = frozen_matrices(shapes, self.shard_plan, self.trained) if plan.narrows_frozen else frozenset()
        """Names of the parameters that are bfloat16 where others are float32."""
        self._parts: dict[tuple[int, ...], list[list[str]]] = {}
        """Names by part, by the number of stages and the bounds."""

    @functools.cached_property
    def costs(self) -> list[int]:
        """See `cut.layer_costs`."""
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

    def __init__(self, plan: RunPlan, model: ModelParameters | None = None):
        """
        Args:
            plan: of the run.
            model: its parameters, if they are known already: a search makes them once for all strategies.
        """
        self.plan, self.model = plan, ModelParameters(plan) if model is None else model
        self.shard_plan, self.tied = self.model.shard_plan, self.model.tied
        self.adapted, self.rounded, self.intervened = self.model.adapted, self.model.rounded, self.model.intervened
        self.model_shapes, self.shapes, self.trained = self.model.model_shapes, self.model.shapes, self.model.trained
        self.num_layers, pp = self.model.num_layers, plan.degrees.pp
        self.bounds = [0, self.num_layers]
        if pp > 1:
            self.bounds = part_bounds(plan.recipe.parallel.pipeline_cut, self.model.costs, pp * plan.num_chunks)
        self._parameters: dict[int, list[LocalParameter]] = {}
        self.sharding = SHARDING_STAGES[plan.recipe.parallel.sharding]
        self._bucket_bytes = plan.gradient_bucket_bytes

    @property
    def num_mtp_layers(self) -> int:
        """Layers that predict further tokens, at the end of the last part."""
        return num_mtp_layers(self.plan.model_config)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model with its adapters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_trained(self) -> int:
        return sum(math.prod(self.shapes[name]) for name in self.trained)

    @property
    def has_plain_products(self) -> bool:
        """Whether no matrix of a layer is more than that, or than a low-rank adapter beside it (`models.products`)."""
        lora = self.plan.recipe.lora
        is_low_rank = lora.method == "lora" and lora.num_pairs == 1 and not lora.dropout and lora.base_format is None
        return not self.rounded and (is_low_rank or not self.adapted)

    @functools.cached_property
    def own_products(self) -> bool:
        """Whether products are operations of the device, op by op (`models.products`)."""
        recipe = self.plan.recipe
        return recipe.engine.mode == "dynamic" and "matmul" in self.plan.device.factory().fused(recipe.engine.precision)

    @functools.cached_property
    def multiplies_together(self) -> bool:
        """Whether such products of one input are one operation over ranks, too, where no adapters are beside them."""
        return self.own_products and "operand" in self.plan.device.factory().fused(self.plan.recipe.engine.precision)

    @property
    def adapts_embedding(self) -> bool:
        return self.shard_plan.embedding in self.adapted

    @property  # not cached: a search gives a layout plans that differ in recompute
    def unreached(self) -> frozenset[int]:
        """Numbers of the layers that no backward pass comes to: nothing in or in front of them is trained but the
        intervention on their output, and nothing is computed again."""
        if not self.intervened:
            return frozenset()
        engine, first = self.plan.recipe.engine, min(self.intervened)
        again = [number for number in range(first + 1) if engine.computes_again(number)]
        # what a part has received has a gradient
        return frozenset(range(min([first + 1, self.bounds[1], *again])))

    def layers_of(self, part: int) -> range:
        """The numbers of a part's layers."""
        return range(self.bounds[part], self.bounds[part + 1])

    def parts_of(self, stage: int) -> range:
        """The parts of the model on a pipeline stage: its chunks."""
        return range(stage, len(self.bounds) - 1, self.plan.degrees.pp)

    def parameters(self, mesh: Mesh) -> list[LocalParameter]:
        """The parameters of a rank, in the order of its parts."""
        if mesh.rank not in self._parameters:
            self._parameters[mesh.rank] = self._make_parameters(mesh)
        return self._parameters[mesh.rank]

    def buckets(self, mesh: Mesh) -> list[list[LocalParameter]]:
        """The gradients that a rank reduces over data ranks, grouped by the collective call they share."""
        found = []
        for part in self.parts_of(mesh.coordinate["pp"]):
            sent = [
                parameter for parameter in self.parameters(mesh) if parameter.part == part and parameter.has_gradient
            ]
            sent = [h for h in sent if (mesh.of_experts if h.is_expert else mesh).degrees.num_data_ranks > 1]
            for chosen in buckets(
                [((h.is_expert, is_in_every_part(h.name)), 4 * h.sum_size) for h in sent], self._bucket_bytes
            ):
                found.append([sent[i] for i in chosen])
        return found

    def _make_parameters(self, mesh: Mesh) -> list[LocalParameter]:
        of_device = parameter_dtype(self.plan)
        # layers are alike: the slice of a parameter is computed once for all parameters sliced like it
        known: dict[tuple[object, ...], tuple[tuple[int, ...], int, ShardRange]] = {}
        embedding, names = f"{self.shard_plan.embedding}.weight", self.model.by_part(self.bounds, mesh.degrees.pp)
        result = []
        for part in self.parts_of(mesh.coordinate["pp"]):
            stored = [
                (n, s, of) for of in names[part] for n, s in self.model.stored.get(of, {of: self.shapes[of]}).items()
            ]
            for name, shape, of in stored:
                expert, dim = self.shard_plan.is_expert(name), self.shard_plan.dim(name)
                trained, stage = name in self.trained, sharding_stage_of(name, self.sharding)
                key = shape, expert, dim, trained, stage
                if key not in known:
                    local = tuple(s.stop - s.start for s in local_slice(name, shape, self.shard_plan, mesh))
                    size = math.prod(local)
                    place = mesh.of_experts if expert else mesh
                    known[key] = local, size, shard_range(size, place, stage, not trained)
                local, size, piece = known[key]
                bias = self.shard_plan.is_gate_bias(name)
                dtype = "float32" if bias else "bfloat16" if name in self.model.narrow else of_device
                codes = name.endswith(f".{CODES}")
                result.append(
                    LocalParameter(
                        name=name,
                        part=part,
                        layer=self.model.layers[of],
                        local_shape=local,
                        size=size,
                        num_bytes=1 if codes else 4 if of != name else _BYTES[dtype],
                        num_values=size * math.prod(self.shapes[of]) // math.prod(shape) if codes or of == name else 0,
                        is_codes=codes,
                        parts=piece.num_shards,
                        piece=piece.size,
                        num_owned=piece.num_owned,
                        stage=stage,
                        is_expert=expert,
                        is_trained=trained,
                        has_gradient=trained and not bias,
                        has_master=has_master(dtype, not trained),
                        is_tied=self.model.embedding_shared and mesh.degrees.pp > 1 and name == embedding,
                    )
                )
        return result


def parameter_dtype(plan: RunPlan) -> str:
    """Dtype of parameters and activations on the device of a run."""
    return plan.device.factory().parameter_dtype(plan.recipe.engine.precision)


def element_bytes(plan: RunPlan) -> int:
    """Bytes of an element of parameters and activations."""
    return _BYTES[parameter_dtype(plan)]


def num_moments(optimizer: str) -> int:
    """Moments an optimizer keeps of each parameter, as large as the parameter."""
    return sum(slot.startswith("moment") for slot in OPTIMIZER_SLOTS[optimizer])


def model_shapes(plan: RunPlan) -> Mapping[str, Sequence[int]]:
    """The shape of every parameter of the model, without adapters.

    Raises:
        UserError: the family does not provide them.
    """
    names = plan.family.names()
    if not hasattr(names, "parameter_shapes"):
        raise UserError(
            f"model.family: the names of {plan.family.name} have no `parameter_shapes(config)`, without which nothing "
            "can be planned; see docs/reference/plugins.md"
        )
    shapes: Mapping[str, Sequence[int]] = names.parameter_shapes(plan.model_config)
    return shapes


def ranks(plan: RunPlan) -> list[Mesh]:
    """One rank of each pipeline stage: its first data and tensor parallel rank, which never holds less than others."""
    degrees = plan.degrees
    each = degrees.num_ranks // degrees.pp
    return [Mesh(degrees, stage * each) for stage in range(degrees.pp)]
