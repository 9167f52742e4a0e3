"""llmsuite: pretrain, fine-tune, align and deploy large language models on PaddlePaddle, one JSON recipe per run."""

# nothing is imported here: Ctrl-C is not caught yet, see __main__
__version__ = "0.2.0.dev0"

_LIVES_IN = {
    "Run": "llmsuite.api",
    "generate": "llmsuite.api",
    "load_recipe": "llmsuite.api",
    "train": "llmsuite.api",
    "RecipeError": "llmsuite.base.errors",
    "UserError": "llmsuite.base.errors",
    "hookimpl": "llmsuite.contract.hookspecs",
}
__all__ = ["__version__", *_LIVES_IN]


def __getattr__(name: str) -> object:
    import importlib

    # everything is imported on first use: `import llmsuite` is fast, and plugins need none of it
    if name in _LIVES_IN:
        return getattr(importlib.import_module(_LIVES_IN[name]), name)
    raise AttributeError(f"module 'llmsuite' has no attribute {name!r}")
