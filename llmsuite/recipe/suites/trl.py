"""Arguments of TRL: `trl sft --config FILE`, and dpo, kto and reward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.recipe.conversion.kinds import WORDS, is_on
from llmsuite.recipe.suites import model, trainer, trl_data, trl_words
from llmsuite.recipe.suites.suite import Run, Suite

_STAGES = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "rm", "rm": "rm"}
_RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "rm": 1e-4}
_LOSSES = {
    "dpo": {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo_mean"},
    "kto": {"kto": "kto", "apo_zero_unpaired": "apo_zero"},
}
_QUERIES_AND_VALUES = ("llama", "qwen")
"""Families whose matrices q_proj and v_proj get adapters by PEFT's default."""
_LENGTH, _BALANCE = 1024, 0.001


def _stage(values: Mapping[str, Any], name: str, told: str | None) -> str:
    if found := [key for key in ("reward_funcs", "num_generations") if is_on(values.get(key))]:
        raise UserError(
            f"{name}: no recipe is this job of TRL, because of {found[0]} = {values[found[0]]}, which is for GRPO and "
            "RLOO; llmsuite recipe new --stage grpo"
        )
    words = re.split(r"[^a-z]+", Path(name).stem.lower())
    stage = told or next((_STAGES[word] for word in words if word in _STAGES), None)
    if stage is None or stage not in {*_STAGES.values(), "lora"}:
        raise UserError(f"{name}: does not tell the command of TRL; add --stage, one of sft, dpo, kto and rm")
    stage = "sft" if stage == "lora" else stage
    return "lora" if stage == "sft" and is_on(values.get("use_peft")) else stage


def _recipe(run: Run) -> dict[str, Any]:
    adapters = run.flag("use_peft")
    defaults = trainer.Defaults(learning_rate=_RATES[run.section], recompute=True, precision="bf16")
    parallel = trainer.parallel(run) | _accelerate(run)
    run.hinted_devices = run.whole("num_processes", None)
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"TRL {run.name}",
        "model": model.model(run),
        "data": _data(run),
        "parallel": parallel,
        "engine": trainer.engine(run, defaults),
    }
    kind = run.take("dtype")
    if not adapters and kind not in (None, "float32"):
        run.refuse("dtype", kind, "parameters in 16 bits have float32 masters here, as with dtype float32")
    recipe["launch"] = trainer.launch(run)
    recipe["train"] = trainer.train(run, recipe["launch"], parallel, defaults)
    has_eval = trainer.evaluates(run, recipe["train"])
    if not has_eval:
        recipe["data"].pop("eval", None)
    if own := _own_section(run):
        recipe[run.section] = own
    if adapters:
        recipe["lora"] = _lora(run)
    if run.has_experts and run.section in ("sft", "dpo", "kto"):
        balance = run.number("router_aux_loss_coef", _BALANCE)
        if balance:
            run.refuse("router_aux_loss_coef", balance, "balances experts over a micro-batch; set it to 0")
    recipe["checkpoint"] = trainer.checkpoint(run, has_eval, defaults)
    recipe |= trainer.ends(run)
    return {key: value for key, value in recipe.items() if value != {}}


def _accelerate(run: Run) -> dict[str, Any]:
    """A profile of accelerate by its name."""
    profile = run.take("accelerate_config")
    if profile is None or profile in ("single_gpu", "multi_gpu"):
        return {}
    found = {"zero1": "stage1", "zero2": "stage2", "zero3": "stage3", "fsdp1": "stage3", "fsdp2": "stage3"}
    if profile not in found:
        run.note(f"parallel.sharding: is not read from {profile}; set it to stage1, stage2 or stage3")
    return {"sharding": found[profile]} if profile in found else {}


def _data(run: Run) -> dict[str, Any]:
    length = run.given("max_length") if "max_length" in run.left else _LENGTH
    run.take("max_length")
    if length is None:
        run.refuse("max_length", "null", "data.max_length is a number")
        length = _LENGTH
    found: dict[str, Any] = {**trl_data.rows(run), "max_length": length}
    if run.section == "sft" and run.flag("packing"):
        strategy = run.take("packing_strategy") or "bfd"
        if strategy != "bfd":
            run.refuse("packing_strategy", strategy, "data.packing has best_fit, which keeps rows whole")
        found["packing"] = "best_fit"
    order = run.take("train_sampling_strategy") or ("sequential" if run.section == "kto" else "random")
    if order == "sequential":
        found["shuffle"] = False
    return found | trainer.loading(run)


def _own_section(run: Run) -> dict[str, Any]:
    if run.section == "sft":
        if run.flag("completion_only_loss"):
            why = (
                "texts of prompt and completion are joined without a chat template there; where yours are turns, leave "
                "both out: data.format trl_completion learns the completion only"
            )
            run.refuse("completion_only_loss", True, why)
        elif not run.flag("assistant_only_loss"):
            why = "every token is learnt, of conversations too; set it to true to learn what the assistant says"
            run.refuse("assistant_only_loss", "not given", why)
        loss = run.take("loss_type")
        if loss not in (None, "nll", "chunked_nll"):
            run.refuse("loss_type", loss, "every supervised token weighs the same")
        return {"truncate": True}
    if run.section == "rm":
        run.note("data.max_length: pairs that are longer are dropped and counted")
        weight = run.number("center_rewards_coefficient", 0)
        return {"center_rewards": float(weight)} if weight else {}
    run.note("data.max_length: longer rows are dropped and counted; TRL cuts them")
    run.note(f"{run.section}: what a chat template puts behind the end of an answer does not count; there it does")
    own: dict[str, Any] = {"beta": float(run.number("beta", 0.1))}
    losses = _LOSSES[run.section]
    first = next(iter(losses))
    told_loss = run.take("loss_type", WORDS) or first
    kinds = told_loss if isinstance(told_loss, list) else [told_loss]
    if len(kinds) != 1 or kinds[0] not in losses:
        run.refuse("loss_type", told_loss, f"{run.section}.loss has {', '.join(losses)} of TRL's")
    kind = str(kinds[0])
    own["loss"] = losses.get(kind, losses[first])
    if run.section == "kto":
        run.note("kto: the divergence is estimated on the whole batch; there, on the micro-batches of a moment")
        for key in ("desirable_weight", "undesirable_weight"):
            weight = run.number(key, 1.0)
            own |= {key: float(weight)} if weight != 1 else {}
    elif (smoothing := run.number("label_smoothing", 0.0)) and kind == "sigmoid":
        own["label_smoothing"] = float(smoothing)
    elif smoothing:
        run.refuse(
            "label_smoothing", smoothing, f"with loss_type {kind} it has no key; dpo.label_smoothing is for sigmoid"
        )
    return own


def _lora(run: Run) -> dict[str, Any]:
    rank, alpha = run.whole("lora_r", 16), run.number("lora_alpha", 32)
    found: dict[str, Any] = {"rank": rank, "alpha": float(alpha)}
    if dropout := run.number("lora_dropout", 0.05):
        found["dropout"] = float(dropout)
    if run.flag("use_rslora"):
        found["rslora"] = True
    if run.flag("use_dora"):
        found["method"] = "dora"
    kind, wanted = run.take("lora_task_type") or "CAUSAL_LM", "SEQ_CLS" if run.section == "rm" else "CAUSAL_LM"
    if kind != wanted:
        run.refuse("lora_task_type", kind, f"has to be {wanted} for the head to be trained as here")
    if run.given("lora_target_modules"):
        found |= model.target_modules(run, "lora_target_modules", ("all-linear",))
    elif run.family.name in _QUERIES_AND_VALUES:
        found["target_modules"] = ["q_proj", "v_proj"]
        run.note("lora.target_modules: q_proj and v_proj, PEFT's default for this kind of model")
    else:
        run.refuse("lora_target_modules", "not given", "PEFT's default for this kind of model is not known; name them")
    four, eight = run.flag("load_in_4bit"), ("load_in_8bit", run.flag("load_in_8bit"))
    kind = ("bnb_4bit_quant_type", str(run.take("bnb_4bit_quant_type") or "nf4"))
    return found | model.bits(run, four, eight, kind, ("use_bnb_nested_quant", run.flag("use_bnb_nested_quant")))


TRL = Suite(
    name="TRL",
    model_key="model_name_or_path",
    stage=_stage,
    recipe=_recipe,
    refused=trl_words.REFUSED,
    without=trl_words.WITHOUT,
    becomes=trl_words.BECOMES,
)
