"""The public contract of llmsuite: what a plugin can register and which events of a run it can follow.

A plugin is a Python package with an entry point in the group `llmsuite` that names a module (or object) with
some of the functions below, each marked `@llmsuite.hookimpl`. An implementation may leave out arguments it does
not need, so that arguments can be added later without breaking it. Everything here imports without Paddle: a factory
is called only in the process that trains. On cpu the ranks of a run are forks of one process: a module is
imported once, before there are ranks, and must not start threads when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pluggy

from llmsuite.schema.section import Section
from llmsuite.specs import (
    API_VERSION,
    Command,
    DataFormat,
    DeviceSpec,
    Environment,
    EnvironmentSpec,
    Exporter,
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
    Turn,
)

__all__ = [
    "API_VERSION",
    "Command",
    "DataFormat",
    "DeviceSpec",
    "Environment",
    "EnvironmentSpec",
    "Exporter",
    "Logger",
    "LoggerSpec",
    "ModelFamily",
    "PrePass",
    "Reply",
    "RewardSpec",
    "RolloutEngineSpec",
    "RunView",
    "Section",
    "StageProfile",
    "StageSpec",
    "Turn",
    "hookimpl",
    "hookspec",
]  # fmt: skip

hookspec = pluggy.HookspecMarker("llmsuite")
hookimpl = pluggy.HookimplMarker("llmsuite")

# Registration: each hook returns a list; the lists of all plugins are merged.


@hookspec
def llmsuite_register_stages() -> list[StageSpec]:
    """Training stages, such as `dpo`. Each brings a section of the recipe of its own name."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_models() -> list[ModelFamily]:
    """Model families, such as `llama`."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_devices() -> list[DeviceSpec]:
    """Device backends, such as `cpu`."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_data_formats() -> list[DataFormat]:
    """Shapes of rows in data files. Formats are tried in the order they are registered, built-in ones first."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_exporters() -> list[Exporter]:
    """Layouts for `llmsuite import`."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_loggers() -> list[LoggerSpec]:
    """Sinks for metrics."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_rewards() -> list[RewardSpec]:
    """Rewards of completions, for the stages of online RL."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_rollout_engines() -> list[RolloutEngineSpec]:
    """What draws the completions of online RL, such as a server."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_environments() -> list[EnvironmentSpec]:
    """Environments of episodes, for the stages of online RL."""
    raise AssertionError("a hookspec is not called")


@hookspec
def llmsuite_register_commands() -> list[Command]:
    """Subcommands of `llmsuite`."""
    raise AssertionError("a hookspec is not called")


# Events of a run: called on rank 0. An implementation that raises is reported once and not called again, unless
# its plugin sets `llmsuite_critical = True`: then the error ends the run.


@hookspec
def llmsuite_run_start(run: RunView) -> None:
    """The model is built and the data is read; the first step comes next."""


@hookspec
def llmsuite_step_end(run: RunView, step: int, metrics: Mapping[str, float]) -> None:
    """A step is done and its metrics are on the host (every `train.log_steps` steps)."""


@hookspec
def llmsuite_rollouts(run: RunView, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
    """A rollout is scored, and `step` is the first that learns from it. For completions see completions.jsonl."""


@hookspec
def llmsuite_checkpoint_saved(run: RunView, step: int, path: Path) -> None:
    """A checkpoint is complete on disk."""


@hookspec
def llmsuite_run_error(run: RunView, error: BaseException) -> None:
    """The run ends because of an error or an interrupt. A second Ctrl-C ends the process at once, without this call."""


@hookspec
def llmsuite_run_end(run: RunView, step: int) -> None:
    """The last step is done and saved."""


def hook_names() -> Iterator[str]:
    """Names of all hooks, in the order of this file."""
    return (name for name in globals() if name.startswith("llmsuite_"))
