"""Memory of each rank of a run, in bytes: tensors that live between steps, those that a step adds, and the peak of
both.

Only tensors are counted. A device also holds the context of its driver, buffers of the collective library and memory
that its allocator cannot reuse because of fragmentation; see `NOT_COUNTED`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.contract.schema.stage_keys import HasDocumentMask
from llmsuite.contract.specs import StageProfile
from llmsuite.models.block_quant import DEQUANTISE_BYTES
from llmsuite.models.head import EMBEDDINGS
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.shape_spec import Latent, MoE, ShapeSpec
from llmsuite.models.targets import HEAD
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import UPDATE_BYTES, UPDATE_CHUNK
from llmsuite.parallel.program.lengths import longest_row
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.timeline import orders, peak_held
from llmsuite.parallel.zero3_units import gather_units, layer_ahead
from llmsuite.planning import activations
from llmsuite.planning.activations import ActivationSettings, MicroBatch
from llmsuite.planning.head import head_kept_bytes, temporaries
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes, ranks
from llmsuite.planning.lora_ga import lora_ga_bytes
from llmsuite.planning.programs import memory_of_steps
from llmsuite.planning.rollouts import cache_bytes, decoder_bytes, reference_bytes, reward_bytes
from llmsuite.planning.teacher import teacher_bytes
from llmsuite.recipe.critic import critic_plans
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan

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
    """Float32 masters, and the shards of parameters that the optimizer updates."""
    moments: float
    gradients: float
    """Gradients after the last micro-batch."""
    activations: float
    """Peak of the activations kept for backward passes."""
    held: float
    """Peak of activations and gradients together, between two passes: the first micro-batches are in flight before
    there are gradients."""
    buffers: float
    """The largest set of temporaries: of a layer, of the logits, or of a gathered parameter."""
    update: float
    """Memory of the optimizer step in addition to parameters, masters and moments."""
    host: float
    """Host memory that `offload_optimizer` uses."""
    sums: float = 0.0
    """Sums of gradients that step programs keep from step to step."""
    decoder: float = 0.0
    """Weights for a rollout, while there are no activations and gradients."""
    reward: float = 0.0
    """Weights of a reward model, which also live from step to step."""
    reference: float = 0.0
    """Frozen weights of a reference model, which also live from step to step."""
    teacher: float = 0.0
    """Frozen weights of a teacher, which also live from step to step."""
    cache: float = 0.0
    """KV cache of a rollout, in addition to `decoder`."""
    critic: float = 0.0
    """Parameters, masters and moments of the critic, which also live from step to step."""
    rotary_tables: float = 0.0
    """Cos and sin of the positions, which also live from step to step; a critic and a reference read them too."""
    lora_ga_init: float = 0.0
    """Gradients that initialise adapters (LoRA-GA), before the first step, in addition to the memory of its passes."""
    critic_peak: float = 0.0
    """Peak of the critic's passes, which follow those of the model, and of both updates."""

    @property
    def between_steps(self) -> float:
        kept = self.parameters + self.masters + self.moments + self.sums
        return kept + self.reward + self.reference + self.teacher + self.critic + self.rotary_tables

    @property
    def peak(self) -> float:
        """Peak memory, in a rollout, in the passes or in the update."""
        passes = self.held + self.buffers + self.lora_ga_init
        return self.between_steps + max(passes, self.update, self.decoder + self.cache, self.critic_peak)


def activation_settings(layout: Layout, profile: StageProfile) -> ActivationSettings:
    """The settings of a run that decide which activations are kept; `profile` is that of its stage."""
    model_plan = layout.model_plan
    parallel_plan = layout.parallel_plan
    engine = parallel_plan.engine
    backend = parallel_plan.device.factory()
    lora = model_plan.lora
    tp = parallel_plan.degrees.tp
    fused = backend.fused(engine.precision)
    fused_in_layers = fused
    if tp > 1 and engine.compiles_layers:
        fused_in_layers = fused - backend.operations_of_local_shards
    keeps_inputs: frozenset[str] = frozenset()
    if lora.adapter_method.keeps_input and not lora.dropout:
        keeps_inputs = layout.adapted
    if layout.trains_head:
        keeps_inputs |= {HEAD}
    embedding_width = None
    if layout.adapts_embedding:
        embedding_width = _adapter_width(layout, layout.shard_plan.embedding)
    elif layout.trains_embedding and model_plan.is_frozen:
        embedding_width = 0.0
    experts = frozenset(name for name in layout.adapted if layout.shard_plan.is_expert(f"{name}.weight"))
    rounds_activations = "rounded_output_matmul" in fused and layout.has_plain_linears
    rounds_attention = (
        rounds_activations and {"attention", "round_attention_input"} <= fused and not model_plan.prefix.tokens
    )
    rows_again = engine.compiles_steps and parallel_plan.degrees.pp == 1 and not model_plan.is_frozen
    return ActivationSettings(
        num_bytes=element_bytes(parallel_plan),
        tp=tp,
        ep=parallel_plan.degrees.ep,
        sequence_parallel=parallel_plan.section.sequence_parallel,
        recompute=engine.recompute,
        every=engine.recompute_every,
        loss_chunk=engine.loss_chunk_tokens,
        fused=fused_in_layers,
        fused_outside=fused,
        has_rotary_tables=not engine.compiles_steps,
        document_mask_bytes=backend.mask_bytes(engine.precision),
        attention_keeps_output=backend.keeps_attention_output(engine.precision),
        is_frozen=model_plan.is_frozen,
        adapter_rank=lora.rank,
        adapted=layout.adapted,
        adapter_widths={name: _adapter_width(layout, name) for name in layout.adapted},
        adapted_experts=experts,
        every_expert_row=engine.compiles_steps,
        embedding_width=embedding_width,
        keeps_expert_rows=not rows_again and (lora.base_format is None or bool(experts)),
        unreached=layout.unreached,
        edited=dict.fromkeys(layout.intervened, model_plan.reft.rank or 0),
        prefix=model_plan.prefix.tokens or 0,
        prefix_network=model_plan.prefix_network_size or 0,
        rounded={name: _local_sizes(layout, name) for name in layout.rounded},
        entropy=profile.entropy,
        compares=profile.teacher is not None,
        compares_nll=profile.teacher is not None and profile.teacher.with_nll,
        rounds_inputs=model_plan.qat.activation_bits is not None,
        keeps_trained_only=layout.uses_device_matmul and model_plan.is_frozen,
        input_bytes=2 if layout.fuses_projections and not (layout.adapted and tp > 1) else None,
        keeps_inputs=keeps_inputs,
        expands_sum_gradients=tp > 1 and not engine.compiles_steps,
        inner_bytes=2 if rounds_activations else None,
        head_bytes=2 if rounds_attention else None,
    )


def _local_sizes(layout: Layout, module: str) -> tuple[int, int]:
    """Inputs and outputs of a rank's slice of a matrix."""
    name = f"{module}.weight"
    tp = layout.parallel_plan.degrees.tp
    inputs, outputs = layout.shapes[name][-2:]
    if layout.shard_plan.is_expert(name):
        return inputs, outputs
    dim = layout.shard_plan.dim(name)
    if dim == 0:
        return inputs // tp, outputs
    if dim == 1:
        return inputs, outputs // tp
    return inputs, outputs


def _adapter_width(layout: Layout, module: str) -> float:
    """Elements that an adapter keeps of each token (`ActivationSettings.adapter_widths`): those of its method; with
    dropout also the masked inputs, and their mask of one byte each."""
    lora = layout.model_plan.lora
    shard_plan = layout.shard_plan
    dropped = 0.0
    if lora.dropout and module != shard_plan.embedding:
        dropped = _local_sizes(layout, module)[0] * (1 + 1 / element_bytes(layout.parallel_plan))
    is_scattered = layout.parallel_plan.section.sequence_parallel and shard_plan.is_tp_region(module.rpartition(".")[0])
    num_outputs = float(_local_sizes(layout, module)[1])
    if is_scattered and shard_plan.dim(f"{module}.weight") == 0:
        num_outputs /= layout.parallel_plan.degrees.tp
    return dropped + lora.adapter_method.kept_width(lora.rank or 0, num_outputs, layout.uses_device_matmul)


def full_micro_batch(
    model_plan: ModelPlan, data_plan: DataPlan, parallel_plan: ParallelPlan, train_plan: TrainPlan
) -> MicroBatch:
    """A micro-batch without padding in which every position is supervised: the largest that a run can have."""
    train = train_plan.section
    length = longest_row(data_plan.section.longest_sample, parallel_plan.length_multiple)
    rows = train.micro_batch_size * train_plan.rows_per_sample
    if train.micro_batch_tokens is not None:
        rows = max(1, train.micro_batch_tokens // length)
    supervised = rows if model_plan.is_scored else rows * length
    if num_mtp_layers(model_plan.config):
        supervised += rows * (length - 1)
    own = train_plan.stage_section
    documents = data_plan.section.packing != "none" or (isinstance(own, HasDocumentMask) and own.document_mask)
    return MicroBatch(rows, length, supervised, documents, needs_token_metadata(model_plan))


def needs_token_metadata(model_plan: ModelPlan) -> bool:
    """True where batches have token metadata: marks of padding for the gates of experts and for observers of quantised
    inputs, values of all tokens for dropout and for interventions."""
    gates = bool(model_plan.shard_plan.gates)
    has_observers = model_plan.qat.activation_bits is not None
    return gates or has_observers or model_plan.lora.dropout > 0 or model_plan.reft.rank is not None


def memory(
    layout: Layout,
    train_plan: TrainPlan,
    max_length: int,
    shape_spec: ShapeSpec,
    batches: Sequence[MicroBatch],
    meshes: Sequence[Mesh] | None = None,
) -> list[StageMemory]:
    """Memory of the fullest rank of each pipeline stage, or of the ranks in `meshes`.

    Args:
        layout: of the run.
        train_plan: of the run.
        max_length: `data.max_length`, the length of generated sequences.
        shape_spec: of its model.
        batches: the micro-batches of a rank, in their order.
        meshes: with the coordinates of the ranks.
    """
    plan = layout.parallel_plan
    pp = plan.degrees.pp
    schedules = orders(plan.schedule, pp, len(batches), plan.num_chunks if pp > 1 else 1)
    meshes = ranks(plan.degrees) if meshes is None else meshes

    def of_ranks(layout: Layout, train_plan: TrainPlan) -> list[StageMemory]:
        settings = activation_settings(layout, train_plan.profile)
        found = []
        for mesh in meshes:
            schedule = schedules[mesh.coordinate["pp"]]
            found.append(_memory_of_rank(layout, train_plan, max_length, shape_spec, mesh, batches, schedule, settings))
        return found

    found = of_ranks(layout, train_plan)
    critic = critic_plans(layout.model_plan, plan, train_plan)
    if critic is None:
        return found
    critics = of_ranks(Layout(critic.model, critic.parallel), critic.train)
    return [_with_critic(own, critic) for own, critic in zip(found, critics)]


def _with_critic(own: StageMemory, critic: StageMemory) -> StageMemory:
    """Memory of a rank that also has a critic. The critic's passes start when the model has its gradients, and updates
    start when both have theirs."""
    passes = own.gradients + critic.held + critic.buffers
    return dataclasses.replace(
        own,
        critic=critic.parameters + critic.masters + critic.moments,
        critic_peak=max(passes, own.update + critic.gradients, critic.update),
        host=own.host + critic.host,
    )


def _memory_of_rank(
    layout: Layout,
    train_plan: TrainPlan,
    max_length: int,
    shape_spec: ShapeSpec,
    mesh: Mesh,
    batches: Sequence[MicroBatch],
    schedule: Sequence[Action],
    settings: ActivationSettings,
) -> StageMemory:
    plan = layout.parallel_plan
    train = train_plan.section
    stage = mesh.coordinate["pp"]
    held = layout.parameters(mesh)
    backend = plan.device.factory()
    parts = layout.parts_of(stage)
    gradients: list[float] = []
    kept: dict[tuple[int, MicroBatch], float] = {}
    for part in parts:
        inside = [h for h in held if h.part == part]
        gradients.append(float(sum(h.gradient_bytes for h in inside)))
        kept_by_program = _kept_by_programs(layout, shape_spec, inside)
        for batch in set(batches):
            kept[part, batch] = kept_by_part(layout, shape_spec, part, batch, settings) + kept_by_program

    def kept_by_pass(action: Action) -> float:
        return kept[parts[action.chunk], batches[action.micro_batch]]

    largest = max(batches, key=lambda b: b.rows * b.length**2)
    of_first_part = kept[0, largest] if 0 in parts else 0.0
    buffers = _buffers(layout, shape_spec, stage, held, largest, settings, of_first_part)
    overlaps = backend.overlaps_communication
    buffers += max(_gathered(layout, held, part, overlaps) for part in parts)
    buffers += _in_buckets(layout.buckets(mesh), overlaps, len(batches) > 2)
    masters = float(sum(h.master_bytes for h in held))
    moments = float(sum(h.moment_bytes(train) for h in held))
    lengths = [batch.length for batch in batches]
    if train_plan.samples_in_training_processes and mesh.loads_data:
        lengths.append(max_length)
    host = 0.0
    offloads = plan.engine.offload_optimizer and backend.can_offload
    if offloads:
        host = masters + moments
        masters = moments = 0.0
    found = StageMemory(
        stage=stage,
        num_parameters=sum(h.num_values for h in held),
        parameters=float(sum(h.parameter_bytes for h in held)),
        masters=masters,
        moments=moments,
        gradients=float(sum(h.gradient_bytes for h in held)),
        activations=peak_held(schedule, kept_by_pass),
        held=peak_held(schedule, kept_by_pass, gradients),
        buffers=buffers,
        update=_update_bytes(held, train, offloads),
        host=host,
        decoder=decoder_bytes(layout, train_plan, shape_spec, mesh),
        reward=reward_bytes(plan, train_plan, mesh),
        reference=reference_bytes(train_plan, held),
        teacher=teacher_bytes(layout, train_plan, mesh),
        cache=cache_bytes(plan, train_plan, max_length, shape_spec, mesh),
        lora_ga_init=lora_ga_bytes(layout, held, largest.tokens),
        rotary_tables=activations.rotary_tables(shape_spec, lengths, settings),
    )
    if plan.engine.compiles_steps:
        return dataclasses.replace(found, **memory_of_steps(found.activations, held, len(batches)))
    return found


def _update_bytes(held: Sequence[LocalParameter], train: TrainSection, offloads: bool) -> float:
    """Bytes of the optimizer step. It handles one gradient at a time: each is copied, then freed."""
    gradients = float(sum(h.gradient_bytes for h in held))
    if not train.master_weights:
        largest = max((h.num_owned for h in held if h.has_gradient), default=0)
        scaled = 2 * 2 * largest  # its rounded parts, and these joined
        updated = UPDATE_BYTES * min(largest, UPDATE_CHUNK)
        gathered = max((2 * h.num_bytes * h.shard_size * h.num_shards for h in held if h.num_shards > 1), default=0)
        return gradients + max(scaled, updated, gathered)
    copied = sum(4 * h.num_owned for h in held if h.has_gradient)
    largest = max((h.size for h in held), default=0)
    gathered = max((2 * h.num_bytes * h.shard_size * h.num_shards for h in held if h.num_shards > 1), default=0)
    update = max(gradients + 4 * largest, copied + gathered)
    if offloads:
        update += max((h.master_bytes + h.moment_bytes(train) for h in held), default=0)
    return float(update)


def kept_by_part(
    layout: Layout, shape_spec: ShapeSpec, part: int, batch: MicroBatch, settings: ActivationSettings
) -> float:
    """Bytes of activations that a micro-batch keeps in a part of the model until its backward pass."""
    last = len(layout.bounds) - 2
    kept = sum(activations.kept_by_layer(shape_spec, i, batch, settings) for i in layout.layers_of(part))
    # an MTP layer runs separately, with a mask and tables of its own
    times = len({shape_spec.layers[i].is_mtp for i in layout.layers_of(part)})
    kept += times * activations.kept_for_all_layers(shape_spec, batch, settings)
    if part == 0:
        kept += activations.embedding_kept_bytes(shape_spec, batch, settings)
    else:  # the received activations
        kept += activations.hidden_state_bytes(shape_spec.hidden, batch, settings)
    if part == last:
        kept += head_kept_bytes(shape_spec, batch, settings, layout.model_plan.is_scored)
    return kept


def _kept_by_programs(layout: Layout, shape_spec: ShapeSpec, held: Iterable[LocalParameter]) -> float:
    """Gathered parameters (sharding stage 3) that a micro-batch keeps under `to_static`.

    A program keeps its inputs until its backward pass, so freeing a gathered parameter returns memory only where the
    layer is recomputed.
    """
    engine = layout.parallel_plan.engine
    if not engine.compiles_layers:
        return 0.0
    kept = 0.0
    for h in held:
        if h.layer is None or engine.recomputes_layer(h.layer):
            continue
        if h.is_stored_sharded and shape_spec.layers[h.layer].compiles(h.name):
            kept += h.size * h.num_bytes
    return kept


def _buffers(
    layout: Layout,
    shape_spec: ShapeSpec,
    stage: int,
    held: Sequence[LocalParameter],
    batch: MicroBatch,
    settings: ActivationSettings,
    of_first_part: float,
) -> float:
    """The largest set of temporaries of a pass, besides the activations it keeps.

    A backward pass frees memory as it goes: the head's before the last layer, that of its MLP before its attention, and
    `of_first_part`, what the first part of the model keeps, before the gradient of the embedding is made.
    """
    top = layout.bounds[max(layout.parts_of(stage)) + 1] - 1
    head_kept = head = 0.0
    is_last = stage == layout.parallel_plan.degrees.pp - 1
    scores_only = layout.model_plan.is_scored
    if is_last:
        head_kept = head_kept_bytes(shape_spec, batch, settings, scores_only)
    largest_in_layer = _accumulated(h for h in held if h.layer is not None)
    outside = [h for h in held if h.layer is None]
    if is_last and not scores_only:
        head = temporaries(shape_spec, batch, settings, _largest(outside))
    # the gradient of the logits is freed before that of the head's matrix is added, and all of a pass before that of
    # the embedding
    head = max(head, _accumulated(h for h in outside if h.name not in EMBEDDINGS) - head_kept)
    embedding = _accumulated(h for h in outside if h.name in EMBEDDINGS) - of_first_part
    layer = shape_spec.layers[top]
    e = settings.num_bytes
    heads = layer.attention.heads / settings.tp
    scores = activations.scores_bytes(layer, batch, settings)
    if isinstance(layer.attention, Latent):
        width = layer.attention.width
    else:
        width = layer.attention.head_size
    mlp = layer.mlp
    size = mlp.width
    if isinstance(mlp, MoE):
        size = mlp.chosen * mlp.width + mlp.shared_width
    of_mlp = activations.mlp_kept(layer, shape_spec.hidden, batch, settings)
    residual = 2 * batch.tokens * shape_spec.hidden * e
    again = 0.0
    if settings.recompute == "full" and top % settings.every == 0:
        again = activations.inside_layer(shape_spec, top, batch, settings)
        again -= activations.kept_by_layer(shape_spec, top, batch, settings)
    in_mlp = again + 2 * batch.tokens * size * e / settings.tp + residual + largest_in_layer - head_kept
    if settings.recompute == "selective":
        again += scores
    in_attention = again + 2 * scores + 3 * batch.tokens * heads * width * e + residual - of_mlp - head_kept
    forward = activations.mask_bytes(batch, activations.settings_of(layer, settings)) + scores
    if settings.recompute == "none":
        forward -= of_mlp + head_kept
    # of a stack, one matrix at a time
    sizes = (h.num_values / (h.local_shape[0] if h.is_expert else 1) for h in held if h.is_codes)
    dequantised = DEQUANTISE_BYTES * max(sizes, default=0.0)
    return max(head, embedding, in_mlp, in_attention, forward, 0.0) + dequantised


def _in_buckets(buckets: Iterable[Sequence[LocalParameter]], overlaps: bool, adds_up: bool) -> float:
    """Bytes of the largest bucket of gradients, in addition to the gradients copied into it.

    Gradients that are reduced in each backward pass wait unsharded until their bucket is full. With `overlaps` a bucket
    that is sent during the passes is freed when the next one is ready, and so is this rank's part of its sum. From the
    third micro-batch on (`adds_up`) that part is not yet the one that earlier ones are added up in. A gradient alone in
    its bucket is not copied.
    """
    most = 0.0
    for bucket in buckets:
        is_sent_in_passes = bucket[0].reduces_each_pass
        times = int(overlaps and is_sent_in_passes)
        if len(bucket) > 1:
            times += 1 + is_sent_in_passes
        size = times * sum(held.sum_size for held in bucket)
        if overlaps and is_sent_in_passes and adds_up:
            size += sum(held.shard_size for held in bucket)
        most = max(most, float(bucket[0].gradient_width * size))
    return most


def _largest(held: Iterable[LocalParameter]) -> float:
    """Bytes of the largest gradient: that of a micro-batch lives in addition to the sum over earlier ones."""
    return max((h.size * h.num_bytes for h in held if h.has_gradient), default=0)


def _accumulated(held: Iterable[LocalParameter]) -> float:
    """Bytes of the largest gradient of a micro-batch with the float32 copy that is added to the sum over earlier ones
    (`sharding.ParameterShard`), where the parameter has a master."""
    return max((h.size * (h.num_bytes + 4 * h.has_master) for h in held if h.has_gradient), default=0)


def _gathered(layout: Layout, held: Sequence[LocalParameter], part: int, overlaps: bool) -> float:
    """Bytes that sharding stage 3 gathers together in a part of the model: those of a module, and where the device
    overlaps both, of the layer that arrives while it computes."""
    inside = [h for h in held if h.part == part]
    sizes = {h.name: float(h.size * h.num_bytes) for h in inside if h.is_stored_sharded}
    units = gather_units(layout.shard_plan, [h.name for h in inside], layout.tied)
    most = 0.0
    for i, unit in enumerate(units):
        ahead = layer_ahead(units, i) if overlaps else None
        names = (*unit.parameters, *ahead.parameters) if ahead else unit.parameters
        most = max(most, sum(sizes.get(name, 0.0) for name in names))
    return most
