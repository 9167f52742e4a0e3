"""Conversion of ms-swift's `megatron sft`, `pt` and `rlhf`, which have Megatron's arguments for training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.plugins.suites import model, swift, swift_megatron_arguments, trainer
from llmsuite.plugins.suites.conversion.kinds import is_on
from llmsuite.plugins.suites.suite import Run, Suite

_RENAMED = {
    "per_device_train_batch_size": "micro_batch_size",
    "max_steps": "train_iters",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_decay_style",
    "warmup_steps": "lr_warmup_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "max_grad_norm": "clip_grad",
    "adam_epsilon": "adam_eps",
    "optim": "optimizer",
}
_STAGES = {"dpo": "dpo", "kto": "kto"}
_DEGREES = {"tensor_model": "tensor", "pipeline_model": "pipeline", "expert_model": "expert"}
_GLOBAL_BATCH = 16
"""Default of `global_batch_size`."""


def _stage(values: Mapping[str, Any], name: str, requested: str | None) -> str:
    command = str(values.get("command"))
    refused = f"{name}: no recipe is this job of ms-swift"
    if command in ("megatron sft", "megatron pt"):
        stage = requested or "sft"
        return "lora" if stage == "sft" and values.get("tuner_type") == "lora" else stage
    kind = str(values.get("rlhf_type") or "dpo")
    if kind not in _STAGES:
        raise UserError(f"{refused}: rlhf_type {kind} {swift.without_stage(kind)}")
    return requested or _STAGES[kind]


def _recipe(run: Run) -> dict[str, Any]:
    kind = swift.kind_of_tuner(run, "full")
    run.take("command"), run.take("rlhf_type")
    if kind == "lora" and run.stage != "lora":
        run.refuse("tuner_type", kind, "adapters have dropout there; with adapters only megatron sft is converted")
    elif kind not in ("full", "lora"):
        run.refuse("tuner_type", kind, "supported are full fine-tuning (full) and adapters (lora)")
    hub = swift.hub_of(run)
    defaults = trainer.Defaults(
        learning_rate=1e-5, micro_batch_size=1, lr_schedule="cosine", weight_decay=0.1, adam_beta2=0.95,
        precision=swift.precision(run), ends_smaller=False, has_bitsandbytes=False,
    )  # fmt: skip
    swift.read_devices(run)
    parallel = _parallel(run)
    run.offload = run.flag("optimizer_cpu_offload")
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"ms-swift {run.name}",
        "model": model.model(run, hub=hub),
        "data": swift.data(run, hub),
        "parallel": parallel,
        "engine": _engine(run, defaults),
        "launch": trainer.launch(run),
    }
    model.revision(run, recipe["model"], hub)
    _accumulate(run, recipe["launch"], parallel)
    _schedule(run)
    recipe["train"] = trainer.train(run, recipe["launch"], parallel, defaults)
    _end_schedule(run, recipe["train"])
    if recipe["train"].get("num_epochs") == 1:
        recipe["data"]["drop_last"] = True
    else:
        run.note("data: at the end of an epoch ms-swift leaves out samples that do not fill a forward pass of all data "
                 "ranks, and at the end of the run those that do not fill a step")  # fmt: skip
    swift.evaluate(run, recipe)
    own = swift.own_section(run)
    if own.get("loss") == "ipo_mean":
        run.refuse("loss_type", "ipo", "sums the log-probabilities of an answer; dpo.loss ipo_mean averages them")
    if own:
        recipe[run.section] = own
        swift.average_micro_batches(run, recipe)
    if kind == "lora":
        recipe["lora"] = _lora(run, parallel)
    recipe["checkpoint"] = trainer.checkpoint(run, swift.has_evaluation(recipe), defaults)
    recipe |= trainer.ends(run)
    return {key: value for key, value in recipe.items() if value != {}}


def _lora(run: Run, parallel: Mapping[str, Any]) -> dict[str, Any]:
    """Return section `lora`. Queries, keys and values are one matrix there, and so are gate and up."""
    found: dict[str, Any] = {"rank": run.integer("lora_rank", 8), "alpha": float(run.number("lora_alpha", 32))}
    found |= model.dropout(run, 0.05)
    if run.flag("use_rslora"):
        found["rslora"] = True
    found["share_first"] = True
    degree = parallel.get("tensor_parallel_degree", 1)
    if degree > 1:
        found["init_shards"] = degree
    names = run.words("target_modules") or ["all-linear"]
    if names != ["all-linear"]:
        run.refuse("target_modules", ", ".join(names), "names matrices of Megatron's model; supported is all-linear")
    elif run.has_experts:
        found["target_modules"] = ["*_proj"]  # with those of routed experts
    return found


def _parallel(run: Run) -> dict[str, Any]:
    """Return the degrees, which do not change results."""
    found: dict[str, Any] = {}
    for theirs, ours in _DEGREES.items():
        degree = run.integer(f"{theirs}_parallel_size", 1)
        if degree > 1:
            found[f"{ours}_parallel_degree"] = degree
    if run.flag("sequence_parallel") and "tensor_parallel_degree" in found:
        found["sequence_parallel"] = True
    value = run.take("use_distributed_optimizer")
    if value is None or is_on(value):
        found["sharding"] = "stage1"
    return found


def _engine(run: Run, defaults: trainer.Defaults) -> dict[str, Any]:
    engine = trainer.engine(run, defaults)
    if run.take("recompute_granularity") == "full":
        engine["recompute"] = "full"
    return engine


def _accumulate(run: Run, launch: Mapping[str, Any], parallel: Mapping[str, Any]) -> None:
    """Set the gradient accumulation of `global_batch_size`.

    Raises:
        UserError: it is not a multiple of the samples of a forward pass over all data ranks.
    """
    given = run.take("gradient_accumulation_steps")
    if given is not None:
        run.refuse("gradient_accumulation_steps", given, "is no argument of megatron; set global_batch_size")
    size = run.integer("global_batch_size", _GLOBAL_BATCH)
    total = launch["num_devices"] * launch.get("nnodes", 1)
    ranks = total // (parallel.get("tensor_parallel_degree", 1) * parallel.get("pipeline_parallel_degree", 1))
    micro = run.given("per_device_train_batch_size") or 1
    each = micro * max(1, ranks) if isinstance(micro, int) else size
    if each < 1 or size % each:
        raise UserError(
            f"{run.location('global_batch_size')} is {size}; expected a multiple of micro_batch_size times the data "
            f"ranks, {each}"
        )
    run.left["gradient_accumulation_steps"] = size // each


def _schedule(run: Run) -> None:
    """Arrange Megatron's arguments of length and warm-up as the Trainer of transformers has them."""
    if run.given("num_train_epochs") is not None:
        steps = run.take("max_steps")
        if steps is not None:
            run.left_out("max_steps", steps, "num_train_epochs takes precedence")
    elif run.given("max_steps") is None:
        raise UserError(f"{run.name}: has neither num_train_epochs nor train_iters")
    if run.given("warmup_ratio") is not None:
        count = run.take("warmup_steps")
        if count is not None:
            run.left_out("warmup_steps", count, "lr_warmup_fraction takes precedence")
        run.note("train.warmup_ratio: the warm-up has a whole number of steps; there it may end within a step")
    if run.given("lr_scheduler_type") == "constant":
        run.left["lr_decay_style"] = (
            "constant_with_warmup"  # Megatron's constant has a warm-up, that of the Trainer none
        )
    decay = run.take("lr_decay_iters")
    if decay is not None and decay != run.left.get("train_iters"):
        run.refuse("lr_decay_iters", decay, "the learning rate decays until the last step")
    if run.given("optim") == "adam":
        run.left["optimizer"] = "adamw"  # its weight decay is decoupled


def _end_schedule(run: Run, train: dict[str, Any]) -> None:
    """Set the final learning rate."""
    least = run.number("min_lr", 0.0)
    if least and train["lr_schedule"] == "constant":
        run.left_out("min_lr", least, "the learning rate is constant")
    elif least:
        train["min_lr_ratio"] = float(f"{least / train['learning_rate']:.6g}")


MEGATRON = Suite(
    name="ms-swift",
    model_key="model",
    stage=_stage,
    recipe=_recipe,
    refused=swift_megatron_arguments.REFUSED,
    ignored=swift_megatron_arguments.IGNORED,
    translations=swift_megatron_arguments.TRANSLATIONS,
    renamed_arguments=_RENAMED,
)
