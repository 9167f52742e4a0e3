"""Plugins that somebody names for one command or one call: Python files, and specs that a program has made."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins import hookspecs
from llmsuite.plugins.manager import REGISTRATIONS, PluginInfo, Registry, tail
from llmsuite.python_files import import_file, variable
from llmsuite.regular import is_file

FILES = "LLMSUITE_PLUGIN_FILES"
"""Variable with the plugins that are files, as `--plugin my_model.py` names them: the ranks of a run inherit it."""


def add_files(registry: Registry) -> Registry:
    """Register the files that are named, after all other plugins; returns the registry.

    Raises:
        UserError: one does not work. Who names a plugin wants it.
    """
    for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        registry.require(load_file(Path(path)))
    return registry


@contextlib.contextmanager
def plugin_files(paths: Sequence[str | Path]) -> Iterator[None]:
    """While active, `add_files` adds these too, here and in processes that are started."""
    before = os.environ.get(FILES)
    given = [*filter(None, (before or "").split(os.pathsep)), *(str(Path(path).resolve()) for path in paths)]
    with variable(FILES, os.pathsep.join(dict.fromkeys(given))):
        yield


def load_file(path: Path) -> PluginInfo:
    """The plugin in a Python file, imported as the neighbour of a script is: by its name, with its directory on
    `sys.path`. It is the module, or where that has no hooks its object `plugin`.

    Raises:
        UserError: there is no such file, or it cannot be imported.
    """
    path = path.resolve()
    if path.suffix != ".py" or not is_file(path):
        raise UserError(f"plugin {path}: is no Python file")
    module = sys.modules.get(path.stem)
    if module is None:
        module = _import(path)
    elif Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise UserError(f"plugin {path}: a module {path.stem!r} is imported already; give the file another name")
    is_one = any(hasattr(module, name) for name in hookspecs.hook_names())
    plugin = module if is_one else getattr(module, "plugin", module)
    return PluginInfo(path.stem, f"the file {path}", path.stem, plugin=plugin)


def _import(path: Path) -> types.ModuleType:
    try:
        return import_file(path)
    except (Exception, SystemExit) as error:  # it is somebody else's code
        raise UserError(f"plugin {path}: {tail(error)}") from error


def plugin_of(specs: Sequence[Any]) -> types.SimpleNamespace:
    """A plugin that registers these specs, such as a `ModelFamily`.

    Raises:
        UserError: something is no spec.
    """
    known = tuple(cls for _, cls in REGISTRATIONS.values())
    for spec in specs:
        if not isinstance(spec, known):
            names = ", ".join(cls.__name__ for cls in known)
            raise UserError(f"a {type(spec).__name__} cannot be registered; give one of: {names}")

    def returning(found: list[Any]) -> Any:
        def register() -> list[Any]:
            return found

        return hookspecs.hookimpl(register)

    by_hook = {hook: [s for s in specs if isinstance(s, cls)] for hook, cls in REGISTRATIONS.values()}
    return types.SimpleNamespace(**{hook: returning(found) for hook, found in by_hook.items() if found})
