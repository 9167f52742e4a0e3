"""The keys of a recipe, collected from the dataclasses of its sections: for help, hints and the JSON Schema."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union

from typing_extensions import is_typeddict

from llmsuite.base.fields import field_values
from llmsuite.contract.schema.section import Section, default_of


@dataclasses.dataclass(frozen=True)
class KeyInfo:
    """One key of a recipe."""

    key: tuple[str, ...]
    annotation: Any
    default: Any
    """`dataclasses.MISSING` where the key is required."""
    declared_in: type
    """The section or TypedDict that declares the key."""

    @property
    def doc(self) -> str:
        """The docstring under the field, in one line; empty if it has none. Computed on access: parsing sources is
        slow."""
        return field_docs(self.declared_in).get(self.key[-1], "")

    @property
    def dotted(self) -> str:
        return ".".join(self.key)

    @property
    def type_text(self) -> str:
        return describe(self.annotation)


@functools.lru_cache(maxsize=1024)
def type_hints(cls: type) -> Mapping[str, Any]:
    """Return the evaluated annotations of a section or a TypedDict; cached, as evaluating postponed ones is slow."""
    return typing.get_type_hints(cls, include_extras=True)


def walk(cls: type, prefix: tuple[str, ...] = ()) -> Iterator[KeyInfo]:
    """Yield every leaf key below a section, in the order of declaration."""
    hints = type_hints(cls)
    for field in dataclasses.fields(cls):
        annotation = hints[field.name]
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from walk(annotation, (*prefix, field.name))
            continue
        yield KeyInfo((*prefix, field.name), annotation, default_of(field), cls)
        if is_typeddict(annotation):
            for name, hint in type_hints(annotation).items():
                yield KeyInfo((*prefix, field.name, name), hint, None, annotation)


def sections(cls: type, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], type[Section]]:
    """Return the type of each key that holds a section rather than a value."""
    found: dict[tuple[str, ...], type[Section]] = {}
    for name, hint in type_hints(cls).items():
        if isinstance(hint, type) and issubclass(hint, Section):
            key = (*prefix, name)
            found |= {key: hint, **sections(hint, key)}
    return found


def section_doc(cls: type[Section]) -> str:
    """Return the docstring of a section in one line; empty if it has none."""
    for base in cls.__mro__[: cls.__mro__.index(Section)]:
        doc = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        if doc and not doc.startswith(f"{base.__name__}("):  # a dataclass without a docstring gets its signature
            return doc.replace("\n", " ")
    return ""


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings under the fields of a dataclass and its bases, by field; empty if the source is missing.
    For a TypedDict, return those of the class in its attribute `documented_in`."""
    if is_typeddict(cls):
        return field_docs(cls.documented_in) if hasattr(cls, "documented_in") else {}
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # made at run time, or in a shell
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, text in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                docs[field.target.id] = inspect.cleandoc(text.value.value).replace("\n", " ")
    return docs


def describe(annotation: Any) -> str:
    """Return a type in words: "integer > 0", "one of: a, b", "text or null"."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        base, *limits = typing.get_args(annotation)
        words = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        rules = [
            f"{words[name]} {value}"
            for limit in limits
            if dataclasses.is_dataclass(limit)
            for name, value in field_values(limit).items()
            if name in words
        ]
        return " ".join([describe(base), " and ".join(rules)]).strip()
    if origin is Literal:
        return "one of: " + ", ".join(map(str, typing.get_args(annotation)))
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in typing.get_args(annotation))
    if origin is list:
        return f"list of {describe(typing.get_args(annotation)[0])}"
    if is_typeddict(annotation) or origin is dict or annotation is dict:
        return "object"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "value"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def accepts_text(annotation: Any) -> bool:
    """Return True if a bare word on the command line is a value of this type."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType, Annotated):
        return any(accepts_text(a) for a in typing.get_args(annotation))
    return annotation is str or (origin is Literal and any(isinstance(a, str) for a in typing.get_args(annotation)))


def accepts_number(annotation: Any) -> bool:
    """Return True if a number is a value of this type."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType, Annotated):
        return any(accepts_number(a) for a in typing.get_args(annotation))
    return annotation in (int, float)


def accepts_list(annotation: Any) -> bool:
    """Return True if a list is a value of this type."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType, Annotated):
        return any(accepts_list(a) for a in typing.get_args(annotation))
    return origin is list


def accepts_object(annotation: Any) -> bool:
    """Return True if an object is a value of this type."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType, Annotated):
        return any(accepts_object(a) for a in typing.get_args(annotation))
    return origin is dict


ALIASES = {
    "train.learning_rate": ("lr",),
    "train.min_lr_ratio": ("min_lr", "min_learning_rate", "lr_end"),
    "train.lr_schedule": ("lr_scheduler", "lr_scheduler_type", "scheduler"),
    "train.num_epochs": ("epochs", "epoch", "n_epochs", "num_train_epochs", "max_epochs"),
    "train.max_steps": ("steps", "num_steps", "train_steps", "max_train_steps", "num_train_steps"),
    "train.global_batch_size": ("batch_size", "bs", "train_batch_size", "gradient_accumulation_steps", "grad_accum"),
    "train.micro_batch_size": ("per_device_train_batch_size", "per_device_batch_size", "mbs"),
    "train.optimizer": ("optim", "optimizer_type"),
    "train.max_grad_norm": ("clip_grad", "grad_clip", "clip_grad_norm", "gradient_clipping", "max_norm"),
    "train.warmup_ratio": ("warmup",),
    "train.weight_decay": ("wd",),
    "train.eval_steps": ("eval_strategy", "evaluation_strategy", "eval_every"),
    "train.log_steps": ("logging_steps", "log_every"),
    "data.train": ("dataset", "datasets", "dataset_name", "train_file", "train_dataset_path", "data_path"),
    "data.eval": ("eval_dataset", "eval_file", "eval_dataset_path", "validation_file"),
    "data.max_length": ("cutoff_len", "max_seq_len", "max_seq_length", "sequence_len", "seq_length", "seq_len"),
    "data.chat_template": ("template",),
    "data.packing": ("pack", "neat_packing", "sample_packing", "zero_padding"),
    "data.num_workers": ("dataloader_num_workers",),
    "model.weights": ("model_name_or_path", "base_model", "model_path", "model_name", "pretrained"),
    "engine.precision": ("bf16", "fp16", "dtype", "torch_dtype", "compute_dtype", "mixed_precision"),
    "engine.recompute": ("gradient_checkpointing", "activation_checkpointing"),
    "engine.loss_chunk_tokens": ("use_liger_kernel", "enable_liger_kernel", "loss_subbatch_sequence_length"),
    "parallel.tensor_parallel_degree": ("tp", "tensor_parallel_size", "tensor_model_parallel_size"),
    "parallel.pipeline_parallel_degree": ("pp", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "parallel.expert_parallel_degree": ("ep", "expert_parallel_size", "expert_model_parallel_size"),
    "parallel.sharding": ("zero", "zero_stage", "deepspeed", "fsdp"),
    "lora.rank": ("lora_rank", "lora_r", "r", "peft", "use_peft"),
    "lora.alpha": ("lora_alpha",),
    "lora.dropout": ("lora_dropout",),
    "lora.target_modules": ("lora_target", "lora_target_modules"),
    "lora.modules_to_save": ("additional_target", "lora_modules_to_save"),
    "lora.base_dtype": ("load_in_4bit", "load_in_8bit", "quantization_bit"),
    "checkpoint.save_steps": ("save_strategy", "save_every", "save_interval"),
    "checkpoint.keep_last": ("save_total_limit",),
    "launch.num_devices": ("gpus", "num_gpus", "nproc_per_node", "num_processes", "world_size"),
    "dpo.loss": ("pref_loss", "loss_type"),
    "dpo.beta": ("pref_beta",),
    "loggers": ("report_to",),
    "rollout.num_generations": ("n", "rollout_n", "n_samples_per_prompt"),
    "rollout.max_completion_length": ("response_length", "max_response_length"),
    "rollout.engine": ("use_vllm",),
    "reward.functions": ("reward_funcs", "reward_function", "reward_fn", "reward_weights"),
    "grpo.epsilon": ("clip_ratio", "clip_ratio_low", "cliprange", "clip_eps", "eps_clip"),
    "grpo.epsilon_high": ("clip_ratio_high",),
    "grpo.dual_clip": ("delta", "clip_ratio_c"),
    "grpo.beta": ("kl_coef", "kl_loss_coef", "init_kl_coef"),
    "grpo.kl": ("kl_loss_type",),
    "grpo.advantage": ("adv_estimator", "advantage_estimator"),
    "grpo.updates": ("steps_per_generation",),
    "grpo.reference": ("ref_model", "reference_model"),
}
"""Names of keys in other suites, for hints: our key -> their names."""

_FULL_DISTRIBUTION = (
    "not supported: the loss uses the log-probabilities of the full distribution; nearest keys: rollout.top_p, "
    "rollout.top_k"
)
UNSUPPORTED_KEYS = {f"rollout.{name}": _FULL_DISTRIBUTION for name in ("min_p", "repetition_penalty")}
"""Keys of other suites that recipes lack although another section has a key of that name -> the reason."""


def did_you_mean(key: tuple[str, ...], cls: type) -> str:
    """Return a hint for an unknown key: the reason why it is not supported, the key that other suites call so, the
    nearest key of the same section, or a key of that name in another section."""
    reason = UNSUPPORTED_KEYS.get(".".join(key))
    if reason:
        return reason
    known = [info.key for info in walk(cls)]
    groups = sections(cls)
    siblings = [k[-1] for k in [*known, *groups] if k[:-1] == key[:-1]]
    near = difflib.get_close_matches(key[-1], siblings, n=1, cutoff=0.6)
    meant = next((tuple(ours.split(".")) for ours, words in ALIASES.items() if key[-1] in words), None)
    if meant in known and (len(key) == 1 or meant[:-1] == key[:-1] or not near):
        return f"did you mean {'.'.join(meant)!r}?"
    elsewhere = [".".join(k) for k in known if k[-1] == key[-1]]
    if near and not (elsewhere and len(key) == 1):  # the section was forgotten
        return f"did you mean {near[0]!r}?"
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere[:3]))}?"
    if siblings:
        return "known keys here: " + ", ".join(sorted(siblings))
    return ""
