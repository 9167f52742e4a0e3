"""Who has what: the parameters of each rank of a run, as the engine will deal them out.

Every decision is asked of the engine's own tables: the cut of the pipeline, the family's shard plan, the pieces of
sharding, the dtypes. Nothing here needs Paddle.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from llmsuite.errors import UserError
from llmsuite.models.head import is_tied
from llmsuite.models.shard_plan import WHOLE
from llmsuite.models.targets import is_trained, linear_modules, pick_modules, with_adapters
from llmsuite.parallel.cut import layer_costs, layer_of, part_bounds, parts_with
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import (
    SHARDING_STAGES,
    Piece,
    buckets,
    has_master,
    local_slice,
    piece_of,
    reduce_in_backward,
)
from llmsuite.recipe.resolve import RunPlan

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of an element, by `engine.precision`."""


@dataclasses.dataclass(slots=True, eq=False)  # a frozen one takes four times as long to make: a search makes 100,000
class Held:
    """A parameter that a rank has, or has a part of."""

    name: str
    part: int
    """Of the pipeline."""
    layer: int | None
    local_shape: tuple[int, ...]
    """What lies here without sharding."""
    size: int
    """Its elements."""
    num_bytes: int
    """Of an element."""
    parts: int
    """Ranks of the sharding axis that have a piece each."""
    piece: int
    """Elements of a piece, with padding."""
    owned: int
    """Elements this rank's optimizer updates."""
    stage: int
    """Of sharding."""
    is_expert: bool
    is_cut: bool
    """Over tp."""
    is_trained: bool
    has_gradient: bool
    has_master: bool
    is_tied: bool
    """Whether the first and the last pipeline stage both have it."""

    @property
    def reduce_in_backward(self) -> bool:
        return reduce_in_backward(self.stage, self.parts, self.has_master)

    @property
    def is_stored_in_parts(self) -> bool:
        return self.stage == 3 and self.parts > 1

    @property
    def adds_up_early(self) -> bool:
        """Whether a gradient is cut over the sharding axis as every backward pass makes it."""
        return self.stage >= 2 and self.parts > 1

    @property
    def sum_size(self) -> int:
        """Elements of the gradient as it is added up."""
        return self.parts * self.piece if self.adds_up_early else self.size

    # bytes between two steps, and what of a gradient lives until the last micro-batch is through

    @property
    def parameter_bytes(self) -> int:
        return (self.owned if self.is_stored_in_parts else self.size) * self.num_bytes

    @property
    def copy_bytes(self) -> int:
        """A master, or under sharding the piece that the optimizer updates."""
        if self.has_master:
            return self.owned * 4
        return self.owned * self.num_bytes if self.parts > 1 and not self.is_stored_in_parts else 0

    @property
    def gradient_bytes(self) -> int:
        if not self.has_gradient:
            return 0
        if self.reduce_in_backward:
            return 4 * (self.piece if self.adds_up_early else self.size)
        return self.size * self.num_bytes

    def moment_bytes(self, optimizer: str) -> int:
        """Of AdamW's state; the two powers of its decay rates, a number each, are on the host."""
        return 2 * 4 * self.owned if optimizer == "adamw" and self.has_gradient else 0


class Model:
    """The parameters of a run as a whole: what of a `Layout` no strategy changes."""

    def __init__(self, plan: RunPlan, shapes: Mapping[str, Sequence[int]] | None = None):
        """`shapes`: of the model without adapters; those that its family says if they are not given."""
        self.cuts, config, lora = plan.family.shard_plan or WHOLE, plan.model_config, plan.recipe.lora
        self.num_layers, self.tied = config.num_hidden_layers, is_tied(config)
        self.model_shapes = shapes = model_shapes(plan) if shapes is None else shapes
        if lora.rank is not None:
            adapted = pick_modules(linear_modules(shapes, self.cuts), self.cuts, lora.target_modules)
            shapes = with_adapters(shapes, adapted, lora.rank)
        self.adapted: frozenset[str] = frozenset(adapted if lora.rank is not None else ())
        qat = plan.recipe.qat
        rounded: Sequence[str] = ()
        if qat.weight_bits is not None:
            rounded = pick_modules(linear_modules(shapes, self.cuts), self.cuts, qat.target_modules)
        self.rounded = frozenset(rounded)
        """Modules whose weights are rounded, and their inputs where that is asked for."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.trained = {n for n in shapes if (lora.rank is None or is_trained(n))}
        self._parts: dict[tuple[int, ...], list[list[str]]] = {}

    @functools.cached_property
    def costs(self) -> list[int]:
        """See `cut.layer_costs`."""
        return layer_costs(self.shapes, self.cuts, self.num_layers, self.tied)

    @functools.cached_property
    def layers(self) -> dict[str, int | None]:
        """Of every parameter the layer it is in."""
        return {name: layer_of(name, self.cuts) for name in self.shapes}

    def by_part(self, bounds: Sequence[int]) -> list[list[str]]:
        """The names that each part of a pipeline has."""
        key = tuple(bounds)
        if key not in self._parts:
            self._parts[key] = [[] for _ in bounds[1:]]
            for name in self.shapes:
                for part in parts_with(name, self.cuts, bounds, self.tied):
                    self._parts[key][part].append(name)
        return self._parts[key]


class Layout:
    """The parameters of a run, and of each of its ranks."""

    def __init__(self, plan: RunPlan, model: Model | None = None):
        """`model`: of the run, where it is known already."""
        self.plan, self.model = plan, Model(plan) if model is None else model
        self.cuts, self.tied = self.model.cuts, self.model.tied
        self.adapted, self.rounded = self.model.adapted, self.model.rounded
        self.model_shapes, self.shapes, self.trained = self.model.model_shapes, self.model.shapes, self.model.trained
        self.rounded = self.model.rounded
        self.num_layers, pp = self.model.num_layers, plan.degrees.pp
        self.bounds = [0, self.num_layers]
        if pp > 1:
            self.bounds = part_bounds(plan.recipe.parallel.pipeline_cut, self.model.costs, pp * plan.num_chunks)
        self._held: dict[int, list[Held]] = {}
        self.sharding = SHARDING_STAGES[plan.recipe.parallel.sharding]
        self._bucket_bytes = plan.gradient_bucket_bytes

    @property
    def num_parameters(self) -> int:
        """Of the whole model with its adapters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_trained(self) -> int:
        return sum(math.prod(self.shapes[name]) for name in self.trained)

    def layers_of(self, part: int) -> range:
        """The numbers of a part's layers."""
        return range(self.bounds[part], self.bounds[part + 1])

    def parts_of(self, stage: int) -> range:
        """The parts that a pipeline stage has, its chunks."""
        return range(stage, len(self.bounds) - 1, self.plan.degrees.pp)

    def held(self, mesh: Mesh) -> list[Held]:
        """What a rank has, in the order of its parts."""
        if mesh.rank not in self._held:
            self._held[mesh.rank] = self._make_held(mesh)
        return self._held[mesh.rank]

    def buckets(self, mesh: Mesh) -> list[list[Held]]:
        """The gradients of a rank that are added up over data ranks, those together that travel in one call."""
        found = []
        for part in self.parts_of(mesh.coordinate["pp"]):
            sent = [held for held in self.held(mesh) if held.part == part and held.has_gradient]
            sent = [h for h in sent if (mesh.of_experts if h.is_expert else mesh).degrees.num_data_ranks > 1]
            for chosen in buckets([(held.is_expert, 4 * held.sum_size) for held in sent], self._bucket_bytes):
                found.append([sent[i] for i in chosen])
        return found

    def _make_held(self, mesh: Mesh) -> list[Held]:
        precision = self.plan.recipe.engine.precision
        # layers are alike: what is cut out of a parameter is worked out once for all that are cut like it
        known: dict[tuple[object, ...], tuple[tuple[int, ...], int, Piece]] = {}
        embedding, names = f"{self.cuts.embedding}.weight", self.model.by_part(self.bounds)
        result = []
        for part in self.parts_of(mesh.coordinate["pp"]):
            for name in names[part]:
                shape, expert, dim = self.shapes[name], self.cuts.is_expert(name), self.cuts.dim(name)
                trained = name in self.trained
                key = shape, expert, dim, trained
                if key not in known:
                    local = tuple(s.stop - s.start for s in local_slice(name, shape, self.cuts, mesh))
                    size = math.prod(local)
                    place = mesh.of_experts if expert else mesh
                    known[key] = local, size, piece_of(size, place, self.sharding, not trained)
                local, size, piece = known[key]
                bias = self.cuts.is_gate_bias(name)
                dtype = "float32" if precision == "fp32" or bias else precision
                result.append(
                    Held(
                        name=name,
                        part=part,
                        layer=self.model.layers[name],
                        local_shape=local,
                        size=size,
                        num_bytes=4 if dtype == "float32" else BYTES[precision],
                        parts=piece.parts,
                        piece=piece.size,
                        owned=piece.num_owned,
                        stage=self.sharding,
                        is_expert=expert,
                        is_cut=dim is not None and mesh.degrees.tp > 1,
                        is_trained=trained,
                        has_gradient=trained and not bias,
                        has_master=has_master(dtype, not trained),
                        is_tied=self.tied and mesh.degrees.pp > 1 and name == embedding,
                    )
                )
        return result


def model_shapes(plan: RunPlan) -> Mapping[str, Sequence[int]]:
    """Of every parameter of the model, without adapters.

    Raises:
        UserError: the family does not say them.
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
    """One rank of each pipeline stage: the first of its data and tensor parallel ranks, which never has less than
    another."""
    degrees = plan.degrees
    each = degrees.num_ranks // degrees.pp
    return [Mesh(degrees, stage * each) for stage in range(degrees.pp)]
