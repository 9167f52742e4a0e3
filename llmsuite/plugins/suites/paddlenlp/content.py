"""Sections model, data, lora, prefix, generation, checkpoint and that of the stage, from PaddleNLP's arguments."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from llmsuite.base.errors import UserError
from llmsuite.data.keys import ALL
from llmsuite.plugins.suites.conversion.conversion import Conversion
from llmsuite.plugins.suites.conversion.family import preset_of
from llmsuite.plugins.suites.conversion.kinds import ONE, Kind, is_true, wrong
from llmsuite.plugins.suites.paddlenlp.refused import DROPOUT

_LOSSES = {"ipo": "ipo_mean"}
"""Losses with other names: PaddleNLP's -> ours."""
_SIMPO_GAMMA = 0.5
"""Default of `simpo_gamma` in PaddleNLP's scripts, like the next two."""
_SPLIT = "949,50,1"
"""Default of `split`."""
_LENGTHS = {"pretrain": 1024, "sft": 2048, "dpo": 4096, "kto": 4096, "rm": 4096}
"""Defaults of `max_length` by stage."""
_COMPARISONS = ("bleu4", "rouge1", "rouge2", "rougel")
"""Metrics of generated answers, with the same names in both suites."""
BATCH = 8
"""Default batch size, of training and evaluation."""
_EVAL_ITERS = 10
"""Number of batches that run_pretrain.py evaluates on."""


def model(run: Conversion) -> dict[str, Any]:
    name = run.take("model_name_or_path")
    tokenizer = run.take("tokenizer_name_or_path")
    if name is None:
        raise UserError(f"{run.name}: has no model_name_or_path")
    fresh = run.stage == "pretrain" and not run.flag("continue_training")
    run.left.pop("continue_training", None)
    model: dict[str, Any] = {"family": run.family.name}
    if fresh:
        model["tokenizer"] = tokenizer or name
    else:
        model["weights"] = name
        if tokenizer not in (None, name):
            model["tokenizer"] = tokenizer
    preset = run.preset = preset_of(str(name), run.family)
    if preset is not None:
        model["preset"] = preset
    elif fresh:
        run.note(f"model.preset: none is known for {name}; set model.config to the sizes of its config.json")
    else:
        run.note(f"model.preset: none is known for {name}; checks need its config.json, in model.weights")
    _extend_positions(run, preset, fresh)
    shape = {f.name for f in dataclasses.fields(run.family.config_cls)} - {"model_type"}
    config = {key: run.take(key, Kind(items=ONE, keys={})) for key in list(run.left) if key in shape}
    if config:
        model["config"] = config
    _refuse_model_defaults(run, preset)
    return model


def _extend_positions(run: Conversion, preset: str | None, fresh: bool) -> None:
    """Set the positions of a new model to the length of a sample, as run_pretrain.py does."""
    length = run.left.get("max_seq_length", _LENGTHS["pretrain"])
    if fresh and preset is not None and isinstance(length, int):
        positions = run.family.config_cls(**run.family.presets[preset]).max_position_embeddings
        if length > positions:
            run.left.setdefault("max_position_embeddings", length)


def _refuse_model_defaults(run: Conversion, preset: str | None) -> None:
    """Refuse defaults of PaddleNLP's models that no argument sets."""
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    if run.family.name == "gpt" and any(key not in run.left for key in dropouts):
        run.refuse(dropouts[0], "not given", f"with GPT it is 0.1, and {DROPOUT}; set {' and '.join(dropouts)} to 0")
    model_type = None
    if preset:
        model_type = run.family.presets[preset].get("model_type", "deepseek_v3")
    if run.family.name == "deepseek" and model_type != "deepseek_v2":
        key = "num_nextn_predict_layers"
        if run.left.pop(key, None) != 0:
            # deepseek_v2/modeling.py (3.0.0b4): the input of eh_proj has hidden states before embeddings, the norm of
            # the model is used instead of shared_head.norm, and the last token of a sample is in neither loss
            reason = "with DeepSeek-V3 it is 1, and its layer differs from that of the published weights"
            run.refuse(key, "not given", f"{reason}; set {key} to 0, and train.mtp_loss_weight to train theirs")


def family_targets(run: Conversion) -> dict[str, Any]:
    """Return `lora.target_modules` where PaddleNLP's `get_lora_target_modules` differs from the default here, which is
    every matrix except those of routed experts."""
    if run.family.name in ("mixtral", "qwen_moe"):  # includes the routed experts, excludes the gate of the shared one
        return {"target_modules": [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]}
    if run.family.name == "ernie_moe":
        run.refuse("lora", True, "PaddleNLP defines no adapter matrices for this family")
    if run.family.name != "deepseek":
        return {}
    shape = run.family.presets[run.preset] if run.preset is not None else {}
    direct = run.family.config_cls(**shape).q_lora_rank is None
    queries = ["q_proj"] if direct else ["q_a_proj", "q_b_proj"]
    dense = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    return {"target_modules": [*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *dense]}


def data(run: Conversion, own: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    strategy = str(run.take("evaluation_strategy") or "no")
    run.evaluates = run.flag("do_eval") or strategy != "no"
    # training_args.py: with do_eval, "no" means "steps"
    run.evaluates_epochs = run.evaluates and strategy == "epoch"
    if run.stage == "pretrain":
        data["train"] = _corpora(run, own)
        own["split"] = str(run.take("split") or _SPLIT)
    elif (rows := run.take("dataset_name_or_path")) is not None:
        data["train"] = f"{rows}/train.json"
        if run.evaluates:
            data["eval"] = f"{rows}/dev.json"
    else:
        train = run.take("train_dataset_path") or run.take("train_datasets")
        held_out = run.take("dev_dataset_path") or run.take("eval_datasets")
        if train is None:
            raise UserError(f"{run.name}: has no dataset_name_or_path and no train_dataset_path")
        data["train"] = str(train)
        if run.evaluates and held_out:
            data["eval"] = str(held_out)
    lengths = [run.integer(key, None) for key in ("max_seq_length", "max_seq_len", "max_length")]
    data["max_length"] = next((value for value in lengths if value is not None), None) or _LENGTHS.get(
        run.section, 2048
    )
    if run.stage != "pretrain":
        data["ignore_columns"] = [ALL]  # PaddleNLP leaves out the columns that it does not read
    _check_template(run)
    if _is_packed(run):
        data["packing"] = "best_fit"
    if run.flag("dataloader_drop_last"):
        data["drop_last"] = True
    workers = run.integer("dataloader_num_workers", 0)
    if workers:
        data["num_workers"] = workers
    return data


def _check_template(run: Conversion) -> None:
    """Check `chat_template` of `init_chat_template`: the tokenizer's template, a file, or "none"."""
    given = run.left.pop("chat_template", None)
    if str(given).lower() == "none" and given is not None:
        why = "src and tgt are concatenated; data.chat_template plain puts them on separate lines"
        run.refuse("chat_template", given, why)
    elif given and given != run.arguments.values.get("model_name_or_path"):
        why = "is a file in PaddleNLP's format; nearest: data.chat_template, or the template of the tokenizer"
        run.refuse("chat_template", given, why)
    elif run.section == "sft":
        run.note(
            "data.chat_template: the tokenizer's; if it has none, PaddleNLP concatenates src and tgt, which no recipe "
            "does"
        )


def _is_packed(run: Conversion) -> bool:
    """Return True if a sample is a pack of rows with `max_length` tokens in total: always in run_dpo.py and run_kto.py;
    with `zero_padding`, which `flash_mask` sets, in run_finetune.py and run_reward.py."""
    flags = [run.flag(key) for key in ("zero_padding", "greedy_zero_padding")]
    packed = flags[0] or run.section in ("dpo", "kto") or is_true(run.left.get("flash_mask"))
    if not packed:
        if flags[1]:
            run.left_out("greedy_zero_padding", True, "belongs to zero_padding, which is not set")
        return False
    if run.section in ("dpo", "rm"):
        run.note(
            "data.packing: a sample is two rows of data.max_length, where PaddleNLP fills one with prompt and both "
            "answers; it has up to twice as many pairs"
        )
    if run.section in ("sft", "dpo", "rm"):
        return True
    size = run.left.get("per_device_train_batch_size", BATCH)
    run.refuse(
        "per_device_train_batch_size",
        size,
        f"counts packs of rows there; rows are not packed in stage {run.stage}, so a step would have fewer rows",
    )
    return False


def _corpora(run: Conversion, own: dict[str, Any]) -> str:
    """Return `data.train` for `input_dir`: a directory or prefix, or alternating weights and prefixes."""
    given = str(run.take("input_dir") or "")
    words = given.split()
    if not words:
        raise UserError(f"{run.name}: has no input_dir")
    if len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2]):
        first = float(words[0])
        if first <= 0:
            raise wrong(given, "a weight above 0 before the first corpus", run.location("input_dir"))
        own["mix"] = {path: float(weight) / first for weight, path in zip(words[2::2], words[3::2])}
        words = words[1:2]
    path = Path(words[0])
    prefixes = []
    if os.path.isdir(path):
        prefixes = sorted(file.with_suffix("") for file in path.glob("*.idx"))
    if len(prefixes) > 1 and "mix" not in own:  # get_train_data_file uses all of them with weight 1
        own["mix"] = {str(prefix): 1.0 for prefix in prefixes[1:]}
        return str(prefixes[0])
    if len(prefixes) == 1:
        return str(prefixes[0])
    if path.suffix != "" or len(prefixes) != 0 or not os.path.isfile(f"{path}.idx"):
        run.note(f"data.train: is {path}; it has to be the prefix of one corpus, {path}/NAME for NAME.bin and NAME.idx")
    return str(path)


def stage_section(run: Conversion) -> dict[str, Any]:
    names = {"loss_type": "loss", "simpo_gamma": "gamma", "sft_loss_ratio": "sft_weight"}
    hints = get_type_hints(run.section_cls)
    own: dict[str, Any] = {}
    for theirs in ("loss_type", "beta", "label_smoothing", "simpo_gamma", "sft_loss_ratio", "desirable_weight",
                   "undesirable_weight"):  # fmt: skip
        ours = names.get(theirs, theirs)
        if theirs not in run.left or f"{run.section}.{ours}" not in run.keys:
            continue
        value = run.take(theirs)
        if value is None:
            continue
        if ours == "loss":
            value = _LOSSES.get(value, value)
        if ours == "loss" and value not in get_args(hints["loss"]):
            run.refuse(theirs, value, f"{run.section}.loss has {', '.join(get_args(hints['loss']))}")
        elif ours == "loss" or value:  # zeros are the defaults
            own[ours] = value
    if own.get("loss") == "simpo":
        own.setdefault("gamma", _SIMPO_GAMMA)
    elif "gamma" in own:
        run.left_out("simpo_gamma", own.pop("gamma"), f"is the margin of simpo, and loss_type is {own.get('loss')}")
    if run.section == "sft":
        own["truncate"] = True  # PaddleNLP truncates long rows
    return own


def lora(run: Conversion) -> dict[str, Any]:
    is_lora = run.flag("lora")
    rank = run.integer("lora_rank", 8)
    plus = run.flag("rslora_plus")
    rslora = run.flag("rslora")
    ratio = run.number("lora_plus_scale", 1.0)
    alpha = run.number("lora_alpha", 0)
    mixer = run.flag("lora_use_mixer")
    dora = run.flag("use_dora")
    mora = run.flag("use_mora")
    dropout = run.number("lora_dropout", 0.0)
    if plus:  # run_dpo.py sets these three
        rslora = True
        ratio = 4.0
        alpha = 4
    pissa = run.flag("pissa")
    loraga = run.flag("loraga")
    if run.flag("lokr"):
        return _lokr(run, is_lora)
    if not is_lora and run.stage != "lora":
        return {}
    if pissa:  # LoRALinear: the scale is then always 1
        rslora = False
        alpha = rank
        if mixer or dora:
            run.refuse("pissa", pissa, "cannot be combined with a mixer or DoRA: lora.init")
    if alpha <= 0:  # run_finetune.py: 4 with rsLoRA, else twice the rank
        alpha = 4 if rslora else 2 * rank
    lora: dict[str, Any] = {"rank": rank, "alpha": float(alpha)}
    if loraga and (pissa or mixer or dora or mora):
        run.refuse("loraga", loraga, "cannot be combined with a mixer, DoRA, MoRA or PiSSA: lora.init")
    if mora:  # LoRALinear: no scale and no B; rsLoRA and LoRA+ have no effect
        if mixer or dora or pissa:
            run.refuse("use_mora", mora, "cannot be combined with a mixer, DoRA or PiSSA: lora.method")
        rslora = False
        ratio = 1
        del lora["alpha"]
    if run.family.name in ("mixtral", "qwen_moe") and loraga:
        why = "routed experts get adapters there, and few tokens reach each of them: lora.init, lora.target_modules"
        run.refuse("loraga", loraga, why)
    methods = [name for name, is_set in (("mixer", mixer), ("dora", dora), ("mora", mora)) if is_set]
    if methods:
        lora["method"] = methods[0]
    if pissa:
        lora["init"] = "pissa"
    elif loraga:
        lora |= _lora_ga(run)
    options = {"dropout": float(dropout), "rslora": rslora, "lora_plus_ratio": float(ratio)}
    defaults = {"dropout": 0.0, "rslora": False, "lora_plus_ratio": 1.0}
    lora |= {key: value for key, value in options.items() if value != defaults[key]}
    return lora | family_targets(run)


def _lokr(run: Conversion, with_lora: bool) -> dict[str, Any]:
    """Return section lora for `lokr` of run_finetune.py, which passes only the rank to `LoKrConfig`: the scale is 1."""
    rank = run.integer("lokr_dim", 8)
    if run.section != "sft":
        run.refuse("lokr", True, "only run_finetune.py reads it; other scripts train all parameters")
    if with_lora:
        run.refuse("lokr", True, "with lora there would be two adapters on each matrix; set one of the two to false")
    return {"rank": rank, "alpha": float(rank), "method": "lokr"} | family_targets(run)


def _lora_ga(run: Conversion) -> dict[str, Any]:
    """Return the keys of LoRA-GA."""
    iterations = run.integer("loraga_init_iters", 32)
    gamma = run.number("loraga_stable_gamma", 64)
    if run.flag("loraga_gradient_offload"):
        run.left_out("loraga_gradient_offload", True, "nearest key: lora.init_passes")
    if gamma <= 0:
        run.refuse("loraga_stable_gamma", gamma, "nearest key: lora.init_gamma, which is above 0")
        return {}
    # their iterations are micro-batches of each data rank
    accumulated = run.arguments.values.get("gradient_accumulation_steps") or 1
    found: dict[str, Any] = {"init": "lora_ga", "init_batches": max(1, -(-iterations // accumulated))}
    if iterations % accumulated:
        run.note(f"lora.init_batches: full global batches, for {iterations} micro-batches of each data rank")
    run.note(
        "lora.init: A is initialised with the first singular vectors and B with the next ones, times the fourth root "
        "of the output dimension, as in the paper; PaddleNLP swaps A and B and uses the input dimension"
    )
    return found | ({"init_gamma": float(gamma)} if gamma != 64 else {})


def prefix(run: Conversion, uses_lora: bool) -> dict[str, Any]:
    if not run.flag("prefix_tuning"):
        return {}
    if run.section != "sft":
        run.refuse("prefix_tuning", True, "is for stage sft only: prefix.tokens")
    if uses_lora:
        run.refuse("prefix_tuning", True, "together with LoRA: prefix.tokens and lora.rank exclude each other")
    found: dict[str, Any] = {"tokens": run.integer("num_prefix_tokens", 128)}
    if run.flag("prefix_projection"):
        found["projection"] = True  # hidden_size of the model, as in every script that has it
        width = run.number("prefix_projection_hidden_size", None)
        if width is not None:
            found |= {"projection_hidden_size": width}
    run.note(
        "prefix.tokens: positions of the text start after the prefix, as in HF PEFT; in PaddleNLP at 0. Both can "
        "express the same, as only the rotary phase of the prefix keys differs"
    )
    return found


def generation(run: Conversion, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return section generation for `GenerateArgument` and the related flags of run_finetune.py."""
    if run.section != "sft" or "eval" not in data or not is_true(run.left.get("eval_with_do_generation")):
        return {}
    if is_true(run.left.get("prefix_tuning")):
        run.flag("eval_with_do_generation")
        run.left_out(
            "eval_with_do_generation", True, "evaluations do not generate answers with a prefix: llmsuite eval"
        )
        return {}
    run.flag("eval_with_do_generation")
    top_k = run.number("top_k", 1)
    top_p = run.number("top_p", 1.0)
    found: dict[str, Any] = {"max_new_tokens": max(1, data["max_length"] - 1)}
    if top_k != 1:  # 1 is greedy decoding
        found |= {"temperature": 1.0, "top_k": top_k}
        if top_p != 1:
            found["top_p"] = float(top_p)
    if run.flag("save_generation_output"):
        found["save"] = True
    run.note(
        "generation: answers may extend to data.max_length, as there; if the tokenizer has a chat template, PaddleNLP "
        "generates none"
    )
    return found


def checkpoint(run: Conversion, data: Mapping[str, Any], generates: bool) -> dict[str, Any]:
    strategy = str(run.take("save_strategy") or "steps")
    every = run.number("save_steps", 500)
    checkpoint: dict[str, Any] = {}
    if strategy == "epoch":
        checkpoint["save_steps"] = "epoch"
    elif strategy == "steps":
        checkpoint["save_steps"] = every
    keep = run.integer("save_total_limit", None)
    if keep is None:
        run.note("checkpoint.keep_last: the 2 newest are kept, because no number is given; PaddleNLP keeps all")
    else:
        checkpoint["keep_last"] = max(2, keep)
        if keep < 2:
            run.note("checkpoint.keep_last: 2, the minimum, because a crash may interrupt the newest")
    best = run.flag("load_best_model_at_end")
    metric = run.take("metric_for_best_model")
    if best and ("eval" in data or (run.stage == "pretrain" and run.evaluates)):
        checkpoint["best_metric"] = "eval/loss"
        name = str(metric).removeprefix("eval_")
        if generates and name in _COMPARISONS:
            checkpoint |= {"best_metric": f"eval/{name}", "best_is": "highest"}
        elif not generates and name == "accuracy" and run.stage in ("sft", "lora"):
            checkpoint |= {"best_metric": "eval/tokens/accuracy", "best_is": "highest"}
        elif metric not in (None, "loss", "eval_loss"):
            run.note(
                f"checkpoint.best_metric: eval/loss, for {metric}: the best checkpoint may be that of another step"
            )
    elif best:
        run.left_out("load_best_model_at_end", True, "there is no evaluation to select the best by")
    if run.take("use_async_save") in (False, 0):
        checkpoint["async_save"] = False
    return checkpoint


def evaluation(run: Conversion, own: dict[str, Any]) -> None:
    """Set the evaluation keys of the stage's section, as run_pretrain.py does."""
    size = run.integer("per_device_eval_batch_size", BATCH)
    if run.stage == "pretrain" and run.evaluates:
        own["max_eval_samples"] = _EVAL_ITERS * size * run.data_ranks
    else:
        run.left_out("per_device_eval_batch_size", size, "evaluation takes train.micro_batch_size samples at a time")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text) is not None
