"""Checks that a layer runs exactly llmsuite's code: only then may a faster form replace that code.

Subclasses keep what their authors wrote. A class may derive from one of `llmsuite.models.blocks` and change its forward
pass, a function that it computes with, or a method that a faster form would skip; and users may register hooks on a
layer. Code that replaces or bypasses the code of a layer checks it here first.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

_PACKAGE = __name__.partition(".")[0]


def is_exactly(module: Any, base: type, *methods: str) -> bool:
    """True if a module runs the code of the class `base`: it is an instance of it, and neither its own class nor the
    module itself overrides `forward` or one of these methods."""
    kind = type(module)
    if not isinstance(module, base) or kind.__call__ is not base.__call__:
        return False
    if vars(module).keys() & {"forward", *methods}:
        return False
    return all(getattr(kind, name) is getattr(base, name) for name in ("forward", *methods))


def is_own(function: Any) -> bool:
    """True if a function that a layer computes with is defined in llmsuite, not by the author of a plugin."""
    while isinstance(function, functools.partial):
        function = function.func
    return _is_of_package(getattr(function, "__module__", None))


def is_own_code(module: Any, *methods: str) -> bool:
    """True if the forward pass of a module and these methods of it are defined in llmsuite or in Paddle, whatever the
    class."""
    kind = type(module)
    functions = (getattr(kind, name) for name in ("forward", *methods))
    return all(_is_of_package(function.__module__, "paddle") for function in functions)


def _is_of_package(name: str | None, *others: str) -> bool:
    return name is not None and name.partition(".")[0] in (_PACKAGE, *others)


def has_hooks(*modules: Any, but: Collection[Any] = ()) -> bool:
    """True if a hook sees or changes inputs or outputs of these modules; hooks in `but` do not count."""
    hooks = []
    for module in modules:
        hooks += [*module._forward_pre_hooks.values(), *module._forward_post_hooks.values()]
    return any(hook not in but for hook in hooks)


def describe_module(name: str, module: Any) -> str:
    """A module as messages name it: its name and its class."""
    return f"{name} ({type(module).__name__})"
