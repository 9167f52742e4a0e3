"""llmsuite: pretrain, fine-tune, align and deploy large language models on PaddlePaddle, one JSON recipe a run."""

# nothing is imported here: Ctrl-C is not caught yet, see __main__
__version__ = "0.1.0"

_LIVES_IN = {
    "Run": "llmsuite.api",
    "generate": "llmsuite.api",
    "load_recipe": "llmsuite.api",
    "RecipeError": "llmsuite.errors",
    "UserError": "llmsuite.errors",
    "hookimpl": "llmsuite.plugins.hookspecs",
}
__all__ = ["__version__", "train", *_LIVES_IN]


def __getattr__(name: str) -> object:
    import importlib

    # everything is imported when it is first asked for: `import llmsuite` is fast, and plugins need nothing of it
    if name == "train":  # a package that can be called, see there
        return importlib.import_module("llmsuite.train")
    if name in _LIVES_IN:
        return getattr(importlib.import_module(_LIVES_IN[name]), name)
    raise AttributeError(f"module 'llmsuite' has no attribute {name!r}")
