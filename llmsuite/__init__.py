"""llmsuite: pretrain, fine-tune, align and deploy large language models on PaddlePaddle, one JSON recipe a run."""

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "hookimpl"]


def __getattr__(name: str) -> Any:
    # pluggy is only loaded when a plugin asks for the marker
    if name == "hookimpl":
        from llmsuite.plugins.hookspecs import hookimpl

        return hookimpl
    raise AttributeError(f"module 'llmsuite' has no attribute {name!r}")
