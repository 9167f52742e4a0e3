"""Finds plugins, registers what they bring, and keeps one broken plugin from stopping the rest."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import os
import sys
import time
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pluggy

from llmsuite.errors import UserError
from llmsuite.plugins import hookspecs
from llmsuite.plugins.hookspecs import (
    API_VERSION,
    Command,
    DataFormat,
    DeviceSpec,
    Exporter,
    LoggerSpec,
    ModelFamily,
    StageSpec,
)

GROUP = "llmsuite"
ALLOW_LIST = "LLMSUITE_PLUGINS"
BUILTIN = "llmsuite (built in)"

_REGISTRATIONS: dict[str, tuple[str, Any]] = {
    # what a user calls it: (hook, type of the specs it returns)
    "stage": ("llmsuite_register_stages", StageSpec),
    "model": ("llmsuite_register_models", ModelFamily),
    "device": ("llmsuite_register_devices", DeviceSpec),
    "data format": ("llmsuite_register_data_formats", DataFormat),
    "exporter": ("llmsuite_register_exporters", Exporter),
    "logger": ("llmsuite_register_loggers", LoggerSpec),
    "command": ("llmsuite_register_commands", Command),
}


@dataclasses.dataclass
class PluginInfo:
    """One plugin, working or not."""

    name: str
    distribution: str
    """Package and version it comes from."""
    value: str
    """What the entry point names."""
    plugin: Any = None
    error: str | None = None
    """Why it is not used; None when it works."""
    load_seconds: float = 0.0
    provides: list[str] = dataclasses.field(default_factory=list)
    """"stage dpo", "device cpu" …"""
    hooks: list[str] = dataclasses.field(default_factory=list)
    events_disabled: bool = False


class Registry:
    """Everything that is registered, by name."""

    def __init__(self) -> None:
        self.plugins: list[PluginInfo] = []
        self.pm = pluggy.PluginManager(GROUP)
        self.pm.add_hookspecs(hookspecs)
        self._specs: dict[str, dict[str, Any]] = {kind: {} for kind in _REGISTRATIONS}
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
    def commands(self) -> dict[str, Command]:
        return self._specs["command"]

    def specs(self, kind: str) -> dict[str, Any]:
        """Everything of a kind: "stage", "model", "device", "data format", "exporter", "logger" or "command"."""
        return self._specs[kind]

    def owner(self, kind: str, name: str) -> PluginInfo:
        """The plugin that registered a name."""
        return self._owners[kind, name]

    def unknown(self, kind: str, name: str) -> str:
        """Why a name cannot be used, and what would be right."""
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
        return message

    def add(self, info: PluginInfo) -> None:
        """Register a loaded plugin, all of it or, when something is wrong with it, nothing."""
        self.plugins.append(info)
        if info.error is not None:
            return
        try:
            self.pm.register(info.plugin, name=info.name)
            self.pm.check_pending()  # a misspelt hook is an error, not a function nobody calls
            specs = list(self._specs_of(info))
        except Exception as error:  # the plugin's own code ran, which may raise anything
            if self.pm.is_registered(info.plugin):
                self.pm.unregister(info.plugin)
            ours = isinstance(error, (pluggy.PluginValidationError, UserError))
            info.error = str(error) if ours else _tail(error)
            return
        info.hooks = sorted(caller.name for caller in self.pm.get_hookcallers(info.plugin) or [])
        for kind, spec in specs:
            self._specs[kind][spec.name] = spec
            self._owners[kind, spec.name] = info
            info.provides.append(f"{kind} {spec.name}")

    def _specs_of(self, info: PluginInfo) -> Iterable[tuple[str, Any]]:
        own: set[tuple[str, str]] = set()
        for kind, (hook, cls) in _REGISTRATIONS.items():
            function = getattr(info.plugin, hook, None)
            for spec in function() if function else []:
                if not isinstance(spec, cls):
                    raise UserError(f"{hook} returned a {type(spec).__name__}; it returns a list of {cls.__name__}")
                if spec.api > API_VERSION:
                    raise UserError(
                        f"{kind} {spec.name!r} needs version {spec.api} of the plugin contract, this llmsuite has "
                        f"{API_VERSION}; install a newer llmsuite or an older {info.distribution}"
                    )
                if (kind, spec.name) in own:
                    raise UserError(f"it registers {kind} {spec.name!r} twice")
                own.add((kind, spec.name))
                self._refuse_duplicate(kind, spec.name, info)
                yield kind, spec

    def _refuse_duplicate(self, kind: str, name: str, info: PluginInfo) -> None:
        first = self._owners.get((kind, name))
        if first is None and (kind, name) not in self._contested:
            return
        if first is None:
            raise UserError(self._contested[kind, name])
        message = (
            f"{kind} {name!r} is registered by both {first.distribution} and {info.distribution}; uninstall one, or "
            f"name the plugins to use in {ALLOW_LIST}"
        )
        if first.distribution != BUILTIN:  # neither of two third parties wins by the order of their names
            del self._specs[kind][name], self._owners[kind, name]
            self._contested[kind, name] = message
        raise UserError(message)

    def emit(self, event: str, **arguments: Any) -> None:
        """Call an event on every plugin. A plugin that raises is reported once and hears no more events."""
        for impl in reversed(getattr(self.pm.hook, event).get_hookimpls()):
            info = next(i for i in self.plugins if i.plugin is impl.plugin)
            if info.events_disabled:
                continue
            try:
                impl.function(**{name: arguments[name] for name in impl.argnames})
            except Exception as error:
                if getattr(impl.plugin, "llmsuite_critical", False):
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
        info.error = _tail(error)
    info.load_seconds = time.perf_counter() - start
    return info


def _allowed(name: str) -> bool:
    names = os.environ.get(ALLOW_LIST)
    return names is None or name in [part.strip() for part in names.split(",")]


def load_plugins(*builtins: ModuleType) -> Registry:
    """The built-in plugins given, then those of installed packages in the order of their names."""
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


def _tail(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-3:]).strip()


def _last_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[-1]
