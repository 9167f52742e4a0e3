"""The plugin registry: discovers plugins, registers their specs, and isolates plugins that fail."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

import pluggy

from llmsuite.base.errors import UserError
from llmsuite.base.suggestions import suggestion
from llmsuite.contract import hookspecs
from llmsuite.contract.specs import (
    API_VERSION,
    Command,
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
    SuiteSpec,
)
from llmsuite.devices.device_kernels import DEVICE_KERNELS, DeviceKernels
from llmsuite.devices.vendors import backend_of, find_vendor
from llmsuite.models.adapter_method import METHODS, AdapterMethod

GROUP = "llmsuite"
"""Group of entry points."""
ALLOW_LIST = "LLMSUITE_PLUGINS"
"""Environment variable with the names of the installed plugins to load; unset for all, empty for none."""
NO_PLUGINS = "LLMSUITE_NO_PLUGINS"
"""Environment variable that `--no-plugins` sets: neither bundled nor installed plugins are loaded."""
BUILTIN = "llmsuite (built in)"
"""`PluginInfo.distribution` of built-in specs."""
BUILTIN_MODULES = ("llmsuite.builtin", "llmsuite.cli.commands")
"""Modules with the built-in specs. They are imported by name, so that whoever needs a registry imports no command."""
BUNDLED = "llmsuite (bundled)"
"""`PluginInfo.distribution` of the plugins in `llmsuite.plugins`."""
BUNDLED_PLUGINS = ("adapters_extra", "align", "cpu_kernels", "rehearse", "studio", "suites")
"""Names of the packages in `llmsuite.plugins`. They are loaded by name, so that no other module imports them."""

REGISTRATIONS: dict[str, tuple[str, Any]] = {
    "stage": ("llmsuite_register_stages", (StageSpec, JobSpec)),
    "model": ("llmsuite_register_models", (ModelFamily,)),
    "device": ("llmsuite_register_devices", (DeviceSpec,)),
    "kernels": ("llmsuite_register_kernels", (DeviceKernels,)),
    "adapter method": ("llmsuite_register_adapters", (AdapterMethod,)),
    "data format": ("llmsuite_register_data_formats", (DataFormat,)),
    "exporter": ("llmsuite_register_exporters", (Exporter,)),
    "logger": ("llmsuite_register_loggers", (LoggerSpec,)),
    "reward": ("llmsuite_register_rewards", (RewardSpec,)),
    "rollout engine": ("llmsuite_register_rollout_engines", (RolloutEngineSpec,)),
    "environment": ("llmsuite_register_environments", (EnvironmentSpec,)),
    "suite": ("llmsuite_register_suites", (SuiteSpec,)),
    "command": ("llmsuite_register_commands", (Command,)),
    "recipe command": ("llmsuite_register_recipe_commands", (Command,)),
}
"""Kind of specs, as named in messages -> (hook, types of the specs)."""


@dataclasses.dataclass
class PluginInfo:
    """A plugin, working or not."""

    name: str
    distribution: str
    """Package and version that the plugin comes from."""
    value: str
    """Address of the module or object, from the entry point."""
    plugin: Any = None
    """The imported module or object."""
    error: str | None = None
    """Reason why the plugin cannot be used; None if it works."""
    load_seconds: float = 0.0
    provides: list[str] = dataclasses.field(default_factory=list)
    """Specs that it registers: "stage dpo", "device cpu" …"""
    hooks: list[str] = dataclasses.field(default_factory=list)
    """Names of the hooks that it implements."""
    events_disabled: bool = False
    """True after a failure in an event; the plugin gets no more events."""


class Registry:
    """All registered specs, by kind and name.

    Those of llmsuite itself are made when somebody asks for their kind: a command that needs few kinds starts without
    the imports of the others. `complete` makes all of them.
    """

    def __init__(self) -> None:
        self.plugins: list[PluginInfo] = []
        self.pm = pluggy.PluginManager(GROUP)
        self.pm.add_hookspecs(hookspecs)
        self._specs: dict[str, dict[str, Any]] = {kind: {} for kind in REGISTRATIONS}
        self._owners: dict[tuple[str, str], PluginInfo] = {}
        # (kind, name) -> reason, of specs that were withdrawn; `unknown` reports it
        self._withdrawn: dict[tuple[str, str], str] = {}
        self._to_make: dict[str, list[PluginInfo]] = {kind: [] for kind in REGISTRATIONS}
        """Plugins of llmsuite itself whose specs of a kind nobody has asked for yet."""

    @property
    def stages(self) -> dict[str, StageSpec | JobSpec]:
        return self.specs("stage")

    @property
    def models(self) -> dict[str, ModelFamily]:
        return self.specs("model")

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        return self.specs("device")

    @property
    def kernels(self) -> dict[str, DeviceKernels]:
        return self.specs("kernels")

    @property
    def adapter_methods(self) -> dict[str, AdapterMethod]:
        return self.specs("adapter method")

    @property
    def data_formats(self) -> dict[str, DataFormat]:
        return self.specs("data format")

    @property
    def exporters(self) -> dict[str, Exporter]:
        return self.specs("exporter")

    @property
    def loggers(self) -> dict[str, LoggerSpec]:
        return self.specs("logger")

    @property
    def rewards(self) -> dict[str, RewardSpec]:
        return self.specs("reward")

    @property
    def rollout_engines(self) -> dict[str, RolloutEngineSpec]:
        return self.specs("rollout engine")

    @property
    def environments(self) -> dict[str, EnvironmentSpec]:
        return self.specs("environment")

    @property
    def suites(self) -> dict[str, SuiteSpec]:
        return self.specs("suite")

    @property
    def commands(self) -> dict[str, Command]:
        return self.specs("command")

    @property
    def recipe_commands(self) -> dict[str, Command]:
        return self.specs("recipe command")

    def specs(self, kind: str) -> dict[str, Any]:
        """Return the specs of a kind by name. Kinds: "stage", "model", "device", "kernels", "adapter method",
        "data format", "exporter", "logger", "reward", "rollout engine", "environment", "suite", "command"
        and "recipe command"."""
        to_make, self._to_make[kind] = self._to_make[kind], []
        for info in to_make:
            for spec in getattr(info.plugin, REGISTRATIONS[kind][0])():
                self._register(kind, spec, info)
        return self._specs[kind]

    def complete(self) -> None:
        """Make the specs of all kinds. The tables of the process that modules read without a registry, such as that of
        the methods of adapters, are complete from then on."""
        for kind in REGISTRATIONS:
            self.specs(kind)

    def stages_by_row_kind(self) -> dict[str, list[str]]:
        """Return the names of the stages that train on rows, by kind of rows."""
        found: dict[str, list[str]] = {}
        for stage in self.stages.values():
            if isinstance(stage, StageSpec) and stage.row_kind:
                found.setdefault(stage.row_kind, []).append(stage.name)
        return found

    def find_device(self, name: str) -> DeviceSpec | None:
        """Return a registered device, or the accelerator of a vendor (`llmsuite.devices.vendors`), which needs no
        registration; None for any other name. A plugin's device takes precedence over the vendor's."""
        if name in self.devices or ("device", name) in self._withdrawn:
            return self.devices.get(name)
        vendor = find_vendor(name)
        if vendor is None:
            return None
        return DeviceSpec(name=name, help=vendor.help, factory=lambda: backend_of(vendor))

    def device(self, name: str) -> DeviceSpec:
        """Return the device of a name, see `find_device`. Raises UserError if there is none."""
        found = self.find_device(name)
        if found is None:
            raise UserError(self.unknown("device", name))
        return found

    def owner(self, kind: str, name: str) -> PluginInfo:
        """Return the plugin that registered a name."""
        self.specs(kind)
        return self._owners[kind, name]

    def unknown(self, kind: str, name: str) -> str:
        """Return the error message for a name that is not registered, with the reason and the registered names."""
        if (kind, name) in self._withdrawn:
            return self._withdrawn[kind, name]
        if name in (specs := left_out(kind)):
            return left_out_reason(kind, name, specs[name][0])
        known = sorted(self.specs(kind))
        message = f"no {kind} is called {name!r}; {suggestion(name, known)}registered: {', '.join(known) or 'none'}"
        broken = [info for info in self.plugins if info.error]
        if broken:
            causes = "; ".join(f"{info.name} ({_last_line(info.error)})" for info in broken)
            message += f". It may be in a plugin that failed to load: {causes}"
        if NO_PLUGINS in os.environ:
            return f"{message}. --no-plugins leaves out all plugins"
        allowed = os.environ.get(ALLOW_LIST)
        if allowed is not None:
            names = "no plugins"
            if allowed.strip():
                names = f"only {allowed}"
            message += f". {ALLOW_LIST} allows {names}"
        return message

    def add(self, info: PluginInfo) -> None:
        """Register all specs and hooks of a loaded plugin, or none and set `PluginInfo.error` if something is wrong."""
        # by equality, as pluggy compares plugins
        same = next((i for i in self.plugins if i.error is None and i.plugin == info.plugin), None)
        self.plugins.append(info)
        if info.error is None and same is not None:
            info.error = f"{info.value} is already registered, as plugin {same.name} of {same.distribution}"
        if info.error is not None:
            return
        try:
            if isinstance(info.plugin, type):  # its methods would be called without an instance
                raise UserError(f"{info.value} is the class {info.plugin.__name__}; name an instance of it")
            # pluggy needs unique names; two distributions, or two objects of one class, may have the same
            name = f"{info.name} of {info.distribution}"
            if self.pm.has_plugin(name):
                name = f"{name} ({len(self.plugins)})"
            self.pm.register(info.plugin, name=name)
            self._check_unknown_hooks(info.plugin)
            hooks = sorted(caller.name for caller in self.pm.get_hookcallers(info.plugin) or [])
            _check_unmarked_hooks(info.plugin, hooks)
            self._check_plain_functions(info.plugin)
            specs = list(self._specs_of(info))
        except (Exception, SystemExit) as error:  # the code of a plugin may raise anything
            if self.pm.is_registered(info.plugin):
                self.pm.unregister(info.plugin)
            if isinstance(error, pluggy.PluginValidationError):
                info.error = f"{error}{_arguments(str(error))}"
            else:
                info.error = str(error) if isinstance(error, UserError) else traceback_tail(error)
            return
        info.hooks = hooks
        for kind, spec in specs:
            self._register(kind, spec, info)

    def add_own(self, info: PluginInfo) -> None:
        """Register a plugin of llmsuite itself; see the class for its specs. They are not checked: tests do that."""
        self.plugins.append(info)
        if info.error is not None:
            return
        self.pm.register(info.plugin, name=f"{info.name} of {info.distribution}")
        info.hooks = sorted(caller.name for caller in self.pm.get_hookcallers(info.plugin) or [])
        for kind, (hook, _) in REGISTRATIONS.items():
            if hook in info.hooks:
                self._to_make[kind].append(info)

    def _register(self, kind: str, spec: Any, info: PluginInfo) -> None:
        self._specs[kind][spec.name] = spec
        self._owners[kind, spec.name] = info
        if kind == "adapter method":
            METHODS[spec.name] = spec
        elif kind == "kernels":
            DEVICE_KERNELS[spec.name] = spec
        info.provides.append(f"{kind} {spec.name}")

    def _check_unknown_hooks(self, plugin: Any) -> None:
        """Raise UserError for a hook that does not exist, such as a misspelt one: nothing would call it."""
        for caller in self.pm.get_hookcallers(plugin) or []:
            if not caller.has_spec() and not all(impl.optionalhook for impl in caller.get_hookimpls()):
                names = list(hookspecs.hook_names())
                hint = suggestion(caller.name, names).rstrip() or f"known: {', '.join(names)}"
                raise UserError(f"no hook is called {caller.name!r}; {hint}")

    def _check_plain_functions(self, plugin: Any) -> None:
        """Raise UserError for a hook that is async or a generator: a call would not execute its body."""
        for caller in self.pm.get_hookcallers(plugin) or []:
            for impl in caller.get_hookimpls():
                is_async = inspect.iscoroutinefunction(impl.function)
                if impl.plugin is plugin and (is_async or inspect.isgeneratorfunction(impl.function)):
                    what = "a generator or a wrapper"
                    if is_async:
                        what = "an async function"
                    raise UserError(f"{caller.name} is {what}, whose body would never run; make it a plain function")

    def require(self, info: PluginInfo) -> None:
        """Register a plugin that the user has requested. Raises UserError if it cannot be registered."""
        self.add(info)
        self.check_devices_of_kernels()
        if info.error is not None:
            raise UserError(f"plugin {info.name} of {info.distribution}: {info.error}")

    def check_devices_of_kernels(self) -> None:
        """Withdraw kernels for a device that is not registered, and report it as the error of their plugin. Called when
        all plugins are loaded: the device may be in a later one."""
        for name, kernels in list(self._specs["kernels"].items()):  # those of llmsuite itself have one
            if self.find_device(kernels.device) is None:
                info = self.owner("kernels", name)
                info.error = f"device of kernels {name!r}: {self.unknown('device', kernels.device)}"
                self.withdraw("kernels", name, info.error)

    def _specs_of(self, info: PluginInfo) -> Iterable[tuple[str, Any]]:
        own: set[tuple[str, str]] = set()
        for kind, (hook, types) in REGISTRATIONS.items():
            impls = [impl for impl in getattr(self.pm.hook, hook).get_hookimpls() if impl.plugin is info.plugin]
            specs = [spec for impl in impls for spec in _as_list(impl.function(), hook, types)]
            for spec in specs:
                if not isinstance(spec, types):
                    raise UserError(f"{hook} returned a list with a {type(spec).__name__}; {_expected_list(types)}")
                if (
                    isinstance(spec.api, int) and spec.api > API_VERSION
                ):  # before its fields are checked: types may differ
                    raise UserError(
                        f"{kind} {spec.name!r} needs version {spec.api} of the plugin contract, this llmsuite has "
                        f"{API_VERSION}; install a newer llmsuite or an older {info.distribution}"
                    )
                self._check(kind, spec)
                if (kind, spec.name) in own:
                    raise UserError(f"it registers {kind} {spec.name!r} twice")
                own.add((kind, spec.name))
                self._check_duplicate(kind, spec.name, info)
                yield kind, spec

    def _check(self, kind: str, spec: Any) -> None:
        from llmsuite.contract import checks  # they import pydantic

        if kind == "adapter method":
            built_in = [m for n, m in self.adapter_methods.items() if self.owner(kind, n).distribution == BUILTIN]
            checks.check_adapter_method(spec, built_in)
            return
        if kind == "kernels":
            checks.check_kernels(spec)
            return
        checks.check_fields(kind, spec)
        if kind == "stage":
            checks.check_stage(spec)
        elif kind == "model":
            checks.check_family(spec)
        elif kind == "command":
            checks.check_command(spec)
        elif kind == "recipe command":
            checks.check_recipe_command(spec)
        elif kind == "suite":
            checks.check_suite(spec)
        elif kind in ("reward", "environment", "rollout engine"):
            section = "rollout" if kind == "rollout engine" else kind
            checks.check_keys(section, spec, self._keys_of_sections(kind))

    def _keys_of_sections(self, kind: str) -> set[str]:
        """Return the keys of all stages' sections that specs of this kind extend."""
        keys: set[str] = set()
        for stage in self.stages.values():
            for section in stage.sections.values():
                if section.extended_by == kind:
                    keys |= {field.name for field in dataclasses.fields(section)}
        return keys

    def _check_duplicate(self, kind: str, name: str, info: PluginInfo) -> None:
        self.specs(kind)  # the names of llmsuite itself are taken
        first = self._owners.get((kind, name))
        if first is None and (kind, name) not in self._withdrawn:
            return
        if first is None:
            raise UserError(self._withdrawn[kind, name])
        both = f"{kind} {name!r} is registered by both {first.distribution} and {info.distribution}"
        if first.distribution in (BUILTIN, BUNDLED):
            raise UserError(f"{both}; a plugin cannot replace a built-in name and has to use another one")
        # neither is kept: the alphabetical order of plugins must not decide which one wins
        self.withdraw(kind, name, f"{both}; uninstall one, or name the plugins to use in {ALLOW_LIST}")
        raise UserError(self._withdrawn[kind, name])

    def withdraw(self, kind: str, name: str, reason: str) -> None:
        """Remove a registered spec; from then on `unknown` reports the reason."""
        del self._specs[kind][name]
        if kind == "adapter method":
            del METHODS[name]
        elif kind == "kernels":
            DEVICE_KERNELS.pop(name, None)
        self._owners.pop((kind, name)).provides.remove(f"{kind} {name}")
        self._withdrawn[kind, name] = reason

    def disable(self, kind: str, name: str, error: Exception) -> None:
        """Remove a spec whose code failed. Raises the error for a built-in spec, as that is a bug."""
        info = self.owner(kind, name)
        if info.distribution == BUILTIN:
            raise error
        info.error = traceback_tail(error)
        self.withdraw(kind, name, f"{kind} {name!r} of {info.distribution} does not work: {_last_line(info.error)}")

    def emit(self, event: str, **arguments: Any) -> None:
        """Call an event hook of every plugin. The first error of a plugin is reported, and it gets no more events."""
        for impl in reversed(getattr(self.pm.hook, event).get_hookimpls()):
            info = next(i for i in self.plugins if i.plugin is impl.plugin)
            if info.events_disabled:
                continue
            try:
                impl.function(**{name: arguments[name] for name in impl.argnames})
            except (Exception, SystemExit) as error:  # SystemExit too: a hook must not end a run silently
                if getattr(impl.plugin, "llmsuite_critical", False):
                    reason = "which ends the run because the plugin sets llmsuite_critical"
                    print(f"llmsuite: plugin {info.name} failed in {event}, {reason}", file=sys.stderr)
                    raise
                info.events_disabled = True
                print(
                    f"llmsuite: plugin {info.name} failed in {event} and gets no more events:\n"
                    + "".join(traceback.format_exception(error)),
                    file=sys.stderr,
                )


def _load(entry_point: importlib.metadata.EntryPoint, distribution: str) -> PluginInfo:
    info = PluginInfo(entry_point.name, distribution, entry_point.value)
    start = time.perf_counter()
    try:
        info.plugin = entry_point.load()
    except (Exception, SystemExit) as error:  # importing a plugin may raise anything
        info.error = traceback_tail(error)
    info.load_seconds = time.perf_counter() - start
    return info


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
    """Return the package and version of an entry point."""
    dist = entry_point.dist
    if dist:
        return f"{dist.name} {dist.version}"
    return "unknown package"


def _load_bundled() -> list[PluginInfo]:
    """Import the plugins that come with llmsuite, as those of an installed package are imported."""
    places = [importlib.metadata.EntryPoint(name, f"llmsuite.plugins.{name}", GROUP) for name in BUNDLED_PLUGINS]
    return [_load(place, BUNDLED) for place in places]


def left_out(kind: str) -> dict[str, tuple[str, Any]]:
    """Return what bundled plugins would register if --no-plugins did not leave them out: for the name of each spec of a
    kind, the name of its plugin, and the spec. Empty without --no-plugins."""
    if NO_PLUGINS not in os.environ:
        return {}
    hook, _ = REGISTRATIONS[kind]
    found: dict[str, tuple[str, Any]] = {}
    for info in _load_bundled():
        if info.error is None and hook in vars(info.plugin):
            found |= {spec.name: (info.name, spec) for spec in getattr(info.plugin, hook)()}
    return found


def left_out_reason(kind: str, name: str, plugin: str) -> str:
    """Return the error message for a spec that `left_out` has."""
    return f"{kind} {name!r} is in the plugin {plugin}, which --no-plugins leaves out"


def left_out_precision(device: str, precision: str) -> str:
    """Return what to append to the error message for a precision that a device does not have: the plugin whose kernels
    have it as a format of weights, if --no-plugins leaves it out; else an empty text."""
    for plugin, kernels in left_out("kernels").values():
        if kernels.device == device and precision in kernels.weight_only_precisions:
            return f"; {precision} is in the plugin {plugin}, which --no-plugins leaves out"
    return ""


def _allowed(name: str) -> bool:
    names = os.environ.get(ALLOW_LIST)
    return names is None or name in [part.strip() for part in names.split(",")]


def left_out_notes() -> list[str]:
    """Return notes on plugins that are not loaded, and on names in the allow list that are not installed."""
    names = [part.strip() for part in os.environ.get(ALLOW_LIST, "").split(",") if part.strip()]
    installed = sorted({entry_point.name for entry_point in importlib.metadata.entry_points(group=GROUP)})
    if NO_PLUGINS in os.environ:
        return [f"--no-plugins leaves out: {', '.join([*BUNDLED_PLUGINS, *installed])}"]
    excluded = [name for name in installed if not _allowed(name)]
    unknown = [name for name in names if name not in installed]
    notes = []
    if excluded:
        notes.append(f"{ALLOW_LIST} leaves out: {', '.join(excluded)}")
    if unknown:
        notes.append(f"{ALLOW_LIST} names {', '.join(unknown)}; installed: {', '.join(installed) or 'none'}")
    return notes


def load_plugins(complete: bool = True) -> Registry:
    """Return a registry with the built-in plugins, then the bundled ones, then those of installed packages in the order
    of their names. With `NO_PLUGINS`, only the built-in ones.

    Args:
        complete: False to make the specs of llmsuite itself later, when somebody asks for their kind.
    """
    result = Registry()
    DEVICE_KERNELS.clear()  # those of this registry are used: without plugins there are none
    for name in BUILTIN_MODULES:
        result.add_own(PluginInfo(name.rpartition(".")[2], BUILTIN, name, plugin=importlib.import_module(name)))
    if NO_PLUGINS not in os.environ:
        for info in _load_bundled():
            result.add_own(info)
        for entry_point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
            if _allowed(entry_point.name):
                result.add(_load(entry_point, _distribution(entry_point)))
        result.check_devices_of_kernels()
    if complete:
        result.complete()
    return result


def _check_unmarked_hooks(plugin: Any, hooks: list[str]) -> None:
    unmarked = [n for n in hookspecs.hook_names() if n not in hooks and callable(getattr(plugin, n, None))]
    if unmarked:
        raise UserError(f"{', '.join(unmarked)}: not marked with @llmsuite.hookimpl, so nothing would call it")
    if not hooks:
        raise UserError("it has no function marked with @llmsuite.hookimpl")


def _arguments(error: str) -> str:
    """Return the parameters of a hook, to append to pluggy's message about an unknown parameter."""
    found = re.search(r"for hook '(\w+)'", error)
    hook = None
    if found:
        hook = getattr(hookspecs, found[1], None)
    if hook is None:
        return ""
    return f"\nIts parameters, each of which is optional: {', '.join(inspect.signature(hook).parameters) or 'none'}"


def _as_list(returned: Any, hook: str, types: tuple[type, ...]) -> list[Any]:
    if not isinstance(returned, (list, tuple)):
        raise UserError(f"{hook} returned a {type(returned).__name__}; {_expected_list(types)}")
    return list(returned)


def _expected_list(types: tuple[type, ...]) -> str:
    return f"it has to return a list of {' or '.join(cls.__name__ for cls in types)}"


def traceback_tail(error: BaseException) -> str:
    """Return the last two calls of a traceback and the error; a SyntaxError includes its line."""
    calls = [call for call in traceback.format_tb(error.__traceback__) if "<frozen importlib" not in call]
    return "".join([*calls[-2:], *traceback.format_exception_only(error)]).strip()


def _last_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[-1]
