"""A run and its steps. `llmsuite.train(recipe)` calls the package, whose name the function has: see `llmsuite.api`."""

import importlib
import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("llmsuite.api").train(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
