"""What llmsuite itself brings, registered through the same hooks as anybody else's plugin. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.hookspecs import (
    DataFormat,
    DeviceSpec,
    Exporter,
    Logger,
    LoggerSpec,
    ModelFamily,
    StageSpec,
    hookimpl,
)


def _dpo() -> Any:
    from llmsuite.stages.dpo import DpoStage

    return DpoStage


@hookimpl
def llmsuite_register_stages() -> list[StageSpec]:
    from llmsuite.stages.sections import DpoSection

    preference = {"data.train": "data/preference/train.jsonl", "data.eval": "data/preference/eval.jsonl"}
    return [
        StageSpec(
            name="dpo",
            help="direct preference optimisation: sigmoid, ipo, hinge",
            config_cls=DpoSection,
            factory=_dpo,
            smoke=preference,
        )
    ]


def _llama() -> Any:
    from llmsuite.models.llama.layers import Llama

    return Llama


def _llama_names() -> Any:
    from llmsuite.models.llama import names

    return names


@hookimpl
def llmsuite_register_models() -> list[ModelFamily]:
    from llmsuite.models.llama.config import PRESETS, SMOKE, LlamaConfig
    from llmsuite.models.llama.shard_plan import PLAN

    return [
        ModelFamily(
            name="llama",
            help="Llama 1, 2, 3.x, SmolLM2, TinyLlama",
            config_cls=LlamaConfig,
            presets=PRESETS,
            smoke=SMOKE,
            factory=_llama,
            names=_llama_names,
            shard_plan=PLAN,
            hf_model_types=("llama",),
            gguf_architectures=("llama",),
        )
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
    from llmsuite.data.formats import BUILTIN

    return BUILTIN


def _write_hf(model: Any, directory: Path) -> None:
    from llmsuite.checkpoint.model_dir import write_hf

    write_hf(model, directory)


def _write_paddlenlp(model: Any, directory: Path) -> None:
    from llmsuite.checkpoint.model_dir import write_paddlenlp

    write_paddlenlp(model, directory)


@hookimpl
def llmsuite_register_exporters() -> list[Exporter]:
    return [
        Exporter(name="hf", help="names and matrices as HF transformers has them", write=_write_hf),
        Exporter(name="paddlenlp", help="names and matrices as PaddleNLP has them", write=_write_paddlenlp),
    ]


class _VisualDL:
    """Scalars for `visualdl --logdir RUN/visualdl`."""

    def __init__(self, run_dir: Path):
        try:
            from visualdl import LogWriter
        except ImportError as error:
            raise UserError("loggers: visualdl is not installed; install it with: pip install visualdl") from error
        self._writer = LogWriter(logdir=str(run_dir / "visualdl"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(tag=name, value=value, step=step)

    def close(self) -> None:
        self._writer.close()


def _visualdl(run_dir: Path) -> Logger:
    return _VisualDL(run_dir)


@hookimpl
def llmsuite_register_loggers() -> list[LoggerSpec]:
    return [LoggerSpec(name="visualdl", help="scalars for VisualDL, below the run's directory", factory=_visualdl)]
