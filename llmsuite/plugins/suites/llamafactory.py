"""Conversion of LLaMA-Factory's arguments: `llamafactory-cli train FILE`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.plugins.suites import llamafactory_arguments, llamafactory_data, model, trainer
from llmsuite.plugins.suites.conversion.kinds import is_on
from llmsuite.plugins.suites.suite import Run, Suite
from llmsuite.plugins.suites.turn_texts import (
    CHATML,
    EACH_ANSWER,
    EMPTY_THOUGHT,
    KEEPS_ENDS,
    LAST_ANSWER,
    LLAMA_3,
    Form,
    check_tokens,
    turns_text,
)

_DEFAULTS = trainer.Defaults(recompute=True)
_STAGES = {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "kto": "kto"}
_QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_SMOLLM_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
_TEMPLATES: Mapping[str, tuple[Form, str | None]] = {
    "chatml": (CHATML, None),
    "qwen": (CHATML, _QWEN_SYSTEM),
    "qwen3": (CHATML, None),
    "qwen3_nothink": (CHATML, None),
    "smollm": (CHATML, None),
    "smollm2": (CHATML, _SMOLLM_SYSTEM),
    "llama3": (LLAMA_3, None),
}
"""Templates -> what they write around turns, and the system turn of rows without one."""
_WITH_QWEN = r"qwen-?2\.5-[\d.]+b-instruct/?$"
"""Models of whose tokenizers' template LLaMA-Factory makes its template qwen."""
_NEAREST = {
    "mistral": "mistral", "mistral_small": "mistral-v7", "gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma",
    "deepseek3": "deepseek-v3", "deepseekr1": "deepseek-r1", "glm4_moe": "glm4.5", "gpt_oss": "gpt-oss", "phi": "phi3",
    "phi4": "phi4",
}  # fmt: skip
"""Templates for the same models that differ, such as in spaces, tools or a default system turn."""
_OF_LAST_TURN = (
    "{%- if not loop.last %}"
    "{%- if '<think>' in content %}"
    "{{- raise_exception('this template writes no thoughts of earlier answers') }}"
    "{%- endif %}"
    "{%- set content = content.lstrip('\\n') %}"
    "{%- else %}"
    f"{EMPTY_THOUGHT}"
    "{%- endif %}"
)
"""Text with which only the last answer begins so, in stages that train on the last answer alone."""
_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo_mean", "simpo": "simpo"}


def _stage(values: Mapping[str, Any], name: str, requested: str | None) -> str:
    if "model_name_or_path" not in values and "model" in values:
        raise UserError(
            f"{name}: has the keys of LLaMA-Factory's engine v1, which is another program; pass a file with "
            "model_name_or_path, stage and finetuning_type"
        )
    if not is_on(values.get("do_train")):
        raise UserError(f"{name}: do_train is not true, so nothing is trained; that is `llmsuite generate`, `llmsuite "
                        "merge` or `llmsuite export`, not a recipe")  # fmt: skip
    kind = str(values.get("stage", "sft"))
    if kind == "rm":
        raise UserError(
            f"{name}: no recipe is this job of LLaMA-Factory: its stage rm scores by a linear layer with a bias "
            "after a dropout of 0.1; here there is neither. For a reward model: llmsuite recipe new --stage rm"
        )
    if requested is None and kind not in _STAGES:
        raise UserError(f"{name}: stage {kind} cannot be converted; supported are {', '.join(_STAGES)}; for ppo: "
                        "llmsuite recipe new --stage ppo")  # fmt: skip
    stage = requested or _STAGES[kind]
    if stage == "sft" and values.get("finetuning_type", "lora") == "lora":
        return "lora"
    return stage


def _recipe(run: Run) -> dict[str, Any]:
    kind = str(run.take("finetuning_type") or "lora")
    run.take("stage")
    own = _own_section(run)
    parallel = trainer.parallel(run) | _megatron(run)
    run.file_devices = run.integer("ray_num_workers", None)
    defaults = _DEFAULTS
    if run.flag("pure_bf16"):
        defaults = _without_masters(run)
    data = _data(run)
    if run.section == "pretrain" and data["train"].endswith(".txt"):
        own["documents"] = "lines"
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"LLaMA-Factory {run.name}",
        "model": model.model(run),
        "data": data,
        "parallel": parallel,
        "engine": _engine(run, kind, defaults),
    }
    model.revision(run, recipe["model"])
    recipe["launch"] = trainer.launch(run)
    recipe["train"] = trainer.train(run, recipe["launch"], parallel, defaults)
    has_eval = trainer.evaluates(run, recipe["train"]) and ("eval" in recipe["data"] or "holdout" in recipe["data"])
    if not has_eval:
        recipe["data"].pop("eval", None)
        recipe["train"].pop("eval_steps", None)
    if own:
        recipe[run.section] = own
    if kind == "lora":
        recipe["lora"] = _lora(run)
    elif kind == "full" and run.given("quantization_bit") is not None:
        run.refuse("quantization_bit", run.take("quantization_bit"), "is for adapters only: lora.base_dtype")
    elif kind != "full":
        run.refuse("finetuning_type", kind, "supported are full fine-tuning (full) and adapters (lora)")
    recipe["checkpoint"] = trainer.checkpoint(run, has_eval, defaults)
    trainer.early_stopping(run, "early_stopping_steps", recipe)
    recipe |= trainer.ends(run)
    return {key: value for key, value in recipe.items() if value != {}}


def _megatron(run: Run) -> dict[str, Any]:
    """Return the degrees of its Megatron engines, which do not change results."""
    found: dict[str, Any] = {}
    if run.given("tensor_model_parallel_size") is not None and run.stage == "lora":
        why = "its Megatron engines put adapters on fused matrices: queries, keys and values; gate and up"
        run.refuse("tensor_model_parallel_size", run.given("tensor_model_parallel_size"), why)
    for theirs, ours in (("tensor_model", "tensor"), ("pipeline_model", "pipeline"), ("expert_model", "expert")):
        degree = run.integer(f"{theirs}_parallel_size", 1)
        if degree > 1:
            found[f"{ours}_parallel_degree"] = degree
    if run.flag("sequence_parallel") and "tensor_parallel_degree" in found:
        found["sequence_parallel"] = True
    return found


def _without_masters(run: Run) -> trainer.Defaults:
    """Return the defaults with `pure_bf16`, for which parameters, adapters too, stay bfloat16."""
    for other, why in (
        ("deepspeed", "DeepSpeed has master weights of its own"),
        ("fsdp", "accelerate makes parameters float32 with bf16, and not without"),
        ("quantization_bit", "adapters of quantised matrices are float32"),
        ("upcast_layernorm", "norms are float32"),
    ):
        if is_on(run.given(other)):
            run.refuse("pure_bf16", True, f"with {other}: {why}")
    return dataclasses.replace(_DEFAULTS, master_weights=False)


def _engine(run: Run, kind: str, defaults: trainer.Defaults) -> dict[str, Any]:
    engine = trainer.engine(run, defaults)
    if not defaults.master_weights:
        engine["precision"] = "bf16"
    run.take("gradient_checkpointing")
    if run.flag("disable_gradient_checkpointing"):
        engine.pop("recompute", None)
    if engine["precision"] == "fp32" and kind == "lora":
        run.note("engine.precision: fp32; there, without bf16 and fp16, the frozen model has the dtype of its files")
    return engine


def _own_section(run: Run) -> dict[str, Any]:
    if run.section == "sft":
        run.note(
            "sft.truncate: truncates the end of a long row; LLaMA-Factory truncates prompts and answers in proportion"
        )
        return {"truncate": True, **({"loss": "dft"} if run.flag("use_dft_loss") else {})}
    if run.section == "pretrain":
        if run.flag("use_dft_loss"):
            run.refuse("use_dft_loss", True, "is a loss of sft")
        return {}
    if run.flag("use_dft_loss"):
        run.refuse("use_dft_loss", True, "is a loss of sft")
    run.note("data.max_length: longer rows are dropped and counted; LLaMA-Factory truncates their prompts and answers")
    own: dict[str, Any] = {"beta": float(run.number("pref_beta", 0.1))}
    if run.section == "kto":
        run.take("pref_loss")
        run.note("kto: the KL divergence is estimated over the global batch; there, over the current micro-batches")
        for theirs, ours in (("kto_chosen_weight", "desirable_weight"), ("kto_rejected_weight", "undesirable_weight")):
            weight = run.number(theirs, 1.0)
            if weight != 1:
                own[ours] = float(weight)
        return own
    loss = str(run.take("pref_loss") or "sigmoid")
    if loss not in _LOSSES:
        why = {
            "orpo": "weights chosen answers equally in its second term; dpo.loss orpo weights tokens equally",
            "kto_pair": "is rejected by TRL since 0.9; nearest: stage kto",
        }
        run.refuse("pref_loss", loss, why.get(loss, f"dpo.loss has {', '.join(_LOSSES)}"))
    own["loss"] = _LOSSES.get(loss, "sigmoid")
    smoothing = run.number("dpo_label_smoothing", 0.0)
    if smoothing and loss == "sigmoid":
        own["label_smoothing"] = float(smoothing)
    gamma = run.number("simpo_gamma", 0.5)
    if own["loss"] == "simpo":
        own["gamma"] = float(gamma)
    elif run.given("simpo_gamma") is not None:
        run.left_out("simpo_gamma", gamma, f"is the margin of simpo, and pref_loss is {loss}")
    return own


def _data(run: Run) -> dict[str, Any]:
    length = run.integer("cutoff_len", 2048)
    if run.section == "pretrain":
        if run.take("packing") is False:
            run.refuse("packing", False, "samples are cut from the concatenated documents")
        run.note(f"data.max_length: {length - 1}, the number of predicted tokens in a sample of {length} tokens")
        length -= 1
    elif run.flag("neat_packing"):
        run.take("packing")
    elif run.flag("packing"):
        run.refuse("packing", True, "without neat_packing tokens attend to other rows of a pack; data.packing "
                                    "separates rows, like neat_packing")  # fmt: skip
    found: dict[str, Any] = {**llamafactory_data.rows(run), **_held_out(run), "max_length": length}
    if is_on(run.given("neat_packing")) and run.section == "sft":
        found["packing"] = "best_fit"
        run.note("data.packing: packs are filled best-fit, so there may be fewer packs than with LLaMA-Factory")
    if run.section != "pretrain":
        found |= _template(run)
    else:
        system = run.take("default_system")
        run.take("template")
        if system is not None:
            run.left_out("default_system", system, "texts for pretraining have no turns")
    if run.flag("disable_shuffling"):
        found["shuffle"] = False
    return found | trainer.loading(run)


def _held_out(run: Run) -> dict[str, Any]:
    """Return `data.holdout`: its rows are those of `datasets.train_test_split` with the seed of the run, too."""
    size = run.number("val_size", 0)
    if not size > 1e-6:
        return {}
    if run.given("eval_dataset") is not None:
        raise UserError(f"{run.name}: has val_size and eval_dataset, which LLaMA-Factory refuses; remove one of them")
    if run.section == "pretrain":
        run.refuse("val_size", size, "it holds rows out and joins the others into samples; nearest key: pretrain.split")
    elif is_on(run.given("streaming")):
        run.refuse("val_size", size, "with streaming it holds the first rows of a buffer out; write them into a file")
    elif size == 1:
        run.refuse("val_size", size, "is one row, or all rows as 1.0; give a number of rows or a fraction below 1")
    elif size > 1:
        return {"holdout": int(size)}
    return {"holdout": float(size)}


def _template(run: Run) -> dict[str, Any]:
    """Return `data.chat_template`, and how answers end: the text of LLaMA-Factory's template."""
    name = run.take("template")
    weights = str(run.given(run.suite.model_key))
    if name is None and re.search(_WITH_QWEN, weights, re.IGNORECASE):
        name = "qwen"
    if name is None:
        run.refuse("template", "not given", "LLaMA-Factory makes one of the tokenizer's by rules of its own; name it")
        return {}
    if name not in _TEMPLATES:
        why = "is a template of LLaMA-Factory"
        if name in _NEAREST:
            why = f"{why} (nearest: data.chat_template {_NEAREST[name]})"
        run.refuse("template", name, f"{why}; to use the template of {weights}, leave it out: data.chat_template")
        return {}
    form, system = _TEMPLATES[name]
    given = run.take("default_system")
    if given is not None:
        system = str(given)
    elif run.given("default_system") == "":
        system = None
    check_tokens(run, name, form)
    thought = ""
    if name == "qwen3":
        if "enable_thinking" in run.left and not is_on(run.left["enable_thinking"]):
            run.refuse("enable_thinking", run.left["enable_thinking"], "removes thoughts; nearest key: "
                                                                       "data.chat_template")  # fmt: skip
        thought = EMPTY_THOUGHT if run.section == "sft" else _OF_LAST_TURN
    run.note("data.chat_template: the text of LLaMA-Factory's template, which refuses rows that it does not write "
             "alike; what it has in {% generation %} is supervised")  # fmt: skip
    answer = EACH_ANSWER if run.section == "sft" else LAST_ANSWER
    return {"chat_template": turns_text(form, system, thought, answer, fills_empty_system=True)} | KEEPS_ENDS


def _lora(run: Run) -> dict[str, Any]:
    rank = run.integer("lora_rank", 8)
    found: dict[str, Any] = {"rank": rank, "alpha": float(run.number("lora_alpha", 0) or 2 * rank)}
    if run.flag("use_dora"):
        found["method"] = "dora"
    if run.flag("pissa_init"):
        found["init"] = "pissa"
        if "method" in found:
            run.refuse("pissa_init", True, "together with DoRA: lora.init pissa needs lora.method lora")
        run.note("lora.init: pissa with exact singular vectors; pissa_iter approximates them by iteration")
    found |= model.dropout(run, 0.0)
    if run.flag("use_rslora"):
        found["rslora"] = True
    ratio = run.number("loraplus_lr_ratio", None)
    if ratio:
        found["lora_plus_ratio"] = float(ratio)
    found |= model.target_modules(run, "lora_target", ("all",), "all")
    found |= model.modules_to_save(run, "additional_target")
    number = run.number("quantization_bit", None)
    method = str(run.take("quantization_method") or "bnb")
    kind = str(run.take("quantization_type") or "nf4")
    doubled = run.take("double_quantization")
    if number is not None and (method not in ("bnb", "bitsandbytes") or number not in (4, 8)):
        run.refuse("quantization_method", method, f"with {number} bits: lora.base_dtype has nf4, fp4 and int8")
    eight = ("quantization_bit", number if number == 8 else None)
    kinds = ("quantization_type", kind)
    return found | model.bits(run, number == 4, eight, kinds, doubled is not False)


LLAMA_FACTORY = Suite(
    name="LLaMA-Factory",
    model_key="model_name_or_path",
    stage=_stage,
    recipe=_recipe,
    refused=llamafactory_arguments.REFUSED,
    ignored=llamafactory_arguments.IGNORED,
    translations=llamafactory_arguments.TRANSLATIONS,
    reads_codes=True,
)
