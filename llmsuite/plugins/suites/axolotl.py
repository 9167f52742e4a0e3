"""Conversion of Axolotl's arguments: `axolotl train FILE`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists
from llmsuite.data.turns import SHAREGPT_ROLES
from llmsuite.plugins.suites import axolotl_arguments, axolotl_templates, model, trainer
from llmsuite.plugins.suites.conversion.end_tokens import is_base
from llmsuite.plugins.suites.conversion.kinds import LIST, MAPPING, ONE, ONE_OR_MAPPING, WORDS, Kind, is_on
from llmsuite.plugins.suites.suite import Run, Suite
from llmsuite.plugins.suites.turn_texts import KEEPS_TEXT

_TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "qwen_25": "qwen2.5", "qwen3": "qwen3",
              "tokenizer_default": "tokenizer"}  # fmt: skip
_TOKENS = (
    (r"llama-?3", ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")),
    (r"llama-?3[._][123]", ("<|finetune_right_pad_id|>", "<|eom_id|>")),
    (r"qwen-?(2|2\.5|3)-", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    (r"smollm2-", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    (r"phi-3(\.5)?-(mini|medium)", ("<|endoftext|>",)),
)
"""Special tokens of tokenizers of published models, by a pattern of the name in lower case: as a pad token, Axolotl
adds none of them."""
_SEPARATING_KERNELS = (
    "flash_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
"""Attention kernels with which packed rows do not attend to each other in Axolotl."""
_MASKING_KERNELS = ("sdpa", "eager")
"""Kernels with which a mask separates packed rows; a micro-batch then has several packs."""
_ROW_KEYS = {
    "path", "type", "name", "split", "data_files", "ds_type", "field_messages", "message_property_mappings",
    "message_field_role", "message_field_content", "chat_template", "roles_to_train", "train_on_eos",
}  # fmt: skip
_DATA_SETS = Kind(
    one=False,
    items=Kind(
        one=False,
        keys={
            **dict.fromkeys(_ROW_KEYS - {"type"}, ONE),
            **dict.fromkeys(("data_files", "roles_to_train"), WORDS),
            "message_property_mappings": MAPPING,
        },
    ),
)
"""Kind of `datasets`. A `type` that is a mapping defines custom prompts, which are refused."""
_LENGTH = 512
"""Default of `sequence_len`."""
_TEXTS = {"alpaca": "alpaca"}
"""Types of rows that become a text -> `data.text_template`."""
_OWN_TOKENS = (
    (r"codellama/|llama-2-|open_llama|tinyllama|mistral-7b-v0\.1", ("<s>", "</s>", "<unk>")),
    (r"llama-3[^/]*instruct", ("<|begin_of_text|>", "<|eot_id|>", None)),
    (r"llama-3", ("<|begin_of_text|>", "<|end_of_text|>", None)),
)
"""Names of models -> the begin, end and unknown token of their tokenizers; the first match counts."""
_RENAMED = {
    "per_device_train_batch_size": "micro_batch_size", "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler", "optim": "optimizer",
}  # fmt: skip


def _stage(values: Mapping[str, Any], name: str, requested: str | None) -> str:
    refused = f"{name}: no recipe is this job of Axolotl, because of"
    kind = values.get("rl")
    if kind:
        new = "there is no such stage"
        if kind in ("dpo", "kto", "grpo"):
            new = f"llmsuite recipe new --stage {kind}"
        raise UserError(f"{refused} rl = {kind}: its rows and rewards have other formats; {new}")
    if is_on(values.get("reward_model")) or is_on(values.get("process_reward_model")):
        raise UserError(f"{refused} reward_model: its rows have other formats; llmsuite recipe new --stage rm")
    if is_on(values.get("pretraining_dataset")):
        raise UserError(
            f"{refused} pretraining_dataset: it trains on each text separately; stage pretrain concatenates them"
        )
    stage = requested or "sft"
    if stage == "sft" and is_on(values.get("adapter")):
        return "lora"
    return stage


def _recipe(run: Run) -> dict[str, Any]:
    adapter = run.take("adapter")
    _read_batch(run)
    four = run.flag("load_in_4bit")
    eight = run.flag("load_in_8bit")
    precision = _precision(run)
    master_weights = precision == "fp32" or is_on(adapter) or _has_masters(run)
    if is_on(run.given("fsdp_config")) and not is_on(run.given("fsdp")):
        run.left["fsdp"] = "full_shard"
    if not master_weights:
        _check_without_masters(run, precision)
        master_weights = precision != "bf16"  # if the reason is left out
    if run.has_experts and is_on(run.given("trust_remote_code")):
        run.refuse("trust_remote_code", True, "is for code of the weights, which may add a load-balancing loss of "
                                              "experts; nearest key: train.expert_balance_loss")  # fmt: skip
    run.take("fsdp_config", ONE_OR_MAPPING)
    parallel = trainer.parallel(run)
    defaults = trainer.Defaults(num_epochs=1, micro_batch_size=1, lr_schedule="cosine", precision=precision,
                                master_weights=master_weights)  # fmt: skip
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"Axolotl {run.name}",
        "model": model.model(run),
        "data": _data(run),
        "parallel": parallel,
        "engine": trainer.engine(run, defaults) | {"precision": precision},
        "launch": trainer.launch(run),
    }
    _read_rate(run)
    if "packing" in recipe["data"]:
        defaults = dataclasses.replace(defaults, ends_smaller=False)
    recipe["train"] = trainer.train(run, recipe["launch"], parallel, defaults)
    recipe["train"] |= _watch_loss(run)
    if "warmup_ratio" in recipe["train"] and is_on(run.given("warmup_ratio")):
        recipe["train"]["warmup_rounding"] = "axolotl"
    share = run.number("cosine_min_lr_ratio", None)
    if share:
        recipe["train"]["min_lr_ratio"] = float(share)
    has_rows = "eval" in recipe["data"] or "holdout" in recipe["data"]
    has_eval = has_rows and _evaluates(run, recipe["train"])
    if not has_eval:
        recipe["data"].pop("eval", None)
    if is_on(adapter):
        recipe["lora"] = _lora(run, str(adapter), four, eight) | _in_full(run, precision)
    recipe["checkpoint"] = _checkpoint(run, has_eval, defaults)
    trainer.early_stopping(run, "early_stopping_patience", recipe)
    if "early_stopping" in recipe["train"]:
        run.note("train.early_stopping: Axolotl also evaluates before the first step, as the first value to improve on")
    recipe |= trainer.ends(run)
    return {key: value for key, value in recipe.items() if value != {}}


def _precision(run: Run) -> str:
    bf16 = run.take("bf16")
    if not is_on(bf16) and bf16 != "auto":
        bf16 = run.given("bfloat16")  # the same
    run.take("bfloat16")
    fp16 = run.take("fp16")
    run.left["bf16"] = None
    run.left["fp16"] = None
    if bf16 == "auto" or is_on(bf16):
        return "bf16"
    return "fp16" if is_on(fp16) else "fp32"


def _has_masters(run: Run) -> bool:
    """Return True if the optimizer of a full fine-tuning in 16 bits updates float32 copies: DeepSpeed's does, and of
    FSDP version 1 accelerate makes the parameters float32 (`Accelerator.prepare_model`). With version 2, for which
    Axolotl has its own `fsdp2_prepare_model`, they stay as they were loaded."""
    if is_on(run.given("deepspeed")):
        return True
    config = run.given("fsdp_config")
    if not is_on(run.given("fsdp")) and not is_on(config):
        return False
    version = run.given("fsdp_version")
    nested = config if isinstance(config, dict) else {}
    if version is None and {"fsdp_version", "version"} & nested.keys():
        run.refuse("fsdp_config", config, "has the version of FSDP, on which master weights depend; set fsdp_version")
    return str(version or 1) != "2"


def _check_without_masters(run: Run, precision: str) -> None:
    """Refuse parameters that are not all bfloat16 in a full fine-tuning without master weights."""
    if precision != "bf16":
        run.refuse(precision, run.given(precision), "trains parameters in fp16 without deepspeed; "
                                                    "train.master_weights: false is for bf16")  # fmt: skip
        return
    is_split = is_on(run.given("fsdp")) or is_on(run.given("fsdp_config"))
    kernel = run.given("attn_implementation")
    casts = kernel not in (None, "eager", "sdpa") or is_on(run.given("flash_attention"))
    if not is_split and not casts and not is_on(run.given("cut_cross_entropy")):
        run.refuse("attn_implementation", kernel, "without flash attention, embeddings and norms are float32 there, "
                                                  "and other parameters in 16 bits")  # fmt: skip


def _read_rate(run: Run) -> None:
    """Parse a learning rate that YAML 1.1 reads as text, such as 1e-4, and check the warm-up."""
    rate = run.left.get("learning_rate")
    if isinstance(rate, str):
        try:
            run.left["learning_rate"] = float(rate)
        except ValueError as error:
            raise UserError(f"{run.name}: learning_rate is {rate!r}; expected a number") from error
    if run.given("warmup_steps") is None and run.given("warmup_ratio") is None:
        run.refuse("warmup_steps", "not given", "it is 0.03 of all steps and at most 100; set warmup_steps")
    if run.given("warmup_steps") == 1:
        run.left["warmup_steps"] = 2
        run.note("train.warmup_steps: 2, as Axolotl sets it in place of 1")


def _read_batch(run: Run) -> None:
    """Compute the micro-batches of a step from `batch_size`, which counts the samples of one device."""
    samples = run.integer("batch_size", None)
    if samples is None:
        return
    if is_on(run.given("gradient_accumulation_steps")):
        run.left_out("batch_size", samples, "gradient_accumulation_steps takes precedence")
        return
    run.left["gradient_accumulation_steps"] = int(samples // (_above_0(run.given("micro_batch_size")) or 1))


def _data(run: Run) -> dict[str, Any]:
    entries = run.take("datasets", _DATA_SETS) or []
    if not entries:
        raise UserError(f"{run.name}: has no datasets")
    template = run.take("chat_template")
    texts = {_TEXTS.get(str(entry.get("type"))) for entry in entries}
    if len(texts) > 1:
        run.refuse("datasets", "types", "data.text_template is the same for all files")
    sources, columns, templates = zip(*(_rows(run, "datasets", entry, template) for entry in entries))
    found: dict[str, Any] = {"train": sources[0]}
    if len(sources) > 1:
        found["mix"] = dict.fromkeys(sources[1:])
    if len({*sources}) < len(sources):
        run.refuse("datasets", "the same twice", "data.mix has each file once")
    held_out = [_rows(run, "test_datasets", entry, template) for entry in run.take("test_datasets", _DATA_SETS) or []]
    if len(held_out) > 1:
        run.refuse(
            "test_datasets",
            f"{len(held_out)} data sets",
            "sets of data.eval have metrics of their own; join their rows",
        )
    if held_out:
        found["eval"] = held_out[0][0]
    all_columns = [*columns, *(entry[1] for entry in held_out)]
    if any(other != columns[0] for other in all_columns):
        run.refuse("datasets", "field_messages", "data.columns is the same for all files")
    if any(other != templates[0] for other in templates):
        run.refuse("datasets", "chat_template", "data.chat_template is the same for all files")
    found |= _held_out(run)
    text = next(iter(texts))
    if text is not None:
        found |= {"text_template": text, "answer_tokens": "apart"}
    else:
        found["columns"] = columns[0]
    found["max_length"] = run.integer("sequence_len", _LENGTH)
    if run.flag("sample_packing"):
        found |= _packing(run, found["max_length"], len(sources))
    if text is None:
        found |= _template(run, templates[0])
    _check_tokens(run, templates[0], text is not None)
    _check_embedding(run)
    return found | trainer.loading(run)


def _held_out(run: Run) -> dict[str, Any]:
    """Return the keys for `val_set_size`: the last rows in the order of a shuffle, of those that are not too long."""
    if not is_on(run.given("val_set_size")):
        return {}
    size = run.number("val_set_size", 0)
    if size == 1 or size < 0:
        run.refuse("val_set_size", size, "leaves no row for training; data.holdout is a share between 0 and 1")
    if is_on(run.given("test_datasets")):
        run.refuse("val_set_size", size, "and test_datasets are both given")
    return {"holdout": int(size) if size > 1 else float(size), "choice": "axolotl"}


def _packing(run: Run, length: int, num_sources: int) -> dict[str, Any]:
    """Return the keys for `sample_packing`: a pack has the tokens of a micro-batch of rows with the greatest length."""
    kernel = run.given("attn_implementation")
    is_masked = kernel in _MASKING_KERNELS
    if not is_masked and kernel not in _SEPARATING_KERNELS and not is_on(run.given("flash_attention")):
        run.refuse("sample_packing", True, "without flash attention tokens attend to other rows of a pack; "
                                           "data.packing separates them")  # fmt: skip
    if num_sources > 1:
        run.refuse("sample_packing", True, "packs rows of several data sets together; join them into one file")
    if is_on(run.given("dataloader_drop_last")):
        run.refuse("dataloader_drop_last", True, "with sample_packing it leaves out the last step of each epoch")
    found: dict[str, Any] = {"packing": "first_fit", "drop_last": True}
    rows = int(_above_0(run.given("per_device_train_batch_size")) or 1)
    if rows > 1 and not is_masked:
        found["pack_length"] = rows * length
        run.left["micro_batch_size"] = 1
        run.note(f"train.micro_batch_size: 1 pack of up to {rows * length} tokens, which is what micro_batch_size "
                 f"{rows} of Axolotl makes")  # fmt: skip
    run.note("data.packing: packs stay the same in each epoch; Axolotl on one device makes them anew")
    run.note("data.drop_last: Axolotl makes as many steps as are full, and an incomplete one at the end of each epoch "
             "but the last")  # fmt: skip
    return found


def _rows(run: Run, key: str, entry: Mapping[str, Any], template: Any) -> tuple[str, dict[str, str], str]:
    """Return the source of a data set as a value of `data.train`, its columns and its chat template."""
    place = str(entry.get("path"))
    kind = entry.get("type")
    is_text = str(kind) in _TEXTS
    if kind != "chat_template" and not is_text:
        run.refuse(key, f"{place}, type {kind}", "uses its own prompt format; supported are chat_template and "
                   f"{', '.join(_TEXTS)}")  # fmt: skip
    unsupported = sorted(set(entry) - _ROW_KEYS)
    if unsupported:
        run.refuse(key, f"{place}, {', '.join(unsupported)}", "nearest: section data")
    for word, usual in (("roles_to_train", ["assistant"]), ("train_on_eos", "turn")):
        if entry.get(word) not in (None, usual):
            run.refuse(key, f"{place}, {word} {entry[word]}", "assistant turns are supervised, with their end tokens")
    name = entry.get("chat_template") or template or "tokenizer_default"
    if name not in _TEMPLATES and not is_text:
        run.refuse(
            "chat_template", name, f"supported are {', '.join(_TEMPLATES)}; the others are Axolotl's own templates"
        )
    files = entry.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if files is not None and not isinstance(files, str):
        run.refuse(key, f"{place}, data_files", "data.train is one file; list each file as a data set")
    options = f"split={entry.get('split') or 'train'}"
    if entry.get("name"):
        options += f"&config={entry['name']}"
    if Path(place).suffix in (".json", ".jsonl", ".parquet", ".csv") or exists(place):
        where = place
    else:
        where = f"hf:{place}/{files}" if isinstance(files, str) else f"hf:{place}?{options}"
    if is_text:
        return where, {}, "tokenizer"
    return where, _columns(run, key, entry), _TEMPLATES.get(name, "tokenizer")


def _columns(run: Run, key: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return `data.columns` for turns of role/content or from/value."""
    named = entry.get("message_property_mappings") or {}
    role = entry.get("message_field_role") or named.get("role", "role")
    content = entry.get("message_field_content") or named.get("content", "content")
    field = {("role", "content"): "messages", ("from", "value"): "conversations"}.get((role, content))
    if field is None or set(named) - {"role", "content"}:
        run.refuse(key, f"{entry.get('path')}, {role}/{content}", "turns have role and content, or from and value")
    if field == "conversations":
        run.note(f"{entry.get('path')}: supported roles are {', '.join(SHAREGPT_ROLES)}")
    return {field or "messages": str(entry.get("field_messages") or "messages")}


def _has_token(base_model: str, token: str) -> bool:
    """Return True for a special token that the tokenizer of a published model is known to have."""
    return any(re.search(pattern, base_model.lower()) and token in tokens for pattern, tokens in _TOKENS)


def _check_tokens(run: Run, template: str, is_text: bool) -> None:
    """Refuse end-of-turn tokens other than those of the template, and special tokens other than the tokenizer's."""
    ends = run.take("eot_tokens", LIST)
    tokens = run.take("special_tokens", MAPPING) or {}
    if ends and is_text:
        run.left_out("eot_tokens", ends, "rows of text have no turns")
    elif ends and ends != [axolotl_templates.end_of(template)]:
        run.refuse("eot_tokens", ", ".join(map(str, ends)), "the end of an answer is determined by the chat template")
    name = str(run.given("base_model"))
    own = next((found for pattern, found in _OWN_TOKENS if re.search(pattern, name.lower())), (None, None, None))
    pad = tokens.get("pad_token")
    if pad is not None and pad not in own and not _has_token(name, str(pad)):
        why = "a token that the tokenizer may not have gets a row of the embedding; leave it out if it has it"
        run.refuse("special_tokens", f"pad_token {pad}", why)
    same = {"pad_token": pad} | dict(zip(("bos_token", "eos_token", "unk_token"), own))
    changed = sorted(role for role, token in tokens.items() if token is not None and same.get(role) != token)
    if changed:
        run.refuse("special_tokens", ", ".join(changed), "tokens are those of the tokenizer")


def _check_embedding(run: Run) -> None:
    """Refuse `resize_token_embeddings_to_32x` where it may add rows to the embedding. It rounds the number of tokens
    up, and a published embedding of a multiple of 32 rows has at least so many."""
    key = "resize_token_embeddings_to_32x"
    if not run.flag(key):
        return
    preset = run.family.presets.get(run.preset or "")
    size = 1 if preset is None else run.family.config_cls(**preset).vocab_size
    if size % 32:
        run.refuse(key, True, "may add rows to the embedding, which start with other values; nearest key: "
                              "model.new_tokens")  # fmt: skip
    else:
        run.left_out(key, True, f"the embedding has {size} rows, a multiple of 32")


def _template(run: Run, template: str) -> dict[str, Any]:
    """Return `data.chat_template`, and how answers end: a text with what Axolotl supervises, for templates that have
    one. Refuse others whose answers do not end with the end-of-sequence token."""
    model_name = str(run.given("base_model"))
    name = axolotl_templates.name_of(template, model_name)
    ends = run.given("eot_tokens")
    text = axolotl_templates.text_of(name, model_name, ends if isinstance(ends, list) else [])
    if text is not None:
        run.note("data.chat_template: the text of Axolotl's template, which refuses rows that it does not supervise "
                 "alike; the end of an answer is supervised only where it is the end-of-sequence token or one of "
                 "eot_tokens")  # fmt: skip
        return {"chat_template": text, **KEEPS_TEXT}
    end = axolotl_templates.end_of(name)
    if end is not None or is_base(model_name):
        why = f"ends answers with {end}, which may not be" if end else "ends answers with another token than"
        run.refuse("chat_template", run.given("chat_template") or "not given", f"{why} the end-of-sequence token of "
                   f"{model_name}; it is not supervised there")  # fmt: skip
    run.note("data.chat_template: that of the tokenizer; Axolotl supervises no [[ at the begin of an answer and no ]] "
             "at its end")  # fmt: skip
    return dict(KEEPS_TEXT)


def _evaluates(run: Run, train: dict[str, Any]) -> bool:
    """Return True if there are evaluations."""
    often = run.number("evals_per_epoch", None)
    share = _interval(often, run.given("num_epochs"), None)
    if share is not None:
        run.left |= {"eval_strategy": "steps", "eval_steps": share}
    elif often:  # once, at the end of the last epoch
        run.left["eval_strategy"] = "epoch"
    elif run.given("eval_steps") is not None:
        run.left.setdefault("eval_strategy", "steps")
    return trainer.evaluates(run, train)


def _watch_loss(run: Run) -> dict[str, Any]:
    """Return `train.loss_watchdog`."""
    threshold = run.number("loss_watchdog_threshold", None)
    patience = run.integer("loss_watchdog_patience", None)
    if threshold is None:
        return {}
    if run.given("logging_steps") != 1:
        run.refuse("loss_watchdog_threshold", threshold, "looks at the mean loss of the recorded steps; set "
                                                         "logging_steps to 1")  # fmt: skip
    return {"loss_watchdog": {"threshold": float(threshold), **({"patience": patience} if patience else {})}}


def _chooses_best(run: Run) -> bool:
    """Return True if Axolotl loads the best checkpoint at the end: it does unless that is turned off, where there are
    evaluations whose interval divides that of checkpoints."""
    if run.given("load_best_model_at_end") is False and not is_on(run.given("early_stopping_patience")):
        return False
    epochs = run.given("num_epochs")
    save, evaluate = (_interval(run.given(f"{kind}s_per_epoch"), epochs, run.given(f"{kind}_steps"))
                      for kind in ("save", "eval"))  # fmt: skip
    return bool(save and evaluate and save % evaluate == 0)


def _interval(often: Any, epochs: Any, steps: Any) -> float | None:
    """Return an interval in steps, or as a share of all steps below 1; None without one."""
    times = _above_0(often) * (_above_0(epochs) or 1)
    if times > 1:
        return 1.0 / times
    return _above_0(steps) or None


def _above_0(value: Any) -> float:
    """Return a number above 0; 0 for any other value, which is refused where the argument is taken."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(min(value, 2**53)) if is_number and value > 0 else 0.0


def _checkpoint(run: Run, has_eval: bool, defaults: trainer.Defaults) -> dict[str, Any]:
    if has_eval:
        run.left["load_best_model_at_end"] = _chooses_best(run)
    if run.left.get("load_best_model_at_end"):
        run.note("checkpoint.best_metric: every evaluated step may be the best; Axolotl ends with the best one of its "
                 "checkpoints")  # fmt: skip
    often = run.number("saves_per_epoch", None)
    if often:
        run.left["save_strategy"] = "epoch"
        if often != 1:
            run.note(f"checkpoint.save_steps: once per epoch instead of {often} times")
    return trainer.checkpoint(run, has_eval, defaults)


def _lora(run: Run, adapter: str, four: bool, eight: bool) -> dict[str, Any]:
    if adapter not in ("lora", "qlora"):
        run.refuse("adapter", adapter, "lora.method has lora, mixer, dora, mora, vera and lokr")
    rank = run.integer("lora_r", None)
    alpha = run.number("lora_alpha", None)
    if rank is None or alpha is None:
        raise UserError(f"{run.name}: has an adapter, but no lora_r or no lora_alpha")
    found: dict[str, Any] = {"rank": rank, "alpha": float(alpha)}
    found |= model.dropout(run, 0.0)
    if run.flag("peft_use_rslora"):
        found["rslora"] = True
    if run.flag("peft_use_dora"):
        found["method"] = "dora"
    ratio = run.number("loraplus_lr_ratio", None)
    if ratio:
        found["lora_plus_ratio"] = float(ratio)
    if run.flag("lora_target_linear"):
        run.take("lora_target_modules", WORDS)
        found |= model.target_modules(run, "lora_target_linear", ("all-linear",), "all-linear")
    else:
        if not run.given("lora_target_modules"):
            run.refuse("lora_target_modules", "not given", "name the matrices, or set lora_target_linear")
        found |= model.target_modules(run, "lora_target_modules", ("all-linear",))
    options = run.take("bnb_config_kwargs", MAPPING) or {}
    kind = ("bnb_config_kwargs.bnb_4bit_quant_type", str(options.get("bnb_4bit_quant_type", "nf4")))
    doubled = bool(options.get("bnb_4bit_use_double_quant", True))
    return found | model.bits(run, four, ("load_in_8bit", eight), kind, doubled)


def _in_full(run: Run, precision: str) -> dict[str, Any]:
    """Return the keys of section lora about modules that are trained in full."""
    given = run.given("lora_modules_to_save")
    if given and precision != "fp32":
        run.refuse("lora_modules_to_save", given, "are trained in 16 bits; they have float32 master weights here")
    found = model.modules_to_save(run, "lora_modules_to_save")
    if run.flag("peft_ensure_weight_tying") and found:
        found["ensure_weight_tying"] = True
    return found


AXOLOTL = Suite(
    name="Axolotl",
    model_key="base_model",
    stage=_stage,
    recipe=_recipe,
    refused=axolotl_arguments.REFUSED,
    ignored=axolotl_arguments.IGNORED,
    translations=axolotl_arguments.TRANSLATIONS,
    renamed_arguments=_RENAMED,
)
