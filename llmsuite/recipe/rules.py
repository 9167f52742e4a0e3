"""What is refused before anything starts: every combination of keys that makes no run, with its reason and an example.

`llmsuite validate` asks these rules, and the table in docs/parallelism.md is made of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmsuite.models.shard_plan import ShardPlan

if TYPE_CHECKING:
    from llmsuite.plugins.hookspecs import StageSpec
    from llmsuite.recipe.resolve import Degrees
    from llmsuite.recipe.schema import EngineSection, ParallelSection, Recipe

Broken = Iterator[tuple[str, str]]
"""(key, message) of each key that breaks a rule."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination that is refused."""

    combination: str
    reason: str
    example: tuple[str, ...]
    """Overrides that make recipes/llama/dpo.json break the rule; none when no override does."""
    check: Callable[[Any], Broken]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the rules between sections look at."""

    recipe: Recipe
    degrees: Degrees
    config: Any
    """Shape of the model; None when that is wrong itself."""
    cuts: ShardPlan
    precisions: Sequence[str] | None
    """Those of the device; None when there is no such device."""
    stage: StageSpec
    """What the recipe runs."""

    @property
    def num_devices(self) -> int:
        return self.recipe.launch.num_devices * self.recipe.launch.nnodes

    @property
    def fixed(self) -> int:
        """Ranks whose number the recipe gives."""
        p = self.recipe.parallel
        return p.tensor_parallel_degree * p.pipeline_parallel_degree * p.sharding_parallel_degree


# between keys of the section `parallel`


def _sequence_parallel(parallel: ParallelSection) -> Broken:
    if parallel.sequence_parallel and parallel.tensor_parallel_degree == 1:
        yield "sequence_parallel", "needs tensor_parallel_degree above 1; set it to false"


def _interleaved(parallel: ParallelSection) -> Broken:
    schedule, chunks = parallel.pipeline_schedule, parallel.virtual_pipeline_degree
    if schedule == "interleaved" and parallel.pipeline_parallel_degree == 1:
        yield "pipeline_schedule", "is interleaved, which needs pipeline_parallel_degree above 1"
    if schedule == "interleaved" and chunks == 1:
        yield "virtual_pipeline_degree", "is 1, which is the schedule 1F1B; choose that, or 2 or more"


def _chunks(parallel: ParallelSection) -> Broken:
    schedule, chunks = parallel.pipeline_schedule, parallel.virtual_pipeline_degree
    if schedule != "interleaved" and chunks not in (None, 1):
        message = f"is {chunks}, but pipeline_schedule {schedule} has one chunk a rank; choose interleaved"
        yield "virtual_pipeline_degree", message


def _cut_of_nothing(parallel: ParallelSection) -> Broken:
    if parallel.pipeline_cut != "layers" and parallel.pipeline_parallel_degree == 1:
        yield "pipeline_cut", "needs pipeline_parallel_degree above 1: there is nothing to cut"


def _cut_in_order(parallel: ParallelSection) -> Broken:
    cut = parallel.pipeline_cut
    if not isinstance(cut, str) and any(a >= b for a, b in itertools.pairwise(cut)):
        yield "pipeline_cut", f"is {cut}; each layer has to come after the one before it"


def _sharding_degree(parallel: ParallelSection) -> Broken:
    degree = parallel.sharding_parallel_degree
    if parallel.sharding == "none" and degree > 1:
        message = f"is {degree} but sharding is none; choose stage1, stage2 or stage3, or 1"
        yield "sharding_parallel_degree", message


# between keys of the section `engine`


def _every_nothing(engine: EngineSection) -> Broken:
    if engine.recompute_every > 1 and engine.recompute != "full":
        yield "recompute_every", f"is {engine.recompute_every}, but recompute is {engine.recompute}; choose full, or 1"


def _inside_a_program(engine: EngineSection) -> Broken:
    if engine.recompute == "selective" and engine.mode == "to_static":
        yield "recompute", "is selective, which is inside of what to_static compiles; choose full or none, or dynamic"


# between sections


def _no_grid(asked: Asked) -> Broken:
    p = asked.recipe.parallel
    if asked.num_devices % asked.fixed:
        yield (
            "launch.num_devices",
            f"{asked.num_devices} devices cannot hold tensor {p.tensor_parallel_degree} x pipeline "
            f"{p.pipeline_parallel_degree} x sharding {p.sharding_parallel_degree} = {asked.fixed} ranks; "
            f"use a multiple of {asked.fixed}",
        )


def _uneven_cut(asked: Asked) -> Broken:
    if asked.config is not None:
        for message in asked.cuts.problems(asked.config, asked.recipe.parallel.tensor_parallel_degree):
            yield "parallel.tensor_parallel_degree", message


def _no_table(asked: Asked) -> Broken:
    parallel = asked.recipe.parallel
    if asked.cuts.layers:
        return
    if (pp := parallel.pipeline_parallel_degree) > 1:
        yield "parallel.pipeline_parallel_degree", f"is {pp}; this family has no table of what a pipeline cuts"
    if parallel.sharding == "stage3":
        yield "parallel.sharding", "is stage3; this family has no table of the modules to gather"
    if asked.recipe.engine.mode == "to_static":
        yield "engine.mode", "is to_static; this family has no table of the layers to compile"
    if (kind := asked.recipe.engine.recompute) != "none":
        yield "engine.recompute", f"is {kind}; this family has no table of the layers to compute again"


def _empty_part(asked: Asked) -> Broken:
    if asked.config is None or not asked.cuts.layers:
        return
    pp, chunks = asked.recipe.parallel.pipeline_parallel_degree, asked.recipe.parallel.num_chunks
    layers = asked.config.num_hidden_layers
    if pp > layers:
        yield "parallel.pipeline_parallel_degree", f"is {pp}; the model has {layers} layers to cut"
    elif pp * chunks > layers:
        message = f"is {chunks}: {pp} pipeline stages have {pp * chunks} chunks then, and the model {layers} layers"
        yield "parallel.virtual_pipeline_degree", message


def _no_cut(asked: Asked) -> Broken:
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


def _nothing_to_shard(asked: Asked) -> Broken:
    sharding = asked.recipe.parallel.sharding
    if sharding != "none" and asked.degrees.num_data_ranks == 1 and asked.num_devices % asked.fixed == 0:
        message = f"is {sharding}, but there is one data rank ({asked.degrees}): nothing to cut over"
        yield "parallel.sharding", message


def _no_experts(asked: Asked) -> Broken:
    if (ep := asked.recipe.parallel.expert_parallel_degree) > 1 and not asked.cuts.experts:
        yield "parallel.expert_parallel_degree", f"is {ep}; this family has no routed experts; remove it"


def _uneven_experts(asked: Asked) -> Broken:
    d, key = asked.degrees, "parallel.expert_parallel_degree"
    if d.ep == 1 or not asked.cuts.experts or asked.num_devices % asked.fixed:
        return
    if d.num_data_ranks % d.ep:
        yield key, f"is {d.ep}, which does not divide the data ranks = {d.num_data_ranks}"
    elif d.sharding % d.ep and d.ep % d.sharding:
        yield key, f"is {d.ep}, which neither divides the ranks of the sharding axis = {d.sharding} nor is a multiple"
    if asked.config is not None and (count := getattr(asked.config, asked.cuts.num_experts)) % (d.ep * d.tp):
        of_tp = f" x tensor parallel degree {d.tp} = {d.ep * d.tp}" if d.tp > 1 else ""
        yield key, f"is {d.ep}{of_tp}, which does not divide {asked.cuts.num_experts} = {count}"


def _no_balance(asked: Asked) -> Broken:
    train = asked.recipe.train
    for key in ("expert_balance_loss", "expert_bias_rate"):
        if getattr(train, key) and not asked.cuts.gates:
            yield f"train.{key}", f"is {getattr(train, key)}; this family has no routed experts; set it to 0"
    if not train.expert_bias_rate or not asked.cuts.gates or asked.config is None:
        return
    if not asked.config.has_gate_bias:
        yield "train.expert_bias_rate", "has no effect: experts of this shape are chosen without a bias; set it to 0"
    elif asked.recipe.lora.rank is not None:
        yield "train.expert_bias_rate", "moves a bias of the model, of which adapters change nothing; set it to 0"


def _uneven_batch(asked: Asked) -> Broken:
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


def _too_long(asked: Asked) -> Broken:
    longest = asked.recipe.data.max_length
    if asked.config is not None and longest > asked.config.max_position_embeddings:
        positions = asked.config.max_position_embeddings
        yield "data.max_length", f"is {longest}; the model was made for at most {positions} positions"


def _no_such_precision(asked: Asked) -> Broken:
    precision = asked.recipe.engine.precision
    if asked.precisions is not None and precision not in asked.precisions:
        known = ", ".join(asked.precisions)
        yield "engine.precision", f"{precision} does not work on {asked.recipe.device}; it has {known}"


def _no_evaluation(asked: Asked) -> Broken:
    # a stage that has a key `split` takes what it evaluates on from data.train
    split = getattr(getattr(asked.recipe, asked.recipe.stage, None), "split", None)
    if asked.recipe.checkpoint.best_metric and not asked.recipe.data.eval and not split:
        yield "checkpoint.best_metric", "is a metric of the evaluation; set data.eval, or remove it"


def _nothing_to_go_back_to(asked: Asked) -> Broken:
    if asked.recipe.train.may_roll_back and asked.recipe.checkpoint.save_steps is None:
        key = "on_nonfinite" if asked.recipe.train.on_nonfinite == "roll_back" else "on_spike"
        yield f"train.{key}", "is roll_back, which needs checkpoints: set checkpoint.save_steps, or choose skip"


def _nothing_to_switch_off(asked: Asked) -> Broken:
    stage = asked.recipe.stage
    reference = getattr(getattr(asked.recipe, stage, None), "reference", None)
    if reference == "adapter_off" and asked.recipe.lora.rank is None:
        yield f"{stage}.reference", "is adapter_off, which takes an adapter; set lora.rank, or set it to cache"


def _nothing_to_train(asked: Asked) -> Broken:
    if asked.stage.adapters and asked.recipe.lora.rank is None:
        yield "lora.rank", f"is null, but stage {asked.recipe.stage} trains adapters only; set it to 8, for one"


def _rounded_adapters(asked: Asked) -> Broken:
    if asked.recipe.qat.weight_bits is not None and asked.recipe.lora.rank is not None:
        message = "is 8, but lora.rank trains adapters of a model that stays as it is; set one of the two to null"
        yield "qat.weight_bits", message


def _not_rounded(asked: Asked) -> Broken:
    if asked.recipe.qat.weight_bits is not None and not asked.stage.quantises and not asked.stage.adapters:
        message = (
            f"is 8, which the stage {asked.recipe.stage} does not go with; use it with pretrain or sft, or set null"
        )
        yield "qat.weight_bits", message


def _observed_in_a_program(asked: Asked) -> Broken:
    if asked.recipe.qat.activation_bits is not None and asked.recipe.engine.mode == "to_static":
        yield (
            "qat.activation_bits",
            "is 8, but what to_static compiles cannot tell how large inputs were; set it to null, or engine.mode to "
            "dynamic",
        )


def _not_one_group(asked: Asked) -> Broken:
    degree, key = asked.recipe.parallel.tensor_parallel_degree, "launch.num_devices"
    if not asked.stage.trains and asked.num_devices != degree:
        yield key, f"makes {asked.num_devices} ranks; stage {asked.recipe.stage} uses tensor parallel degree = {degree}"


def _no_metrics(asked: Asked) -> Broken:
    if asked.recipe.loggers:
        yield "loggers", f"stage {asked.recipe.stage} has no metrics to log; remove it"


PARALLEL_RULES = (
    Rule(
        "`sequence_parallel` with tensor parallel degree 1",
        "nothing to cut over",
        ("--parallel.tensor_parallel_degree=1",),
        _sequence_parallel,
    ),
    Rule(
        "`interleaved` without a pipeline, or with one chunk",
        "it would be another schedule",
        ("--parallel.pipeline_schedule=interleaved", "--parallel.virtual_pipeline_degree=1"),
        _interleaved,
    ),
    Rule(
        "a virtual degree without `interleaved`",
        "it would change nothing",
        ("--parallel.virtual_pipeline_degree=2",),
        _chunks,
    ),
    Rule(
        "`pipeline_cut` without a pipeline",
        "it would change nothing",
        ("--parallel.pipeline_parallel_degree=1", "--parallel.pipeline_cut=parameters"),
        _cut_of_nothing,
    ),
    Rule(
        "layers of `pipeline_cut` that are not in order",
        "no cut",
        ("--parallel.pipeline_cut=[16,16]",),
        _cut_in_order,
    ),
    Rule(
        "`sharding_parallel_degree` without `sharding`",
        "nothing would be cut",
        ("--parallel.sharding=none", "--parallel.sharding_parallel_degree=2"),
        _sharding_degree,
    ),
)
"""Between keys of the section `parallel`; checked when a recipe is read."""

ENGINE_RULES = (
    Rule(
        "`recompute_every` without `recompute: full`",
        "it would change nothing",
        ("--engine.recompute=none", "--engine.recompute_every=2"),
        _every_nothing,
    ),
    Rule(
        "`recompute: selective` with `to_static`",
        "a layer is compiled whole",
        ("--engine.recompute=selective", "--engine.mode=to_static"),
        _inside_a_program,
    ),
)
"""Between keys of the section `engine`."""

RULES = (
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
    Rule(
        "`roll_back` without `save_steps`",
        "there is no checkpoint to go back to",
        ("--train.on_nonfinite=roll_back", "--checkpoint.save_steps=null"),
        _nothing_to_go_back_to,
    ),
    Rule(
        "`best_metric` without evaluation",
        "there is no value to compare",
        ("--data.eval=null", "--checkpoint.best_metric=eval/loss"),
        _no_evaluation,
    ),
    Rule(
        "a reference by `adapter_off` without an adapter",
        "the reference would be what is trained",
        ("--dpo.reference=adapter_off",),
        _nothing_to_switch_off,
    ),
    Rule(
        "stage `lora` without `lora.rank`",
        "nothing would be trained",
        (),
        _nothing_to_train,
    ),
    Rule(
        "`qat` with adapters",
        "the rounded weights would not be those that are trained",
        (),
        _rounded_adapters,
    ),
    Rule(
        "`qat` with another stage than `pretrain` and `sft`",
        "it is tested with those",
        ("--qat.weight_bits=8",),
        _not_rounded,
    ),
    Rule(
        "`qat.activation_bits` with `to_static`",
        "inputs are observed between operations",
        (),
        _observed_in_a_program,
    ),
)
"""Between sections, the model's shape and the device."""

UNTRAINED_RULES = (
    *(rule for rule in RULES if rule.check in (_no_grid, _uneven_cut, _no_such_precision)),
    Rule(
        "a stage that does not train with other ranks than the tensor parallel ones",
        "they would have nothing to do",
        (),
        _not_one_group,
    ),
    Rule("loggers with a stage that does not train", "there are no metrics", (), _no_metrics),
)
"""The same, for a stage that does not train."""
