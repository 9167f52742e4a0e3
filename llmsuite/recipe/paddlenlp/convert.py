"""From PaddleNLP's arguments to a recipe, section by section; what is left over is told with its reason."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from llmsuite.errors import UserError
from llmsuite.plugins.hookspecs import ModelFamily
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.keys import walk
from llmsuite.recipe.load import recipe_type
from llmsuite.recipe.paddlenlp.arguments import Arguments
from llmsuite.recipe.paddlenlp.without import reason

_SCRIPTS = {"pretrain": "pretrain", "finetune": "sft", "sft": "sft", "lora": "lora", "dpo": "dpo", "simpo": "dpo"}
_SCRIPTS |= {"kto": "kto", "reward": "rm", "rm": "rm"}
_FAMILIES = {"llama|vicuna|alpaca": "llama", "qwen": "qwen", "deepseek": "deepseek", "gpt": "gpt"}
_SUFFIXES = re.compile(r"^meta-|-(instruct|chat|hf|base|en|bf16)\b", re.IGNORECASE)
_PER_MACHINE = 8


@dataclasses.dataclass
class Converted:
    """What `convert` gives."""

    recipe: dict[str, Any]
    left_out: list[tuple[str, Any, str]] = dataclasses.field(default_factory=list)
    """Arguments without counterpart: name, value, why and what is nearest."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What was decided that the arguments do not say."""


def convert(
    arguments: Arguments,
    name: str,
    registry: Registry,
    stage: str | None = None,
    family: str | None = None,
    num_devices: int | None = None,
) -> Converted:
    """A recipe of the same run.

    Args:
        arguments: what PaddleNLP would be given.
        name: of the file, for the recipe's `source` and to tell the stage by.
        registry: what stages and families there are.
        stage: of the recipe, where the arguments do not tell.
        family: of the model, where its name does not tell.
        num_devices: of all machines, where the arguments do not tell.

    Raises:
        UserError: stage or family cannot be told, or an argument is not of its type.
    """
    stage = stage or _stage(arguments, name, registry)
    if stage not in registry.stages:
        raise UserError(registry.unknown("stage", stage))
    model = str(arguments.values.get("model_name_or_path", ""))
    family = family or next((f for words, f in _FAMILIES.items() if re.search(words, model, re.IGNORECASE)), None)
    if family is None:
        raise UserError(f"model_name_or_path is {model!r}, which tells no family; add --family llama, for example")
    if family not in registry.models:
        raise UserError(registry.unknown("model", family))
    return _Conversion(arguments, name, registry, stage, registry.models[family], num_devices).run()


def _stage(arguments: Arguments, name: str, registry: Registry) -> str:
    """By the script, the name of the file, then by arguments that one stage has only."""
    values = arguments.values
    stem = next((word for word in re.split(r"[^a-z]+", (arguments.script or name).lower()) if word in _SCRIPTS), None)
    stage = _SCRIPTS.get(stem or "")
    if stage is None:
        if "input_dir" in values:
            stage = "pretrain"
        elif "loss_type" in values and "train_dataset_path" in values:
            stage = "dpo"
        elif "dataset_name_or_path" in values:
            stage = "sft"
        else:
            raise UserError(f"{name}: tells no stage; add --stage, one of {', '.join(registry.stages)}")
    return "lora" if stage == "sft" and _true(values.get("lora")) else stage


def _true(value: Any) -> bool:
    return value in (True, 1, "true", "1")


class _Conversion:
    """One conversion. `take` gives an argument and crosses it off; what is not crossed off has no counterpart."""

    def __init__(
        self,
        arguments: Arguments,
        name: str,
        registry: Registry,
        stage: str,
        family: ModelFamily,
        num_devices: int | None,
    ):
        self.arguments, self.name, self.stage, self.family = arguments, name, stage, family
        self.left = dict(arguments.values)
        self.section = registry.stages[stage].section_name
        self.section_cls = registry.stages[stage].config_cls
        tree = {"stage": stage, "model": {"family": family.name}}
        self.keys = {info.dotted for info in walk(recipe_type(tree, registry)[0])}
        self.told_devices = num_devices
        self.result = Converted({})

    def run(self) -> Converted:
        own = self.stage_section()
        recipe: dict[str, Any] = {
            "stage": self.stage,
            "source": f"PaddleNLP {self.name}",
            "model": self.model(),
            "data": self.data(own),
            "parallel": self.parallel(),
            "engine": self.engine(),
        }
        recipe["launch"] = self.launch(recipe["parallel"])
        recipe["train"] = self.train(recipe["launch"], recipe["parallel"])
        if own:
            recipe[self.section] = own
        if lora := self.lora():
            recipe["lora"] = lora
        recipe["checkpoint"] = self.checkpoint(recipe["data"], own)
        recipe["device"] = self.take("device") or self.arguments.device or "gpu"
        if "visualdl" in str(self.take("report_to") or ""):
            recipe["loggers"] = ["visualdl"]
        recipe["seed"] = self.number("seed", 42)
        recipe["output_dir"] = str(self.take("output_dir") or f"runs/{Path(self.name).stem}")
        self.result.recipe = {key: value for key, value in recipe.items() if value != {}}
        for key, value in self.left.items():
            self.left_out(key, value, reason(key) or self.unknown(key))
        return self.result

    # arguments

    def take(self, key: str) -> Any:
        value = self.left.pop(key, None)
        return None if value in ("", "None", "none", "null") else value

    def number(self, key: str, default: Any) -> Any:
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{self.name}: {key} is {value!r}; a number is wanted")
        return value

    def flag(self, key: str) -> bool:
        return _true(self.take(key))

    def left_out(self, key: str, value: Any, why: str) -> None:
        self.result.left_out.append((key, value, why))

    def note(self, text: str) -> None:
        self.result.notes.append(text)

    def unknown(self, key: str) -> str:
        near = difflib.get_close_matches(key, {k.rpartition(".")[2]: k for k in self.keys}, n=1)
        full = sorted(k for k in self.keys if near and k.rpartition(".")[2] == near[0])
        return f"is not known; nearest key: {full[0]}" if full else "is not known"

    # sections

    def model(self) -> dict[str, Any]:
        name, tokenizer = self.take("model_name_or_path"), self.take("tokenizer_name_or_path")
        if name is None:
            raise UserError(f"{self.name}: has no model_name_or_path")
        fresh = self.stage == "pretrain" and not self.flag("continue_training")
        self.left.pop("continue_training", None)
        model: dict[str, Any] = {"family": self.family.name}
        if fresh:
            model["tokenizer"] = tokenizer or name
        else:
            model["weights"] = name
            if tokenizer not in (None, name):
                model["tokenizer"] = tokenizer
        preset = _preset(str(name), self.family)
        if preset is not None:
            model["preset"] = preset
        else:
            self.note(f"model.preset: none is known of {name}; checks need its config.json, in model.weights")
            model.setdefault("weights", name)
        shape = {f.name for f in dataclasses.fields(self.family.config_cls)} - {"model_type"}
        config = {key: self.take(key) for key in list(self.left) if key in shape}
        if config:
            model["config"] = config
        return model

    def data(self, own: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        strategy = str(self.take("evaluation_strategy") or "")
        evaluates = self.flag("do_eval") and strategy != "no"
        if self.stage == "pretrain":
            data["train"] = self.corpora(own)
            if split := self.take("split"):
                own["split"] = str(split)
        elif (rows := self.take("dataset_name_or_path")) is not None:
            data["train"] = f"{rows}/train.json"
            data |= {"eval": f"{rows}/dev.json"} if evaluates else {}
        else:
            train = self.take("train_dataset_path") or self.take("train_datasets")
            held_out = self.take("dev_dataset_path") or self.take("eval_datasets")
            if train is None:
                raise UserError(f"{self.name}: has no dataset_name_or_path and no train_dataset_path")
            data["train"] = str(train)
            data |= {"eval": str(held_out)} if evaluates and held_out else {}
        lengths = [self.number(key, None) for key in ("max_seq_length", "max_seq_len", "max_length")]
        if length := next((value for value in lengths if value is not None), None):
            data["max_length"] = length
        if self.flag("zero_padding"):
            if "data.packing" in self.keys and self.section == "sft":
                data["packing"] = "best_fit"
            else:
                self.left_out("zero_padding", True, f"rows are not packed in stage {self.stage}")
        if workers := self.number("dataloader_num_workers", 0):
            data["num_workers"] = workers
        if strategy == "epoch":
            self.left_out("evaluation_strategy", strategy, "evaluation is after train.eval_steps, and the last step")
        self.evaluates = evaluates
        return data

    def corpora(self, own: dict[str, Any]) -> str:
        """`input_dir`: a directory or prefix, or weights and prefixes in turn."""
        given = str(self.take("input_dir") or "")
        words = given.split()
        if not words:
            raise UserError(f"{self.name}: has no input_dir")
        if len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2]):
            first = float(words[0])
            own["mix"] = {path: float(weight) / first for weight, path in zip(words[2::2], words[3::2])}
            words = words[1:2]
        path = Path(words[0])
        prefixes = sorted(file.with_suffix("") for file in path.glob("*.idx")) if path.is_dir() else []
        if len(prefixes) == 1:
            return str(prefixes[0])
        if path.suffix != "" or len(prefixes) != 0 or not path.with_suffix(".idx").is_file():
            self.note(
                f"data.train: is {path}; it has to be the prefix of one corpus, {path}/NAME for NAME.bin and .idx"
            )
        return str(path)

    def parallel(self) -> dict[str, Any]:
        parallel: dict[str, Any] = {}
        tp, pp = (self.number(f"{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline"))
        tp, pp = max(tp, 1), max(pp, 1)
        chunks = self.number("virtual_pp_degree", 1)
        if tp > 1:
            parallel["tensor_parallel_degree"] = tp
        if pp > 1:
            parallel["pipeline_parallel_degree"] = pp
            parallel["pipeline_schedule"] = "interleaved" if chunks > 1 else "1F1B"
            parallel |= {"virtual_pipeline_degree": chunks} if chunks > 1 else {}
        words = str(self.take("sharding") or "").split()
        self.offload = "offload" in words
        stages = [word for word in words if re.fullmatch(r"stage[123]", word)]
        degree = max(self.number("sharding_parallel_degree", 1), self.number("sharding_degree", 1), 1)
        if stages:
            parallel["sharding"] = stages[0]
            parallel |= {"sharding_parallel_degree": degree} if degree > 1 else {}
        elif degree > 1:
            self.left_out("sharding_parallel_degree", degree, "sharding is not given, so nothing is cut")
        experts = self.number("expert_parallel_degree", 1)
        if experts > 1:
            parallel["expert_parallel_degree"] = experts
        if self.flag("sequence_parallel"):
            if tp > 1:
                parallel["sequence_parallel"] = True
            else:
                self.left_out("sequence_parallel", True, "needs parallel.tensor_parallel_degree above 1")
        return parallel

    def engine(self) -> dict[str, Any]:
        bf16, fp16 = self.flag("bf16"), self.flag("fp16")
        precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
        level = self.take("fp16_opt_level")
        if level not in (None, "O2") and precision != "fp32":
            self.left_out("fp16_opt_level", level, "parameters are in 16 bits with float32 masters, which is O2")
        granularity = self.take("recompute_granularity") or "full"
        kind = {"full": "full", "full_attn": "selective", "core_attn": "selective"}.get(str(granularity))
        engine = {"mode": "to_static" if self.flag("to_static") else "dynamic", "precision": precision}
        recompute = self.flag("recompute")
        if recompute and kind is None:
            self.left_out("recompute_granularity", granularity, "nearest key: engine.recompute, full or selective")
        engine["recompute"] = (kind or "full") if recompute else "none"
        offload = [self.flag(key) for key in ("tensorwise_offload_optimizer", "offload_optim")]
        return {**engine, "offload_optimizer": True} if self.offload or any(offload) else engine

    def launch(self, parallel: Mapping[str, Any]) -> dict[str, Any]:
        fixed = math.prod(
            parallel.get(key, 1)
            for key in ("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree")
        )
        told, nodes = self.arguments.num_devices, self.arguments.nnodes or 1
        total = self.told_devices or (told * nodes if told else None)
        if total is None:
            total = math.lcm(fixed, _PER_MACHINE)
            self.note(f"launch: {total} devices, as nothing says how many; --num_devices N for another number")
        if told and not self.told_devices:
            return {"num_devices": told, **({"nnodes": nodes} if nodes > 1 else {})}
        machines = total // _PER_MACHINE if total % _PER_MACHINE == 0 else 1
        return {"num_devices": total // machines, **({"nnodes": machines} if machines > 1 else {})}

    def train(self, launch: Mapping[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
        total = launch["num_devices"] * launch.get("nnodes", 1)
        fixed = parallel.get("tensor_parallel_degree", 1) * parallel.get("pipeline_parallel_degree", 1)
        ranks = max(1, total // fixed)
        degree = parallel.get("sharding_parallel_degree", 1)
        if ranks == 1 and "sharding" in parallel:
            self.left_out("sharding", parallel.pop("sharding"), f"there is one data rank on {total} devices")
        elif degree == ranks:
            parallel.pop("sharding_parallel_degree", None)  # all data ranks take part, which is the default
        micro, accumulate = (
            self.number(key, 1) for key in ("per_device_train_batch_size", "gradient_accumulation_steps")
        )
        steps, epochs = self.number("max_steps", -1), self.number("num_train_epochs", 3)
        length = {"max_steps": steps} if steps > 0 else {"num_epochs": max(1, math.ceil(epochs))}
        if steps <= 0 and epochs != length["num_epochs"]:
            self.note(f"train.num_epochs: {length['num_epochs']}, for {epochs}; train.max_steps can be any number")
        train: dict[str, Any] = {**length, "global_batch_size": micro * accumulate * ranks, "micro_batch_size": micro}
        train["learning_rate"] = self.number("learning_rate", 5e-5)
        kind = str(self.take("lr_scheduler_type") or "linear")
        schedule = {"constant_with_warmup": "constant"}.get(kind, kind)
        if schedule not in ("constant", "linear", "cosine"):
            self.left_out("lr_scheduler_type", kind, "train.lr_schedule has constant, linear, cosine; linear is taken")
            schedule = "linear"
        train["lr_schedule"] = schedule
        train |= self.warmup(steps)
        least = self.number("min_learning_rate", 0)
        if least and schedule != "constant":
            train["min_lr_ratio"] = float(f"{least / train['learning_rate']:.6g}")
        for key in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
            value = self.number(key, None)
            train |= {key: float(value)} if value is not None else {}
        norm = self.number("max_grad_norm", 1.0)
        train["max_grad_norm"] = float(norm) if norm > 0 else None
        every = self.number("eval_steps", None)
        if every and self.evaluates:
            train["eval_steps"] = every
        if (log := self.number("logging_steps", 1)) > 1:
            train["log_steps"] = log
        optimizer = self.take("optim")
        if optimizer not in (None, "adamw"):
            self.left_out("optim", optimizer, "nearest key: train.optimizer, adamw")
        return train

    def warmup(self, steps: int) -> dict[str, Any]:
        """`warmup_steps` counts before `warmup_ratio`, as with PaddleNLP."""
        ratio, count = self.number("warmup_ratio", 0.0), self.number("warmup_steps", 0)
        if count > 0 and steps > 0:
            ratio = min(1.0, float(f"{count / steps:.6g}"))
        elif count > 0:
            self.left_out("warmup_steps", count, "how many steps there are is not known; set train.warmup_ratio")
        return {"warmup_ratio": float(ratio)} if ratio else {}

    def stage_section(self) -> dict[str, Any]:
        names = {"loss_type": "loss", "simpo_gamma": "gamma", "sft_loss_ratio": "sft_weight"}
        hints = get_type_hints(self.section_cls)
        own: dict[str, Any] = {}
        for theirs in ("loss_type", "beta", "label_smoothing", "simpo_gamma", "sft_loss_ratio", "desirable_weight",
                       "undesirable_weight"):  # fmt: skip
            ours = names.get(theirs, theirs)
            if theirs not in self.left or f"{self.section}.{ours}" not in self.keys:
                continue
            value = self.take(theirs)
            if ours == "loss" and value not in get_args(hints["loss"]):
                self.left_out(theirs, value, f"{self.section}.loss has {', '.join(get_args(hints['loss']))}")
            elif value is not None and (ours == "loss" or value):  # zeros are what is so anyway
                own[ours] = value
        return own

    def lora(self) -> dict[str, Any]:
        wanted, rank = self.flag("lora"), self.number("lora_rank", 8)
        rslora = self.flag("rslora") or self.flag("rslora_plus")
        ratio = self.number("lora_plus_scale", 1.0)
        alpha = self.number("lora_alpha", 0)
        if not wanted and self.stage != "lora":
            return {}
        # run_finetune.py: 4 with rsLoRA, else twice the rank
        lora = {"rank": rank, "alpha": float(alpha if alpha > 0 else 4 if rslora else 2 * rank)}
        lora |= {"rslora": True} if rslora else {}
        return lora | ({"lora_plus_ratio": float(ratio)} if ratio != 1 else {})

    def checkpoint(self, data: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        strategy, every = str(self.take("save_strategy") or "steps"), self.number("save_steps", None)
        checkpoint: dict[str, Any] = {}
        if strategy == "steps" and every:
            checkpoint["save_steps"] = every
        elif strategy == "epoch":
            self.left_out(
                "save_strategy", strategy, "nearest key: checkpoint.save_steps; the last step is always saved"
            )
        keep = self.number("save_total_limit", None)
        if keep is not None:
            checkpoint["keep_last"] = max(2, keep)
            if keep < 2:
                self.note("checkpoint.keep_last: 2, the least, because the newest may be the one a crash interrupts")
        best, metric = self.flag("load_best_model_at_end"), self.take("metric_for_best_model")
        if best and metric in (None, "loss", "eval_loss") and ("eval" in data or "split" in own):
            checkpoint["best_metric"] = "eval/loss"
        elif best:
            self.left_out("load_best_model_at_end", metric or True, "nearest key: checkpoint.best_metric, eval/loss")
        if self.take("use_async_save") in (False, 0):
            checkpoint["async_save"] = False
        return checkpoint


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9.]+([eE][-+]?[0-9]+)?", text) is not None


def _preset(name: str, family: ModelFamily) -> str | None:
    """The shape the family has under a model's name, without what says how it was tuned."""
    plain = _SUFFIXES.sub("", name.rstrip("/").rpartition("/")[2]).lower()
    return plain if plain in family.presets else None
