"""Built-in stages, model families, devices, formats and the like, registered through the hooks that plugins use. Each
hook imports what it registers, without Paddle: a command asks for some kinds only."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmsuite.contract.hookspecs import hookimpl
from llmsuite.contract.specs import (
    Capability,
    DataFormat,
    DeviceSpec,
    EnvironmentSpec,
    Exporter,
    JobSpec,
    LoggerSpec,
    ModelFamily,
    RewardSpec,
    RolloutEngineSpec,
    StageSpec,
)

if TYPE_CHECKING:
    from llmsuite.contract.schema.section import Section
    from llmsuite.models.adapter_method import AdapterMethod


def lazily(address: str) -> Callable[[], Any]:
    """Return a factory that imports and returns the object at an address such as "package.module:Name"."""
    return functools.partial(pkgutil.resolve_name, address)


CONVERSATIONS = {
    "data.train": "data/sft/train.jsonl",
    "data.eval": "data/sft/eval.jsonl",
    "data.ignore_columns": ["tasks"],
}
PREFERENCE = {
    "data.train": "data/preference/train.jsonl",
    "data.eval": "data/preference/eval.jsonl",
    "data.ignore_columns": ["task", "answer"],
}
UNPAIRED = {
    "data.train": "data/unpaired/train.jsonl",
    "data.eval": "data/unpaired/eval.jsonl",
    "data.ignore_columns": ["task"],
}
ROLLOUTS = {
    "data.train": "data/digits/sft/train.jsonl",
    "data.eval": "data/digits/sft/eval.jsonl",
    "rollout.num_generations": 4,
    "rollout.max_completion_length": 16,
    # easy enough that a model with random weights gets a reward now and then
    "reward": {"functions": {"format": 1.0}, "format": {"pattern": "[a-m].*"}},
}
TEXT = {"data.train": "data/pretrain/train.txt", "data.eval": "data/pretrain/eval.txt"}
_SUPERVISED: frozenset[Capability] = frozenset(
    {
        "answer_ends",
        "generation",
        "mtp",
        "packing",
        "plain_text",
        "prefix",
        "prompt_lengths",
        "step_programs",
        "thoughts",
    }
)
"""Capabilities of supervised fine-tuning, of all parameters and of adapters."""


@hookimpl
def llmsuite_register_stages() -> list[StageSpec | JobSpec]:
    return [*_language_stages(), *_preference_stages(), *_rollout_stages(), _infer_job()]


def _language_stages() -> list[StageSpec]:
    """Return the stages of language modelling: pre-training, supervised fine-tuning and distillation."""
    from llmsuite.contract.schema.rollout import RolloutSection
    from llmsuite.stages.gkd_section import GkdSection
    from llmsuite.stages.sections import PretrainSection, SftSection

    return [
        StageSpec(
            name="pretrain",
            help="next-token prediction over text or an indexed corpus",
            config_cls=PretrainSection,
            profile=PretrainSection.profile,
            factory=lazily("llmsuite.stages.pretrain:PretrainStage"),
            capabilities=frozenset({"all_logits", "fixed_length", "generation", "mtp", "qat", "step_programs"}),
            smoke={**TEXT, "pretrain.mix": {}},
        ),
        StageSpec(
            name="sft",
            row_kind="conversation",
            help="supervised fine-tuning on the assistant's turns of conversations",
            config_cls=SftSection,
            profile=SftSection.profile,
            factory=lazily("llmsuite.stages.sft:SftStage"),
            capabilities=_SUPERVISED | {"qat"},
            smoke=CONVERSATIONS,
        ),
        StageSpec(
            name="lora",
            row_kind="conversation",
            help="supervised fine-tuning of low-rank adapters; the section lora goes with the other stages too",
            config_cls=SftSection,
            profile=SftSection.profile,
            sections={"sft": SftSection},
            factory=lazily("llmsuite.stages.sft:SftStage"),
            capabilities=_SUPERVISED | {"adapters_only"},
            smoke=CONVERSATIONS,
        ),
        StageSpec(
            name="gkd",
            row_kind="conversation",
            help="knowledge distillation: the distributions of a teacher at the assistant's turns of conversations, or "
            "of answers that the model samples",
            config_cls=GkdSection,
            sections={"rollout": RolloutSection},
            profile=GkdSection.profile,
            factory=lazily("llmsuite.stages.gkd:GkdStage"),
            capabilities=frozenset(
                {"answer_ends", "generation", "packing", "plain_text", "prompt_lengths", "thoughts"}
            ),
            smoke=CONVERSATIONS,
        ),
    ]


def _preference_stages() -> list[StageSpec]:
    """Return the stages that train on preferences."""
    from llmsuite.stages.sections import DpoSection, KtoSection, RmSection

    return [
        StageSpec(
            name="dpo",
            row_kind="preference",
            help="direct preference optimisation: sigmoid, ipo, hinge, kto_pair, simpo, orpo",
            config_cls=DpoSection,
            profile=DpoSection.profile,
            factory=lazily("llmsuite.stages.dpo:DpoStage"),
            capabilities=frozenset({"answer_ends", "generation", "packing", "ranked", "step_programs"}),
            smoke=PREFERENCE,
        ),
        StageSpec(
            name="rm",
            row_kind="preference",
            help="reward model: a score for each answer, trained on pairs",
            config_cls=RmSection,
            profile=RmSection.profile,
            factory=lazily("llmsuite.stages.rm:RmStage"),
            capabilities=frozenset({"answer_ends", "margins", "packing", "ranked", "score_head", "step_programs"}),
            smoke=PREFERENCE,
        ),
        StageSpec(
            name="kto",
            row_kind="unpaired",
            help="preference optimisation on single answers that are labelled as desirable or not: kto, apo_zero",
            config_cls=KtoSection,
            profile=KtoSection.profile,
            factory=lazily("llmsuite.stages.kto:KtoStage"),
            capabilities=frozenset({"answer_ends", "step_programs"}),
            smoke=UNPAIRED,
        ),
    ]


def _infer_job() -> JobSpec:
    """Return the job that runs inference."""
    from llmsuite.stages.sections import InferSection

    return JobSpec(
        name="infer",
        help="no training: a model answers the prompts of a file",
        config_cls=InferSection,
        factory=lazily("llmsuite.stages.infer:work"),
        smoke={"data.prompts": "data/preference/eval.jsonl", "infer.max_new_tokens": 16},
        result="answers.jsonl",
    )


def _rollout_stages() -> list[StageSpec]:
    """Return the stages that train on completions that the model samples (online RL)."""
    from llmsuite.contract.schema.environment import EnvironmentSection
    from llmsuite.contract.schema.reward import RewardSection
    from llmsuite.contract.schema.rollout import RolloutSection
    from llmsuite.stages.online_dpo_section import OnlineDpoSection
    from llmsuite.stages.ppo_section import PpoSection
    from llmsuite.stages.rl_sections import EvalRolloutSection, GrpoSection

    sections: dict[str, type[Section]] = {
        "rollout": RolloutSection,
        "reward": RewardSection,
        "eval_rollout": EvalRolloutSection,
    }
    return [
        StageSpec(
            name="grpo",
            row_kind="prompt",
            help="group relative policy optimisation on sampled completions: dapo, grpo, dr_grpo, cispo, sapo",
            config_cls=GrpoSection,
            sections={**sections, "environment": EnvironmentSection},
            profile=GrpoSection.profile,
            factory=lazily("llmsuite.stages.grpo:GrpoStage"),
            capabilities=frozenset({"async_rollout", "step_programs"}),
            smoke=ROLLOUTS,
        ),
        StageSpec(
            name="online_dpo",
            row_kind="prompt",
            help="dpo on the best and the worst of the completions that the model samples for a prompt",
            config_cls=OnlineDpoSection,
            sections=sections,
            profile=OnlineDpoSection.profile,
            factory=lazily("llmsuite.stages.online_dpo:OnlineDpoStage"),
            capabilities=frozenset({"step_programs"}),
            smoke=ROLLOUTS,
        ),
        StageSpec(
            name="ppo",
            row_kind="prompt",
            help="proximal policy optimisation with a critic on sampled completions",
            config_cls=PpoSection,
            sections={**sections, "environment": EnvironmentSection},
            profile=PpoSection.profile,
            factory=lazily("llmsuite.stages.ppo:PpoStage"),
            capabilities=frozenset({"async_rollout", "step_programs"}),
            smoke={**ROLLOUTS, "ppo.critic.weights": None, "ppo.critic.learning_rate": 1e-3},
        ),
    ]


def _dense(name: str, cls: str, help: str, hf_model_types: tuple[str, ...], gguf: tuple[str, ...] = ()) -> ModelFamily:
    """Return the decoder whose description is in `llmsuite.models.families.NAME`."""
    from llmsuite.contract.dense_family import dense_family

    module = importlib.import_module(f"llmsuite.models.families.{name}")
    return dense_family(
        name=name,
        help=help,
        config_cls=pkgutil.resolve_name(f"{module.__name__}:{cls}Config"),
        presets=module.PRESETS,
        smoke=module.SMOKE,
        smoke_keeps=module.SMOKE_KEEPS,
        hf_model_types=hf_model_types,
        gguf_architectures=gguf,
    )


@hookimpl
def llmsuite_register_models() -> list[ModelFamily]:
    return [
        _dense("llama", "Llama", "Llama 1, 2, 3.x, SmolLM2, TinyLlama, Mistral", ("llama", "mistral"), gguf=("llama",)),
        _dense("mixtral", "Mixtral", "Mixtral", ("mixtral",)),
        _dense("qwen", "Qwen", "Qwen2, Qwen2.5, dense Qwen3", ("qwen2", "qwen3"), gguf=("qwen2", "qwen3")),
        _dense("qwen_moe", "QwenMoe", "Qwen2-MoE, Qwen3-MoE", ("qwen2_moe", "qwen3_moe")),
        _dense("qwen_hybrid", "QwenHybrid", "Qwen3.5 for text, without experts", ("qwen3_5_text",)),
        _dense(
            "qwen_hybrid_moe",
            "QwenHybridMoe",
            "Qwen3-Next, Qwen3.5 for text with experts",
            ("qwen3_next", "qwen3_5_moe_text"),
        ),
        _dense("ernie", "Ernie", "ERNIE-4.5 without experts", ("ernie4_5",)),
        _dense("gemma", "Gemma", "Gemma 2 and 3 for text", ("gemma2", "gemma3_text")),
        _dense("phi", "Phi", "Phi-3, Phi-3.5, Phi-4", ("phi3",)),
        _dense("granite", "Granite", "Granite 3.x without experts", ("granite",)),
        _dense("smollm3", "SmolLM3", "SmolLM3", ("smollm3",)),
        _dense("olmo", "Olmo", "OLMo 2 and 3", ("olmo2", "olmo3")),
        _dense("seed_oss", "SeedOss", "Seed-OSS", ("seed_oss",)),
        _dense("hunyuan", "Hunyuan", "Hunyuan without experts", ("hunyuan_v1_dense",)),
        _dense("glm", "Glm", "GLM-4-0414, GLM-Z1", ("glm4",)),
        _dense("cohere", "Cohere", "Command R7B, Command A", ("cohere2",)),
        _dense("starcoder", "Starcoder", "StarCoder2", ("starcoder2",)),
        _dense("internlm", "Internlm", "InternLM3", ("internlm3",)),
        _dense("ministral", "Ministral", "Ministral 3 for text", ("ministral3",)),
        _dense("granite_moe", "GraniteMoe", "Granite 3.x with experts", ("granitemoe",)),
        _dense("minimax", "Minimax", "MiniMax-M2", ("minimax_m2",)),
        _dense("gpt_oss", "GptOss", "gpt-oss", ("gpt_oss",)),
        _dense("glm_moe", "GlmMoe", "GLM-4.5, GLM-4.6", ("glm4_moe",)),
        _dense("ernie_moe", "ErnieMoe", "ERNIE-4.5 with experts", ("ernie4_5_moe",)),
        _dense("gpt", "GPT", "GPT-2, GPT-3", ("gpt2", "gpt")),
        _dense("deepseek", "DeepSeek", "DeepSeek-V2, V2-Lite, V3; Kimi K2", ("deepseek_v2", "deepseek_v3", "kimi_k2")),
    ]


def _device(name: str, help: str, backend: str) -> DeviceSpec:
    """Return a device whose backend class is at the address `backend`."""
    return DeviceSpec(name=name, help=help, factory=lambda: pkgutil.resolve_name(backend)())


@hookimpl
def llmsuite_register_devices() -> list[DeviceSpec]:
    return [
        _device("cpu", "processes over Gloo, fp32; in training also bf16", "llmsuite.devices.cpu:CpuBackend"),
        _device("gpu", "NVIDIA GPUs over NCCL, fp32, bf16, fp16", "llmsuite.devices.gpu:GpuBackend"),
        _device("xpu", "Kunlun XPUs over BKCL, fp32, bf16, fp16", "llmsuite.devices.xpu:XpuBackend"),
    ]


@hookimpl
def llmsuite_register_adapters() -> list[AdapterMethod]:
    from llmsuite.adapters.methods import BUILT_IN

    return list(BUILT_IN)


@hookimpl
def llmsuite_register_data_formats() -> list[DataFormat]:
    from llmsuite.data import conversation_formats, preference_formats, prompt_formats, rejected_formats

    pairs = [*preference_formats.BUILTIN, *rejected_formats.BUILTIN]
    return [*pairs, *conversation_formats.BUILTIN, *prompt_formats.BUILTIN]


def _exporter(name: str, help: str, write: str) -> Exporter:
    """Return a layout whose write function is at the address `write`."""
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
    from llmsuite.observe import loggers

    return list(loggers.BUILTIN)


@hookimpl
def llmsuite_register_rewards() -> list[RewardSpec]:
    from llmsuite.rl import reward_sections

    return list(reward_sections.BUILTIN)


@hookimpl
def llmsuite_register_rollout_engines() -> list[RolloutEngineSpec]:
    from llmsuite.rl import engine_sections

    return list(engine_sections.BUILTIN)


@hookimpl
def llmsuite_register_environments() -> list[EnvironmentSpec]:
    from llmsuite.rl import environment_sections

    return list(environment_sections.BUILTIN)
