"""The plugin interface of llmsuite: hooks to register extensions and to receive the events of a run.

A plugin is a Python package with an entry point in the group `llmsuite`. The entry point names a module (or an object)
that has some of the functions below, each marked with `@llmsuite.hookimpl`. An implementation may omit parameters that
it does not need; parameters added in later versions therefore do not break it.

Plugins are imported by every command, without Paddle: import Paddle inside factories, which are called only in the
training processes. On cpu, the ranks of a run are forks of one process: a module is imported once, before the ranks
are forked, and must not start threads at import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pluggy

from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import (
    API_VERSION,
    Command,
    ConversionOptions,
    ConvertedRecipe,
    DataFormat,
    DeviceSpec,
    Environment,
    EnvironmentSpec,
    Exporter,
    JobSpec,
    Logger,
    LoggerSpec,
    ModelFamily,
    PrePass,
    Reply,
    RewardSpec,
    RolloutEngineSpec,
    RunView,
    StageProfile,
    StageSpec,
    SuiteSpec,
    Turn,
)
from llmsuite.devices.device_kernels import DeviceKernels
from llmsuite.models.adapter_method import (
    AdaptedModel,
    AdapterConfig,
    AdapterLayers,
    AdapterMethod,
    AdapterParameter,
    PaddleNlpFiles,
)

__all__ = [
    "API_VERSION",
    "AdaptedModel",
    "AdapterConfig",
    "AdapterLayers",
    "AdapterMethod",
    "AdapterParameter",
    "Command",
    "ConversionOptions",
    "ConvertedRecipe",
    "DataFormat",
    "DeviceKernels",
    "DeviceSpec",
    "Environment",
    "EnvironmentSpec",
    "Exporter",
    "JobSpec",
    "Logger",
    "LoggerSpec",
    "ModelFamily",
    "PaddleNlpFiles",
    "PrePass",
    "Reply",
    "RewardSpec",
    "RolloutEngineSpec",
    "RunView",
    "Section",
    "StageProfile",
    "StageSpec",
    "SuiteSpec",
    "Turn",
    "hookimpl",
    "hookspec",
]  # fmt: skip

hookspec = pluggy.HookspecMarker("llmsuite")
hookimpl = pluggy.HookimplMarker("llmsuite")

# Registration hooks. Each returns a list; the lists of all plugins are merged.


@hookspec
def llmsuite_register_stages() -> list[StageSpec | JobSpec]:
    """Return stages, such as `dpo`, and jobs that do not train, such as `infer`. Each adds a section of its name to
    recipes."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_models() -> list[ModelFamily]:
    """Return model families, such as `llama`."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_devices() -> list[DeviceSpec]:
    """Return device backends, such as `cpu`."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_kernels() -> list[DeviceKernels]:
    """Return kernels for a device that exists: implementations of operations of `Ops` and its groups. They are used
    wherever the device computes in a precision that they support on this machine."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_adapters() -> list[AdapterMethod]:
    """Return methods of adapters, values of `lora.method`: how each changes a matrix, starts, is sharded, merged and
    stored."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_data_formats() -> list[DataFormat]:
    """Return formats of rows in data files. `data.format: auto` tries formats in the order of registration, built-in
    formats first."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_exporters() -> list[Exporter]:
    """Return layouts of model directories for `llmsuite import`."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_loggers() -> list[LoggerSpec]:
    """Return loggers, which receive the metrics of a run."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_rewards() -> list[RewardSpec]:
    """Return rewards of completions, for online RL stages."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_rollout_engines() -> list[RolloutEngineSpec]:
    """Return rollout engines, which sample the completions of online RL, such as a server."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_environments() -> list[EnvironmentSpec]:
    """Return environments for multi-turn episodes, for online RL stages."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_suites() -> list[SuiteSpec]:
    """Return other suites, whose training arguments `llmsuite recipe from-NAME` turns into recipes."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_commands() -> list[Command]:
    """Return subcommands of `llmsuite`."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_recipe_commands() -> list[Command]:
    """Return subcommands of `llmsuite recipe`, which has `new` and `from-NAME` itself."""
    raise AssertionError("a hookspec is not called")


# Events of a run, called on rank 0. If an implementation raises, the error is reported once and the plugin gets no more
# events; if the plugin sets `llmsuite_critical = True`, the error ends the run instead.


@hookspec
def llmsuite_run_start(run: RunView) -> None:
    """Called after the model is built and the data is loaded, before the first step."""


@hookspec
def llmsuite_step_end(run: RunView, step: int, metrics: Mapping[str, float]) -> None:
    """Called every `train.log_steps` steps, when the metrics of the step are on the host."""


@hookspec
def llmsuite_rollouts(run: RunView, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
    """Called after the rewards of a rollout are computed. `step` is the first step that trains on it; `completions` are
    records as in completions.jsonl."""


@hookspec
def llmsuite_checkpoint_saved(run: RunView, step: int, path: Path) -> None:
    """Called when a checkpoint is complete on disk, at `path`."""


@hookspec
def llmsuite_run_error(run: RunView, error: BaseException) -> None:
    """Called when the run ends because of an error or an interrupt. A second Ctrl-C ends the process immediately,
    without this call."""


@hookspec
def llmsuite_run_end(run: RunView, step: int) -> None:
    """Called after the last step is done and saved."""


def hook_names() -> Iterator[str]:
    """Return the names of all hooks, in the order of this file."""
    return (name for name in globals() if name.startswith("llmsuite_"))
