"""Conversion of TRL's arguments: `trl sft --config FILE`, and dpo, kto, reward and grpo."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.plugins.suites import grpo, model, trainer, trl_arguments, trl_data
from llmsuite.plugins.suites.conversion.kinds import WORDS, is_on
from llmsuite.plugins.suites.suite import Run, Suite
from llmsuite.plugins.suites.turn_texts import KEEPS_ENDS

_STAGES = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "rm", "rm": "rm", "grpo": "grpo"}
_RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "rm": 1e-4, "grpo": 1e-6}
_LOSSES = {
    "dpo": {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo_mean"},
    "kto": {"kto": "kto", "apo_zero_unpaired": "apo_zero"},
}
_GRPO = grpo.GrpoDefaults(
    beta=0.0, temperature=1.0, loss="dapo", corrects_servers=True,
    rewards={"accuracy_reward": "trl_accuracy", "think_format_reward": "trl_think_format"},
)  # fmt: skip
_QUERIES_AND_VALUES = ("llama", "qwen")
"""Families in which PEFT by default puts adapters on q_proj and v_proj."""
_LENGTH = 1024
_BALANCE = 0.001


def _stage(values: Mapping[str, Any], name: str, requested: str | None) -> str:
    words = re.split(r"[^a-z]+", Path(name).stem.lower())
    stage = requested or next((_STAGES[word] for word in words if word in _STAGES), None)
    if stage is None or stage not in {*_STAGES.values(), "lora"}:
        raise UserError(f"{name}: does not tell the command of TRL; add --stage, one of sft, dpo, kto, rm and grpo")
    found = [key for key in ("reward_funcs", "num_generations") if is_on(values.get(key))]
    if found and (stage != "grpo" or "rloo" in words):
        raise UserError(
            f"{name}: no recipe is this job of TRL, because of {found[0]} = {values[found[0]]}, which is for GRPO and "
            "RLOO; for GRPO add --stage grpo"
        )
    stage = "sft" if stage == "lora" else stage
    if stage == "sft" and is_on(values.get("use_peft")):
        return "lora"
    return stage


def _recipe(run: Run) -> dict[str, Any]:
    adapters = run.flag("use_peft")
    defaults = trainer.Defaults(learning_rate=_RATES[run.section], recompute=True, precision="bf16")
    parallel = trainer.parallel(run) | _accelerate(run)
    run.file_devices = run.integer("num_processes", None)
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"TRL {run.name}",
        "model": model.model(run),
        "data": _data(run),
        "parallel": parallel,
        "engine": trainer.engine(run, defaults),
    }
    keeps_dropout = "disable_dropout" in run.left and not is_on(run.given("disable_dropout"))
    if keeps_dropout and run.section != "grpo":  # where it is the default
        run.refuse("disable_dropout", run.take("disable_dropout"), "models are trained without dropout")
    kind = run.take("dtype")
    if not adapters and kind not in (None, "float32"):
        defaults = _without_masters(run, kind, recipe["engine"]["precision"], defaults)
    recipe["launch"] = trainer.launch(run)
    recipe["train"] = trainer.train(run, recipe["launch"], parallel, defaults)
    has_eval = trainer.evaluates(run, recipe["train"])
    if not has_eval:
        recipe["data"].pop("eval", None)
    if run.section == "grpo":
        if "max_completion_length" in run.left and run.given("max_completion_length") is None:
            run.refuse("max_completion_length", "null", "rollout.max_completion_length is a number")
        recipe |= grpo.sections(run, recipe, adapters, _GRPO)
        most = run.integer("vllm_max_model_length", None)
        if most is None:
            most = _LENGTH + recipe["rollout"]["max_completion_length"]
            run.note(
                f"data.max_length: {_LENGTH} tokens for prompts, which have no limit there; longer ones are dropped"
            )
        recipe["data"]["max_length"] = most
        run.note(
            "data.train: a prompt has to be turns; TRL gives a prompt of text to the model without a chat template"
        )
    elif own := _own_section(run):
        recipe[run.section] = own
    if adapters:
        recipe["lora"] = _lora(run)
    _check_balance(run)
    recipe["checkpoint"] = trainer.checkpoint(run, has_eval, defaults)
    recipe |= trainer.ends(run)
    return {key: value for key, value in recipe.items() if value != {}}


def _without_masters(run: Run, dtype: Any, precision: str, defaults: trainer.Defaults) -> trainer.Defaults:
    """Return the defaults of a full fine-tuning whose parameters are loaded in `dtype` and updated so."""
    if dtype != "bfloat16" or precision != "bf16":
        run.refuse("dtype", dtype, "train.master_weights: false is for bfloat16, with bf16")
        return defaults
    if trainer.is_wrapped(run):
        run.refuse("dtype", dtype, "with DeepSpeed or FSDP; master weights are those of float32 parameters here: "
                                   "dtype float32")  # fmt: skip
        return defaults
    return dataclasses.replace(defaults, master_weights=False)


def _check_balance(run: Run) -> None:
    """Refuse the load-balancing loss of models with experts, which all commands but reward have by default."""
    given = run.given("router_aux_loss_coef")
    if run.section == "rm":
        if given is not None:
            run.refuse("router_aux_loss_coef", run.take("router_aux_loss_coef"), "is no argument of trl reward")
        return
    balance = run.number("router_aux_loss_coef", _BALANCE)
    if not run.has_experts:
        if given is not None:
            run.left_out("router_aux_loss_coef", given, "the model has no experts")
    elif balance:
        run.refuse("router_aux_loss_coef", balance, "is a load-balancing loss over the micro-batch; set it to 0")


def _accelerate(run: Run) -> dict[str, Any]:
    """Return section parallel for a profile of accelerate, by its name."""
    profile = run.take("accelerate_config")
    if profile is None or profile in ("single_gpu", "multi_gpu"):
        return {}
    found = {"zero1": "stage1", "zero2": "stage2", "zero3": "stage3", "fsdp1": "stage3", "fsdp2": "stage3"}
    if profile not in found:
        run.note(f"parallel.sharding: cannot be read from {profile}; set it to stage1, stage2 or stage3")
    return {"sharding": found[profile]} if profile in found else {}


def _data(run: Run) -> dict[str, Any]:
    length = _LENGTH
    if "max_length" in run.left:
        length = run.given("max_length")
    run.take("max_length")
    if length is None:
        run.refuse("max_length", "null", "data.max_length is a number")
        length = _LENGTH
    found: dict[str, Any] = {**trl_data.rows(run), "max_length": length}
    if run.section != "grpo":
        # its templates for training mark the line break after an answer too, and its pairs are full texts of a template
        found |= KEEPS_ENDS
    if run.section == "sft" and run.flag("packing"):
        strategy = run.take("packing_strategy") or "bfd"
        if strategy != "bfd":
            run.refuse("packing_strategy", strategy, "data.packing has best_fit, which does not split rows")
        found["packing"] = "best_fit"
    if not _is_shuffled(run):
        found["shuffle"] = False
    return found | trainer.loading(run)


def _is_shuffled(run: Run) -> bool:
    """Return True if the order of the rows is random. The sampler of GRPO reads `shuffle_dataset` alone."""
    if run.section == "grpo":
        if run.given("train_sampling_strategy") is not None:
            order = run.take("train_sampling_strategy")
            run.left_out("train_sampling_strategy", order, "prompts are ordered by shuffle_dataset")
        return "shuffle_dataset" not in run.left or is_on(run.take("shuffle_dataset"))
    if is_on(run.given("shuffle_dataset")):
        run.refuse("shuffle_dataset", run.take("shuffle_dataset"), "nearest key: data.shuffle, in every epoch")
    order = run.take("train_sampling_strategy") or ("sequential" if run.section == "kto" else "random")
    return order != "sequential"


def _own_section(run: Run) -> dict[str, Any]:
    if run.section == "sft":
        if run.flag("completion_only_loss"):
            why = (
                "prompt and completion are concatenated without a chat template there; if yours are turns, leave both "
                "out: data.format trl_completion supervises the completion only"
            )
            run.refuse("completion_only_loss", True, why)
        elif not run.flag("assistant_only_loss"):
            why = "all tokens are supervised, also in conversations; set it to true to supervise assistant turns"
            run.refuse("assistant_only_loss", "not given", why)
        loss = run.take("loss_type")
        if loss not in (None, "nll", "chunked_nll", "dft"):
            run.refuse("loss_type", loss, "of TRL's losses, sft.loss has nll, chunked_nll, dft")
        return {"truncate": True, **({"loss": "dft"} if loss == "dft" else {})}
    if run.section == "rm":
        run.note("data.max_length: pairs that are longer are dropped and counted")
        weight = run.number("center_rewards_coefficient", 0)
        return {"center_rewards": float(weight)} if weight else {}
    run.note("data.max_length: longer rows are dropped and counted; TRL truncates them")
    run.note(f"{run.section}: tokens of the chat template after the end of an answer do not count; there they do")
    own: dict[str, Any] = {"beta": float(run.number("beta", 0.1))}
    losses = _LOSSES[run.section]
    first = next(iter(losses))
    given_loss = run.take("loss_type", WORDS) or first
    kinds = given_loss if isinstance(given_loss, list) else [given_loss]
    if len(kinds) != 1 or kinds[0] not in losses:
        run.refuse("loss_type", given_loss, f"of TRL's losses, {run.section}.loss has {', '.join(losses)}")
    kind = str(kinds[0])
    own["loss"] = losses.get(kind, losses[first])
    if run.section == "kto":
        run.note("kto: the KL divergence is estimated over the global batch; there, over the current micro-batches")
        for key in ("desirable_weight", "undesirable_weight"):
            weight = run.number(key, 1.0)
            if weight != 1:
                own[key] = float(weight)
        return own
    smoothing = run.number("label_smoothing", 0.0)
    if smoothing and kind == "sigmoid":
        own["label_smoothing"] = float(smoothing)
    elif smoothing:
        why = f"is not supported with loss_type {kind}; dpo.label_smoothing is for sigmoid"
        run.refuse("label_smoothing", smoothing, why)
    return own


def _lora(run: Run) -> dict[str, Any]:
    rank = run.integer("lora_r", 16)
    alpha = run.number("lora_alpha", 32)
    found: dict[str, Any] = {"rank": rank, "alpha": float(alpha)}
    found |= model.dropout(run, 0.05)
    if run.flag("use_rslora"):
        found["rslora"] = True
    if run.flag("use_dora"):
        found["method"] = "dora"
    kind = run.take("lora_task_type") or "CAUSAL_LM"
    expected = "SEQ_CLS" if run.section == "rm" else "CAUSAL_LM"
    if kind != expected:
        run.refuse("lora_task_type", kind, f"has to be {expected}, so that the head is trained as here")
    if run.given("lora_target_modules"):
        found |= model.target_modules(run, "lora_target_modules", ("all-linear",))
    elif run.family.name in _QUERIES_AND_VALUES:
        found["target_modules"] = ["q_proj", "v_proj"]
        run.note("lora.target_modules: q_proj and v_proj, PEFT's default for this kind of model")
    else:
        run.refuse("lora_target_modules", "not given", "PEFT's default for this kind of model is not known; name them")
    four = run.flag("load_in_4bit")
    eight = ("load_in_8bit", run.flag("load_in_8bit"))
    kind = ("bnb_4bit_quant_type", str(run.take("bnb_4bit_quant_type") or "nf4"))
    return found | model.bits(run, four, eight, kind, run.flag("use_bnb_nested_quant"))


TRL = Suite(
    name="TRL",
    model_key="model_name_or_path",
    stage=_stage,
    recipe=_recipe,
    refused=trl_arguments.REFUSED,
    ignored=trl_arguments.IGNORED,
    translations=trl_arguments.TRANSLATIONS,
    rollout_stages=("grpo",),
)
