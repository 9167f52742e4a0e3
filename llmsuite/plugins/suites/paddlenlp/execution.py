"""Sections parallel, engine, launch and train, from PaddleNLP's arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from llmsuite.contract.schema.degrees import DEVICES_PER_MACHINE, launch_section
from llmsuite.plugins.suites.conversion.conversion import Conversion
from llmsuite.plugins.suites.conversion.kinds import is_true
from llmsuite.plugins.suites.paddlenlp.content import BATCH

_BALANCE = 0.001
"""`aux_loss_alpha` in the config.json of DeepSeek-V2 and V3, which PaddleNLP uses."""
_LOGGING_STEPS = 500
"""Default of `logging_steps`, which is also the default interval of evaluations."""
_PRETRAIN_MIN_RATE = 1e-5
"""Default of `min_learning_rate` in run_pretrain.py; other scripts decay to 0."""


def parallel(run: Conversion, supports_interleaving: bool) -> dict[str, Any]:
    """Return section parallel; `supports_interleaving` is True if the device supports interleaved pipelines."""
    parallel: dict[str, Any] = {}
    tp, pp = (run.integer(f"{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline"))
    tp = max(tp, 1)
    pp = max(pp, 1)
    chunks = run.integer("virtual_pp_degree", 1)
    schedule = str(run.take("pipeline_schedule_mode") or "1F1B")
    if tp > 1:
        parallel["tensor_parallel_degree"] = tp
    if pp > 1:
        parallel["pipeline_parallel_degree"] = pp
        known = "1F1B"
        if schedule in ("FThenB", "1F1B"):
            known = schedule
        if chunks > 1 and not supports_interleaving:
            why = f"the device does not support interleaved pipelines; {known} gives the same numbers"
            run.left_out("virtual_pp_degree", chunks, why)
            chunks = 1
        parallel["pipeline_schedule"] = "interleaved" if chunks > 1 else known
        if chunks > 1:
            parallel["virtual_pipeline_degree"] = chunks
        if schedule not in ("FThenB", "1F1B", "VPP"):
            run.left_out("pipeline_schedule_mode", schedule, f"nearest: parallel.pipeline_schedule {known}")
    words = str(run.take("sharding") or "").split()
    run.offload = "offload" in words or run.flag("sharding_offload")
    stages = [word for word in words if re.fullmatch(r"stage[123]", word)]
    degree = max(run.integer("sharding_parallel_degree", 1), run.integer("sharding_degree", 1), 1)
    if stages:
        parallel["sharding"] = stages[0]
        if degree > 1:
            parallel["sharding_parallel_degree"] = degree
    elif degree > 1:
        run.left_out("sharding_parallel_degree", degree, "sharding is not given, so nothing is sharded")
    experts = run.integer("expert_parallel_degree", 1)
    if experts > 1:
        parallel["expert_parallel_degree"] = experts
    if run.flag("sequence_parallel"):
        if tp > 1:
            parallel["sequence_parallel"] = True
        else:
            run.left_out("sequence_parallel", True, "needs parallel.tensor_parallel_degree above 1")
    if tp > 1 and _fuses(run):
        parallel["fuse_projections"] = True
    return parallel


def _fuses(run: Conversion) -> bool:
    """Return True if queries, keys and values, or gate and up, are one matrix there, and the job can fuse them here."""
    fused = [key for key in ("fuse_attention_qkv", "fuse_attention_ffn") if is_true(run.left.get(key))]
    others = ("lora", "vera", "lokr", "reft", "to_static")
    if not fused or run.stage == "lora" or any(is_true(run.arguments.values.get(key)) for key in others):
        return False
    for key in fused:
        run.take(key)
    what = "queries, keys and values, and gate and up"
    run.note(f"parallel.fuse_projections: for {what}; their matrices stay separate, but share one all-reduce")
    return True


def engine(run: Conversion) -> dict[str, Any]:
    bf16 = run.flag("bf16")
    fp16 = run.flag("fp16")
    precision = "fp16" if fp16 else "fp32"
    if bf16:
        precision = "bf16"
    level = run.take("fp16_opt_level")
    if level not in (None, "O2") and precision != "fp32":
        run.left_out("fp16_opt_level", level, "parameters are in 16 bits with float32 master weights, which is O2")
    granularity = run.take("recompute_granularity") or "full"
    kind = {"full": "full", "full_attn": "selective", "core_attn": "selective"}.get(str(granularity))
    engine: dict[str, Any] = {"mode": "to_static" if run.flag("to_static") else "dynamic", "precision": precision}
    recompute = run.flag("recompute")
    if recompute and kind is None:
        run.left_out("recompute_granularity", granularity, "nearest key: engine.recompute, full or selective")
    engine["recompute"] = (kind or "full") if recompute else "none"
    offload = [run.flag(key) for key in ("tensorwise_offload_optimizer", "offload_optim")]
    if run.offload or any(offload):
        engine["offload_optimizer"] = True
    return engine


def launch(run: Conversion, parallel: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree")
    degrees = [parallel.get(key, 1) for key in keys]
    fixed = math.prod(degrees) * max(1, run.integer("data_parallel_degree", 1))
    per_machine = run.arguments.num_devices
    machines = run.arguments.nnodes or 1
    if per_machine and not run.requested_devices:
        section = {"num_devices": per_machine}
        if machines > 1:
            section["nnodes"] = machines
        return section
    total = run.requested_devices
    if not total:
        total = math.lcm(fixed, DEVICES_PER_MACHINE)
        run.note(f"launch: {total} devices, because no number is given; --num_devices N for another number")
    return launch_section(total)


def train(run: Conversion, launch: Mapping[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    total = launch["num_devices"] * launch.get("nnodes", 1)
    fixed = parallel.get("tensor_parallel_degree", 1) * parallel.get("pipeline_parallel_degree", 1)
    ranks = run.data_ranks = max(1, total // fixed)
    degree = parallel.get("sharding_parallel_degree", 1)
    if ranks == 1 and "sharding" in parallel:
        run.left_out("sharding", parallel.pop("sharding"), f"there is one data rank on {total} devices")
    elif degree == ranks:
        parallel.pop("sharding_parallel_degree", None)  # all data ranks, which is the default
    micro = run.integer("per_device_train_batch_size", BATCH)
    accumulate = run.integer("gradient_accumulation_steps", 1)
    steps = run.integer("max_steps", -1)
    epochs = run.number("num_train_epochs", 1)
    length = {"max_steps": steps} if steps > 0 else {"num_epochs": max(1, math.ceil(epochs))}
    if steps <= 0 and epochs != length["num_epochs"]:
        run.refuse("num_train_epochs", epochs, "train.num_epochs is an integer; max_steps can express fractions")
    train: dict[str, Any] = {**length, "global_batch_size": micro * accumulate * ranks, "micro_batch_size": micro}
    train["learning_rate"] = run.number("learning_rate", 5e-5)
    train |= _schedule(run, train["learning_rate"], steps)
    for key in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
        value = run.number(key, None)
        if value is not None:
            train[key] = float(value)
    if run.family.name == "deepseek":
        balance = run.number("aux_loss_alpha", _BALANCE)
        if balance:
            train["expert_balance_loss"] = float(balance)
    norm = run.number("max_grad_norm", 1.0)
    train["max_grad_norm"] = float(norm) if norm > 0 else None
    every = run.number("eval_steps", None) or run.left.get("logging_steps", _LOGGING_STEPS)
    if run.evaluates:
        train["eval_steps"] = "epoch" if run.evaluates_epochs else every
    log_steps = run.number("logging_steps", 1)
    if log_steps > 1:
        train["log_steps"] = log_steps
    optimizer = run.take("optim")
    if optimizer not in (None, "adamw"):
        run.refuse("optim", optimizer, "train.optimizer has adamw")
    return train


def _schedule(run: Conversion, rate: float, steps: int) -> dict[str, Any]:
    """Return the schedule, warm-up and minimum of the learning rate: of the trainer, or of run_pretrain.py, which has
    its own schedules."""
    kind = str(run.take("lr_scheduler_type") or "linear")
    schedule = {"constant_with_warmup": "constant"}.get(kind, kind)
    if schedule not in ("constant", "linear", "cosine"):
        run.refuse("lr_scheduler_type", kind, "train.lr_schedule has constant, linear, cosine and wsd")
        schedule = "linear"
    own = run.stage == "pretrain" and schedule != "constant"
    found: dict[str, Any] = {"lr_schedule": schedule, **_warmup(run, kind, steps, own)}
    decays = run.number("decay_steps", None)
    if decays is not None and decays != steps and schedule != "constant":
        run.refuse("decay_steps", decays, "the learning rate decays until the last step")
    given = run.number("min_learning_rate", None)
    least = given or 0
    if given is None and own:
        least = _PRETRAIN_MIN_RATE
    if least > rate and schedule != "constant":
        value = f"{least}, the default" if given is None else given
        run.refuse("min_learning_rate", value, f"is above learning_rate {rate}; train.min_lr_ratio is at most 1")
    elif least and schedule != "constant":
        found["min_lr_ratio"] = float(f"{least / rate:.6g}")
    if own:
        run.note("train.lr_schedule: decays one step later than in run_pretrain.py, whose last step has the minimum")
    return found


def _warmup(run: Conversion, kind: str, steps: int, own: bool) -> dict[str, Any]:
    """Return the warm-up of `get_warmup_steps`: `warmup_steps` takes precedence over `warmup_ratio`; the first step has
    rate 0.

    With the own schedules of run_pretrain.py, the first of W steps has 1/W of the rate.
    """
    ratio = run.number("warmup_ratio", 0.0)
    count = run.number("warmup_steps", 0)
    if kind == "constant" or (count <= 0 and ratio <= 0):
        if count > 0 or ratio > 0:
            run.left_out("warmup_steps", count or ratio, "lr_scheduler_type constant has no warm-up")
        return {}
    if count <= 0 and steps > 0:
        # run_pretrain.py does not round; round(..., 6) keeps 0.07 * 100 = 7.000000000000001 at 7 steps
        count = math.ceil(round(ratio * steps, 6) if own else ratio * steps)
    warm = {"warmup_steps": count} if count > 0 else {"warmup_ratio": float(ratio)}
    return warm if own else warm | {"warmup_from_zero": True}
