"""Finds plugins, registers what they bring, and keeps one broken plugin from stopping the rest."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import inspect
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pluggy

from llmsuite.errors import UserError
from llmsuite.plugins import hookspecs
from llmsuite.plugins.checks import check_command, check_family, check_fields, check_keys, check_stage
from llmsuite.schema.environment import EnvironmentSection
from llmsuite.schema.reward import RewardSection
from llmsuite.specs import (
    API_VERSION,
    Command,
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

GROUP = "llmsuite"
ALLOW_LIST = "LLMSUITE_PLUGINS"
BUILTIN = "llmsuite (built in)"

REGISTRATIONS: dict[str, tuple[str, Any]] = {
    "stage": ("llmsuite_register_stages", StageSpec),
    "model": ("llmsuite_register_models", ModelFamily),
    "device": ("llmsuite_register_devices", DeviceSpec),
    "data format": ("llmsuite_register_data_formats", DataFormat),
    "exporter": ("llmsuite_register_exporters", Exporter),
    "logger": ("llmsuite_register_loggers", LoggerSpec),
    "reward": ("llmsuite_register_rewards", RewardSpec),
    "rollout engine": ("llmsuite_register_rollout_engines", RolloutEngineSpec),
    "environment": ("llmsuite_register_environments", EnvironmentSpec),
    "command": ("llmsuite_register_commands", Command),
}
"""Kind, as messages call it -> hook, and type of the specs it returns."""


@dataclasses.dataclass
class PluginInfo:
    """One plugin, working or not."""

    name: str
    distribution: str
    """Package and version it comes from."""
    value: str
    """The module or object that the entry point names."""
    plugin: Any = None
    """That module or object, once imported."""
    error: str | None = None
    """Why it cannot be used; None when it works."""
    load_seconds: float = 0.0
    provides: list[str] = dataclasses.field(default_factory=list)
    """What it registers: "stage dpo", "device cpu" …"""
    hooks: list[str] = dataclasses.field(default_factory=list)
    """The hooks it implements."""
    events_disabled: bool = False
    """Whether it failed in an event, and gets no more."""


class Registry:
    """Everything that is registered, by name."""

    def __init__(self) -> None:
        self.plugins: list[PluginInfo] = []
        self.pm = pluggy.PluginManager(GROUP)
        self.pm.add_hookspecs(hookspecs)
        self._specs: dict[str, dict[str, Any]] = {kind: {} for kind in REGISTRATIONS}
        self._owners: dict[tuple[str, str], PluginInfo] = {}
        self._contested: dict[tuple[str, str], str] = {}

    @property
    def stages(self) -> dict[str, StageSpec]:
        return self._specs["stage"]

    @property
    def models(self) -> dict[str, ModelFamily]:
        return self._specs["model"]

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        return self._specs["device"]

    @property
    def data_formats(self) -> dict[str, DataFormat]:
        return self._specs["data format"]

    @property
    def exporters(self) -> dict[str, Exporter]:
        return self._specs["exporter"]

    @property
    def loggers(self) -> dict[str, LoggerSpec]:
        return self._specs["logger"]

    @property
    def rewards(self) -> dict[str, RewardSpec]:
        return self._specs["reward"]

    @property
    def rollout_engines(self) -> dict[str, RolloutEngineSpec]:
        return self._specs["rollout engine"]

    @property
    def environments(self) -> dict[str, EnvironmentSpec]:
        return self._specs["environment"]

    @property
    def commands(self) -> dict[str, Command]:
        return self._specs["command"]

    def specs(self, kind: str) -> dict[str, Any]:
        """Everything of a kind: "stage", "model", "device", "data format", "exporter", "logger", "reward",
        "rollout engine", "environment" or "command"."""
        return self._specs[kind]

    def readers(self) -> dict[str, list[str]]:
        """The stages that train on rows, by the kind of rows."""
        found: dict[str, list[str]] = {}
        for stage in self.stages.values():
            if stage.row_kind:
                found.setdefault(stage.row_kind, []).append(stage.name)
        return found

    def owner(self, kind: str, name: str) -> PluginInfo:
        """The plugin that registered a name."""
        return self._owners[kind, name]

    def unknown(self, kind: str, name: str) -> str:
        """The message for a name that is not registered: why, and which names are."""
        if (kind, name) in self._contested:
            return self._contested[kind, name]
        known = sorted(self._specs[kind])
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        message = f"no {kind} is called {name!r}; {hint}registered: {', '.join(known) or 'none'}"
        broken = [info for info in self.plugins if info.error]
        if broken:
            causes = "; ".join(f"{info.name} ({_last_line(info.error)})" for info in broken)
            message += f". Plugins that failed to load may bring it: {causes}"
        allowed = os.environ.get(ALLOW_LIST)
        if allowed is not None:
            message += f". {ALLOW_LIST} allows {f'only {allowed}' if allowed.strip() else 'no plugins'}"
        return message

    def add(self, info: PluginInfo) -> None:
        """Register a loaded plugin: all of it, or nothing when something is wrong with it."""
        # equal is the same to pluggy, too
        same = next((i for i in self.plugins if i.error is None and i.plugin == info.plugin), None)
        self.plugins.append(info)
        if info.error is None and same is not None:
            info.error = f"{info.value} is registered already, as plugin {same.name} of {same.distribution}"
        if info.error is not None:
            return
        try:
            if isinstance(info.plugin, type):  # whose methods would be called without an object
                raise UserError(f"{info.value} is the class {info.plugin.__name__}; name an object of it")
            # two distributions may give their plugins the same name, and a program has several objects of one class
            name = f"{info.name} of {info.distribution}"
            self.pm.register(info.plugin, name=f"{name} ({len(self.plugins)})" if self.pm.has_plugin(name) else name)
            self._refuse_unknown_hooks(info.plugin)
            hooks = sorted(caller.name for caller in self.pm.get_hookcallers(info.plugin) or [])
            _refuse_unmarked(info.plugin, hooks)
            self._refuse_unrun(info.plugin)
            specs = list(self._specs_of(info))
        except (Exception, SystemExit) as error:  # the plugin's own code ran, which may raise anything
            if self.pm.is_registered(info.plugin):
                self.pm.unregister(info.plugin)
            if isinstance(error, pluggy.PluginValidationError):
                info.error = f"{error}{_arguments(str(error))}"
            else:
                info.error = str(error) if isinstance(error, UserError) else tail(error)
            return
        info.hooks = hooks
        for kind, spec in specs:
            self._specs[kind][spec.name] = spec
            self._owners[kind, spec.name] = info
            info.provides.append(f"{kind} {spec.name}")

    def _refuse_unknown_hooks(self, plugin: Any) -> None:
        """Raise UserError for a misspelt hook, which nothing would call."""
        for caller in self.pm.get_hookcallers(plugin) or []:
            if not caller.has_spec() and not all(impl.optionalhook for impl in caller.get_hookimpls()):
                near = difflib.get_close_matches(caller.name, hookspecs.hook_names(), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(hookspecs.hook_names())}"
                raise UserError(f"no hook is called {caller.name!r}; {hint}")

    def _refuse_unrun(self, plugin: Any) -> None:
        """Raise UserError for a hook whose call would only make a coroutine or a generator, which nothing runs."""
        for caller in self.pm.get_hookcallers(plugin) or []:
            for impl in caller.get_hookimpls():
                is_async = inspect.iscoroutinefunction(impl.function)
                if impl.plugin is plugin and (is_async or inspect.isgeneratorfunction(impl.function)):
                    what = "an async function" if is_async else "a generator or a wrapper"
                    raise UserError(f"{caller.name} is {what}, which nothing would run; make it a plain function")

    def require(self, info: PluginInfo) -> None:
        """Register a plugin that somebody has named. Raises UserError when something is wrong with it."""
        self.add(info)
        if info.error is not None:
            raise UserError(f"plugin {info.name} of {info.distribution}: {info.error}")

    def _specs_of(self, info: PluginInfo) -> Iterable[tuple[str, Any]]:
        own: set[tuple[str, str]] = set()
        for kind, (hook, cls) in REGISTRATIONS.items():
            impls = [impl for impl in getattr(self.pm.hook, hook).get_hookimpls() if impl.plugin is info.plugin]
            for spec in (spec for impl in impls for spec in _as_list(impl.function(), hook, cls)):
                if not isinstance(spec, cls):
                    raise UserError(f"{hook} returned a list with a {type(spec).__name__}; {_returns(cls)}")
                if isinstance(spec.api, int) and spec.api > API_VERSION:  # whose other fields may be of other types
                    raise UserError(
                        f"{kind} {spec.name!r} needs version {spec.api} of the plugin contract, this llmsuite has "
                        f"{API_VERSION}; install a newer llmsuite or an older {info.distribution}"
                    )
                if info.distribution != BUILTIN:  # those are tested
                    self._check(kind, spec)
                if (kind, spec.name) in own:
                    raise UserError(f"it registers {kind} {spec.name!r} twice")
                own.add((kind, spec.name))
                self._refuse_duplicate(kind, spec.name, info)
                yield kind, spec

    def _check(self, kind: str, spec: Any) -> None:
        check_fields(kind, spec)
        if kind == "stage":
            check_stage(spec)
        elif kind == "model":
            check_family(spec)
        elif kind == "command":
            check_command(spec)
        elif kind == "reward":
            check_keys("reward", spec, {field.name for field in dataclasses.fields(RewardSection)})
        elif kind == "environment":
            check_keys("environment", spec, {field.name for field in dataclasses.fields(EnvironmentSection)})
        elif kind == "rollout engine":
            check_keys("rollout", spec, self._keys_of_sections(kind))

    def _keys_of_sections(self, kind: str) -> set[str]:
        """The keys of sections of stages that this kind extends."""
        sections = [section for stage in self.stages.values() for section in stage.sections.values()]
        return {f.name for section in sections if section.extended_by == kind for f in dataclasses.fields(section)}

    def _refuse_duplicate(self, kind: str, name: str, info: PluginInfo) -> None:
        first = self._owners.get((kind, name))
        if first is None and (kind, name) not in self._contested:
            return
        if first is None:
            raise UserError(self._contested[kind, name])
        both = f"{kind} {name!r} is registered by both {first.distribution} and {info.distribution}"
        if first.distribution == BUILTIN:
            raise UserError(f"{both}; a plugin cannot replace what is built in, it has to choose another name")
        # the order of their names must not decide which of two third parties wins
        self.withdraw(kind, name, f"{both}; uninstall one, or name the plugins to use in {ALLOW_LIST}")
        raise UserError(self._contested[kind, name])

    def withdraw(self, kind: str, name: str, reason: str) -> None:
        """Remove something that is registered; `unknown` gives the reason from then on."""
        del self._specs[kind][name]
        self._owners.pop((kind, name)).provides.remove(f"{kind} {name}")
        self._contested[kind, name] = reason

    def disable(self, kind: str, name: str, error: Exception) -> None:
        """Remove something whose own code failed; if it is built in, that is a bug, and the error is raised."""
        info = self.owner(kind, name)
        if info.distribution == BUILTIN:
            raise error
        info.error = tail(error)
        self.withdraw(kind, name, f"{kind} {name!r} of {info.distribution} does not work: {_last_line(info.error)}")

    def emit(self, event: str, **arguments: Any) -> None:
        """Call an event on every plugin. A plugin that raises is reported once and gets no more events."""
        for impl in reversed(getattr(self.pm.hook, event).get_hookimpls()):
            info = next(i for i in self.plugins if i.plugin is impl.plugin)
            if info.events_disabled:
                continue
            try:
                impl.function(**{name: arguments[name] for name in impl.argnames})
            except (Exception, SystemExit) as error:  # a hook does not end a run on the quiet
                if getattr(impl.plugin, "llmsuite_critical", False):
                    critical = "which ends the run, as the plugin sets llmsuite_critical"
                    print(f"llmsuite: plugin {info.name} failed in {event}, {critical}", file=sys.stderr)
                    raise
                info.events_disabled = True
                print(
                    f"llmsuite: plugin {info.name} failed in {event} and gets no more events:\n"
                    + "".join(traceback.format_exception(error)),
                    file=sys.stderr,
                )


def _load(entry_point: importlib.metadata.EntryPoint) -> PluginInfo:
    dist = entry_point.dist
    info = PluginInfo(entry_point.name, f"{dist.name} {dist.version}" if dist else "unknown package", entry_point.value)
    start = time.perf_counter()
    try:
        info.plugin = entry_point.load()
    except (Exception, SystemExit) as error:  # importing somebody else's code may raise anything
        info.error = tail(error)
    info.load_seconds = time.perf_counter() - start
    return info


def _allowed(name: str) -> bool:
    names = os.environ.get(ALLOW_LIST)
    return names is None or name in [part.strip() for part in names.split(",")]


def allow_list_says() -> list[str]:
    """What the allow list leaves out of the installed plugins, and whom it names that is not installed."""
    names = [name for part in os.environ.get(ALLOW_LIST, "").split(",") if (name := part.strip())]
    installed = sorted({entry_point.name for entry_point in importlib.metadata.entry_points(group=GROUP)})
    left_out = [name for name in installed if not _allowed(name)]
    unknown = [name for name in names if name not in installed]
    said = [f"{ALLOW_LIST} leaves out: {', '.join(left_out)}"] if left_out else []
    if unknown:
        said.append(f"{ALLOW_LIST} names {', '.join(unknown)}; installed: {', '.join(installed) or 'none'}")
    return said


def load_plugins(*builtins: ModuleType) -> Registry:
    """A registry of these built-in plugins, then of those of installed packages in the order of their names."""
    result = Registry()
    for module in builtins:
        result.add(PluginInfo(module.__name__.rpartition(".")[2], BUILTIN, module.__name__, plugin=module))
        assert result.plugins[-1].error is None, result.plugins[-1].error
    if os.environ.get(ALLOW_LIST) == "":
        return result
    for entry_point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
        if _allowed(entry_point.name):
            result.add(_load(entry_point))
    return result


def _refuse_unmarked(plugin: Any, hooks: list[str]) -> None:
    unmarked = [n for n in hookspecs.hook_names() if n not in hooks and callable(getattr(plugin, n, None))]
    if unmarked:
        raise UserError(f"{', '.join(unmarked)}: not marked with @llmsuite.hookimpl, so nothing would call it")
    if not hooks:
        raise UserError("it has no function marked with @llmsuite.hookimpl")


def _arguments(error: str) -> str:
    """The arguments that a hook has, for pluggy's message about one that it has not."""
    found = re.search(r"for hook '(\w+)'", error)
    hook = getattr(hookspecs, found[1], None) if found else None
    if hook is None:
        return ""
    return f"\nIts arguments, of which it may leave out some: {', '.join(inspect.signature(hook).parameters) or 'none'}"


def _as_list(returned: Any, hook: str, cls: type) -> list[Any]:
    if not isinstance(returned, (list, tuple)):
        raise UserError(f"{hook} returned a {type(returned).__name__}; {_returns(cls)}")
    return list(returned)


def _returns(cls: type) -> str:
    return f"it has to return a list of {cls.__name__}"


def tail(error: BaseException) -> str:
    """The end of a traceback: the last two calls, and the error, which of a SyntaxError has the line."""
    calls = [call for call in traceback.format_tb(error.__traceback__) if "<frozen importlib" not in call]
    return "".join([*calls[-2:], *traceback.format_exception_only(error)]).strip()


def _last_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[-1]
