"""What llmsuite itself brings, registered through the same hooks as anybody else's plugin. Imports no Paddle."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from llmsuite.observe import loggers
from llmsuite.plugins.hookspecs import hookimpl
from llmsuite.specs import (
    DataFormat,
    DeviceSpec,
    Exporter,
    LoggerSpec,
    ModelFamily,
    StageSpec,
)


def _dpo() -> Any:
    from llmsuite.stages.dpo import DpoStage

    return DpoStage


def _sft() -> Any:
    from llmsuite.stages.sft import SftStage

    return SftStage


def _pretrain() -> Any:
    from llmsuite.stages.pretrain import PretrainStage

    return PretrainStage


def _rm() -> Any:
    from llmsuite.stages.rm import RmStage

    return RmStage


def _kto() -> Any:
    from llmsuite.stages.kto import KtoStage

    return KtoStage


def _infer() -> Any:
    from llmsuite.stages.infer import work

    return work


@hookimpl
def llmsuite_register_stages() -> list[StageSpec]:
    from llmsuite.stages.sections import DpoSection, InferSection, KtoSection, PretrainSection, RmSection, SftSection

    conversations = {"data.train": "data/sft/train.jsonl", "data.eval": "data/sft/eval.jsonl"}
    preference = {"data.train": "data/preference/train.jsonl", "data.eval": "data/preference/eval.jsonl"}
    return [
        StageSpec(
            name="dpo",
            help="direct preference optimisation: sigmoid, ipo, hinge, kto_pair, simpo, orpo",
            config_cls=DpoSection,
            factory=_dpo,
            smoke=preference,
            rows_per_sample=2,
            profile=DpoSection.profile,
        ),
        StageSpec(
            name="lora",
            help="supervised fine-tuning of low-rank adapters; the section lora goes with the other stages too",
            config_cls=SftSection,
            section="sft",
            adapters=True,
            factory=_sft,
            smoke=conversations,
            profile=SftSection.profile,
        ),
        StageSpec(
            name="sft",
            help="supervised fine-tuning on the assistant's turns of conversations",
            config_cls=SftSection,
            factory=_sft,
            smoke=conversations,
            quantises=True,
            profile=SftSection.profile,
        ),
        StageSpec(
            name="pretrain",
            help="next-token prediction over text or an indexed corpus",
            config_cls=PretrainSection,
            factory=_pretrain,
            smoke={"data.train": "data/pretrain/train.txt", "data.eval": "data/pretrain/eval.txt", "pretrain.mix": {}},
            quantises=True,
            takes_all=True,
        ),
        StageSpec(
            name="rm",
            help="reward model: a score for each answer, learnt from pairs",
            config_cls=RmSection,
            factory=_rm,
            smoke=preference,
            head="score",
            rows_per_sample=2,
            profile=RmSection.profile,
        ),
        StageSpec(
            name="kto",
            help="preference optimisation on single answers that are wanted or not: kto, apo_zero",
            config_cls=KtoSection,
            factory=_kto,
            smoke={"data.train": "data/unpaired/train.jsonl", "data.eval": "data/unpaired/eval.jsonl"},
            profile=KtoSection.profile,
        ),
        StageSpec(
            name="infer",
            help="no training: a model answers the prompts of a file",
            config_cls=InferSection,
            factory=_infer,
            smoke={"data.prompts": "data/preference/eval.jsonl", "infer.max_new_tokens": 16},
            trains=False,
            result="answers.jsonl",
        ),
    ]


def _family(name: str, cls: str, help: str, hf_model_types: tuple[str, ...], gguf: tuple[str, ...] = ()) -> ModelFamily:
    """The family whose code lies in `llmsuite.models.NAME`; its layers are imported when they are needed."""
    package = f"llmsuite.models.{name}"
    config = importlib.import_module(f"{package}.config")
    return ModelFamily(
        name=name,
        help=help,
        config_cls=getattr(config, f"{cls}Config"),
        presets=config.PRESETS,
        smoke=config.SMOKE,
        smoke_keeps=config.SMOKE_KEEPS,
        factory=lambda: getattr(importlib.import_module(f"{package}.layers"), cls),
        names=lambda: importlib.import_module(f"{package}.names"),
        shard_plan=importlib.import_module(f"{package}.shard_plan").PLAN,
        anatomy=lambda shape: importlib.import_module(f"{package}.anatomy").anatomy(shape),
        hf_model_types=hf_model_types,
        gguf_architectures=gguf,
    )


@hookimpl
def llmsuite_register_models() -> list[ModelFamily]:
    return [
        _family("llama", "Llama", "Llama 1, 2, 3.x, SmolLM2, TinyLlama", ("llama",), gguf=("llama",)),
        _family("qwen", "Qwen", "Qwen2, Qwen2.5, dense Qwen3", ("qwen2", "qwen3")),
        _family("gpt", "GPT", "GPT-2, GPT-3", ("gpt2",)),
        _family("deepseek", "DeepSeek", "DeepSeek-V2, V2-Lite, V3", ("deepseek_v2", "deepseek_v3")),
    ]


def _cpu() -> Any:
    from llmsuite.devices.cpu import CpuBackend

    return CpuBackend()


def _gpu() -> Any:
    from llmsuite.devices.gpu import GpuBackend

    return GpuBackend()


def _xpu() -> Any:
    from llmsuite.devices.xpu import XpuBackend

    return XpuBackend()


@hookimpl
def llmsuite_register_devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(name="cpu", help="processes over Gloo, fp32", factory=_cpu),
        DeviceSpec(name="gpu", help="NVIDIA GPUs over NCCL, fp32, bf16, fp16", factory=_gpu),
        DeviceSpec(name="xpu", help="Kunlun XPUs over BKCL, fp32, bf16, fp16", factory=_xpu),
    ]


@hookimpl
def llmsuite_register_data_formats() -> list[DataFormat]:
    from llmsuite.data import conversations, formats, prompts

    return [*formats.BUILTIN, *conversations.BUILTIN, *prompts.BUILTIN]


def _write_hf(model: Any, directory: Path) -> None:
    from llmsuite.checkpoint.model_writer import write_hf

    write_hf(model, directory)


def _write_paddlenlp(model: Any, directory: Path) -> None:
    from llmsuite.checkpoint.model_writer import write_paddlenlp

    write_paddlenlp(model, directory)


@hookimpl
def llmsuite_register_exporters() -> list[Exporter]:
    return [
        Exporter(name="hf", help="names and matrices as HF transformers has them", write=_write_hf),
        Exporter(name="paddlenlp", help="names and matrices as PaddleNLP has them", write=_write_paddlenlp),
    ]


@hookimpl
def llmsuite_register_loggers() -> list[LoggerSpec]:
    return list(loggers.BUILTIN)
