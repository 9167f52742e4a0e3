"""Activation memory: the bytes that a forward pass keeps for its backward pass.

Counts the tensors that the operations of `models.blocks`, `models.experts` and `devices.ops` save: matrix products save
their factors, norms their scaled input, softmax its output; sums, copies and casts save nothing. With plain operations
a run on CPU holds exactly this: tests compare it with the allocator's own count. For fused kernels the tensors that
they save are counted. Temporaries of a running pass are not counted here: see `memory`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from llmsuite.models.shape_spec import GatedDelta, GatedMLP, GroupedQuery, Latent, LayerSpec, MoE, ShapeSpec

INDEX_BYTES = 8
"""Bytes of a token id or a position: int64."""


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The shape of one micro-batch on a rank."""

    rows: int
    length: int
    supervised: int
    """Positions whose logits or scores are computed."""
    documents: bool = False
    """True where rows hold several documents, whose starts the layers get."""
    has_token_metadata: bool = False
    """True where padding is marked, for the gates of experts or for observers of quantised inputs."""
    expert_rows: float | None = None
    """Rows that reach the experts of a rank in each layer, if known; None to assume an even load."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclasses.dataclass(frozen=True)
class ActivationSettings:
    """The part of a strategy that decides which activations are kept."""

    num_bytes: int
    """Bytes of an element of an activation."""
    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    every: int = 1
    fused: frozenset[str] = frozenset()
    """Operations of `devices.ops.Ops` that run as one kernel inside the decoder layers."""
    fused_outside: frozenset[str] = frozenset()
    """Operations that run as one kernel before the first and after the last decoder layer."""
    has_rotary_tables: bool = False
    """True where the tables of cos and sin stay from pass to pass: in all passes that are no programs of full steps."""
    document_mask_bytes: int = 4
    """Bytes that fused attention keeps of a token to know its document."""
    attention_keeps_output: bool = False
    """True where fused attention keeps its output for the backward pass."""
    is_frozen: bool = False
    """True where the model itself is not trained."""
    adapter_rank: int | None = None
    adapted: frozenset[str] = frozenset()
    """Full names of the modules that have adapters."""
    adapter_widths: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Elements that an adapter keeps of each token, or of each row of experts, by module."""
    adapted_experts: frozenset[str] = frozenset()
    """Modules of `adapted` that are routed experts: their adapters get the rows of experts."""
    embedding_width: float | None = None
    """Elements that the adapter of the embedding keeps of each token; 0 where the embedding itself is trained next to
    adapters, None where it is frozen with them, or all is trained."""
    every_expert_row: bool = False
    """True where a rank has a row for each choice, also for experts of other ranks, with expert parallel of the tokens
    of all data ranks: in step programs."""
    keeps_expert_rows: bool = True
    """True where the inputs of the experts' matrices are kept: for quantised matrices only for adapters; step programs
    recompute them."""
    edited: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Rank of the intervention after each layer that has one, by number."""
    unreached: frozenset[int] = frozenset()
    """Numbers of the layers that no backward pass reaches: they keep nothing except for an intervention after them."""
    prefix_network: int = 0
    """Width of the network that makes a prefix; 0 without one."""
    prefix: int = 0
    """Tokens of the prefix before every row; attention has queries, keys and values of them."""
    rounded: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """(inputs, outputs) on a rank of every module whose weight is rounded (quantisation-aware training), by name."""
    rounds_inputs: bool = False
    """True where the inputs of the modules in `rounded` are rounded too."""
    entropy: bool = False
    """True where the loss needs the entropy of tokens: no kernel computes it in place."""
    compares: bool = False
    """True where the loss is a divergence from a teacher."""
    compares_nll: bool = False
    """True where it also has the negative log-probabilities of targets."""
    keeps_trained_only: bool = False
    """True where the model is frozen, and products keep an input only for the gradient of a matrix
    (`models.linear_ops`)."""
    input_bytes: int | None = None
    """Bytes of an element that such a product keeps of its input; None for `num_bytes`."""
    keeps_inputs: frozenset[str] = frozenset()
    """Modules of `adapted` whose adapters keep the input of their matrix too, and a head that is trained itself."""
    expands_sum_gradients: bool = False
    """True where the gradient of a sum over a vocabulary that is cut is a tensor over all of it: so Paddle 3.3.1
    computes it in eager passes, by its rules of distributed tensors."""
    inner_bytes: int | None = None
    """Bytes of an element between the products of a gated MLP without biases; None for `num_bytes`."""
    loss_chunk: int | None = None
    """Number of tokens whose logits exist at a time; None for all of a micro-batch."""
    head_bytes: int | None = None
    """Bytes of an element of queries, keys, values and attention outputs, where there are no biases and norms of heads;
    None for `num_bytes`."""

    @property
    def token_shards(self) -> int:
        """Number of ranks that the tokens between attention and MLP are split over."""
        if self.sequence_parallel:
            return self.tp
        return 1

    @property
    def cast_bytes(self) -> int:
        """Bytes of an element of the float32 copy that a norm makes of its input; 0 where the input is float32."""
        if self.num_bytes < 4:
            return 4
        return 0


def kept_by_layer(shape_spec: ShapeSpec, number: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that a layer keeps, including its output, without its input."""
    between = hidden_state_bytes(shape_spec.hidden, batch, settings)
    if number in settings.unreached:
        if number in settings.edited:
            return between + _edit(shape_spec, number, batch, settings)
        return 0.0
    mtp_inputs = 0.0
    if shape_spec.layers[number].is_mtp:  # its inputs: no other layer keeps them
        mtp_inputs = 2 * between + INDEX_BYTES * batch.tokens
    if settings.recompute == "full" and number % settings.every == 0:
        return mtp_inputs or between  # the head reads only some tokens of its output, see `head.head_kept_bytes`
    return mtp_inputs + inside_layer(shape_spec, number, batch, settings)


def _edit(shape_spec: ShapeSpec, number: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that the intervention after a layer keeps: its input, and its products in the subspace, masked and not."""
    if number not in settings.edited:
        return 0.0
    return hidden_state_bytes(shape_spec.hidden, batch, settings) * (
        1 + 2 * settings.edited[number] / shape_spec.hidden
    )


def settings_of(layer: LayerSpec, settings: ActivationSettings) -> ActivationSettings:
    """The settings for a layer: no kernel computes attention with a cap of its scores, or with sinks."""
    if not layer.needs_scores:
        return settings
    without = frozenset({"attention"})
    return dataclasses.replace(settings, fused=settings.fused - without, fused_outside=settings.fused_outside - without)


def inside_layer(shape_spec: ShapeSpec, number: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that a layer keeps without recompute, or with recompute of its attention only ("selective")."""
    layer = shape_spec.layers[number]
    settings = settings_of(layer, settings)
    between = hidden_state_bytes(shape_spec.hidden, batch, settings)
    # in a layer with experts only attention and the norm before it are compiled
    of_mlp = settings
    if isinstance(layer.mlp, MoE):
        of_mlp = dataclasses.replace(settings, fused=settings.fused_outside)
    each = layer.num_norms / 2
    norms = sum(each * norm_kept(layer.norm, shape_spec.hidden, batch, how) for how in (settings, of_mlp))
    # of attention and MLP; gathered under sequence parallel
    inputs = sum(_input(shape_spec, number, region, batch, settings) for region in ("self_attn", "mlp"))
    if layer.norms == "after" and not settings.sequence_parallel:  # they are the residual stream itself
        inputs = 0.0
    if layer.norms == "parallel" and not settings.sequence_parallel:  # they are one tensor
        inputs = max(_input(shape_spec, number, region, batch, settings) for region in ("self_attn", "mlp"))
    kept = norms + inputs + attention_kept(layer, batch, settings) + mlp_kept(layer, shape_spec.hidden, batch, of_mlp)
    kept -= _inputs_of_last(layer, number, batch, settings)
    if layer.is_mtp:  # norms of both inputs and of the output; the joined inputs, and their product
        plain = dataclasses.replace(settings, fused=settings.fused_outside)
        kept += 3 * norm_kept(layer.norm, shape_spec.hidden, batch, plain) + 3 * between
    outputs = 2  # of attention and MLP: their sums with the residual
    if layer.norms in ("after", "both"):
        outputs = 4  # the norms after them take them too
    elif layer.norms == "parallel":
        outputs = 1  # no norm takes the sum with that of attention
    kept += outputs * between + _edit(shape_spec, number, batch, settings)
    return kept + _adapters(layer, number, batch, settings) + _rounded(layer, number, batch, settings)


def _input(shape_spec: ShapeSpec, number: int, region: str, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that the first products of attention or an MLP keep of their input."""
    if region == "mlp" and isinstance(shape_spec.layers[number].mlp, MoE):  # gates read it too
        return float(batch.tokens * shape_spec.hidden * settings.num_bytes)
    if settings.keeps_trained_only:
        inside = (name for name in settings.keeps_inputs if f".{number}.{region}." in name)
        if all(name.rpartition(".")[2] in _OWN_INPUT for name in inside):
            return 0.0
    return float(batch.tokens * shape_spec.hidden * (settings.input_bytes or settings.num_bytes))


def _inputs_of_last(layer: LayerSpec, number: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes of inputs of the last products of attention and MLP, counted with what makes them, that are not kept."""
    left = 0.0
    what = layer.attention
    e = settings.num_bytes
    if isinstance(what, Latent):
        left += what.heads * what.value * (e - _of_last(number, "self_attn.o_proj", e, settings))
        for name, width in (("q_b_proj", what.q_rank or 0), ("kv_b_proj", what.kv_rank)):  # every rank has them whole
            left += settings.tp * width * (e - _of_last(number, f"self_attn.{name}", e, settings))
    elif isinstance(what, GatedDelta):
        left += what.width * (e - _of_last(number, "self_attn.out_proj", e, settings))
    elif "attention" in settings.fused and not settings.attention_keeps_output:
        made = e
        if what.rounds:
            made = settings.head_bytes or e
        left += what.heads * what.head_size * (made - _of_last(number, "self_attn.o_proj", made, settings))
    if not isinstance(layer.mlp, MoE):
        made = e
        if isinstance(layer.mlp, GatedMLP) and layer.mlp.rounds:
            made = settings.inner_bytes or e
        left += layer.mlp.width * (made - _of_last(number, "mlp.down_proj", made, settings))
    return left * batch.tokens / settings.tp


def _of_last(number: int, module: str, made: int, settings: ActivationSettings) -> int:
    """Bytes of an element that a last product keeps of its input, which is produced with `made` bytes."""
    if settings.keeps_trained_only and not any(name.endswith(f".{number}.{module}") for name in settings.keeps_inputs):
        return 0
    return min(made, settings.input_bytes or made)


def hidden_state_bytes(hidden: float, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes of a hidden state between attention and MLP: sharded by tokens under sequence parallel."""
    return batch.tokens * hidden * settings.num_bytes / settings.token_shards


def norm_kept(kind: str, hidden: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that a norm keeps besides its input, which the residual holds, and its output, which is counted as the
    input of attention or MLP."""
    tokens = batch.tokens / settings.token_shards
    if kind in ("layer", "layer_gain"):
        statistics = 2 * 4
        if settings.is_frozen:  # the gain is outside then
            return tokens * (statistics + hidden * settings.num_bytes)
        return float(tokens * statistics)
    gain = _gain_bytes(kind, hidden)
    width = hidden * settings.cast_bytes + 4
    if "rms_norm" not in settings.fused:
        width += hidden * settings.num_bytes
    elif not gain:
        width = 4
    return gain + tokens * width


def _gain_bytes(kind: str, size: int) -> int:
    """Bytes of the gain of a norm where it is not the parameter itself, but 1 + weight in float32."""
    if kind == "offset_rms":
        return 4 * size
    return 0


def _normed_heads(size: float, heads: float, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that the norm of queries or keys keeps: its output, scaled and unscaled."""
    if "rms_norm" in settings.fused:
        return batch.tokens * (size * settings.num_bytes + heads * 4)
    return batch.tokens * (2 * size * settings.num_bytes + heads * 4 + size * settings.cast_bytes)


def attention_kept(layer: LayerSpec, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes kept between the input of attention and its output."""
    what = layer.attention
    e = settings.num_bytes
    tokens = batch.tokens
    heads = what.heads / settings.tp
    if isinstance(what, GatedDelta):
        return _delta_kept(what, batch, settings)
    scores = heads * batch.rows * (batch.length + settings.prefix) ** 2 * e
    again = settings.recompute == "selective"
    if isinstance(what, Latent):
        return _latent_kept(what, scores, batch, settings)
    size = what.head_size
    kv_heads = what.kv_heads / settings.tp
    if what.rounds:
        e = settings.head_bytes or e
    kept = 0.0
    if not again:
        kept += settings.prefix * settings.prefix_network * e  # what the network has inside
    if what.normed is not None:
        kept += 2 * _gain_bytes(layer.norm, size)
        for count in (heads, kv_heads):
            num_norms = count
            if what.normed == "whole":
                num_norms = 1
            kept += _normed_heads(count * size, num_norms, batch, settings)
    if what.rotary and "rotary" not in settings.fused:
        # both halves of queries and keys, unrotated
        kept += tokens * e * (heads + kv_heads) * (what.rotary_size or size)
    output = tokens * e * heads * size
    if what.gated:  # the sigmoids of gates, and their products with the output
        kept += 2 * output
    if again:
        return kept + tokens * e * (heads + 2 * kv_heads) * size + output
    extended = tokens + batch.rows * settings.prefix
    if "attention" in settings.fused:
        # the output of the text's own tokens is a view
        return kept + extended * e * (2 * heads + 2 * kv_heads) * size + heads * extended * 4
    if what.score_cap is not None:
        scores *= 2  # uncapped and capped
    if what.sinks:  # one more score of each query, and one more value of each row
        scores += heads * (extended + batch.rows * size) * e
    return kept + extended * e * 3 * heads * size + output + scores  # keys and values repeated for each query head


def _latent_kept(what: Latent, scores: float, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes kept between the input of latent attention and its output; `scores` are those of its scores."""
    e = settings.num_bytes
    tokens = batch.tokens
    heads = what.heads / settings.tp
    norms = _latent_norm(what.kv_rank, batch, settings)
    if what.q_rank is not None:
        norms += _latent_norm(what.q_rank, batch, settings)
    rotated = 0.0
    if "rotary" not in settings.fused:
        rotated = heads * what.rope + what.rope
    if settings.recompute == "selective":
        inside = heads * (2 * what.nope + what.rope + what.value) + what.rope
        return norms + tokens * e * (rotated + inside + heads * what.value)
    whole = 3
    sums = scores
    if "attention" in settings.fused:
        whole += settings.attention_keeps_output
        sums = heads * tokens * 4
    return norms + tokens * e * (rotated + heads * (whole * what.width + what.value)) + sums


def _delta_kept(what: GatedDelta, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes kept between the input of linear attention and its output. What is kept for a chunk is float32."""
    e = settings.num_bytes
    tokens = batch.tokens
    heads = what.heads / settings.tp
    keys = what.key_width / settings.tp
    values = what.width / settings.tp
    before = batch.rows * (what.taps - 1)
    # of each channel: projection, padded and convolved input, activation; of queries and keys also the unit vectors
    kept = e * (4 * tokens + before) * (2 * keys + values) + 4 * tokens * 2 * (keys + what.key_heads / settings.tp)
    # outputs: scaled, normed and gated, with gates and their activations
    outputs = 5 if "rms_norm" not in settings.fused else 4
    kept += e * tokens * outputs * values + 4 * (4 * tokens + 2) * heads
    if batch.documents:  # masked inputs of the convolutions, and their masks
        kept += e * (what.taps - 1) * tokens * (2 * keys + values + 3)
    repeated = 2 if what.group > 1 else 0
    if settings.recompute == "selective":
        return kept + 4 * tokens * (heads * (repeated * what.key_size + what.head_size) + heads)
    size = min(what.chunk, batch.length)
    chunks = -(-batch.length // size)
    inside = batch.rows * chunks * size
    padded = int(chunks * size != batch.length)
    each = (5 + repeated + padded) * what.key_size + (4 + padded) * what.head_size + 3 + padded + 8 * size
    kept += 4 * inside * heads * each
    if batch.documents:
        kept += 4 * inside * (heads + 1) * (size + 1)
    return kept + 4 * (batch.rows * chunks * heads * what.key_size * what.head_size + 2 * size**2)


def _latent_norm(width: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that the norm of a compressed query or key-value keeps: input, scaled input, output. It is replicated over
    tp."""
    if "rms_norm" in settings.fused:
        return batch.tokens * (2 * width * settings.num_bytes + 4)
    return batch.tokens * (3 * width * settings.num_bytes + 4 + width * settings.cast_bytes)


def mlp_kept(layer: LayerSpec, hidden: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes kept between the input of the MLP and its output."""
    what = layer.mlp
    e = settings.num_bytes
    tokens = batch.tokens
    times = 3  # gate, up, their product
    if "swiglu" not in settings.fused or (isinstance(what, GatedMLP) and what.activation != "silu"):
        times = 4  # without a kernel also the gate's activation
    inner = settings.inner_bytes or e
    if isinstance(what, GatedMLP):
        if not what.rounds:
            inner = e
        return tokens * inner * times * what.width / settings.tp
    if not isinstance(what, MoE):
        return tokens * e * 2 * what.width / settings.tp
    rows = _expert_rows(what, batch, settings)
    combined = float(tokens * what.chosen)
    if settings.every_expert_row:
        combined = rows
    if what.clamp is not None:
        times = 7  # gate and up, both cut; the sigmoid, its product with the gate, and that with up
    routed = rows * e * (hidden + times * what.width) + combined * e * hidden
    if not settings.keeps_expert_rows:
        routed -= rows * e * (hidden + what.width)
    shared = tokens * inner * times * what.shared_width / settings.tp
    # scores; for each choice its number, weight and place among the sorted rows
    gate = tokens * (2 * what.experts * 4 + what.chosen * (3 * INDEX_BYTES + 4))
    if what.normed:
        gate += tokens * (2 * what.chosen + 1 + (what.least_total is not None)) * 4
    if what.shared_gated:
        shared += tokens * (hidden + 1) * e  # both factors
    return routed + shared + gate


def _expert_rows(what: MoE, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Rows of a rank's experts: with an even load, a tensor parallel group has tokens x chosen experts in total."""
    if batch.expert_rows is not None:
        return batch.expert_rows
    if settings.every_expert_row:
        return batch.tokens * what.chosen * settings.ep
    return batch.tokens * what.chosen / settings.tp


def _adapters(layer: LayerSpec, number: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    if settings.adapter_rank is None:
        return 0.0
    inside = [name for name in settings.adapted if f".{number}." in name]
    experts = settings.adapted_experts.intersection(inside)
    kept = batch.tokens * sum(settings.adapter_widths[name] for name in inside if name not in experts)
    if isinstance(layer.mlp, MoE):
        kept += _expert_rows(layer.mlp, batch, settings) * sum(settings.adapter_widths[name] for name in experts)
    return kept * settings.num_bytes


_OWN_INPUT = frozenset(("o_proj", "out_proj", "down_proj", "q_b_proj", "kv_b_proj"))
"""Matrices whose input no other matrix reads."""


def _rounded(layer: LayerSpec, number: int, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that quantisation-aware training keeps in addition.

    A product keeps its rounded weight and its rounded input; the backward pass of the rounding keeps two more tensors
    of the size of the input. The unrounded input is freed unless another matrix reads it.
    """
    inside = {name: sizes for name, sizes in settings.rounded.items() if f".{number}." in name}
    extra = sum(inputs * outputs for inputs, outputs in inside.values()) * float(settings.num_bytes)
    if not settings.rounds_inputs:
        return extra
    sharing: dict[str, list[int]] = {}
    for name, (inputs, _) in inside.items():
        owner, _, word = name.rpartition(".")
        extra += 3.0 * batch.tokens * inputs * settings.num_bytes
        reader = owner
        if word in _OWN_INPUT:
            reader = name
        elif layer.norms == "parallel" and not settings.sequence_parallel:  # attention and MLP share it
            reader = owner.rpartition(".")[0]
        sharing.setdefault(reader, []).append(inputs)
    for name, widths in sharing.items():
        if layer.norms == "after" and name.endswith("self_attn"):
            continue  # it is the output of the layer before
        if len(widths) == _num_consumers(layer, name):
            extra -= batch.tokens * widths[0] * settings.num_bytes
    return extra


def _num_consumers(layer: LayerSpec, name: str) -> int:
    """Number of matrices that read an input: the input of one matrix, or the shared input of a module or a layer."""
    word = name.rpartition(".")[2]
    if word in _OWN_INPUT:
        return 1
    of_attention = 3
    if isinstance(layer.attention, Latent):
        of_attention = 2
    elif isinstance(layer.attention, GatedDelta):
        of_attention = layer.attention.num_projections
    of_mlp = 1
    if isinstance(layer.mlp, MoE):
        of_mlp = 3  # with the gate, which is not rounded
    elif isinstance(layer.mlp, GatedMLP):
        of_mlp = 2
    return {"self_attn": of_attention, "mlp": of_mlp}.get(word, of_attention + of_mlp)


def embedding_kept_bytes(shape_spec: ShapeSpec, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes kept before the first layer: the token ids and the input of the layer.

    When only adapters are trained, nothing here has a gradient: less is kept than `kept_by_layer` counts, unless the
    layer is recomputed.
    """
    if settings.embedding_width is not None:
        width = shape_spec.hidden + settings.embedding_width
        return batch.tokens * INDEX_BYTES + hidden_state_bytes(width, batch, settings)
    if settings.adapter_rank is not None and settings.recompute != "full":
        return -norm_kept(shape_spec.layers[0].norm, shape_spec.hidden, batch, settings)
    if settings.prefix and settings.recompute != "full":
        return -_without_gradient(shape_spec, batch, settings)
    positions = 0
    if shape_spec.learned_positions:
        positions = INDEX_BYTES * batch.length
    return batch.tokens * INDEX_BYTES + positions + hidden_state_bytes(shape_spec.hidden, batch, settings)


def _without_gradient(shape_spec: ShapeSpec, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that the first layer does not keep before its attention where only prefixes are trained."""
    layer = shape_spec.layers[0]
    tokens = batch.tokens
    e = settings.num_bytes
    assert isinstance(layer.attention, GroupedQuery), "a rule rejects prefixes for other attention"
    what = layer.attention
    heads = what.heads / settings.tp
    kv_heads = what.kv_heads / settings.tp
    kept = norm_kept(layer.norm, shape_spec.hidden, batch, settings)
    kept += _input(shape_spec, 0, "self_attn", batch, settings)
    if what.normed is not None:
        for count in (heads, kv_heads):
            kept += _normed_heads(count * what.head_size, count, batch, settings)
    if what.rotary and "rotary" not in settings.fused:
        kept += tokens * e * (heads + kv_heads) * what.head_size
    return kept


def kept_for_all_layers(shape_spec: ShapeSpec, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes that all layers share: the rotation, unless it is `rotary_tables`, and the attention mask where attention
    is recomputed."""
    settings = settings_of(shape_spec.layers[0], settings)
    outside = dataclasses.replace(settings, fused=settings.fused_outside)
    kept = 0.0
    if settings.recompute != "none":
        kept = len(shape_spec.attention_kinds) * mask_bytes(batch, outside)
    if (
        settings.recompute == "full"
        and batch.has_token_metadata
        and any(isinstance(layer.mlp, MoE) for layer in shape_spec.layers)
    ):
        kept += 4 * batch.tokens  # which tokens are real, for gates
    if batch.documents and "attention" in outside.fused:  # the bounds of each token's document
        extended = batch.tokens + batch.rows * settings.prefix
        kept += len({window for _, window in shape_spec.attention_kinds}) * extended * settings.document_mask_bytes
    elif "attention" in outside.fused:
        windows = (window for _, window in shape_spec.attention_kinds if window is not None)
        kept += sum(batch.length * settings.document_mask_bytes for window in windows if window < batch.length)
    num_kinds = len(shape_spec.attention_kinds)
    if batch.documents and shape_spec.has_states:  # the positions
        kept += INDEX_BYTES * batch.tokens
    if batch.documents:  # each token's row of the tables
        return kept + num_kinds * rotation_bytes(shape_spec, batch.tokens, settings)
    if settings.has_rotary_tables:
        return kept
    return kept + num_kinds * rotation_bytes(shape_spec, batch.length, settings)


def rotary_tables(shape_spec: ShapeSpec, lengths: Iterable[int], settings: ActivationSettings) -> float:
    """Bytes of the tables of cos and sin that stay from pass to pass (`models.rotation`), once sequences of these
    lengths have been seen, in their order."""
    if not settings.has_rotary_tables:
        return 0.0
    kept = 0
    for length in lengths:
        if length > kept:
            kept = max(length, 2 * kept)  # as `rotation._tables` grows
    num_rotations = len({rotation for rotation, _ in shape_spec.attention_kinds})
    return num_rotations * rotation_bytes(shape_spec, kept, settings)


def rotation_bytes(shape_spec: ShapeSpec, positions: int, settings: ActivationSettings) -> float:
    """Bytes of cos and sin for a number of positions, by one rotation; 0 where positions are learned."""
    if shape_spec.learned_positions:
        return 0.0
    attention = next(layer.attention for layer in shape_spec.layers if not isinstance(layer.attention, GatedDelta))
    if isinstance(attention, Latent):
        size = attention.rope
    else:
        size = attention.rotary_size or attention.head_size
    return positions * size * settings.num_bytes


def mask_bytes(batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes of the mask that plain attention adds to its scores."""
    if "attention" in settings.fused:
        return 0.0
    rows = 1
    if batch.documents:
        rows = batch.rows
    length = batch.length + settings.prefix
    return rows * length**2 * settings.num_bytes


def scores_bytes(layer: LayerSpec, batch: MicroBatch, settings: ActivationSettings) -> float:
    """Bytes of the attention scores of every pair of tokens: of linear attention, of those in a chunk."""
    heads = layer.attention.heads / settings.tp
    if isinstance(layer.attention, GatedDelta):
        return 4.0 * heads * batch.tokens * min(layer.attention.chunk, batch.length)
    length = batch.length + settings.prefix
    if "attention" in settings_of(layer, settings).fused:
        return 0.0
    return heads * batch.rows * length**2 * settings.num_bytes
