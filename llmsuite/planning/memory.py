"""Memory of each rank of a run, in bytes: what lives between steps, what a step adds, and the peak of both.

Only tensors are counted. A device also holds the context of its driver, buffers of the collective library and memory
that its allocator cannot reuse because of fragmentation; see `NOT_COUNTED`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from llmsuite.models.anatomy import Anatomy, Latent, MoE
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.lengths import longest_row
from llmsuite.parallel.schedule import Action
from llmsuite.planning import activations
from llmsuite.planning.activations import ActivationSettings, MicroBatch
from llmsuite.planning.beginning import beginning_bytes
from llmsuite.planning.head import kept_behind, temporaries
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes, ranks
from llmsuite.planning.programs import memory_of_steps
from llmsuite.planning.rollouts import cache_bytes, decoder_bytes, reference_bytes, reward_bytes
from llmsuite.planning.schedule import orders, peak_held
from llmsuite.recipe.critic import critic_plan
from llmsuite.recipe.resolve import RunPlan

NOT_COUNTED = (
    "the driver's context and the collective library's buffers (with NCCL 1-2 GiB a device, by the number of groups)",
    "fragmentation of the allocator; Paddle's grows by need",
)
UNEVEN_EXPERTS = "experts: rows are counted as if they were evenly loaded, the fullest rank has more"


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Memory of a rank of one pipeline stage. `parameters`, `masters` and `moments` live from step to step."""

    stage: int
    num_parameters: int
    """On this rank."""
    parameters: float
    masters: float
    """Float32 masters, and the pieces of parameters that sharding gives the optimizer to update."""
    moments: float
    gradients: float
    """Gradients when the last micro-batch is done."""
    activations: float
    """Peak of the activations kept for backward passes."""
    held: float
    """Peak of activations and gradients together, between two passes: the first micro-batches are in flight before
    there are gradients."""
    buffers: float
    """The largest set of temporaries: of a layer, of the logits, or of a gathered parameter."""
    update: float
    """What the optimizer step takes besides parameters, masters and moments."""
    host: float
    """What `offload_optimizer` keeps in host memory."""
    sums: float = 0.0
    """Sums of gradients that programs of whole steps keep from step to step."""
    decoder: float = 0.0
    """Weights for a rollout, while there are no activations and gradients."""
    reward: float = 0.0
    """Weights of a reward model, which live from step to step too."""
    reference: float = 0.0
    """Frozen weights to compare with, which live from step to step too."""
    cache: float = 0.0
    """The cache of a rollout, beside `decoder`."""
    critic: float = 0.0
    """Parameters, masters and moments of the critic, which live from step to step too."""
    beginning: float = 0.0
    """The gradients that adapters begin with, before the first step, beside its passes."""
    beside_critic: float = 0.0
    """The most that its passes and both updates take, which follow on the passes of the model."""

    @property
    def between_steps(self) -> float:
        kept = self.parameters + self.masters + self.moments + self.sums
        return kept + self.reward + self.reference + self.critic

    @property
    def peak(self) -> float:
        """The most memory at once, in a rollout, in the passes or in the update."""
        passes = self.held + self.buffers + self.beginning
        return self.between_steps + max(passes, self.update, self.decoder + self.cache, self.beside_critic)


def activation_settings(layout: Layout) -> ActivationSettings:
    """The settings of a run that decide which activations are kept."""
    plan, engine, parallel = layout.plan, layout.plan.recipe.engine, layout.plan.recipe.parallel
    backend, lora, tp = plan.device.factory(), plan.recipe.lora, plan.degrees.tp
    fused = backend.fused(engine.precision)
    experts = frozenset(name for name in layout.adapted if layout.shard_plan.is_expert(f"{name}.weight"))
    has_operands = "operand_matmul" in fused and layout.has_plain_products
    attends_operands = has_operands and {"attention", "attention_operand"} <= fused and not plan.recipe.prefix.tokens
    rows_again = engine.compiles_steps and plan.degrees.pp == 1 and not plan.recipe.freezes_model
    return ActivationSettings(
        num_bytes=element_bytes(plan),
        tp=tp,
        ep=plan.degrees.ep,
        sequence_parallel=parallel.sequence_parallel,
        recompute=engine.recompute,
        every=engine.recompute_every,
        loss_chunk=engine.loss_chunk_tokens,
        fused=fused - backend.on_parts_only if tp > 1 and engine.compiles_layers else fused,
        fused_outside=fused,
        document_mask_bytes=backend.document_mask_bytes,
        attention_keeps_output=backend.attention_keeps_output,
        is_frozen=plan.recipe.freezes_model,
        adapter_rank=plan.recipe.lora.rank,
        adapted=layout.adapted,
        adapter_widths={name: _adapter_width(layout, name) for name in layout.adapted},
        adapted_experts=experts,
        every_expert_row=engine.compiles_steps,
        embedding_width=_adapter_width(layout, layout.shard_plan.embedding) if layout.adapts_embedding else None,
        keeps_expert_rows=not rows_again and (plan.recipe.lora.base_format is None or bool(experts)),
        unreached=layout.unreached,
        edited=dict.fromkeys(layout.intervened, plan.recipe.reft.rank or 0),
        prefix=plan.recipe.prefix.tokens or 0,
        prefix_network=plan.recipe.prefix.network_size(plan.model_config.hidden_size) or 0,
        rounded={name: _local_sizes(layout, name) for name in layout.rounded},
        entropy=plan.profile.entropy,
        rounds_inputs=plan.recipe.qat.activation_bits is not None,
        keeps_trained_only=layout.own_products and plan.recipe.freezes_model,
        input_bytes=2 if layout.multiplies_together and not (layout.adapted and tp > 1) else None,
        reading=frozenset() if lora.dropout or lora.method == "vera" else layout.adapted,
        inner_bytes=2 if has_operands else None,
        head_bytes=2 if attends_operands else None,
    )


def _local_sizes(layout: Layout, module: str) -> tuple[int, int]:
    """Inputs and outputs of a rank's slice of a matrix."""
    name, tp = f"{module}.weight", layout.plan.degrees.tp
    inputs, outputs = layout.shapes[name][-2:]
    dim = None if layout.shard_plan.is_expert(name) else layout.shard_plan.dim(name)
    return inputs // (tp if dim == 0 else 1), outputs // (tp if dim == 1 else 1)


def _adapter_width(layout: Layout, module: str) -> float:
    """See `ActivationSettings.adapter_widths`: the product with the first factor, what a mixer multiplies, or the
    output that DoRA or VeRA scales; and of dropout the inputs that are left, and their mask, of a byte each."""
    lora, shard_plan = layout.plan.recipe.lora, layout.shard_plan
    dropped = 0.0
    if lora.dropout and module != shard_plan.embedding:
        dropped = _local_sizes(layout, module)[0] * (1 + 1 / element_bytes(layout.plan))
    if lora.is_structured:  # computed again
        return dropped
    dropped += lora.rank or 0
    if lora.method == "mixer":
        return dropped + float(lora.rank or 0)
    if lora.num_pairs > 1:  # the second product with a first factor, and two updates
        return dropped + (0.0 if layout.own_products else float(lora.rank or 0))
    if lora.method == "vera" and not layout.own_products:  # in front of d and behind it
        dropped += lora.rank or 0
    if lora.method not in ("dora", "vera"):
        return dropped
    is_scattered = layout.plan.recipe.parallel.sequence_parallel and shard_plan.is_region(module.rpartition(".")[0])
    scattered = is_scattered and shard_plan.dim(f"{module}.weight") == 0
    return dropped + _local_sizes(layout, module)[1] / (layout.plan.degrees.tp if scattered else 1)


def full_micro_batch(plan: RunPlan) -> MicroBatch:
    """A micro-batch without padding in which every position is supervised: the largest a run can meet."""
    recipe = plan.recipe
    length = longest_row(plan)
    rows = recipe.train.micro_batch_size * plan.rows_per_sample
    if recipe.train.micro_batch_tokens is not None:
        rows = max(1, recipe.train.micro_batch_tokens // length)
    supervised = rows if plan.stage.head == "score" else rows * length
    if num_mtp_layers(plan.model_config):
        supervised += rows * (length - 1)
    documents = recipe.data.packing != "none" or getattr(plan.section, "document_mask", False)
    return MicroBatch(rows, length, supervised, documents, marks_padding(plan))


def marks_padding(plan: RunPlan) -> bool:
    """Whether batches mark their tokens: padding for the gates of experts and for observers of quantised inputs, every
    one for dropout and for interventions."""
    recipe = plan.recipe
    gates = plan.family.shard_plan is not None and bool(plan.family.shard_plan.gates)
    return gates or recipe.qat.activation_bits is not None or recipe.lora.dropout > 0 or recipe.reft.rank is not None


def memory(
    layout: Layout, anatomy: Anatomy, batches: Sequence[MicroBatch], meshes: Sequence[Mesh] | None = None
) -> list[StageMemory]:
    """Memory of the fullest rank of each pipeline stage, or of the ranks in `meshes`.

    Args:
        layout: of the run.
        anatomy: of its model.
        batches: the micro-batches of a rank, in their order.
        meshes: the places of ranks.
    """
    plan, settings = layout.plan, activation_settings(layout)
    pp = plan.degrees.pp
    schedules = orders(plan.schedule, pp, len(batches), plan.num_chunks if pp > 1 else 1)
    meshes = ranks(plan) if meshes is None else meshes
    found = [
        _memory_of_rank(layout, anatomy, mesh, batches, schedules[mesh.coordinate["pp"]], settings) for mesh in meshes
    ]
    if plan.profile.critic is None:
        return found
    other = Layout(critic_plan(plan))
    settings = activation_settings(other)
    critics = [
        _memory_of_rank(other, anatomy, mesh, batches, schedules[mesh.coordinate["pp"]], settings) for mesh in meshes
    ]
    return [_with_critic(own, critic) for own, critic in zip(found, critics)]


def _with_critic(own: StageMemory, critic: StageMemory) -> StageMemory:
    """A rank that has a critic too. Its passes begin when the gradients of the model are there, and updates when both
    have theirs."""
    passes = own.gradients + critic.held + critic.buffers
    return dataclasses.replace(
        own,
        critic=critic.parameters + critic.masters + critic.moments,
        beside_critic=max(passes, own.update + critic.gradients, critic.update),
        host=own.host + critic.host,
    )


def _memory_of_rank(
    layout: Layout,
    anatomy: Anatomy,
    mesh: Mesh,
    batches: Sequence[MicroBatch],
    schedule: Sequence[Action],
    settings: ActivationSettings,
) -> StageMemory:
    plan, stage, held = layout.plan, mesh.coordinate["pp"], layout.parameters(mesh)
    backend = plan.device.factory()
    parts = layout.parts_of(stage)
    programs = {part: _kept_by_programs(layout, anatomy, [h for h in held if h.part == part]) for part in parts}
    kept = {
        (part, batch): kept_by_part(layout, anatomy, part, batch, settings) + programs[part]
        for part in parts
        for batch in set(batches)
    }

    def kept_by_pass(action: Action) -> float:
        return kept[parts[action.chunk], batches[action.micro_batch]]

    gradients = [float(sum(h.gradient_bytes for h in held if h.part == part)) for part in parts]
    largest = max(batches, key=lambda b: b.rows * b.length**2)
    buffers = _buffers(layout, anatomy, stage, held, largest, settings)
    buffers += _in_buckets(layout.buckets(mesh), backend.sends_beside_passes)
    masters = float(sum(h.master_bytes for h in held))
    moments = float(sum(h.moment_bytes(plan.recipe.train.optimizer) for h in held))
    offloads = plan.recipe.engine.offload_optimizer and backend.moves_to_host
    found = StageMemory(
        stage=stage,
        num_parameters=sum(h.num_values for h in held),
        parameters=float(sum(h.parameter_bytes for h in held)),
        masters=0.0 if offloads else masters,
        moments=0.0 if offloads else moments,
        gradients=float(sum(h.gradient_bytes for h in held)),
        activations=peak_held(schedule, kept_by_pass),
        held=peak_held(schedule, kept_by_pass, gradients),
        buffers=buffers,
        update=_update_bytes(held, plan.recipe.train.optimizer, offloads),
        host=masters + moments if offloads else 0.0,
        decoder=decoder_bytes(layout, anatomy, mesh),
        reward=reward_bytes(plan, mesh),
        reference=reference_bytes(plan, held),
        cache=cache_bytes(layout, anatomy, mesh),
        beginning=beginning_bytes(layout, held, largest.tokens),
    )
    if plan.recipe.engine.compiles_steps:
        return dataclasses.replace(found, **memory_of_steps(found.activations, held, len(batches)))
    return found


def _update_bytes(held: Sequence[LocalParameter], optimizer: str, offloads: bool) -> float:
    """Bytes of the optimizer step. It takes the gradients one at a time: each is copied, then freed."""
    gradients = float(sum(h.gradient_bytes for h in held))
    copied = sum(4 * h.num_owned for h in held if h.has_gradient)
    largest = max((h.size for h in held), default=0)
    gathered = max((2 * h.num_bytes * h.piece * h.parts for h in held if h.parts > 1), default=0)
    update = max(gradients + 4 * largest, copied + gathered)
    if offloads:
        update += max((h.master_bytes + h.moment_bytes(optimizer) for h in held), default=0)
    return float(update)


def kept_by_part(layout: Layout, anatomy: Anatomy, part: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Activations that a micro-batch keeps in a part of the model until its backward pass."""
    last = len(layout.bounds) - 2
    kept = sum(activations.kept_by_layer(anatomy, i, batch, settings) for i in layout.layers_of(part))
    # a layer that predicts further tokens runs by itself, with a mask and tables of its own
    times = len({anatomy.layers[i].predicts_further for i in layout.layers_of(part)})
    kept += times * activations.kept_for_all_layers(anatomy, batch, settings)
    if part == 0:
        kept += activations.kept_in_front(anatomy, batch, settings)
    else:  # what was received
        kept += activations.hidden_state_bytes(anatomy.hidden, batch, settings)
    if part == last:
        kept += kept_behind(anatomy, batch, settings, layout.plan.stage.head == "score")
    return kept


def _kept_by_programs(layout: Layout, anatomy: Anatomy, held: Iterable[LocalParameter]) -> float:
    """Gathered parameters (sharding stage 3) that a micro-batch keeps under `to_static`.

    A program keeps its inputs until its backward pass, so freeing a gathered parameter returns memory only where the
    layer is recomputed.
    """
    engine = layout.plan.recipe.engine
    if not engine.compiles_layers:
        return 0.0
    kept = 0.0
    for h in held:
        if h.is_stored_in_parts and h.layer is not None and anatomy.layers[h.layer].compiles(h.name):
            kept += 0 if engine.computes_again(h.layer) else h.size * h.num_bytes
    return kept


def _buffers(
    layout: Layout,
    anatomy: Anatomy,
    stage: int,
    held: Sequence[LocalParameter],
    batch: MicroBatch,
    settings: ActivationSettings,
) -> float:
    """The largest set of temporaries of a pass, besides the activations it keeps.

    A backward pass frees memory as it goes: the head's before the last layer, that of its MLP before its attention.
    """
    top = layout.bounds[max(layout.parts_of(stage)) + 1] - 1
    behind = head = 0.0
    is_last, scores_only = stage == layout.plan.degrees.pp - 1, layout.plan.stage.head == "score"
    if is_last:
        behind = kept_behind(anatomy, batch, settings, scores_only)
    largest_in_layer = _largest(h for h in held if h.layer is not None)
    if is_last and not scores_only:
        head = temporaries(anatomy, batch, settings, _largest(h for h in held if h.layer is None))
    layer, e = anatomy.layers[top], settings.num_bytes
    heads = layer.attention.heads / settings.tp
    scores = activations.scores_bytes(layer, batch, settings)
    width = layer.attention.width if isinstance(layer.attention, Latent) else layer.attention.head_size
    mlp = layer.mlp
    size = mlp.chosen * mlp.width + mlp.shared_width if isinstance(mlp, MoE) else mlp.width
    of_mlp = activations.mlp_kept(layer, anatomy.hidden, batch, settings)
    residual = 2 * batch.tokens * anatomy.hidden * e
    again = 0.0
    if settings.recompute == "full" and top % settings.every == 0:
        again = activations.inside_layer(anatomy, top, batch, settings)
        again -= activations.kept_by_layer(anatomy, top, batch, settings)
    in_mlp = again + 2 * batch.tokens * size * e / settings.tp + residual + largest_in_layer - behind
    if settings.recompute == "selective":
        again += scores
    in_attention = again + 2 * scores + 3 * batch.tokens * heads * width * e + residual - of_mlp - behind
    forward = activations.mask_bytes(batch, settings) + scores
    if settings.recompute == "none":
        forward -= of_mlp + behind
    # of a stack, one matrix at a time
    whole = (h.num_values / (h.local_shape[0] if h.is_expert else 1) for h in held if h.is_codes)
    dequantised = _DEQUANTISED * max(whole, default=0.0)
    return max(head, in_mlp, in_attention, forward, 0.0) + _gathered(held) + dequantised


_DEQUANTISED = 10
"""Bytes for each value of a quantised matrix while it is made whole: wide codes, and both halves before they are joined
(`models.quantised.dequantise_on_device`)."""


def _in_buckets(buckets: Iterable[Sequence[LocalParameter]], beside_passes: bool) -> float:
    """The largest bucket of gradients, besides the gradients copied into it.

    Gradients that are reduced in each backward pass wait whole until their bucket is full; a bucket in flight beside
    the passes is freed when the next one is ready.
    """
    most = 0.0
    for bucket in buckets:
        if len(bucket) > 1:
            times = 1 + (1 + beside_passes if bucket[0].reduces_each_pass else 0)
            most = max(most, 4.0 * times * sum(held.sum_size for held in bucket))
    return most


def _largest(held: Iterable[LocalParameter]) -> float:
    """Bytes of the largest gradient: that of a micro-batch lives besides the sum of those before it."""
    return max((h.size * h.num_bytes for h in held if h.has_gradient), default=0)


def _gathered(held: Sequence[LocalParameter]) -> float:
    """Bytes that sharding stage 3 gathers at once: the largest layer, or the largest module outside of the layers."""
    sizes: dict[object, float] = {}
    for h in held:
        if h.is_stored_in_parts:
            place = h.layer if h.layer is not None else h.name
            sizes[place] = sizes.get(place, 0.0) + h.size * h.num_bytes
    return max(sizes.values(), default=0.0)
