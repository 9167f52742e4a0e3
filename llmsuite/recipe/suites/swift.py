"""Arguments of ms-swift: `swift sft` and `swift rlhf`, as a shell script or the YAML or JSON file that they take."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.recipe.conversion.arguments import read_command
from llmsuite.recipe.conversion.kinds import ONE_OR_MAPPING, is_on
from llmsuite.recipe.suites import model, swift_words, trainer
from llmsuite.recipe.suites.suite import Run, Suite
from llmsuite.regular import exists

_COMMANDS = ("sft", "pt", "rlhf")
_LISTS = ("dataset", "val_dataset", "target_modules", "loss_type", "modules_to_save", "report_to")
"""Arguments with several values, which a command line parts by spaces."""
_ENVIRONMENT = ("NPROC_PER_NODE", "NNODES", "USE_HF")
"""Variables in front of the command that say how many ranks there are and which hub is meant."""
_STAGES = {"dpo": "dpo", "kto": "kto", "rm": "rm"}
_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo_mean"}
_KNOWN_TEMPLATES = r"qwen-?(1\.5|2|2\.5)[-_](?!vl|audio|omni)|qwen-?3-.*instruct-2507|llama-?3-(8|70)b"
"""Models whose tokenizers have the text of ms-swift's templates, with the same system turn."""
_TO_16_BITS = {None: "bf16", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp16"}
"""Precision by `torch_dtype`; there is mixed precision with float32 too."""
_ACCUMULATED = 16


def read_shell(path: Path) -> dict[str, Any]:
    """The arguments of the one command in a script that trains, with the command itself and variables in front.

    Raises:
        UserError: there is none, or there are several.
    """
    return read_command(path, _begin, _ENVIRONMENT)


def _begin(words: list[str]) -> tuple[int, str] | None:
    """Where the arguments of a training command begin, and what it is."""
    for at, word in enumerate(words):
        script = re.fullmatch(r".*swift/cli/(_megatron/)?(sft|pt|rlhf)\.py", word)
        if script is not None:
            return at + 1, f"{'megatron' if script[1] else 'swift'} {script[2]}"
        if word in ("swift", "megatron") and words[at + 1 : at + 2] and words[at + 1] in _COMMANDS:
            return at + 2, f"{word} {words[at + 1]}"
    return None


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    for key in _LISTS:
        if isinstance(values.get(key), str):
            values[key] = values[key].split()
    return values


def _stage(values: Mapping[str, Any], name: str, told: str | None) -> str:
    command = str(values.get("command") or ("swift rlhf" if "rlhf_type" in values else "swift sft"))
    refused = f"{name}: no recipe is this job of ms-swift"
    if command.startswith("megatron"):
        raise UserError(f"{refused}: megatron is a program of its own, with other arguments; write a recipe: llmsuite "
                        "recipe new")  # fmt: skip
    if command == "swift pt":
        raise UserError(f"{refused}: swift pt trains on each text by itself; stage pretrain joins them. For "
                        "pretraining: llmsuite recipe new --stage pretrain")  # fmt: skip
    kind = str(values.get("rlhf_type") or "dpo") if command == "swift rlhf" else "sft"
    if kind in ("grpo", "ppo"):
        raise UserError(f"{refused}: its {kind} has rewards and a way to draw of its own; llmsuite recipe new --stage "
                        f"{kind}")  # fmt: skip
    if kind != "sft" and kind not in _STAGES:
        why = "adds a loss of the chosen answers" if kind in ("simpo", "cpo", "orpo") else "is no stage"
        raise UserError(f"{refused}: rlhf_type {kind} {why}")
    stage = told or _STAGES.get(kind, kind)
    # older versions call it train_type
    kind = str(values.get("tuner_type") or values.get("train_type") or "lora")
    return "lora" if stage == "sft" and kind == "lora" else stage


def _recipe(run: Run) -> dict[str, Any]:
    word = "train_type" if run.given("train_type") and not run.given("tuner_type") else "tuner_type"
    kind = str(run.take("tuner_type") or run.take("train_type") or "lora")
    run.take("command"), run.take("rlhf_type")
    is_full = kind == "full"
    hub = "" if is_on(run.take("use_hf")) | is_on(run.take("USE_HF")) else "ms:"
    if (dtype := run.take("torch_dtype")) not in _TO_16_BITS:
        run.refuse("torch_dtype", dtype, "engine.precision has fp32, bf16 and fp16")
    defaults = trainer.Defaults(
        learning_rate=1e-5 if is_full else 1e-4, micro_batch_size=1, lr_schedule="cosine", weight_decay=0.1,
        adam_beta2=0.95, recompute=True, precision=_TO_16_BITS.get(dtype, "bf16"),
    )  # fmt: skip
    has_masters = is_on(run.given("deepspeed")) or defaults.precision == "fp16"
    if is_full and not has_masters:
        run.refuse(word, kind, "without deepspeed it trains parameters in 16 bits; they have float32 masters "
                               "here")  # fmt: skip
    parallel = trainer.parallel(run)
    ranks, machines = run.whole("NPROC_PER_NODE", 0), run.whole("NNODES", 1)
    run.hinted_devices = ranks * machines or None
    recipe: dict[str, Any] = {
        "stage": run.stage,
        "source": f"ms-swift {run.name}",
        "model": model.model(run, hub=hub),
        "data": _data(run, hub),
        "parallel": parallel,
        "engine": trainer.engine(run, defaults),
        "launch": trainer.launch(run),
    }
    _accumulate(run, recipe["launch"])
    recipe["train"] = trainer.train(run, recipe["launch"], parallel, defaults)
    _evaluate(run, recipe)
    if own := _own_section(run):
        recipe[run.section] = own
    if kind == "lora":
        recipe["lora"] = _lora(run)
    elif not is_full:
        run.refuse(word, kind, "what is trained is the whole model (full) or adapters (lora)")
    recipe["checkpoint"] = trainer.checkpoint(run, "eval" in recipe["data"], defaults)
    recipe |= trainer.ends(run)
    return {key: value for key, value in recipe.items() if value != {}}


def _accumulate(run: Run, launch: Mapping[str, Any]) -> None:
    """Gradients of at least 16 samples are added up, where nothing else is said."""
    if run.given("gradient_accumulation_steps") is None:
        total = launch["num_devices"] * launch.get("nnodes", 1)
        size = run.given("per_device_train_batch_size") or 1
        if isinstance(size, int) and size > 0:
            run.left["gradient_accumulation_steps"] = max(1, math.ceil(_ACCUMULATED / size / total))


def _evaluate(run: Run, recipe: dict[str, Any]) -> None:
    """Evaluations are where checkpoints are, unless they are said to be elsewhere."""
    if "eval" not in recipe["data"]:
        for key in ("eval_strategy", "eval_steps"):
            if (value := run.take(key)) is not None:
                run.left_out(key, value, "there are no rows to evaluate on")
        return
    strategy = run.given("eval_strategy") or run.given("save_strategy") or "steps"
    run.left["eval_strategy"] = strategy
    if strategy == "steps":
        run.left.setdefault("eval_steps", run.given("save_steps") or 500)
    if not trainer.evaluates(run, recipe["train"]):
        recipe["data"].pop("eval")


def _data(run: Run, hub: str) -> dict[str, Any]:
    places = [_place(run, "dataset", word, hub) for word in run.words("dataset")]
    held_out = [_place(run, "val_dataset", word, hub) for word in run.words("val_dataset")]
    if not places:
        raise UserError(f"{run.name}: has no dataset")
    found: dict[str, Any] = {"train": places[0]}
    if len(places) > 1:
        found["mix"] = dict.fromkeys(places[1:])
    if held_out:
        found["eval"] = held_out[0]
        if len(held_out) > 1:
            run.refuse("val_dataset", ", ".join(held_out), "data.eval is one; join their rows in a file")
    if columns := run.take("columns", ONE_OR_MAPPING):
        run.refuse("columns", columns, "renames columns of each data set before it is recognised; nearest key: "
                                       "data.columns")  # fmt: skip
    found["max_length"] = _length(run)
    if run.flag("packing"):
        found["packing"] = "best_fit"
        if run.section != "sft":
            run.refuse("packing", True, "a pack is a sample of one row there; of pairs it is two rows here")
        run.note("data.packing: packs are filled best-fit, so there may be fewer of them than there")
    if _says_no(run, "dataset_shuffle") and _says_no(run, "train_dataloader_shuffle"):
        found["shuffle"] = False
    _template(run)
    return found | trainer.loading(run)


def _says_no(run: Run, key: str) -> bool:
    return key in run.left and not is_on(run.take(key))


def _place(run: Run, key: str, word: str, hub: str) -> str:
    """A data set as `data.train` names it: NAME:SUBSET#COUNT, or a file."""
    name, _, count = word.partition("#")
    if count:
        run.refuse(key, word, "draws rows at random; write them into a file, or leave out #COUNT")
    prefix = next((given for given in ("HF::", "MS::") if name.startswith(given)), "")
    name, hub = name.removeprefix(prefix), {"HF::": "hf:", "MS::": "ms:"}.get(prefix, hub or "hf:")
    if name.startswith((".", "/", "~")) or Path(name).suffix in (".jsonl", ".json", ".csv") or exists(name):
        return name
    name, _, subset = name.partition(":")
    if name == "swift/self-cognition":
        run.refuse(key, word, "is filled in with model_name and model_author; write its rows into a file")
    run.note(f"data.train: {name} is read by its columns; where ms-swift has rules of its own for it, rows may differ")
    return f"{hub}{name}?split=train" + (f"&config={subset}" if subset else "")


def _length(run: Run) -> int:
    given = run.whole("max_length", None)
    if given is not None:
        return int(given)
    if run.preset is None:
        run.refuse("max_length", "not given", "it is what the model can take; set it, as data.max_length is a number")
        return 2048
    run.note("data.max_length: the positions of the model, as max_length is not given")
    return int(run.family.config_cls(**run.family.presets[run.preset]).max_position_embeddings)


def _template(run: Run) -> None:
    """Nothing but the tokenizer's template, where it is known to have the text of ms-swift's."""
    weights, given = str(run.given(run.suite.model_key)), run.take("template")
    if given is not None or not re.search(_KNOWN_TEMPLATES, weights, re.IGNORECASE):
        why = "is a text of ms-swift's own, which may have other system turns or thoughts than the tokenizer's"
        run.refuse("template", given or "not given", f"for {weights} it {why}")
    run.note("data.chat_template: the tokenizer's own, which has the text of ms-swift's; what is behind the end of an "
             "answer is not learnt")  # fmt: skip


def _own_section(run: Run) -> dict[str, Any]:
    strategy = run.take("truncation_strategy") or "delete"
    if strategy not in ("delete", "right") or (strategy == "right" and run.section != "sft"):
        run.refuse("truncation_strategy", strategy, "longer rows are dropped, and in stage sft cut at their end")
    scale, usual = run.take("loss_scale"), "default" if run.section == "sft" else "last_round"
    if scale not in (None, usual):
        run.refuse("loss_scale", scale, "every token that the assistant says counts alike")
    if run.section == "sft":
        if loss := run.words("loss_type"):
            run.refuse("loss_type", ", ".join(loss), "every supervised token weighs the same")
        return {"truncate": True} if strategy == "right" else {}
    if run.section == "rm":
        weight = run.number("center_rewards_coefficient", 0)
        return {"center_rewards": float(weight)} if weight else {}
    own: dict[str, Any] = {"beta": float(run.number("beta", 0.1))}
    if run.section == "kto":
        run.note("kto: the divergence is estimated on the whole batch; there, on the micro-batches of a moment")
        for key in ("desirable_weight", "undesirable_weight"):
            weight = run.number(key, 1.0)
            own |= {key: float(weight)} if weight != 1 else {}
        return own
    kinds = run.words("loss_type") or ["sigmoid"]
    if len(kinds) != 1 or kinds[0] not in _LOSSES:
        run.refuse("loss_type", ",".join(kinds), f"dpo.loss has {', '.join(_LOSSES)} of ms-swift's")
    own["loss"] = _LOSSES.get(kinds[0], "sigmoid")
    if (smoothing := run.number("label_smoothing", 0)) and kinds == ["sigmoid"]:
        own["label_smoothing"] = float(smoothing)
    return own


def _lora(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": run.whole("lora_rank", 8), "alpha": float(run.number("lora_alpha", 32))}
    if dropout := run.number("lora_dropout", 0.05):
        found["dropout"] = float(dropout)
    if run.flag("use_rslora"):
        found["rslora"] = True
    if run.flag("use_dora"):
        found["method"] = "dora"
    if ratio := run.number("lorap_lr_ratio", None):
        found["lora_plus_ratio"] = float(ratio)
    init = str(run.take("init_weights")).lower()
    if init == "pissa":
        found["init"] = "pissa"
    elif init not in ("none", "true"):
        run.refuse("init_weights", init, "lora.init has default and pissa")
    found |= model.target_modules(run, "target_modules", ("all-linear",), "all-linear")
    number, method = run.number("quant_bits", None), run.take("quant_method")
    kind, doubled = str(run.take("bnb_4bit_quant_type") or "nf4"), run.take("bnb_4bit_use_double_quant")
    if number is not None and (method != "bnb" or number not in (4, 8)):
        run.refuse("quant_method", method, f"with {number} bits: lora.base_dtype has nf4, fp4 and int8")
    eight = ("quant_bits", number if number == 8 else None)
    kinds, scales = ("bnb_4bit_quant_type", kind), ("bnb_4bit_use_double_quant", doubled is not False)
    return found | model.bits(run, number == 4, eight, kinds, scales)


SWIFT = Suite(
    name="ms-swift",
    model_key="model",
    stage=_stage,
    recipe=_recipe,
    refused=swift_words.REFUSED,
    without=swift_words.WITHOUT,
    becomes=swift_words.BECOMES,
    flatten=_flatten,
    read_shell=read_shell,
)
