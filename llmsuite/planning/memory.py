"""Memory of each rank of a run, in bytes: what lives between steps, what a step adds, and the peak of both.

Counted are tensors. Beside them a device holds the context of its driver, buffers of the collective library and what an
allocator cannot use for pieces; see `NOT_COUNTED`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from llmsuite.models.anatomy import Anatomy, Latent, MoE
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.schedule import Action
from llmsuite.planning import activations
from llmsuite.planning.activations import How, Pass
from llmsuite.planning.layout import BYTES, Held, Layout, ranks
from llmsuite.planning.schedule import orders, peak_held
from llmsuite.recipe.resolve import RunPlan

NOT_COUNTED = (
    "the driver's context and the collective library's buffers (with NCCL 1-2 GiB a device, by the number of groups)",
    "what an allocator cannot use for pieces; Paddle's grows by need",
    "experts: rows are counted as if evenly dealt over them, the fullest rank has more",
)


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Of a rank of one pipeline stage. Of its fields, `parameters` to `moments` live from step to step."""

    stage: int
    num_parameters: int
    """Elements that lie here."""
    parameters: float
    copies: float
    """Masters, and the pieces that sharding cuts out for the optimizer."""
    moments: float
    gradients: float
    """When the last micro-batch is through."""
    activations: float
    """Kept for backward passes, at most at once."""
    held: float
    """Activations and gradients together, at most at once between two passes: the first micro-batches meet no
    gradients yet."""
    buffers: float
    """The largest temporary set of tensors: of a layer, the logits, or a parameter that is brought together."""
    update: float
    """What the optimizer's step takes beside parameters, copies and moments."""
    host: float
    """What `offload_optimizer` keeps in host memory."""

    @property
    def between_steps(self) -> float:
        return self.parameters + self.copies + self.moments

    @property
    def peak(self) -> float:
        """In the passes, or in the update."""
        return self.between_steps + max(self.held + self.buffers, self.update)


def how_of(layout: Layout) -> How:
    """What of a run decides what a pass keeps."""
    plan, engine, parallel = layout.plan, layout.plan.recipe.engine, layout.plan.recipe.parallel
    backend = plan.device.factory()
    fused = backend.fused(engine.precision)
    in_programs = plan.degrees.tp > 1 and engine.mode == "to_static"
    return How(
        num_bytes=BYTES[engine.precision],
        tp=plan.degrees.tp,
        ep=plan.degrees.ep,
        sequence_parallel=parallel.sequence_parallel,
        recompute=engine.recompute,
        every=engine.recompute_every,
        fused=frozenset() if backend.fuses_alike_only and in_programs else fused,
        fused_outside=fused,
        fuses_alike_only=backend.fuses_alike_only,
        adapter_rank=plan.recipe.lora.rank,
        adapted=layout.adapted,
        rounded={name: _local_sizes(layout, name) for name in layout.rounded},
        rounds_inputs=plan.recipe.qat.activation_bits is not None,
    )


def _local_sizes(layout: Layout, module: str) -> tuple[int, int]:
    """Inputs and outputs that a rank has of a matrix."""
    name, tp = f"{module}.weight", layout.plan.degrees.tp
    inputs, outputs = layout.shapes[name]
    dim = layout.cuts.dim(name)
    return inputs // (tp if dim == 0 else 1), outputs // (tp if dim == 1 else 1)


def full_pass(plan: RunPlan) -> Pass:
    """A micro-batch without padding, of which every position is learnt: the most a run can meet."""
    recipe = plan.recipe
    multiple = 64 if recipe.engine.mode == "to_static" else 1
    if recipe.parallel.sequence_parallel:
        multiple = multiple if multiple % plan.degrees.tp == 0 else multiple * plan.degrees.tp
    length = -(-recipe.data.max_length // multiple) * multiple
    rows = recipe.train.micro_batch_size * plan.stage.rows_per_sample
    if recipe.train.micro_batch_tokens is not None:
        rows = max(1, recipe.train.micro_batch_tokens // length)
    supervised = rows if plan.stage.head == "score" else rows * length
    documents = recipe.data.packing != "none" or getattr(plan.section, "document_mask", False)
    return Pass(rows, length, supervised, documents, marks_padding(plan))


def marks_padding(plan: RunPlan) -> bool:
    """Whether it is marked in the rows what is padding: for gates, and for those who take note of inputs."""
    gates = plan.family.shard_plan is not None and bool(plan.family.shard_plan.gates)
    return gates or plan.recipe.qat.activation_bits is not None


def memory(
    layout: Layout, anatomy: Anatomy, batches: Sequence[Pass], meshes: Sequence[Mesh] | None = None
) -> list[StageMemory]:
    """Of a rank of each pipeline stage, that which has most; or of the ranks in `meshes`.

    Args:
        layout: of the run.
        anatomy: of its model.
        batches: the micro-batches of a rank, in their order.
        meshes: places of ranks.
    """
    plan = layout.plan
    how, pp = how_of(layout), plan.degrees.pp
    schedules = orders(plan.schedule, pp, len(batches), plan.num_chunks if pp > 1 else 1)
    result = []
    for mesh in ranks(plan) if meshes is None else meshes:
        stage, held, largest = (
            mesh.coordinate["pp"],
            layout.held(mesh),
            max(batches, key=lambda b: b.rows * b.length**2),
        )
        parts = list(layout.parts_of(stage))
        programs = {part: _kept_by_programs(layout, anatomy, [h for h in held if h.part == part]) for part in parts}
        kept = {
            (part, batch): kept_by_part(layout, anatomy, part, batch, how) + programs[part]
            for part in parts
            for batch in set(batches)
        }

        def left(action: Action, parts: list[int] = parts, kept: dict[tuple[int, Pass], float] = kept) -> float:
            return kept[parts[action.chunk], batches[action.micro_batch]]

        gradients = [float(sum(h.gradient_bytes for h in held if h.part == part)) for part in parts]
        result.append(
            _stage(
                layout,
                anatomy,
                stage,
                held,
                peak_held(schedules[stage], left),
                peak_held(schedules[stage], left, gradients),
                largest,
                how,
                _in_buckets(layout.buckets(mesh), plan.device.factory().sends_beside_passes),
            )
        )
    return result


def kept_by_part(layout: Layout, anatomy: Anatomy, part: int, batch: Pass, how: How) -> float:
    """What a micro-batch leaves in a part of the model until its backward pass."""
    last = len(layout.bounds) - 2
    kept = sum(activations.kept_by_layer(anatomy, i, batch, how) for i in layout.layers_of(part))
    kept += activations.kept_for_all_layers(anatomy, batch, how)
    if part == 0:
        kept += activations.kept_in_front(anatomy, batch, how)
    else:  # what was received
        kept += batch.tokens * anatomy.hidden * how.num_bytes / (how.tp if how.sequence_parallel else 1)
    if part == last:
        kept += activations.kept_behind(anatomy, batch, how, layout.plan.stage.head == "score")
    return kept


def _kept_by_programs(layout: Layout, anatomy: Anatomy, held: Iterable[Held]) -> float:
    """What a micro-batch keeps of the parameters that stage 3 brings together: a program keeps what goes into it until
    its backward pass, so giving the memory back frees it only where the layer is computed again."""
    engine = layout.plan.recipe.engine
    if engine.mode != "to_static":
        return 0.0
    kept = 0.0
    for h in held:
        if h.is_stored_in_parts and h.layer is not None and not engine.computes_again(h.layer):
            experts = isinstance(anatomy.layers[h.layer].mlp, MoE)  # of these layers attention alone is compiled
            if not experts or any(word in h.name for word in (".input_layernorm.", ".self_attn.")):
                kept += h.size * h.num_bytes
    return kept


def _stage(
    layout: Layout,
    anatomy: Anatomy,
    stage: int,
    held: Sequence[Held],
    activations_kept: float,
    with_gradients: float,
    batch: Pass,
    how: How,
    in_buckets: float,
) -> StageMemory:
    recipe = layout.plan.recipe
    optimizer = recipe.train.optimizer
    copies = float(sum(h.copy_bytes for h in held))
    moments = float(sum(h.moment_bytes(optimizer) for h in held))
    away = recipe.engine.offload_optimizer and layout.plan.device.name != "cpu"
    gradients = float(sum(h.gradient_bytes for h in held))
    # the update hands gradients on a parameter at a time: a copy each, before the gradient itself is freed
    handed = sum(4 * h.owned for h in held if h.has_gradient)
    largest = max((h.size for h in held), default=0)
    joined = max((2 * h.num_bytes * h.piece * h.parts for h in held if h.parts > 1), default=0)
    update = max(gradients + 4 * largest, handed + joined)
    if away:
        update += max((h.copy_bytes + h.moment_bytes(optimizer) for h in held), default=0)
    return StageMemory(
        stage=stage,
        num_parameters=sum(h.size for h in held),
        parameters=float(sum(h.parameter_bytes for h in held)),
        copies=0.0 if away else copies,
        moments=0.0 if away else moments,
        gradients=gradients,
        activations=activations_kept,
        held=with_gradients,
        buffers=_buffers(layout, anatomy, stage, held, batch, how) + in_buckets,
        update=float(update),
        host=copies + moments if away else 0.0,
    )


def _buffers(layout: Layout, anatomy: Anatomy, stage: int, held: Sequence[Held], batch: Pass, how: How) -> float:
    """The largest of what passes hold beside what they keep.

    What a backward pass is through with is free again: the head for the last layer, its MLP for its attention.
    """
    top = layout.bounds[max(layout.parts_of(stage)) + 1] - 1
    behind = head = 0.0
    is_last, scores_only = stage == layout.plan.degrees.pp - 1, layout.plan.stage.head == "score"
    if is_last:
        behind = activations.kept_behind(anatomy, batch, how, scores_only)
    largest_in_layer = _largest(h for h in held if h.layer is not None)
    if is_last and not scores_only:
        # forward logits beside softmax's output, backward its gradient, unless a kernel has one place for all of them;
        # of 16-bit logits a float32 copy comes first
        wide = 0 if "cross_entropy" in how.fused and how.tp == 1 else 4
        wide += how.num_bytes if how.num_bytes < 4 else 0
        outside = _largest(h for h in held if h.layer is None)
        head = batch.supervised * anatomy.vocabulary / how.tp * wide + outside
    layer, e = anatomy.layers[top], how.num_bytes
    heads = layer.attention.heads / how.tp
    scores = activations.scores_bytes(layer, batch, how)
    width = layer.attention.value if isinstance(layer.attention, Latent) else layer.attention.head_size
    mlp = layer.mlp
    size = mlp.chosen * mlp.width + mlp.shared_width if isinstance(mlp, MoE) else mlp.width
    of_mlp = activations.mlp_kept(layer, anatomy.hidden, batch, how)
    residual = 2 * batch.tokens * anatomy.hidden * e
    again = 0.0
    if how.recompute == "full" and top % how.every == 0:
        again = activations.inside_layer(anatomy, top, batch, how)
        again -= activations.kept_by_layer(anatomy, top, batch, how)
    in_mlp = again + 2 * batch.tokens * size * e / how.tp + residual + largest_in_layer - behind
    if how.recompute == "selective":
        again += scores
    in_attention = again + 2 * scores + 3 * batch.tokens * heads * width * e + residual - of_mlp - behind
    forward = activations.mask_bytes(layer, batch, how) + scores
    if how.recompute == "none":
        forward -= of_mlp + behind
    return max(head, in_mlp, in_attention, forward, 0.0) + _gathered(held)


def _in_buckets(buckets: Iterable[Sequence[Held]], beside_passes: bool) -> float:
    """Gradients that are laid side by side, beside what they are laid from. Those that are cut at once wait for each
    other whole; what is on its way meanwhile is freed when the next ones are ready."""
    most = 0.0
    for bucket in buckets:
        if len(bucket) > 1:
            times = 1 + (1 + beside_passes if bucket[0].adds_up_early else 0)
            most = max(most, 4.0 * times * sum(held.sum_size for held in bucket))
    return most


def _largest(held: Iterable[Held]) -> float:
    """The gradient of a micro-batch beside the sum of those before it."""
    return max((h.size * h.num_bytes for h in held if h.has_gradient), default=0)


def _gathered(held: Sequence[Held]) -> float:
    """In sharding stage 3: the parameters of the largest layer, or of the largest module beside the layers, whole."""
    sizes: dict[object, float] = {}
    for h in held:
        if h.is_stored_in_parts:
            where = h.layer if h.layer is not None else h.name
            sizes[where] = sizes.get(where, 0.0) + h.size * h.num_bytes
    return max(sizes.values(), default=0.0)
