"""Conversion of PaddleFormers' arguments: `paddleformers-cli train FILE`. Most are PaddleNLP's, with other defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.plugins.suites import model, paddleformers_arguments, trainer
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

_DEFAULTS = trainer.Defaults(num_epochs=1, precision="bf16", has_bitsandbytes=False)
_STAGES = {"sft": "sft", "dpo": "dpo", "pt": "pretrain"}
_TEMPLATES: Mapping[str, Form] = {"qwen3": CHATML, "qwen3_nothink": CHATML, "llama3": LLAMA_3}
_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo_mean", "simpo": "simpo"}
_OFFLOAD = ("tensorwise_offload_optimizer", "optimizer_cpu_offload", "offload_optim")
_LENGTH = 4096


def _stage(values: Mapping[str, Any], name: str, requested: str | None) -> str:
    if not is_on(values.get("do_train")):
        raise UserError(f"{name}: do_train is not true, so nothing is trained; that is `llmsuite generate`, `llmsuite "
                        "merge` or `llmsuite export`, not a recipe")  # fmt: skip
    kind = str(values.get("stage") or "")
    if requested is None and not kind:
        raise UserError(
            f"{name}: has no stage: PaddleFormers 1.2.0 then trains adapters by SFT, older versions use the stage of "
            "the script; write stage (SFT, DPO or PT) and fine_tuning (full or LoRA) into it"
        )
    if requested is None and kind.lower() not in _STAGES:
        raise UserError(f"{name}: stage {kind} is no job of a recipe; supported are SFT, DPO and PT")
    stage = requested or _STAGES[kind.lower()]
    if stage == "sft" and _trains_adapters(values):
        return "lora"
    return stage


def _trains_adapters(values: Mapping[str, Any]) -> bool:
    """Return True if adapters are trained: by `fine_tuning`, whose default is LoRA and which overrides `lora`.

    A file with neither `fine_tuning` nor `stage` is for an older version, where `lora` determines it.
    """
    if not values.get("stage") and values.get("fine_tuning") is None:
        return is_on(values.get("lora"))
    return str(values.get("fine_tuning", "LoRA")).lower() == "lora"


def _recipe(run: Run) -> dict[str, Any]:
    adapters = run.stage == "lora" or _trains_adapters(run.arguments.values)
    for key in ("stage", "fine_tuning", "lora"):
        run.take(key)
    _balance(run)
    parallel = _parallel(run)
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"PaddleFormers {run.name}",
        "model": model.model(run, run.take("tokenizer_name_or_path")),
        "data": _data(run),
        "parallel": parallel,
        "engine": _engine(run),
    }
    recipe["launch"] = trainer.launch(run)
    recipe["train"] = _train(run, recipe["launch"], parallel)
    has_eval = trainer.evaluates(run, recipe["train"]) and "eval" in recipe["data"]
    if not has_eval:
        recipe["data"].pop("eval", None)
        recipe["train"].pop("eval_steps", None)
    own = _own_section(run)
    if own:
        recipe[run.section] = own
    if adapters:
        recipe["lora"] = _lora(run, parallel)
    recipe["checkpoint"] = trainer.checkpoint(run, has_eval, _DEFAULTS)
    recipe |= trainer.ends(run)
    device = run.take("device")
    if device:
        recipe["device"] = str(device)
    return {key: value for key, value in recipe.items() if value != {}}


def _balance(run: Run) -> None:
    """Refuse models with experts, whose config balances them there; without experts, ignore the argument."""
    key = "router_aux_loss_coef"
    weight = run.take(key)
    routed = run.has_experts
    if routed:
        why = "there, the config of the model balances its experts"
        run.refuse("model_name_or_path", run.given("model_name_or_path"), why)
    if weight is not None and routed:
        run.refuse(key, weight, "is a load-balancing loss over the micro-batch; nearest key: train.expert_balance_loss")
    elif weight is not None:
        run.left_out(key, weight, paddleformers_arguments.EXPERTS)


def _expert_ranks(run: Run) -> int:
    """Return the minimum number of ranks in a pipeline stage: the expert parallel degree, also without experts."""
    found = 1
    for key in ("expert_model_parallel_size", "expert_parallel_degree"):
        degree = run.integer(key, None)
        if degree is not None:
            found = max(found, int(degree))
            run.left_out(key, degree, paddleformers_arguments.EXPERTS)
    return found


def _parallel(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    degrees = []
    for names, ours in (
        (("tensor_model_parallel_size", "tensor_parallel_degree"), "tensor_parallel_degree"),
        (("pipeline_model_parallel_size", "pipeline_parallel_degree"), "pipeline_parallel_degree"),
        (("sharding_parallel_size", "sharding_parallel_degree"), "sharding_parallel_degree"),
    ):
        degree = max(run.integer(name, 1) for name in names)
        degrees.append(max(1, int(degree)))
        if degree > 1:
            found[ours] = degree
    words = str(run.take("sharding") or ("stage1" if degrees[2] > 1 else "")).split()
    offloads = [run.flag(key) for key in _OFFLOAD]
    run.offload = "offload" in words or any(offloads)
    stages = [word for word in words if word in ("stage1", "stage2", "stage3")]
    if stages:
        found["sharding"] = stages[0]
    if run.flag("sequence_parallel") and "tensor_parallel_degree" in found:
        found["sequence_parallel"] = True
    least = math.lcm(math.prod(degrees), degrees[1] * _expert_ranks(run))
    run.file_devices = least if least > 1 else None
    if run.file_devices and not run.requested_devices:
        run.note(
            f"launch: {run.file_devices} devices, the minimum for the degrees; --num_devices N for another number, "
            "which multiplies train.global_batch_size"
        )
    return found


def _engine(run: Run) -> dict[str, Any]:
    kind = run.take("compute_type") or "bf16"
    if kind not in ("bf16", "fp16", "float32"):
        run.refuse("compute_type", kind, "its blocks or scales differ; nearest key: lora.base_dtype")
    run.take("bf16"), run.take("fp16")  # compute_type overrides them
    engine: dict[str, Any] = {"precision": {"float32": "fp32"}.get(str(kind), str(kind))}
    granularity = run.take("recompute_granularity")
    recomputes = run.flag("recompute")
    if granularity not in (None, "full", "selective"):
        run.note(f"engine.recompute: full instead of recompute_granularity {granularity}")
    if granularity is not None or recomputes:
        engine["recompute"] = "selective" if granularity == "selective" else "full"
    if run.offload:
        engine["offload_optimizer"] = True
    return engine


def _train(run: Run, launch: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    total = launch["num_devices"] * launch.get("nnodes", 1)
    cut = parallel.get("tensor_parallel_degree", 1) * parallel.get("pipeline_parallel_degree", 1)
    if parallel.get("sharding_parallel_degree") == max(1, total // cut):
        parallel.pop("sharding_parallel_degree")  # all data ranks, which is the default
    if run.left.get("max_grad_norm") is None:
        run.left["max_grad_norm"] = 1.0
    train = trainer.train(run, launch, parallel, _DEFAULTS)
    least = run.number("min_lr", 0)
    if least and train["lr_schedule"] == "cosine":
        train["min_lr_ratio"] = float(f"{least / train['learning_rate']:.6g}")
    elif least:
        run.left_out("min_lr", least, "belongs to the cosine schedule")
    if "sharding_parallel_degree" in parallel and "sharding" not in parallel:
        parallel.pop("sharding_parallel_degree")
    return train


def _data(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, ours in (("train_dataset_path", "train"), ("eval_dataset_path", "eval")):
        paths = run.words(key)
        if len(paths) > 1:
            run.refuse(key, ", ".join(paths), "files are mixed by probability; join their rows in one file")
        if paths:
            found[ours] = paths[0]
        share = run.take(key.replace("_path", "_prob"))
        if share is not None and len(paths) == 1 and str(share) not in ("1", "1.0"):
            run.refuse(key.replace("_path", "_prob"), share, "all rows of the file are used")
    if "train" not in found:
        raise UserError(f"{run.name}: has no train_dataset_path; set it to the file with the rows")
    found["max_length"] = run.integer("max_seq_len", _LENGTH)
    packs = run.flag("packing")
    if run.section == "pretrain":
        if not packs:
            run.refuse("packing", False, "samples are cut from the concatenated documents")
        run.take("template"), run.take("template_backend")
        return found | trainer.loading(run)
    if packs and run.section == "dpo":
        why = "a pack has prompts with both answers, and the loss is a mean over each pack; a pack of pairs is two rows"
        run.refuse("packing", True, f"{why} here")
    elif packs:
        found["packing"] = "best_fit"
    elif run.section == "dpo" or run.given("dataset_type") != "map":
        _repeat_last(run)
    if run.section == "dpo":
        run.note("data.max_length: is for a prompt with one answer; there, for a prompt with both")
    return found | _template(run) | trainer.loading(run)


def _repeat_last(run: Run) -> None:
    """Report the last row of an epoch, which PaddleFormers reads twice; refuse several epochs."""
    run.note("data: a step that the rows of an epoch do not fill takes rows of the next one; there it first takes the "
             "last row again")  # fmt: skip
    epochs = run.given("num_train_epochs")
    if isinstance(epochs, (int, float)) and epochs > 1:
        run.refuse("num_train_epochs", epochs, "the last row of each epoch is read twice there; set packing")


def _template(run: Run) -> dict[str, Any]:
    """Return `data.chat_template`, and how answers end: the text of PaddleFormers' template."""
    backend = run.take("template_backend") or "custom"
    name = run.take("template")
    if backend != "custom":
        run.refuse("template_backend", backend, "adds the end-of-sequence token to what the chat template writes")
        return {}
    if name is None:
        run.refuse("template", "not given", "PaddleFormers makes one of the tokenizer's by rules of its own; name it")
        return {}
    if name not in _TEMPLATES:
        run.refuse("template", name, "is a template of PaddleFormers; to use the tokenizer's template, leave it out")
        return {}
    check_tokens(run, name, _TEMPLATES[name])
    run.note("data.chat_template: the text of PaddleFormers' template, which refuses rows that it does not write "
             "alike; what it has in {% generation %} is supervised. With `label` 0 for the last answer, its end is "
             "supervised there")  # fmt: skip
    thought = EMPTY_THOUGHT if name == "qwen3" else ""
    answer = EACH_ANSWER if run.section == "sft" else LAST_ANSWER
    return {"chat_template": turns_text(_TEMPLATES[name], None, thought, answer)} | KEEPS_ENDS


def _own_section(run: Run) -> dict[str, Any]:
    if run.section == "pretrain":
        causal = run.flag("use_global_causal_attn")
        run.note("pretrain: a sample begins with the last token of the previous sample; there, with the token after it")
        return {} if causal else {"document_mask": True}
    if run.section == "sft":
        cut = run.take("truncation_strategy") or "delete"
        if cut not in ("delete", "right"):
            run.refuse(
                "truncation_strategy", cut, "sft.truncate truncates the end of a row; otherwise rows are dropped"
            )
        return {"truncate": True} if cut == "right" else {}
    own: dict[str, Any] = {"beta": float(run.number("beta", 0.1))}
    loss = str(run.take("loss_type") or "sigmoid")
    if loss not in _LOSSES:
        run.refuse("loss_type", loss, f"of PaddleFormers' losses, dpo.loss has {', '.join(_LOSSES)}")
    own["loss"] = _LOSSES.get(loss, "sigmoid")
    gamma = run.number("simpo_gamma", 0.5)
    smoothing = run.number("label_smoothing", 0.0)
    if own["loss"] == "simpo":
        own["gamma"] = float(gamma)
    if smoothing:
        own["label_smoothing"] = float(smoothing)
    weight = run.number("sft_loss_ratio", 0.0)
    if weight:
        own["sft_weight"] = float(weight)
    return own


def _lora(run: Run, parallel: Mapping[str, Any]) -> dict[str, Any]:
    rank = run.integer("lora_rank", 8)
    plus = run.flag("rslora_plus")
    rslora = run.flag("rslora") or plus
    ratio = run.number("lora_plus_scale", 1.0)
    found: dict[str, Any] = {"rank": rank, "alpha": 4.0 if rslora else 2.0 * rank}
    alpha = run.take("lora_alpha")
    if alpha not in (None, -1, found["alpha"]):
        run.left_out("lora_alpha", alpha, f"is not used by its trainers, which use {found['alpha']:g}")
    if rslora:
        found["rslora"] = True
    ratio = 4.0 if plus else ratio
    if ratio != 1:
        found["lora_plus_ratio"] = float(ratio)
    if run.family.name == "qwen":
        found["share_first"] = True  # its matrices of one input are one matrix there
    degree = parallel.get("tensor_parallel_degree", 1)
    if degree > 1:
        found["init_shards"] = degree
    if run.family.name not in ("llama", "qwen"):
        run.refuse("fine_tuning", "LoRA", f"the matrices that get adapters in {run.family.name} there are not known")
    return found


PADDLE_FORMERS = Suite(
    name="PaddleFormers",
    model_key="model_name_or_path",
    stage=_stage,
    recipe=_recipe,
    refused=paddleformers_arguments.REFUSED,
    ignored=paddleformers_arguments.IGNORED,
    translations=paddleformers_arguments.TRANSLATIONS,
)
