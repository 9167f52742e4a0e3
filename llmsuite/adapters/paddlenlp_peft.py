"""Import of single modules of `paddlenlp.peft`, the source of the adapter layers, without the rest of paddlenlp.

`import paddlenlp.peft` (PaddleNLP 3.0.0b4) runs `paddlenlp/__init__.py`. That takes 3 s and 240 MB in every rank,
replaces `F.linear` by a product in FP8, replaces `Tensor.numpy` and `paddle.to_tensor`, and disables Paddle's signal
handler. The modules with the layers need none of it: alone they take 0.2 s and 18 MB, and change nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command

_IMPORTED_BY_THEM = ("paddlenlp", "paddlenlp.peft", "paddlenlp.transformers", "paddlenlp.utils")


def import_alone(*modules: str) -> list[Any]:
    """Import modules of paddlenlp without running the `__init__` of their packages.

    Empty packages replace those during the import. The modules stay in `sys.modules`, the empty packages do not: a
    later `import paddlenlp` works as usual and finds the same classes.

    Args:
        modules: full names, such as "paddlenlp.peft.lora.lora_layers".

    Raises:
        UserError: paddlenlp is not installed, or a package that these modules need.
    """
    found = importlib.util.find_spec("paddlenlp")
    if found is None or not found.submodule_search_locations:
        raise UserError(
            "lora.rank: adapters are layers of paddlenlp, which is not installed; install it with: "
            f"{install_command('paddlenlp', alone='paddlenlp')}"
        )
    root = found.submodule_search_locations[0]
    stand_ins = []
    for name in sorted({*_IMPORTED_BY_THEM, *(module.rpartition(".")[0] for module in modules)}):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [root + name.removeprefix("paddlenlp").replace(".", "/")]
            sys.modules[name] = package
            stand_ins.append(name)
    try:
        return [importlib.import_module(module) for module in modules]
    except ModuleNotFoundError as error:
        raise UserError(
            f"lora.rank: adapters are layers of paddlenlp, which need the package {error.name}; install it with: "
            f"{install_command('cpu')}"
        ) from error
    finally:
        for name in stand_ins:
            del sys.modules[name]
