"""What llmsuite itself brings, registered through the same hooks as anybody else's plugin. Imports no Paddle."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from llmsuite.observe import loggers
from llmsuite.plugins.hookspecs import hookimpl
from llmsuite.rl import engine_sections, environment_sections, reward_sections
from llmsuite.schema.environment import EnvironmentSection
from llmsuite.schema.reward import RewardSection
from llmsuite.schema.section import Section
from llmsuite.specs import (
    DataFormat,
    DeviceSpec,
    EnvironmentSpec,
    Exporter,
    LoggerSpec,
    ModelFamily,
    RewardSpec,
    RolloutEngineSpec,
    StageSpec,
)
from llmsuite.stages.evaluated import of_completions, of_loss
from llmsuite.stages.online_dpo_section import OnlineDpoSection
from llmsuite.stages.ppo_section import PpoSection
from llmsuite.stages.rl_sections import EvalRolloutSection, GrpoSection, RolloutSection
from llmsuite.stages.sections import DpoSection, InferSection, KtoSection, PretrainSection, RmSection, SftSection


def lazily(address: str) -> Callable[[], Any]:
    """A factory that imports and returns the object at an address such as "package.module:Name"."""
    return functools.partial(pkgutil.resolve_name, address)


CONVERSATIONS = {"data.train": "data/sft/train.jsonl", "data.eval": "data/sft/eval.jsonl"}
PREFERENCE = {"data.train": "data/preference/train.jsonl", "data.eval": "data/preference/eval.jsonl"}
UNPAIRED = {"data.train": "data/unpaired/train.jsonl", "data.eval": "data/unpaired/eval.jsonl"}
ROLLOUTS = {
    "data.train": "data/digits/sft/train.jsonl",
    "data.eval": "data/digits/sft/eval.jsonl",
    "rollout.num_generations": 4,
    "rollout.max_completion_length": 16,
    # a model with random weights is right once in a while only if this is easy
    "reward": {"functions": {"format": 1.0}, "format": {"pattern": "[a-m].*"}},
}
TEXT = {"data.train": "data/pretrain/train.txt", "data.eval": "data/pretrain/eval.txt"}


@hookimpl
def llmsuite_register_stages() -> list[StageSpec]:
    return [*_language_stages(), *_preference_stages(), *_rollout_stages(), _infer_stage()]


def _language_stages() -> list[StageSpec]:
    """Stages that learn to write text as it is given."""
    return [
        StageSpec(
            name="pretrain",
            packs=False,
            help="next-token prediction over text or an indexed corpus",
            config_cls=PretrainSection,
            factory=lazily("llmsuite.stages.pretrain:PretrainStage"),
            evaluates=of_loss(),
            smoke={**TEXT, "pretrain.mix": {}},
            quantises=True,
            predicts_further=True,
            compares_answers=True,
            fills_rows=True,
            takes_all=True,
            in_programs=True,
        ),
        StageSpec(
            name="sft",
            row_kind="conversation",
            help="supervised fine-tuning on the assistant's turns of conversations",
            config_cls=SftSection,
            profile=SftSection.profile,
            factory=lazily("llmsuite.stages.sft:SftStage"),
            evaluates=of_loss("tokens/accuracy"),
            smoke=CONVERSATIONS,
            quantises=True,
            predicts_further=True,
            tells_prompts=True,
            takes_prefix=True,
            compares_answers=True,
            in_programs=True,
        ),
        StageSpec(
            name="lora",
            row_kind="conversation",
            help="supervised fine-tuning of low-rank adapters; the section lora goes with the other stages too",
            config_cls=SftSection,
            profile=SftSection.profile,
            section="sft",
            adapters=True,
            factory=lazily("llmsuite.stages.sft:SftStage"),
            evaluates=of_loss("tokens/accuracy"),
            predicts_further=True,
            tells_prompts=True,
            takes_prefix=True,
            compares_answers=True,
            in_programs=True,
            smoke=CONVERSATIONS,
        ),
    ]


def _preference_stages() -> list[StageSpec]:
    """Stages that learn which answers are wanted."""
    return [
        StageSpec(
            name="dpo",
            row_kind="preference",
            help="direct preference optimisation: sigmoid, ipo, hinge, kto_pair, simpo, orpo",
            config_cls=DpoSection,
            profile=DpoSection.profile,
            factory=lazily("llmsuite.stages.dpo:DpoStage"),
            evaluates=of_loss(),
            compares_answers=True,
            in_programs=True,
            smoke=PREFERENCE,
            rows_per_sample=2,
        ),
        StageSpec(
            name="rm",
            row_kind="preference",
            help="reward model: a score for each answer, trained on pairs",
            config_cls=RmSection,
            profile=RmSection.profile,
            factory=lazily("llmsuite.stages.rm:RmStage"),
            evaluates=of_loss(),
            in_programs=True,
            smoke=PREFERENCE,
            head="score",
            rows_per_sample=2,
        ),
        StageSpec(
            name="kto",
            row_kind="unpaired",
            packs=False,
            help="preference optimisation on single answers that are wanted or not: kto, apo_zero",
            config_cls=KtoSection,
            profile=KtoSection.profile,
            factory=lazily("llmsuite.stages.kto:KtoStage"),
            evaluates=of_loss(),
            in_programs=True,
            smoke=UNPAIRED,
        ),
    ]


def _infer_stage() -> StageSpec:
    """The stage that does not train."""
    return StageSpec(
        name="infer",
        help="no training: a model answers the prompts of a file",
        config_cls=InferSection,
        factory=lazily("llmsuite.stages.infer:work"),
        smoke={"data.prompts": "data/preference/eval.jsonl", "infer.max_new_tokens": 16},
        trains=False,
        result="answers.jsonl",
    )


def _rollout_stages() -> list[StageSpec]:
    """Stages that learn from completions the model draws."""
    sections: dict[str, type[Section]] = {
        "rollout": RolloutSection,
        "reward": RewardSection,
        "eval_rollout": EvalRolloutSection,
    }
    return [
        StageSpec(
            name="grpo",
            row_kind="prompt",
            packs=False,
            help="group relative policy optimisation on completions the model draws: dapo, grpo, dr_grpo, cispo, sapo",
            config_cls=GrpoSection,
            sections={**sections, "environment": EnvironmentSection},
            profile=GrpoSection.profile,
            draws_ahead=True,
            factory=lazily("llmsuite.stages.grpo:GrpoStage"),
            evaluates=of_completions,
            smoke=ROLLOUTS,
        ),
        StageSpec(
            name="online_dpo",
            row_kind="prompt",
            packs=False,
            help="dpo on the best and the worst of the completions that the model draws for a prompt",
            config_cls=OnlineDpoSection,
            sections=sections,
            profile=OnlineDpoSection.profile,
            factory=lazily("llmsuite.stages.online_dpo:OnlineDpoStage"),
            evaluates=of_completions,
            smoke=ROLLOUTS,
        ),
        StageSpec(
            name="ppo",
            row_kind="prompt",
            packs=False,
            help="proximal policy optimisation with a critic on completions the model draws",
            config_cls=PpoSection,
            sections={**sections, "environment": EnvironmentSection},
            profile=PpoSection.profile,
            factory=lazily("llmsuite.stages.ppo:PpoStage"),
            evaluates=of_completions,
            draws_ahead=True,
            smoke={**ROLLOUTS, "ppo.critic.weights": None, "ppo.critic.learning_rate": 1e-3},
        ),
    ]


def _family(name: str, cls: str, help: str, hf_model_types: tuple[str, ...], gguf: tuple[str, ...] = ()) -> ModelFamily:
    """The family whose code is in `llmsuite.models.NAME`; its layers are imported when they are needed."""
    package = f"llmsuite.models.{name}"
    config = importlib.import_module(f"{package}.config")
    return ModelFamily(
        name=name,
        help=help,
        config_cls=getattr(config, f"{cls}Config"),
        presets=config.PRESETS,
        smoke=config.SMOKE,
        smoke_keeps=config.SMOKE_KEEPS,
        factory=lazily(f"{package}.layers:{cls}"),
        names=lazily(f"{package}.names"),
        shard_plan=importlib.import_module(f"{package}.shard_plan").PLAN,
        anatomy=lambda shape: pkgutil.resolve_name(f"{package}.anatomy:anatomy")(shape),
        hf_model_types=hf_model_types,
        gguf_architectures=gguf,
    )


@hookimpl
def llmsuite_register_models() -> list[ModelFamily]:
    return [
        _family(
            "llama", "Llama", "Llama 1, 2, 3.x, SmolLM2, TinyLlama, Mistral", ("llama", "mistral"), gguf=("llama",)
        ),
        _family("qwen", "Qwen", "Qwen2, Qwen2.5, dense Qwen3", ("qwen2", "qwen3"), gguf=("qwen2", "qwen3")),
        _family("qwen_moe", "QwenMoe", "Qwen2-MoE, Qwen3-MoE", ("qwen2_moe", "qwen3_moe")),
        _family("ernie", "Ernie", "ERNIE-4.5 without experts", ("ernie4_5",)),
        _family("ernie_moe", "ErnieMoe", "ERNIE-4.5 with experts", ("ernie4_5_moe",)),
        _family("gpt", "GPT", "GPT-2, GPT-3", ("gpt2", "gpt")),
        _family("deepseek", "DeepSeek", "DeepSeek-V2, V2-Lite, V3", ("deepseek_v2", "deepseek_v3")),
    ]


def _device(name: str, help: str, backend: str) -> DeviceSpec:
    """A device whose backend class is at the address `backend`."""
    return DeviceSpec(name=name, help=help, factory=lambda: pkgutil.resolve_name(backend)())


@hookimpl
def llmsuite_register_devices() -> list[DeviceSpec]:
    return [
        _device("cpu", "processes over Gloo, fp32; in training also bf16", "llmsuite.devices.cpu:CpuBackend"),
        _device("gpu", "NVIDIA GPUs over NCCL, fp32, bf16, fp16", "llmsuite.devices.gpu:GpuBackend"),
        _device("xpu", "Kunlun XPUs over BKCL, fp32, bf16, fp16", "llmsuite.devices.xpu:XpuBackend"),
    ]


@hookimpl
def llmsuite_register_data_formats() -> list[DataFormat]:
    from llmsuite.data import conversations, formats, prompts

    return [*formats.BUILTIN, *conversations.BUILTIN, *prompts.BUILTIN]


def _exporter(name: str, help: str, write: str) -> Exporter:
    """A layout whose writing function is at the address `write`."""
    return Exporter(name=name, help=help, write=lambda model, path: pkgutil.resolve_name(write)(model, path))


@hookimpl
def llmsuite_register_exporters() -> list[Exporter]:
    module = "llmsuite.checkpoint.model_writer"
    return [
        _exporter("hf", "names and matrices as HF transformers has them", f"{module}:write_hf"),
        _exporter("paddlenlp", "names and matrices as PaddleNLP has them", f"{module}:write_paddlenlp"),
    ]


@hookimpl
def llmsuite_register_loggers() -> list[LoggerSpec]:
    return list(loggers.BUILTIN)


@hookimpl
def llmsuite_register_rewards() -> list[RewardSpec]:
    return list(reward_sections.BUILTIN)


@hookimpl
def llmsuite_register_rollout_engines() -> list[RolloutEngineSpec]:
    return list(engine_sections.BUILTIN)


@hookimpl
def llmsuite_register_environments() -> list[EnvironmentSpec]:
    return list(environment_sections.BUILTIN)
