"""Conversion of `TrainingArguments` of transformers, which most suites use with their own defaults."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import launch_section
from llmsuite.plugins.suites.conversion.kinds import ONE_OR_MAPPING, WORDS, is_on, number, wrong
from llmsuite.plugins.suites.conversion.refuse import Refusal
from llmsuite.plugins.suites.suite import Run

_OPTIMIZERS = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla")
_IN_8_BITS = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
"""AdamW of bitsandbytes with states in 8 bits; a paged one differs in where its states are."""
_STAGES = {"zero1": "stage1", "zero2": "stage2", "zero3": "stage3", "full_shard": "stage3", "shard_grad_op": "stage2"}
_LOGGERS = ("tensorboard", "wandb", "swanlab", "mlflow")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Defaults of a suite's arguments; the values here are those of transformers."""

    learning_rate: float = 5e-5
    micro_batch_size: int = 8
    num_epochs: float = 3
    lr_schedule: str = "linear"
    weight_decay: float = 0.0
    adam_beta2: float = 0.999
    warmup_ratio: float = 0.0
    save_steps: int | None = 500
    recompute: bool = False
    precision: str = "fp32"
    accumulate: int = 1
    ends_smaller: bool = True
    """True if the last batch of an epoch is smaller."""
    master_weights: bool = True
    """False if the optimizer updates parameters that are bfloat16."""
    has_bitsandbytes: bool = True
    """True if `optim` may name an optimizer of bitsandbytes."""


def parallel(run: Run) -> dict[str, Any]:
    """Return section parallel for DeepSpeed's or FSDP's arguments, which do not change results."""
    offload = False
    stage = None
    deepspeed = run.take("deepspeed", ONE_OR_MAPPING)
    fsdp = run.take("fsdp", WORDS)
    if is_on(deepspeed):
        stage, offload = _deepspeed(run, deepspeed)
    if is_on(fsdp):
        words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp)
        found = next((known for known in ("full_shard", "shard_grad_op") if known in words), "full_shard")
        stage = _STAGES[found]
        offload = "offload" in words
    run.offload = offload
    return {"sharding": stage} if stage is not None else {}


def _deepspeed(run: Run, given: Any) -> tuple[str | None, bool]:
    """Return the ZeRO stage, and True if the optimizer is offloaded: from the config file, or from its name if it is
    missing."""
    config = given if isinstance(given, dict) else None
    if config is None and os.path.isfile(str(given)):
        try:
            config = json.loads(Path(str(given)).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{given}: cannot be read as JSON: {error}") from error
    if isinstance(config, dict):
        _check_deepspeed(run, given, config)
        zero = _section(given, config, "zero_optimization")
        where = _section(given, zero, "offload_optimizer")
        return _STAGES.get(f"zero{zero.get('stage', 0)}"), where.get("device", "none") != "none"
    found = re.search(r"z(?:ero)?[-_]?([0-3])", str(given).rpartition("/")[2])
    if found is None:
        run.note(f"parallel.sharding: {given} is missing; set it to stage1, stage2 or stage3")
        return None, False
    return _STAGES.get(f"zero{found[1]}"), "offload" in str(given)


def _section(given: Any, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise UserError(f"{given}: {name} is {found!r}; expected a section: {{...}}")
    return found


def _check_deepspeed(run: Run, given: Any, config: Mapping[str, Any]) -> None:
    """Refuse sections of DeepSpeed's config that override the arguments."""
    if config.get("scheduler"):
        why = "its scheduler replaces lr_scheduler_type; remove it from that file: train.lr_schedule"
        run.refuse("deepspeed", given, why)
    # transformers rejects an AdamW config that differs from the arguments; DeepSpeed's Adam is AdamW by default
    optimizer = _section(given, config, "optimizer") or {"type": "AdamW"}
    if str(optimizer.get("type")).lower() not in ("adam", "adamw"):
        run.refuse("deepspeed", given, f"its optimizer is {optimizer.get('type')}; train.optimizer has adamw")
    if config.get("tensor_parallel"):
        why = "its tensor_parallel reduces the number of data ranks; nearest: parallel.tensor_parallel_degree"
        run.refuse("deepspeed", given, why)


def launch(run: Run) -> dict[str, Any]:
    """Return section launch: devices from the command line, else from the file, else one."""
    total = run.requested_devices or run.file_devices
    if not total:
        total = 1
        run.note(
            "launch: 1 device, because the file names no number; --num_devices N for another number, which multiplies "
            "train.global_batch_size"
        )
    return launch_section(total)


def engine(run: Run, defaults: Defaults) -> dict[str, Any]:
    """Return section engine: precision, recomputation and offloading."""
    given_bf16 = run.given("bf16")
    bf16 = run.flag("bf16", "auto")
    fp16 = run.flag("fp16", "auto")
    precision = "fp32"
    if bf16 or given_bf16 == "auto":
        precision = "bf16"
    elif fp16:
        precision = "fp16"
    elif given_bf16 is None:
        precision = defaults.precision
    engine: dict[str, Any] = {"precision": precision}
    recompute = run.take("gradient_checkpointing")
    if is_on(recompute) or (recompute is None and defaults.recompute):
        engine["recompute"] = "full"
    if run.offload:
        engine["offload_optimizer"] = True
    return engine


def train(run: Run, launch: Mapping[str, Any], parallel: dict[str, Any], defaults: Defaults) -> dict[str, Any]:
    """Return section train: batch sizes, length, optimizer and schedule."""
    total = launch["num_devices"] * launch.get("nnodes", 1)
    cut = parallel.get("tensor_parallel_degree", 1) * parallel.get("pipeline_parallel_degree", 1)
    ranks = run.data_ranks = max(1, total // cut)
    is_split = bool(parallel) or is_wrapped(run)
    if ranks == 1 and "sharding" in parallel:
        run.note(f"parallel.sharding: {parallel.pop('sharding')} is left out, because there is one data rank")
    micro = run.integer("per_device_train_batch_size", defaults.micro_batch_size)
    accumulate = run.integer("gradient_accumulation_steps", defaults.accumulate)
    train: dict[str, Any] = _length(run, defaults)
    train |= {"global_batch_size": micro * accumulate * ranks, "micro_batch_size": micro}
    drops = run.section in ("grpo", "gkd") or is_on(run.given("dataloader_drop_last"))
    if "num_epochs" in train and defaults.ends_smaller and not drops:
        run.note(f"train.num_epochs: the last batch of an epoch takes samples of the next; with {run.suite.name} it is "
                 "smaller")  # fmt: skip
    rate = train["learning_rate"] = float(run.number("learning_rate", defaults.learning_rate))
    if rate <= 0:
        raise wrong(rate, "a number above 0", run.location("learning_rate"))
    train |= _schedule(run, rate, train.get("max_steps"), defaults)
    for key, default in (("weight_decay", defaults.weight_decay), ("adam_beta1", 0.9),
                         ("adam_beta2", defaults.adam_beta2), ("adam_epsilon", 1e-8)):  # fmt: skip
        value = run.number(key, default)
        if value != {"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}[key]:
            train[key] = float(value)
    norm = run.number("max_grad_norm", 1.0)
    if norm != 1:
        train["max_grad_norm"] = float(norm) if norm > 0 else None
    train |= _optimizer(run, is_split, "weight_decay" in train, defaults)
    every = run.take("logging_steps")
    if isinstance(every, int) and every > 1:
        train["log_steps"] = every
    return train


def is_wrapped(run: Run) -> bool:
    """Return True if DeepSpeed, FSDP or Megatron has the optimizer, or a profile of accelerate that may name them."""
    wrappers = ("deepspeed", "fsdp", "tensor_model_parallel_size")
    profile = run.given("accelerate_config")
    return any(is_on(run.given(key)) for key in wrappers) or profile not in (None, "single_gpu", "multi_gpu")


def _optimizer(run: Run, is_split: bool, decays: bool, defaults: Defaults) -> dict[str, Any]:
    """Return `train.optimizer`, unless it is the default.

    Args:
        run: the conversion.
        is_split: whether ranks may have parts of the optimizer's parameters.
        decays: whether there is weight decay.
        defaults: of the suite.
    """
    optimizer = run.take("optim")
    found: dict[str, Any] = {} if defaults.master_weights else {"master_weights": False}
    if optimizer in _IN_8_BITS and defaults.has_bitsandbytes:
        if not is_split:
            return found | {"optimizer": "adamw_8bit"}
        why = (
            "DeepSpeed, FSDP and Megatron quantise its states by parts of parameters; train.optimizer: adamw_8bit does "
        )
        run.refuse("optim", optimizer, f"{why}so by full parameters")
    elif not defaults.master_weights:
        _check_without_masters(run, optimizer)
    elif optimizer is None or optimizer in _OPTIMIZERS:
        return {}
    elif optimizer == "paged_adamw_32bit" and defaults.has_bitsandbytes:
        # bitsandbytes decays parameters after the update, AdamW before it
        if decays:
            run.refuse("optim", optimizer, "its weight decay follows the update; train.optimizer: adamw decays before")
    else:
        run.refuse("optim", optimizer, "train.optimizer has adamw")
    return found


def _check_without_masters(run: Run, optimizer: Any) -> None:
    """Refuse other optimizers of bfloat16 parameters than AdamW as it is here: implementations that are the same in
    float32 round them in different ways."""
    if optimizer is None:
        run.note("train.master_weights: false; updates are those of adamw_torch_fused, which is the default of "
                 "transformers with PyTorch 2.8 and later")  # fmt: skip
    elif optimizer == "paged_adamw_32bit":
        run.refuse("optim", optimizer, "keeps float32 moments of parameters in 16 bits; train.master_weights: false "
                                       "keeps them in 16 bits")  # fmt: skip
    elif optimizer in ("adamw_torch", "adamw_hf"):
        run.refuse("optim", optimizer, "rounds parameters in 16 bits after each operation; train.master_weights: false "
                                       "rounds once, as adamw_torch_fused")  # fmt: skip
    elif optimizer != "adamw_torch_fused":
        run.refuse("optim", optimizer, "train.optimizer has adamw; with train.master_weights: false as "
                                       "adamw_torch_fused")  # fmt: skip


def _length(run: Run, defaults: Defaults) -> dict[str, Any]:
    steps = run.integer("max_steps", -1)
    epochs = run.number("num_train_epochs", defaults.num_epochs)
    if steps > 0:
        if run.given("num_train_epochs") is not None:
            run.left_out("num_train_epochs", epochs, "max_steps takes precedence")
        return {"max_steps": steps}
    if epochs != int(epochs) or epochs < 1:
        run.refuse("num_train_epochs", epochs, "train.num_epochs is an integer; max_steps can express fractions")
    return {"num_epochs": max(1, math.ceil(epochs))}


def _schedule(run: Run, rate: float, steps: int | None, defaults: Defaults) -> dict[str, Any]:
    """Return the schedule and its warm-up, whose first step has learning rate 0."""
    kind = str(run.take("lr_scheduler_type") or defaults.lr_schedule)
    options = run.take("lr_scheduler_kwargs", ONE_OR_MAPPING) or {}
    options = dict(options) if isinstance(options, dict) else options
    schedule = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(kind, kind)
    if schedule not in ("constant", "linear", "cosine"):
        run.refuse("lr_scheduler_type", kind, "train.lr_schedule has constant, linear, cosine and wsd")
        schedule = "linear"
    found: dict[str, Any] = {"lr_schedule": schedule}
    if kind == "cosine_with_min_lr" and isinstance(options, dict):
        least = _option(run, options, "min_lr")
        share = _option(run, options, "min_lr_rate") if least is None else least / rate
        if share:
            found["min_lr_ratio"] = float(f"{share:.6g}")
    if options:
        run.refuse("lr_scheduler_kwargs", options, f"train has no such keys for {kind}")
    count = run.number("warmup_steps", 0)
    ratio = run.number("warmup_ratio", defaults.warmup_ratio)
    if 0 < count < 1:  # a fraction of the steps, in newer versions
        count, ratio = 0, count
    if kind == "constant" or (count <= 0 and ratio <= 0):
        if kind == "constant" and (count > 0 or ratio > 0):
            run.note(
                f"train.warmup_steps: is left out, because {run.written('lr_scheduler_type')} constant has no warm-up"
            )
        return found
    if count <= 0 and steps is not None:
        count = math.ceil(ratio * steps)
    warm = {"warmup_steps": count} if count > 0 else {"warmup_ratio": float(ratio)}
    return found | warm | {"warmup_from_zero": True}


def _option(run: Run, options: dict[str, Any], key: str) -> Any:
    """Remove and return a number of `lr_scheduler_kwargs`; None if it is not given."""
    value = options.pop(key, None)
    if value is None:
        return None
    return number(value, f"{run.location('lr_scheduler_kwargs')}.{key}")


def evaluates(run: Run, train: dict[str, Any]) -> bool:
    """Return True if there are evaluations; set their interval in section `train`."""
    kind = str(run.take("eval_strategy") or run.take("evaluation_strategy") or "no")
    run.take("evaluation_strategy")
    do_eval = run.flag("do_eval")
    every = run.take("eval_steps")
    if kind == "epoch":
        train["eval_steps"] = "epoch"
    elif kind == "steps":
        train["eval_steps"] = _evaluated_every(run, every, train.get("max_steps"))
    elif every is not None:
        run.left_out("eval_steps", every, "eval_strategy is not steps")
    return do_eval or kind != "no"


def _evaluated_every(run: Run, every: Any, max_steps: int | None) -> Any:
    """Return the interval of evaluations in steps, or as a fraction of them; the default is that of records."""
    if not isinstance(every, (int, float)) or every <= 0:
        every = run.given("logging_steps")
    if isinstance(every, float) and every < 1 and max_steps is not None:
        return math.ceil(every * max_steps)
    return every or 500


def checkpoint(run: Run, has_eval: bool, defaults: Defaults) -> dict[str, Any]:
    """Return section checkpoint: interval, number of checkpoints kept, and the best metric."""
    kind = str(run.take("save_strategy") or "steps")
    every = run.take("save_steps")
    found: dict[str, Any] = {}
    if kind == "epoch":
        found["save_steps"] = "epoch"
    elif kind in ("steps", "best") and isinstance(every or defaults.save_steps, int):
        found["save_steps"] = every or defaults.save_steps
    elif kind != "no" and every is not None:
        run.note(f"checkpoint.save_steps: is left out, because it cannot be a fraction of the steps ({every})")
    keep = run.integer("save_total_limit", None)
    if keep is None:
        run.note("checkpoint.keep_last: the 2 newest are kept, because no number is given; the Trainer keeps all")
    else:
        found["keep_last"] = max(2, keep)
        if keep < 2:
            run.note("checkpoint.keep_last: 2, the minimum, because a crash may interrupt the newest")
    best = run.flag("load_best_model_at_end")
    metric = run.take("metric_for_best_model")
    if best and has_eval and run.section == "grpo":
        found |= {"best_metric": "eval/reward", "best_is": "highest"}
        if metric not in ("reward", "eval_reward"):
            run.note(f"checkpoint.best_metric: eval/reward instead of {metric or 'loss'}: another checkpoint may be "
                     "the best")  # fmt: skip
    elif best and has_eval:
        found["best_metric"] = "eval/loss"
        if metric not in (None, "loss", "eval_loss"):
            run.note(f"checkpoint.best_metric: eval/loss instead of {metric}: another checkpoint may be the best")
    elif best:
        run.left_out("load_best_model_at_end", True, "there is no evaluation to select the best by")
    return found


def early_stopping(run: Run, key: str, recipe: dict[str, Any]) -> None:
    """Set early stopping as the callback of transformers, which needs evaluations and the best checkpoint."""
    patience = run.integer(key, None)
    if patience is None:
        return
    if "best_metric" not in recipe["checkpoint"] or "eval_steps" not in recipe["train"]:
        run.refuse(key, patience, "needs load_best_model_at_end, and evaluations before the last step")
    else:
        recipe["train"]["early_stopping"] = {"patience": patience}


def loading(run: Run) -> dict[str, Any]:
    """Return the keys of section `data` that the Trainer has arguments for."""
    found: dict[str, Any] = {}
    if run.flag("dataloader_drop_last"):
        found["drop_last"] = True
    workers = run.integer("dataloader_num_workers", 0)
    if workers:
        found["num_workers"] = workers
    return found


def ends(run: Run) -> dict[str, Any]:
    """Return the top-level keys: device, loggers, seed and output directory."""
    found: dict[str, Any] = {"device": "cpu" if run.flag("use_cpu") else "gpu"}
    report_to = run.take("report_to", WORDS)
    names = " ".join(map(str, report_to)) if isinstance(report_to, list) else str(report_to or "")
    loggers = [name for name in _LOGGERS if name in names]
    if loggers:
        found["loggers"] = loggers
    found["seed"] = run.integer("seed", 42)
    found["output_dir"] = str(run.take("output_dir") or f"runs/{Path(run.name).stem}")
    return found


REFUSED: Mapping[str, Refusal] = {
    "label_smoothing_factor": Refusal("labels are not smoothed"),
    "neftune_noise_alpha": Refusal("noise on embeddings is not supported"),
    "optim_args": Refusal("train.optimizer has adamw, without more arguments"),
    "optim_target_modules": Refusal("every parameter has one optimizer"),
    "auto_find_batch_size": Refusal("the batch size is fixed; see: llmsuite plan"),
    "average_tokens_across_devices": Refusal(
        "the loss is averaged over the tokens of the global batch", lambda value: value is not None and not is_on(value)
    ),
    "accelerator_config": Refusal("batches are those of data and train"),
    "parallelism_config": Refusal("nearest key: section parallel"),
    "past_index": Refusal("rows are independent", lambda value: isinstance(value, int) and value >= 0),
    "half_precision_backend": Refusal("nearest key: engine.precision", lambda value: value not in (None, "auto")),
    "fp16_full_eval": Refusal("nearest key: engine.precision"),
}
IGNORED: Mapping[str, str] = {
    "do_train": "a recipe trains",
    "do_predict": "generation is a command of its own: llmsuite generate",
    "per_device_eval_batch_size": "evaluation takes train.micro_batch_size samples at a time",
    "bf16_full_eval": "evaluation uses the precision of training",
    "eval_accumulation_steps": "evaluation keeps only sums",
    "eval_on_start": "evaluations begin with train.eval_steps",
    "eval_delay": "evaluations begin with train.eval_steps",
    "gradient_checkpointing_kwargs": "there is one implementation of recomputation",
    "logging_*": "metrics go to the terminal and to metrics.jsonl",
    "disable_tqdm": "metrics go to the terminal and to metrics.jsonl",
    "log_*": "metrics go to the terminal and to metrics.jsonl",
    "run_name": "metrics go to the terminal and to metrics.jsonl",
    "project": "metrics go to the terminal and to metrics.jsonl",
    "trackio_*": "metrics go to the terminal and to metrics.jsonl",
    "include_*": "metrics go to the terminal and to metrics.jsonl",
    "save_only_model": "checkpoints contain the optimizer state, for resuming",
    "save_safetensors": "checkpoints are safetensors",
    "save_on_each_node": "machines without a shared directory store their part of a checkpoint",
    "overwrite_output_dir": "an output directory with checkpoints is resumed or refused",
    "resume_from_checkpoint": "add --resume to llmsuite run",
    "ignore_data_skip": "a resumed run continues exactly",
    "restore_callback_states_from_checkpoint": "a resumed run continues exactly",
    "greater_is_better": "nearest key: checkpoint.best_is",
    "data_seed": "the order of the rows follows from seed",
    "full_determinism": "nearest key: engine.deterministic",
    "group_by_length": "rows are assigned to micro-batches by length: data.group_by_length",
    "length_column_name": "rows are assigned to micro-batches by length: data.group_by_length",
    "remove_unused_columns": "keys that the data format does not define are ignored",
    "dataloader_*": "nearest key: data.num_workers",
    "tf32": "the device backend chooses how matrix products are computed",
    "torch_compile*": "nearest key: engine.mode, to_static",
    "torch_empty_cache_steps": "the allocator manages memory",
    "jit_mode_eval": "nearest key: engine.mode, to_static",
    "use_liger_kernel": "the device backend chooses its fused kernels; nearest key: engine.loss_chunk_tokens",
    "liger_kernel_config": "the device backend chooses its fused kernels; nearest key: engine.loss_chunk_tokens",
    "fsdp_*": "layers are sharded separately: parallel.sharding",
    "ddp_*": "nearest key: launch.stall_seconds",
    "local_rank": "ranks are started by llmsuite run",
    "push_to_hub*": "uploading is a command of its own: llmsuite push",
    "hub_*": "uploading is a command of its own: llmsuite push",
    "label_names": "stages define their labels",
    "skip_memory_metrics": "metrics go to the terminal and to metrics.jsonl",
    "trust_remote_code": "only registered families are supported; code that comes with weights is not executed",
    "model_init_kwargs": "weights are read in engine.precision",
    "attn_implementation": "the device backend chooses its fused kernels",
    "dtype": "nearest key: engine.precision",
    "torch_dtype": "nearest key: engine.precision",
}
TRANSLATIONS: Mapping[str, str] = {
    "per_device_train_batch_size": "train.micro_batch_size, and a factor of train.global_batch_size",
    "gradient_accumulation_steps": "a factor of train.global_batch_size",
    "num_train_epochs": "train.num_epochs",
    "lr_scheduler_type": "train.lr_schedule",
    "lr_scheduler_kwargs": "train.min_lr_ratio",
    "warmup_*": "train.warmup_steps or train.warmup_ratio, with train.warmup_from_zero",
    "logging_steps": "train.log_steps",
    "bf16": "engine.precision",
    "fp16": "engine.precision",
    "gradient_checkpointing": "engine.recompute",
    "deepspeed": "parallel.sharding, engine.offload_optimizer",
    "fsdp": "parallel.sharding, engine.offload_optimizer",
    "optim": "train.optimizer",
    "save_steps": "checkpoint.save_steps",
    "save_strategy": "checkpoint.save_steps",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "train.eval_steps",
    "eval_strategy": "train.eval_steps",
    "evaluation_strategy": "train.eval_steps",
    "do_eval": "data.eval",
    "load_best_model_at_end": "checkpoint.best_metric",
    "metric_for_best_model": "checkpoint.best_metric",
    "dataloader_num_workers": "data.num_workers",
    "dataloader_drop_last": "data.drop_last",
    "report_to": "loggers",
    "use_cpu": "device",
    "max_grad_norm": "train.max_grad_norm",
    "max_steps": "train.max_steps",
    "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "adam_*": "train.adam_beta1, adam_beta2, adam_epsilon",
    "seed": "seed",
    "output_dir": "output_dir",
}
