"""Plugins of one command or one call: Python files named by the user, and specs passed by a program."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.python_files import import_file, variable
from llmsuite.base.safe_files import is_file, real_path
from llmsuite.contract import hookspecs
from llmsuite.contract.registry import REGISTRATIONS, PluginInfo, Registry, traceback_tail

FILES = "LLMSUITE_PLUGIN_FILES"
"""Environment variable with the plugin files of `--plugin my_model.py`; the ranks of a run inherit it."""


def add_files(registry: Registry) -> Registry:
    """Register the plugin files of the environment variable, after all other plugins; return the registry.

    Raises:
        UserError: a file cannot be registered. Unlike an installed plugin, the user has requested it.
    """
    for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        registry.require(load_file(Path(path)))
    return registry


@contextlib.contextmanager
def plugin_files(paths: Sequence[str | Path]) -> Iterator[None]:
    """Context in which `add_files` also registers these files, in this process and in those it starts."""
    before = os.environ.get(FILES)
    given = [*filter(None, (before or "").split(os.pathsep)), *(str(real_path(path)) for path in paths)]
    with variable(FILES, os.pathsep.join(dict.fromkeys(given))):
        yield


def load_file(path: Path) -> PluginInfo:
    """Return the plugin in a Python file: the module, or its object `plugin` if the module has no hooks.

    The module is imported by its file name, with its directory on `sys.path`, like a module next to a script.

    Raises:
        UserError: there is no such file, or it cannot be imported.
    """
    path = real_path(path)
    if path.suffix != ".py" or not is_file(path):
        raise UserError(f"plugin {path}: is not a Python file")
    module = sys.modules.get(path.stem)
    if module is None:
        module = _import(path)
    elif real_path(getattr(module, "__file__", None) or "") != path:
        raise UserError(f"plugin {path}: another module {path.stem!r} is already imported; rename the file")
    is_one = any(hasattr(module, name) for name in hookspecs.hook_names())
    plugin = module if is_one else getattr(module, "plugin", module)
    return PluginInfo(path.stem, f"the file {path}", path.stem, plugin=plugin)


def _import(path: Path) -> types.ModuleType:
    try:
        return import_file(path)
    except (Exception, SystemExit) as error:  # the code of a plugin may raise anything
        raise UserError(f"plugin {path}: {traceback_tail(error)}") from error


def plugin_from_specs(specs: Sequence[Any]) -> types.SimpleNamespace:
    """Return a plugin that registers specs, such as a `ModelFamily`.

    Raises:
        UserError: an object is not a spec.
    """
    known = tuple(cls for _, types in REGISTRATIONS.values() for cls in types)
    for spec in specs:
        if not isinstance(spec, known):
            names = ", ".join(cls.__name__ for cls in known)
            raise UserError(f"a {type(spec).__name__} cannot be registered; pass one of: {names}")

    def returning(found: list[Any]) -> Any:
        def register() -> list[Any]:
            return found

        return hookspecs.hookimpl(register)

    hooks = {}
    for hook, of_hook in REGISTRATIONS.values():
        found = [spec for spec in specs if isinstance(spec, of_hook)]
        if found:
            hooks[hook] = returning(found)
    return types.SimpleNamespace(**hooks)
