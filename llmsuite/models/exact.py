"""Whether a layer is exactly one of llmsuite's: only then may a faster form compute in the place of its code.

Subclasses keep what their authors wrote. A class may derive from one of `llmsuite.models.blocks` and change its forward
pass, a function that it computes with, or a method that a faster form would pass over; and anybody may hang hooks on a
layer. Whatever replaces or goes round the code of a layer asks here first.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from paddle import nn

_PACKAGE = __name__.partition(".")[0]


def is_exactly(module: Any, base: type, *methods: str) -> bool:
    """Whether a module computes by the code of a class: it is one of this class or of one derived from it, and neither
    its own class nor the module itself has another `forward`, or another one of these methods."""
    return is_of_exact_class(module, base, *methods) and not vars(module).keys() & {"forward", *methods}


def is_of_exact_class(module: Any, base: type, *methods: str) -> bool:
    """`is_exactly`, whatever the module itself has been given in place of the code of its class."""
    kind = type(module)
    if not isinstance(module, base) or kind.__call__ is not base.__call__:
        return False
    return all(getattr(kind, name) is getattr(base, name) for name in ("forward", *methods))


def is_plain(*layers: Any) -> bool:
    """Whether these are Paddle's linear layers and nothing more."""
    return all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in layers)


def is_own(function: Any) -> bool:
    """Whether a function that a layer computes with is one of llmsuite's, and not its author's."""
    while isinstance(function, functools.partial):
        function = function.func
    return _is_of_package(getattr(function, "__module__", None))


def is_own_code(module: Any, *methods: str) -> bool:
    """Whether the forward pass of a module, and these methods of it, are written in llmsuite or in Paddle: of whichever
    class."""
    kind = type(module)
    found = (getattr(kind, name) for name in ("forward", *methods))
    return all(_is_of_package(code.__module__, "paddle") for code in found)


def _is_of_package(name: str | None, *others: str) -> bool:
    return name is not None and name.partition(".")[0] in (_PACKAGE, *others)


def has_hooks(*modules: Any, but: Collection[Any] = ()) -> bool:
    """Whether somebody sees or changes what these modules take or give; hooks in `but` do not count."""
    hooks = (hook for m in modules for of in (m._forward_pre_hooks, m._forward_post_hooks) for hook in of.values())
    return any(hook not in but for hook in hooks)


def named_kind(name: str, module: Any) -> str:
    """A module as messages name it: its place, and its class."""
    return f"{name} ({type(module).__name__})"
