"""Arguments of Axolotl: `axolotl train FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.data.turns import SHAREGPT_ROLES
from llmsuite.errors import UserError
from llmsuite.recipe.conversion.kinds import LIST, MAPPING, ONE, ONE_OR_MAPPING, WORDS, Kind, is_on
from llmsuite.recipe.suites import axolotl_words, model, trainer
from llmsuite.recipe.suites.suite import Run, Suite
from llmsuite.regular import exists

_TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "tokenizer_default": "tokenizer"}
_ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
_APART = ("flash_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Kernels of attention with which packed rows do not see each other there."""
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
"""`datasets`. A `type` that is a mapping makes texts of its own, which is refused."""
_LENGTH = 512
_OWN_WORDS = {
    "per_device_train_batch_size": "micro_batch_size", "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler", "optim": "optimizer",
}  # fmt: skip


def _stage(values: Mapping[str, Any], name: str, told: str | None) -> str:
    refused = f"{name}: no recipe is this job of Axolotl, because of"
    if kind := values.get("rl"):
        new = f"llmsuite recipe new --stage {kind}" if kind in ("dpo", "kto", "grpo") else "it is no stage"
        raise UserError(f"{refused} rl = {kind}: its rows and rewards have forms of their own; {new}")
    if is_on(values.get("reward_model")) or is_on(values.get("process_reward_model")):
        raise UserError(f"{refused} reward_model: its rows have forms of their own; llmsuite recipe new --stage rm")
    if is_on(values.get("pretraining_dataset")):
        raise UserError(f"{refused} pretraining_dataset: it trains on each text by itself; stage pretrain joins them")
    stage = told or "sft"
    return "lora" if stage == "sft" and is_on(values.get("adapter")) else stage


def _recipe(run: Run) -> dict[str, Any]:
    adapter = run.take("adapter")
    four, eight = run.flag("load_in_4bit"), run.flag("load_in_8bit")
    precision = _precision(run)
    if not is_on(adapter) and precision != "fp32" and not is_on(run.given("deepspeed")):
        run.refuse(precision, run.given(precision), "trains parameters in 16 bits without deepspeed; they have float32 "
                                                    "masters here")  # fmt: skip
    if is_on(run.given("fsdp_config")) and not is_on(run.given("fsdp")):
        run.left["fsdp"] = "full_shard"
    run.take("fsdp_config", ONE_OR_MAPPING)
    parallel = trainer.parallel(run)
    defaults = trainer.Defaults(num_epochs=1, micro_batch_size=1, lr_schedule="cosine", precision=precision)
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"Axolotl {run.name}",
        "model": model.model(run),
        "data": _data(run),
        "parallel": parallel,
        "engine": trainer.engine(run, defaults),
        "launch": trainer.launch(run),
    }
    _read_rate(run)
    recipe["train"] = trainer.train(run, recipe["launch"], parallel, defaults)
    if share := run.number("cosine_min_lr_ratio", None):
        recipe["train"]["min_lr_ratio"] = float(share)
    if "eval" in recipe["data"] and not _evaluates(run, recipe["train"]):
        recipe["data"].pop("eval")
    if is_on(adapter):
        recipe["lora"] = _lora(run, str(adapter), four, eight)
    recipe["checkpoint"] = _checkpoint(run, "eval" in recipe["data"], defaults)
    recipe |= trainer.ends(run)
    return {key: value for key, value in recipe.items() if value != {}}


def _precision(run: Run) -> str:
    bf16, fp16 = run.take("bf16"), run.take("fp16")
    run.left["bf16"], run.left["fp16"] = None, None
    if bf16 == "auto" or is_on(bf16):
        return "bf16"
    return "fp16" if is_on(fp16) else "fp32"


def _read_rate(run: Run) -> None:
    """The learning rate, which YAML may read as a text, and the warm-up."""
    rate = run.left.get("learning_rate")
    if isinstance(rate, str):
        try:
            run.left["learning_rate"] = float(rate)
        except ValueError as error:
            raise UserError(f"{run.name}: learning_rate is {rate!r}; a number is wanted") from error
    if run.given("warmup_steps") is None and run.given("warmup_ratio") is None:
        run.refuse("warmup_steps", "not given", "it is 0.03 of all steps and at most 100; set warmup_steps")


def _data(run: Run) -> dict[str, Any]:
    entries = run.take("datasets", _DATA_SETS) or []
    if not entries:
        raise UserError(f"{run.name}: has no datasets")
    template = run.take("chat_template")
    places, columns, templates = zip(*(_rows(run, "datasets", entry, template) for entry in entries))
    found: dict[str, Any] = {"train": places[0]}
    if len(places) > 1:
        found["mix"] = dict.fromkeys(places[1:])
    held_out = [_rows(run, "test_datasets", entry, template) for entry in run.take("test_datasets", _DATA_SETS) or []]
    if len(held_out) > 1:
        run.refuse("test_datasets", f"{len(held_out)} data sets", "data.eval is one; join their rows in a file")
    if held_out:
        found["eval"] = held_out[0][0]
    if any(other != columns[0] for other in (*columns, *(entry[1] for entry in held_out))):
        run.refuse("datasets", "field_messages", "data.columns is for all files alike")
    if any(other != templates[0] for other in templates):
        run.refuse("datasets", "chat_template", "data.chat_template is for all files alike")
    found |= {"columns": columns[0], "max_length": run.whole("sequence_len", _LENGTH)}
    if run.flag("sample_packing"):
        found["packing"] = "best_fit"
        kernel = run.given("attn_implementation")
        if kernel not in _APART and not is_on(run.given("flash_attention")):
            run.refuse("sample_packing", True, "without flash attention tokens see the other rows of a pack; "
                                               "data.packing keeps them apart")  # fmt: skip
        run.note("data.packing: packs are filled best-fit, so there may be fewer of them than there")
    if templates[0] != "tokenizer":
        found["chat_template"] = templates[0]
    _check_ends(run, templates[0])
    return found | trainer.loading(run)


def _rows(run: Run, key: str, entry: Mapping[str, Any], template: Any) -> tuple[str, dict[str, str], str]:
    """Where a data set is, its columns and its chat template."""
    place, kind = str(entry.get("path")), entry.get("type")
    if kind != "chat_template":
        run.refuse(key, f"{place}, type {kind}", "writes its rows in a text of its own; type chat_template is read")
    if odd := sorted(set(entry) - _ROW_KEYS):
        run.refuse(key, f"{place}, {', '.join(odd)}", "nearest: section data")
    for word, usual in (("roles_to_train", ["assistant"]), ("train_on_eos", "turn")):
        if entry.get(word) not in (None, usual):
            run.refuse(key, f"{place}, {word} {entry[word]}", "what the assistant says is learnt, with its end")
    name = entry.get("chat_template") or template or "tokenizer_default"
    if name not in _TEMPLATES:
        run.refuse("chat_template", name, f"there are {', '.join(_TEMPLATES)}; the others are texts of Axolotl's own")
    files = entry.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if files is not None and not isinstance(files, str):
        run.refuse(key, f"{place}, data_files", "data.train is one file; name each as a data set")
    options = f"split={entry.get('split') or 'train'}" + (f"&config={entry['name']}" if entry.get("name") else "")
    if Path(place).suffix in (".json", ".jsonl", ".parquet", ".csv") or exists(place):
        where = place
    else:
        where = f"hf:{place}/{files}" if isinstance(files, str) else f"hf:{place}?{options}"
    return where, _columns(run, key, entry), _TEMPLATES.get(name, "tokenizer")


def _columns(run: Run, key: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Turns of role/content, or of from/value."""
    named = entry.get("message_property_mappings") or {}
    role = entry.get("message_field_role") or named.get("role", "role")
    content = entry.get("message_field_content") or named.get("content", "content")
    field = {("role", "content"): "messages", ("from", "value"): "conversations"}.get((role, content))
    if field is None or set(named) - {"role", "content"}:
        run.refuse(key, f"{entry.get('path')}, {role}/{content}", "turns have role and content, or from and value")
    if field == "conversations":
        run.note(f"{entry.get('path')}: speakers may be {', '.join(SHAREGPT_ROLES)}")
    return {field or "messages": str(entry.get("field_messages") or "messages")}


def _check_ends(run: Run, template: str) -> None:
    """Tokens that end a turn are those of the template, and none is made the end of a sequence."""
    ends, tokens = run.take("eot_tokens", LIST), run.take("special_tokens", MAPPING) or {}
    if ends and ends != [_ENDS.get(template)]:
        run.refuse("eot_tokens", ", ".join(map(str, ends)), "what ends an answer is read from the chat template")
    if odd := sorted(set(tokens) - {"pad_token"}):
        run.refuse("special_tokens", ", ".join(odd), "tokens are those of the tokenizer")


def _evaluates(run: Run, train: dict[str, Any]) -> bool:
    """Whether there are evaluations; `evals_per_epoch` is once, or a number of steps that is not known."""
    often = run.number("evals_per_epoch", None)
    if often == 1:
        run.left["eval_strategy"] = "epoch"
    elif often:
        run.refuse("evals_per_epoch", often, "train.eval_steps is a number of steps, or once an epoch")
    elif run.given("eval_steps") is not None:
        run.left.setdefault("eval_strategy", "steps")
    return trainer.evaluates(run, train)


def _checkpoint(run: Run, has_eval: bool, defaults: trainer.Defaults) -> dict[str, Any]:
    often = run.number("saves_per_epoch", None)
    if often:
        run.left["save_strategy"] = "epoch"
        if often != 1:
            run.note(f"checkpoint.save_steps: once an epoch, where it is {often} times there")
    return trainer.checkpoint(run, has_eval, defaults)


def _lora(run: Run, adapter: str, four: bool, eight: bool) -> dict[str, Any]:
    if adapter not in ("lora", "qlora"):
        run.refuse("adapter", adapter, "lora.method has lora, mixer, dora, mora, vera and lokr")
    rank, alpha = run.whole("lora_r", None), run.number("lora_alpha", None)
    if rank is None or alpha is None:
        raise UserError(f"{run.name}: has an adapter and no lora_r or no lora_alpha")
    found: dict[str, Any] = {"rank": rank, "alpha": float(alpha)}
    if dropout := run.number("lora_dropout", 0.0):
        found["dropout"] = float(dropout)
    if run.flag("peft_use_rslora"):
        found["rslora"] = True
    if run.flag("peft_use_dora"):
        found["method"] = "dora"
    if ratio := run.number("loraplus_lr_ratio", None):
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
    doubled = ("bnb_config_kwargs.bnb_4bit_use_double_quant", bool(options.get("bnb_4bit_use_double_quant", True)))
    return found | model.bits(run, four, ("load_in_8bit", eight), kind, doubled)


AXOLOTL = Suite(
    name="Axolotl",
    model_key="base_model",
    stage=_stage,
    recipe=_recipe,
    refused=axolotl_words.REFUSED,
    without=axolotl_words.WITHOUT,
    becomes=axolotl_words.BECOMES,
    own_words=_OWN_WORDS,
)
