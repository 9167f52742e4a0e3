"""The types of what `import llmsuite` offers; `__init__.py` imports each name when it is first asked for."""

from llmsuite.api import Run, generate, load_recipe, train
from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.hookspecs import hookimpl

__version__: str

__all__ = ["RecipeError", "Run", "UserError", "__version__", "generate", "hookimpl", "load_recipe", "train"]
