"""How a run is carried out: strategy, engine, devices, optimizer and schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from llmsuite.recipe.conversion.conversion import Conversion
from llmsuite.recipe.conversion.kinds import is_true
from llmsuite.recipe.paddlenlp.content import BATCH
from llmsuite.schema.degrees import PER_MACHINE, launch_of

_BALANCE = 0.001
"""`aux_loss_alpha` in the config.json of DeepSeek-V2 and V3, which PaddleNLP trains with."""
_LOGGING_STEPS = 500
"""`logging_steps` where it is not given; evaluations are as far apart."""
_PRETRAIN_LEAST = 1e-5
"""`min_learning_rate` of run_pretrain.py where it is not given; other scripts come down to 0."""


def parallel(run: Conversion, interleaves: bool) -> dict[str, Any]:
    """The strategy; `interleaves` says whether the device runs interleaved pipelines."""
    parallel: dict[str, Any] = {}
    tp, pp = (run.whole(f"{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline"))
    tp, pp = max(tp, 1), max(pp, 1)
    chunks, schedule = run.whole("virtual_pp_degree", 1), str(run.take("pipeline_schedule_mode") or "1F1B")
    if tp > 1:
        parallel["tensor_parallel_degree"] = tp
    if pp > 1:
        parallel["pipeline_parallel_degree"] = pp
        known = schedule if schedule in ("FThenB", "1F1B") else "1F1B"
        if chunks > 1 and not interleaves:
            why = f"the device does not run interleaved pipelines yet; {known} has the same numbers"
            run.left_out("virtual_pp_degree", chunks, why)
            chunks = 1
        parallel["pipeline_schedule"] = "interleaved" if chunks > 1 else known
        parallel |= {"virtual_pipeline_degree": chunks} if chunks > 1 else {}
        if schedule not in ("FThenB", "1F1B", "VPP"):
            run.left_out("pipeline_schedule_mode", schedule, f"nearest: parallel.pipeline_schedule {known}")
    words = str(run.take("sharding") or "").split()
    run.offload = "offload" in words or run.flag("sharding_offload")
    stages = [word for word in words if re.fullmatch(r"stage[123]", word)]
    degree = max(run.whole("sharding_parallel_degree", 1), run.whole("sharding_degree", 1), 1)
    if stages:
        parallel["sharding"] = stages[0]
        parallel |= {"sharding_parallel_degree": degree} if degree > 1 else {}
    elif degree > 1:
        run.left_out("sharding_parallel_degree", degree, "sharding is not given, so nothing is cut")
    experts = run.whole("expert_parallel_degree", 1)
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
    """Whether queries, keys and values, or gate and up, are one matrix there, in a job that can fuse them here."""
    fused = [key for key in ("fuse_attention_qkv", "fuse_attention_ffn") if is_true(run.left.get(key))]
    others = ("lora", "vera", "lokr", "reft", "to_static")
    if not fused or run.stage == "lora" or any(is_true(run.arguments.values.get(key)) for key in others):
        return False
    for key in fused:
        run.take(key)
    what = "queries, keys and values, and gate and up"
    run.note(f"parallel.fuse_projections: for {what}; their matrices stay apart, their sums over ranks are one")
    return True


def engine(run: Conversion) -> dict[str, Any]:
    bf16, fp16 = run.flag("bf16"), run.flag("fp16")
    precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    level = run.take("fp16_opt_level")
    if level not in (None, "O2") and precision != "fp32":
        run.left_out("fp16_opt_level", level, "parameters are in 16 bits with float32 masters, which is O2")
    granularity = run.take("recompute_granularity") or "full"
    kind = {"full": "full", "full_attn": "selective", "core_attn": "selective"}.get(str(granularity))
    engine = {"mode": "to_static" if run.flag("to_static") else "dynamic", "precision": precision}
    recompute = run.flag("recompute")
    if recompute and kind is None:
        run.left_out("recompute_granularity", granularity, "nearest key: engine.recompute, full or selective")
    engine["recompute"] = (kind or "full") if recompute else "none"
    offload = [run.flag(key) for key in ("tensorwise_offload_optimizer", "offload_optim")]
    return {**engine, "offload_optimizer": True} if run.offload or any(offload) else engine


def launch(run: Conversion, parallel: Mapping[str, Any]) -> dict[str, Any]:
    fixed = math.prod(
        parallel.get(key, 1)
        for key in ("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree")
    ) * max(1, run.whole("data_parallel_degree", 1))
    told, nodes = run.arguments.num_devices, run.arguments.nnodes or 1
    total = run.told_devices or (told * nodes if told else None)
    if total is None:
        total = math.lcm(fixed, PER_MACHINE)
        run.note(f"launch: {total} devices, as nothing says how many; --num_devices N for another number")
    if told and not run.told_devices:
        return {"num_devices": told, **({"nnodes": nodes} if nodes > 1 else {})}
    return launch_of(total)


def train(run: Conversion, launch: Mapping[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    total = launch["num_devices"] * launch.get("nnodes", 1)
    fixed = parallel.get("tensor_parallel_degree", 1) * parallel.get("pipeline_parallel_degree", 1)
    ranks = run.data_ranks = max(1, total // fixed)
    degree = parallel.get("sharding_parallel_degree", 1)
    if ranks == 1 and "sharding" in parallel:
        run.left_out("sharding", parallel.pop("sharding"), f"there is one data rank on {total} devices")
    elif degree == ranks:
        parallel.pop("sharding_parallel_degree", None)  # all data ranks take part, which is the default
    micro = run.whole("per_device_train_batch_size", BATCH)
    accumulate = run.whole("gradient_accumulation_steps", 1)
    steps, epochs = run.whole("max_steps", -1), run.number("num_train_epochs", 1)
    length = {"max_steps": steps} if steps > 0 else {"num_epochs": max(1, math.ceil(epochs))}
    if steps <= 0 and epochs != length["num_epochs"]:
        run.refuse("num_train_epochs", epochs, "train.num_epochs is whole; max_steps can be any number")
    train: dict[str, Any] = {**length, "global_batch_size": micro * accumulate * ranks, "micro_batch_size": micro}
    train["learning_rate"] = run.number("learning_rate", 5e-5)
    train |= _schedule(run, train["learning_rate"], steps)
    for key in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
        value = run.number(key, None)
        train |= {key: float(value)} if value is not None else {}
    if run.family.name == "deepseek" and (balance := run.number("aux_loss_alpha", _BALANCE)):
        train["expert_balance_loss"] = float(balance)
    norm = run.number("max_grad_norm", 1.0)
    train["max_grad_norm"] = float(norm) if norm > 0 else None
    every = run.number("eval_steps", None) or run.left.get("logging_steps", _LOGGING_STEPS)
    if run.evaluates:
        train["eval_steps"] = "epoch" if run.evaluates_epochs else every
    if (log := run.number("logging_steps", 1)) > 1:
        train["log_steps"] = log
    optimizer = run.take("optim")
    if optimizer not in (None, "adamw"):
        run.refuse("optim", optimizer, "train.optimizer has adamw")
    return train


def _schedule(run: Conversion, rate: float, steps: int) -> dict[str, Any]:
    """The schedule, its warm-up and its floor: those of the trainer, or of run_pretrain.py, which has its own."""
    kind = str(run.take("lr_scheduler_type") or "linear")
    schedule = {"constant_with_warmup": "constant"}.get(kind, kind)
    if schedule not in ("constant", "linear", "cosine"):
        run.refuse("lr_scheduler_type", kind, "train.lr_schedule has constant, linear, cosine and wsd")
        schedule = "linear"
    own = run.stage == "pretrain" and schedule != "constant"
    found: dict[str, Any] = {"lr_schedule": schedule, **_warmup(run, kind, steps, own)}
    decays = run.number("decay_steps", None)
    if decays is not None and decays != steps and schedule != "constant":
        run.refuse("decay_steps", decays, "the learning rate comes down until the last step")
    told = run.number("min_learning_rate", None)
    least = _PRETRAIN_LEAST if told is None and own else told or 0
    if least > rate and schedule != "constant":
        value = f"{least}, as it is not given" if told is None else told
        run.refuse("min_learning_rate", value, f"is above learning_rate {rate}; train.min_lr_ratio is at most 1")
    elif least and schedule != "constant":
        found["min_lr_ratio"] = float(f"{least / rate:.6g}")
    if own:
        run.note(
            "train.lr_schedule: comes down one step later than with run_pretrain.py, whose last step has the floor"
        )
    return found


def _warmup(run: Conversion, kind: str, steps: int, own: bool) -> dict[str, Any]:
    """The steps of `get_warmup_steps`: `warmup_steps` counts before `warmup_ratio`; the first one has rate 0.

    With a schedule of its own, of run_pretrain.py, the first of W steps has 1/W of the rate.
    """
    ratio, count = run.number("warmup_ratio", 0.0), run.number("warmup_steps", 0)
    if kind == "constant" or (count <= 0 and ratio <= 0):
        if count > 0 or ratio > 0:
            run.left_out("warmup_steps", count or ratio, "lr_scheduler_type constant has no warm-up")
        return {}
    if count <= 0 and steps > 0:
        # run_pretrain.py rounds nothing: 0.07 * 100, a little more than 7, is as good as 7 steps
        count = math.ceil(round(ratio * steps, 6) if own else ratio * steps)
    warm = {"warmup_steps": count} if count > 0 else {"warmup_ratio": float(ratio)}
    return warm if own else warm | {"warmup_from_zero": True}
