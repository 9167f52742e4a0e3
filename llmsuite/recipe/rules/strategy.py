"""Rules of how a run is spread: devices, degrees, the model's shape, batches and precision."""

from __future__ import annotations

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation


def _no_grid(asked: RuleContext) -> Violation:
    p = asked.recipe.parallel
    if asked.num_devices % asked.fixed:
        yield (
            "launch.num_devices",
            f"{asked.num_devices} devices cannot hold tensor {p.tensor_parallel_degree} x pipeline "
            f"{p.pipeline_parallel_degree} x sharding {p.sharding_parallel_degree} = {asked.fixed} ranks; "
            f"use a multiple of {asked.fixed}",
        )


def _uneven_cut(asked: RuleContext) -> Violation:
    if asked.config is not None:
        for message in asked.shard_plan.problems(asked.config, asked.recipe.parallel.tensor_parallel_degree):
            yield "parallel.tensor_parallel_degree", message


def _no_table(asked: RuleContext) -> Violation:
    parallel = asked.recipe.parallel
    if asked.shard_plan.layers:
        return
    if (pp := parallel.pipeline_parallel_degree) > 1:
        yield "parallel.pipeline_parallel_degree", f"is {pp}; this family has no table of what a pipeline cuts"
    if parallel.sharding == "stage3":
        yield "parallel.sharding", "is stage3; this family has no table of the modules to gather"
    if asked.recipe.engine.mode == "to_static":
        yield "engine.mode", "is to_static; this family has no table of the layers to compile"
    if (kind := asked.recipe.engine.recompute) != "none":
        yield "engine.recompute", f"is {kind}; this family has no table of the layers to compute again"


def _empty_part(asked: RuleContext) -> Violation:
    if asked.config is None or not asked.shard_plan.layers:
        return
    pp, chunks = asked.recipe.parallel.pipeline_parallel_degree, asked.recipe.parallel.num_chunks
    layers = asked.config.num_hidden_layers
    if pp > layers:
        yield "parallel.pipeline_parallel_degree", f"is {pp}; the model has {layers} layers to cut"
    elif pp * chunks > layers:
        message = f"is {chunks}: {pp} pipeline stages have {pp * chunks} chunks then, and the model {layers} layers"
        yield "parallel.virtual_pipeline_degree", message


def _no_cut(asked: RuleContext) -> Violation:
    parallel = asked.recipe.parallel
    pp, chunks, cut = parallel.pipeline_parallel_degree, parallel.num_chunks, parallel.pipeline_cut
    if asked.config is None or isinstance(cut, str) or pp * chunks > asked.config.num_hidden_layers:
        return
    if len(cut) != pp * chunks - 1:
        parts = f"{pp} pipeline stages of {chunks} chunks are {pp * chunks} parts"
        yield "parallel.pipeline_cut", f"names {len(cut)} layers; {parts}, which {pp * chunks - 1} layers begin"
    elif cut[-1] >= asked.config.num_hidden_layers:
        last = asked.config.num_hidden_layers - 1
        yield "parallel.pipeline_cut", f"names layer {cut[-1]}; the model has layers 0 to {last}"


def _nothing_to_shard(asked: RuleContext) -> Violation:
    sharding = asked.recipe.parallel.sharding
    if sharding != "none" and asked.degrees.num_data_ranks == 1 and asked.num_devices % asked.fixed == 0:
        message = f"is {sharding}, but there is one data rank ({asked.degrees}): nothing to cut over"
        yield "parallel.sharding", message


def _no_experts(asked: RuleContext) -> Violation:
    if (ep := asked.recipe.parallel.expert_parallel_degree) > 1 and not asked.shard_plan.experts:
        yield "parallel.expert_parallel_degree", f"is {ep}; this family has no routed experts; remove it"


def _uneven_experts(asked: RuleContext) -> Violation:
    d, key = asked.degrees, "parallel.expert_parallel_degree"
    if d.ep == 1 or not asked.shard_plan.experts or asked.num_devices % asked.fixed:
        return
    if d.num_data_ranks % d.ep:
        yield key, f"is {d.ep}, which does not divide the data ranks = {d.num_data_ranks}"
    elif d.sharding % d.ep and d.ep % d.sharding:
        yield key, f"is {d.ep}, which neither divides the ranks of the sharding axis = {d.sharding} nor is a multiple"
    if asked.config is not None and (count := getattr(asked.config, asked.shard_plan.num_experts)) % (d.ep * d.tp):
        of_tp = f" x tensor parallel degree {d.tp} = {d.ep * d.tp}" if d.tp > 1 else ""
        yield key, f"is {d.ep}{of_tp}, which does not divide {asked.shard_plan.num_experts} = {count}"


def _no_balance(asked: RuleContext) -> Violation:
    train = asked.recipe.train
    for key in ("expert_balance_loss", "expert_bias_rate"):
        if getattr(train, key) and not asked.shard_plan.gates:
            yield f"train.{key}", f"is {getattr(train, key)}; this family has no routed experts; set it to 0"
    if not train.expert_bias_rate or not asked.shard_plan.gates or asked.config is None:
        return
    if not asked.config.has_gate_bias:
        yield "train.expert_bias_rate", "has no effect: experts of this shape are chosen without a bias; set it to 0"
    elif asked.recipe.lora.rank is not None:
        yield "train.expert_bias_rate", "moves a bias of the model, of which adapters change nothing; set it to 0"


def _uneven_batch(asked: RuleContext) -> Violation:
    train, ranks = asked.recipe.train, asked.degrees.num_data_ranks
    if train.micro_batch_tokens is not None:
        if train.global_batch_size % ranks:
            yield (
                "train.global_batch_size",
                f"is {train.global_batch_size}; it has to be a multiple of {ranks} data ranks",
            )
        return
    per_pass = train.micro_batch_size * ranks
    if train.global_batch_size % per_pass and asked.num_devices % asked.fixed == 0:
        yield (
            "train.global_batch_size",
            f"is {train.global_batch_size}; it has to be a multiple of micro_batch_size {train.micro_batch_size} x "
            f"data ranks {ranks} = {per_pass}",
        )


def _too_long(asked: RuleContext) -> Violation:
    longest = asked.recipe.data.max_length
    if asked.config is not None and longest > asked.config.max_position_embeddings:
        positions = asked.config.max_position_embeddings
        yield "data.max_length", f"is {longest}; the model was made for at most {positions} positions"


def _no_such_precision(asked: RuleContext) -> Violation:
    precision = asked.recipe.engine.precision
    if asked.precisions is not None and precision not in asked.precisions:
        known = ", ".join(asked.precisions)
        yield "engine.precision", f"{precision} does not work on {asked.recipe.device}; it has {known}"


STRATEGY_RULES = (
    Rule(
        "degrees whose product does not divide the devices",
        "no grid",
        ("--parallel.pipeline_parallel_degree=3",),
        _no_grid,
    ),
    Rule(
        "a tensor parallel degree that does not divide heads, key-value heads, vocabulary, MLP width or experts",
        "a matrix would be cut unevenly",
        ("--parallel.tensor_parallel_degree=16", "--launch.num_devices=64"),
        _uneven_cut,
    ),
    Rule(
        "a pipeline, stage 3, recompute or `to_static` with a family that has no table of cuts",
        "nobody says what its layers are",
        (),
        _no_table,
    ),
    Rule(
        "more pipeline stages, or chunks of all of them, than layers",
        "a part would be empty",
        ("--parallel.pipeline_parallel_degree=64", "--launch.num_devices=256"),
        _empty_part,
    ),
    Rule(
        "a list in `pipeline_cut` with more or fewer layers than parts begin, or with one that is not there",
        "no cut",
        ("--parallel.pipeline_cut=[8,16]",),
        _no_cut,
    ),
    Rule(
        "sharding with one data rank",
        "nothing to cut over",
        ("--launch.num_devices=4",),
        _nothing_to_shard,
    ),
    Rule(
        "expert parallel with a family that has no routed experts",
        "nothing to deal out",
        ("--parallel.expert_parallel_degree=2",),
        _no_experts,
    ),
    Rule(
        "an expert parallel degree that does not divide the data ranks, or, with tensor parallel, the experts",
        "ranks would have different numbers of experts, or share them with nobody",
        (
            "--model.family=deepseek",
            "--model.preset=deepseek-v2-lite",
            "--parallel.expert_parallel_degree=4",
        ),
        _uneven_experts,
    ),
    Rule(
        "keys that balance experts with a family that has none, or none with a bias, or with adapters",
        "nothing to balance",
        ("--train.expert_bias_rate=0.001",),
        _no_balance,
    ),
    Rule(
        "a batch that is no multiple of micro-batch x data ranks",
        "ranks would see different numbers of samples",
        ("--train.global_batch_size=63",),
        _uneven_batch,
    ),
    Rule(
        "sequences longer than the model's positions",
        "it was not made for them",
        ("--data.max_length=200000",),
        _too_long,
    ),
    Rule(
        "a precision that the device does not have",
        "on cpu, Paddle's kernels are float32",
        ("--device=cpu",),
        _no_such_precision,
    ),
)
"""Between sections, the model's shape and the device."""

GENERAL_RULES = tuple(rule for rule in STRATEGY_RULES if rule.check in (_no_grid, _uneven_cut, _no_such_precision))
"""Those for a stage that does not train, too."""
