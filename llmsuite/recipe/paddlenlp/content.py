"""What is trained on what: sections model, data, checkpoint, lora and that of the stage."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from llmsuite.errors import UserError
from llmsuite.recipe.conversion.conversion import Conversion
from llmsuite.recipe.conversion.family import preset_of
from llmsuite.recipe.conversion.kinds import ONE, Kind, is_true, wrong
from llmsuite.recipe.paddlenlp.refused import DROPOUT

_LOSSES = {"ipo": "ipo_mean"}
"""Losses that have another name here."""
_SIMPO_GAMMA = 0.5
"""`simpo_gamma`, `split`, `max_length` (by stage) where they are not given, as in PaddleNLP's scripts."""
_SPLIT = "949,50,1"
_LENGTHS = {"pretrain": 1024, "sft": 2048, "dpo": 4096, "kto": 4096, "rm": 4096}
_COMPARISONS = ("bleu4", "rouge1", "rouge2", "rougel")
"""Metrics of generated answers, which have the same names here."""
BATCH = 8
"""Samples of a batch, of training or evaluation, where they are not given."""
_EVAL_ITERS = 10
"""run_pretrain.py evaluates on so many batches."""


def model(run: Conversion) -> dict[str, Any]:
    name, tokenizer = run.take("model_name_or_path"), run.take("tokenizer_name_or_path")
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
        run.note(f"model.preset: none is known of {name}; set model.config to the sizes of its config.json")
    else:
        run.note(f"model.preset: none is known of {name}; checks need its config.json, in model.weights")
    _extend_positions(run, preset, fresh)
    shape = {f.name for f in dataclasses.fields(run.family.config_cls)} - {"model_type"}
    config = {key: run.take(key, Kind(items=ONE, keys={})) for key in list(run.left) if key in shape}
    if config:
        model["config"] = config
    _refuse_what_models_add(run, preset)
    return model


def _extend_positions(run: Conversion, preset: str | None, fresh: bool) -> None:
    """run_pretrain.py gives a fresh model as many positions as a sample has tokens."""
    length = run.left.get("max_seq_length", _LENGTHS["pretrain"])
    if fresh and preset is not None and isinstance(length, int):
        positions = run.family.config_cls(**run.family.presets[preset]).max_position_embeddings
        if length > positions:
            run.left.setdefault("max_position_embeddings", length)


def _refuse_what_models_add(run: Conversion, preset: str | None) -> None:
    """What PaddleNLP's models do by their own defaults, which no argument says."""
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    if run.family.name == "gpt" and any(key not in run.left for key in dropouts):
        run.refuse(dropouts[0], "not given", f"with GPT it is 0.1, and {DROPOUT}; set {' and '.join(dropouts)} to 0")
    model_type = run.family.presets[preset].get("model_type", "deepseek_v3") if preset else None
    if run.family.name == "deepseek" and model_type != "deepseek_v2":
        key = "num_nextn_predict_layers"
        if run.left.pop(key, None) != 0:
            # its deepseek_v2/modeling.py: hidden states in front of embeddings in the input of eh_proj, the norm
            # of the model in place of shared_head.norm, and the last token of a sample in neither loss (3.0.0b4)
            reason = "with DeepSeek-V3 it is 1, and its layer is another one than the published weights have"
            run.refuse(key, "not given", f"{reason}; set {key} to 0, and train.mtp_loss_weight to train theirs")


def family_targets(run: Conversion) -> dict[str, Any]:
    """`lora.target_modules`, where PaddleNLP's `get_lora_target_modules` names others than every matrix but those of
    routed experts."""
    if run.family.name == "qwen_moe":  # with the routed experts, without the gate of the shared one
        return {"target_modules": [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]}
    if run.family.name == "ernie_moe":
        run.refuse("lora", True, "PaddleNLP names no matrices of this family for adapters")
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
    # training_args.py: with do_eval "no" is as good as "steps"
    run.evaluates_epochs = run.evaluates and strategy == "epoch"
    if run.stage == "pretrain":
        data["train"] = _corpora(run, own)
        own["split"] = str(run.take("split") or _SPLIT)
    elif (rows := run.take("dataset_name_or_path")) is not None:
        data["train"] = f"{rows}/train.json"
        data |= {"eval": f"{rows}/dev.json"} if run.evaluates else {}
    else:
        train = run.take("train_dataset_path") or run.take("train_datasets")
        held_out = run.take("dev_dataset_path") or run.take("eval_datasets")
        if train is None:
            raise UserError(f"{run.name}: has no dataset_name_or_path and no train_dataset_path")
        data["train"] = str(train)
        data |= {"eval": str(held_out)} if run.evaluates and held_out else {}
    lengths = [run.whole(key, None) for key in ("max_seq_length", "max_seq_len", "max_length")]
    data["max_length"] = next((value for value in lengths if value is not None), None) or _LENGTHS.get(
        run.section, 2048
    )
    _check_template(run)
    if _is_packed(run):
        data["packing"] = "best_fit"
    if run.flag("dataloader_drop_last"):
        data["drop_last"] = True
    if workers := run.whole("dataloader_num_workers", 0):
        data["num_workers"] = workers
    return data


def _check_template(run: Conversion) -> None:
    """`chat_template` of `init_chat_template`: that of the tokenizer, a file, or "none" for none."""
    told = run.left.pop("chat_template", None)
    if str(told).lower() == "none" and told is not None:
        run.refuse(
            "chat_template", told, "src and tgt are joined as they are; data.chat_template plain has them on lines"
        )
    elif told and told != run.arguments.values.get("model_name_or_path"):
        why = "is a file of PaddleNLP's own form; nearest: data.chat_template, or the template of the tokenizer"
        run.refuse("chat_template", told, why)
    elif run.section == "sft":
        run.note(
            "data.chat_template: the tokenizer's; where it has none PaddleNLP joins src and tgt as they are, which no "
            "recipe does"
        )


def _is_packed(run: Conversion) -> bool:
    """Whether a sample is a pack of rows, of `max_length` tokens in all: always with run_dpo.py and run_kto.py, in
    run_finetune.py and run_reward.py with `zero_padding`, which `flash_mask` sets."""
    asked = [run.flag(key) for key in ("zero_padding", "greedy_zero_padding")]
    packed = asked[0] or run.section in ("dpo", "kto") or is_true(run.left.get("flash_mask"))
    if not packed:
        if asked[1]:
            run.left_out("greedy_zero_padding", True, "says how zero_padding packs, and that is not set")
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
        f"counts packs of rows there; rows are not packed in stage {run.stage}, so a step would have fewer",
    )
    return False


def _corpora(run: Conversion, own: dict[str, Any]) -> str:
    """`input_dir`: a directory or prefix, or weights and prefixes in turn."""
    given = str(run.take("input_dir") or "")
    words = given.split()
    if not words:
        raise UserError(f"{run.name}: has no input_dir")
    if len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2]):
        first = float(words[0])
        if first <= 0:
            raise wrong(given, "a weight above 0 in front of the first corpus", run.place("input_dir"))
        own["mix"] = {path: float(weight) / first for weight, path in zip(words[2::2], words[3::2])}
        words = words[1:2]
    path = Path(words[0])
    prefixes = sorted(file.with_suffix("") for file in path.glob("*.idx")) if os.path.isdir(path) else []
    if len(prefixes) > 1 and "mix" not in own:  # get_train_data_file: all of them, with weight 1
        own["mix"] = {str(prefix): 1.0 for prefix in prefixes[1:]}
        return str(prefixes[0])
    if len(prefixes) == 1:
        return str(prefixes[0])
    if path.suffix != "" or len(prefixes) != 0 or not os.path.isfile(f"{path}.idx"):
        run.note(f"data.train: is {path}; it has to be the prefix of one corpus, {path}/NAME for NAME.bin and .idx")
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
        elif ours == "loss" or value:  # zeros are what is so anyway
            own[ours] = value
    if own.get("loss") == "simpo":
        own.setdefault("gamma", _SIMPO_GAMMA)
    elif "gamma" in own:
        run.left_out("simpo_gamma", own.pop("gamma"), f"is the margin of simpo, and loss_type is {own.get('loss')}")
    if run.section == "sft":
        own["truncate"] = True  # PaddleNLP cuts what is too long
    return own


def lora(run: Conversion) -> dict[str, Any]:
    wanted, rank = run.flag("lora"), run.whole("lora_rank", 8)
    plus, rslora = run.flag("rslora_plus"), run.flag("rslora")
    ratio, alpha = run.number("lora_plus_scale", 1.0), run.number("lora_alpha", 0)
    mixer, dora, mora = run.flag("lora_use_mixer"), run.flag("use_dora"), run.flag("use_mora")
    dropout = run.number("lora_dropout", 0.0)
    if plus:  # run_dpo.py sets these three
        rslora, ratio, alpha = True, 4.0, 4
    pissa, loraga = run.flag("pissa"), run.flag("loraga")
    if run.flag("lokr"):
        return _lokr(run, wanted)
    if not wanted and run.stage != "lora":
        return {}
    if pissa:  # LoRALinear: the scale is 1 then, whatever is said
        rslora, alpha = False, rank
        if mixer or dora:
            run.refuse("pissa", pissa, "goes with neither a mixer nor DoRA: lora.init")
    # run_finetune.py: 4 with rsLoRA, else twice the rank
    lora: dict[str, Any] = {"rank": rank, "alpha": float(alpha if alpha > 0 else 4 if rslora else 2 * rank)}
    if loraga and (pissa or mixer or dora or mora):
        run.refuse("loraga", loraga, "goes with no mixer, DoRA, MoRA or PiSSA: lora.init")
    if mora:  # LoRALinear: there is neither a scale nor B, and the others are left out
        if mixer or dora or pissa:
            run.refuse("use_mora", mora, "goes with neither a mixer, DoRA nor PiSSA: lora.method")
        rslora, ratio = False, 1
        del lora["alpha"]
    if run.family.name == "qwen_moe" and loraga:
        why = "routed experts get adapters there, of which few tokens make a gradient: lora.init, lora.target_modules"
        run.refuse("loraga", loraga, why)
    lora |= {"method": "mixer"} if mixer else {"method": "dora"} if dora else {"method": "mora"} if mora else {}
    lora |= {"init": "pissa"} if pissa else _lora_ga(run) if loraga else {}
    lora |= {"dropout": float(dropout)} if dropout else {}
    lora |= {"rslora": True} if rslora else {}
    lora |= {"lora_plus_ratio": float(ratio)} if ratio != 1 else {}
    return lora | family_targets(run)


def _lokr(run: Conversion, with_lora: bool) -> dict[str, Any]:
    """`lokr` of run_finetune.py: its `LoKrConfig` gets nothing but the rank, so the scale is 1."""
    rank = run.whole("lokr_dim", 8)
    if run.section != "sft":
        run.refuse("lokr", True, "only run_finetune.py reads it; with another script the whole model is trained")
    if with_lora:
        run.refuse("lokr", True, "with lora there would be two adapters on each matrix; set one of the two to false")
    return {"rank": rank, "alpha": float(rank), "method": "lokr"} | family_targets(run)


def _lora_ga(run: Conversion) -> dict[str, Any]:
    """The keys of LoRA-GA."""
    iterations, gamma = run.whole("loraga_init_iters", 32), run.number("loraga_stable_gamma", 64)
    if run.flag("loraga_gradient_offload"):
        run.left_out("loraga_gradient_offload", True, "nearest key: lora.init_passes")
    if gamma <= 0:
        run.refuse("loraga_stable_gamma", gamma, "nearest key: lora.init_gamma, which is above 0")
        return {}
    # theirs are micro-batches of every data rank
    accumulated = run.arguments.values.get("gradient_accumulation_steps") or 1
    found: dict[str, Any] = {"init": "lora_ga", "init_batches": max(1, -(-iterations // accumulated))}
    if iterations % accumulated:
        run.note(f"lora.init_batches: whole global batches, for {iterations} micro-batches of each data rank")
    run.note(
        "lora.init: A begins with the first singular vectors and B with the next ones, times the fourth root of the "
        "outputs, as in the paper; PaddleNLP has them the other way round, and the inputs"
    )
    return found | ({"init_gamma": float(gamma)} if gamma != 64 else {})


def prefix(run: Conversion, uses_lora: bool) -> dict[str, Any]:
    if not run.flag("prefix_tuning"):
        return {}
    if run.section != "sft":
        run.refuse("prefix_tuning", True, "is for stage sft: prefix.tokens")
    if uses_lora:
        run.refuse("prefix_tuning", True, "beside LoRA: prefix.tokens and lora.rank are not for the same run")
    found: dict[str, Any] = {"tokens": run.whole("num_prefix_tokens", 128)}
    if run.flag("prefix_projection"):
        found["projection"] = True  # as wide as the model, in every script that had it
        width = run.number("prefix_projection_hidden_size", None)
        found |= {} if width is None else {"projection_hidden_size": width}
    run.note(
        "prefix.tokens: the text's positions begin behind the prefix, as in HF PEFT; in PaddleNLP at 0. What can be "
        "learnt is the same, with keys that are turned by as many positions"
    )
    return found


def generation(run: Conversion, data: Mapping[str, Any]) -> dict[str, Any]:
    """`GenerateArgument` and the flags of run_finetune.py that go with it."""
    if run.section != "sft" or "eval" not in data or not is_true(run.left.get("eval_with_do_generation")):
        return {}
    if is_true(run.left.get("prefix_tuning")):
        run.flag("eval_with_do_generation")
        run.left_out("eval_with_do_generation", True, "evaluations have no answers behind a prefix: llmsuite eval")
        return {}
    run.flag("eval_with_do_generation")
    top_k, top_p = run.number("top_k", 1), run.number("top_p", 1.0)
    found: dict[str, Any] = {"max_new_tokens": max(1, data["max_length"] - 1)}
    if top_k != 1:  # the most likely one is drawn in any case
        found |= {"temperature": 1.0, "top_k": top_k}
        found |= {"top_p": float(top_p)} if top_p != 1 else {}
    if run.flag("save_generation_output"):
        found["save"] = True
    run.note(
        "generation: answers go on to the end of data.max_length, as there; where the tokenizer has a chat template "
        "PaddleNLP generates none"
    )
    return found


def checkpoint(run: Conversion, data: Mapping[str, Any], generates: bool) -> dict[str, Any]:
    strategy, every = str(run.take("save_strategy") or "steps"), run.number("save_steps", 500)
    checkpoint: dict[str, Any] = {}
    if strategy == "epoch":
        checkpoint["save_steps"] = "epoch"
    elif strategy == "steps":
        checkpoint["save_steps"] = every
    keep = run.whole("save_total_limit", None)
    if keep is None:
        run.note("checkpoint.keep_last: the 2 newest are kept, where nothing says how many and theirs keeps all")
    else:
        checkpoint["keep_last"] = max(2, keep)
        if keep < 2:
            run.note("checkpoint.keep_last: 2, the least, because the newest may be the one a crash interrupts")
    best, metric = run.flag("load_best_model_at_end"), run.take("metric_for_best_model")
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
        run.left_out("load_best_model_at_end", True, "there is no evaluation to tell the best by")
    if run.take("use_async_save") in (False, 0):
        checkpoint["async_save"] = False
    return checkpoint


def evaluation(run: Conversion, own: dict[str, Any]) -> None:
    """What run_pretrain.py evaluates on, for the stage's section."""
    size = run.whole("per_device_eval_batch_size", BATCH)
    if run.stage == "pretrain" and run.evaluates:
        own["max_eval_samples"] = _EVAL_ITERS * size * run.data_ranks
    else:
        run.left_out("per_device_eval_batch_size", size, "evaluation takes train.micro_batch_size samples at a time")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text) is not None
