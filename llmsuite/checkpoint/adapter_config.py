"""The configuration beside adapters, of HF PEFT or PaddleNLP, and what base.json may have: one table of their keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.files import read_json_object
from llmsuite.models.block_quant import LEVELS
from llmsuite.strict_json import FLAG, NULL, NUMBER, TEXT, Kind, by_name, check_kinds, list_of, whole

_RANK = whole(1, 1 << 20)
_SIZE = whole(1, 1 << 30)
_NAMES = list_of(TEXT) | TEXT | NULL
_FLAG = FLAG | NULL
KINDS: Mapping[str, Kind] = {
    "alpha": NUMBER | NULL,
    "alpha_pattern": by_name(NUMBER) | NULL,
    "base_model_name_or_path": TEXT | NULL,
    "ensure_weight_tying": _FLAG,
    "init_lora_weights": FLAG | TEXT | NULL,
    "lokr_alpha": NUMBER | NULL,
    "lokr_dim": _RANK | NULL,
    "lora_alpha": NUMBER | NULL,
    "lora_dropout": NUMBER | NULL,
    "lora_use_mixer": _FLAG,
    "modules_to_save": _NAMES,
    "num_attention_heads": _SIZE | NULL,
    "num_hidden_layers": _SIZE | NULL,
    "num_layers": _SIZE | NULL,
    "num_virtual_tokens": _SIZE | NULL,
    "peft_type": TEXT | NULL,
    "r": _RANK | NULL,
    "rank_pattern": by_name(_RANK) | NULL,
    "revision": TEXT | NULL,
    "rslora": _FLAG,
    "target_modules": _NAMES,
    "token_dim": _SIZE | NULL,
    "use_dora": _FLAG,
    "use_rslora": _FLAG,
    "vera_alpha": NUMBER | NULL,
}
"""What the keys that are read may be; null is as if a key were not there."""
BASE_KINDS: Mapping[str, Kind] = {
    "path": TEXT | NULL,
    "sha256": TEXT,
    "stored_as": Kind("an object", lambda value: isinstance(value, dict)) | NULL,
}
"""Those of base.json."""
STORED_KINDS: Mapping[str, Kind] = {
    "dtype": Kind(f"one of {', '.join(LEVELS)}, int8", lambda value: value in ("int8", *LEVELS)),
    "block": Kind("an even number above 0", lambda value: type(value) is int and value > 0 and value % 2 == 0),
}
"""Those of its `stored_as`."""
_PATTERN = re.compile(r"(?P<whole>\^)?(?P<any>\.\*(?:\\\.)?)?(?P<name>(?:[\w.-]|\\[.-])+)\$?")


def read_adapter_config(path: Path) -> dict[str, Any]:
    """The content of a configuration of adapters. Raises UserError naming a key that is not what `KINDS` says."""
    config = read_json_object(path)
    check_kinds(path, config, KINDS)
    return config


def value_for(where: Path, config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """The value of a module by `rank_pattern` or `alpha_pattern`: that of the first pattern its name ends with.

    PEFT takes patterns for regular expressions, which a stranger can write so that they never come to an end. Here
    they are names: `q_proj` and `.*\\.q_proj` of every module that ends so, `^model.layers.0.self_attn.q_proj` of one.

    Args:
        where: the file, for messages.
        config: its content.
        key: of the patterns.
        module: name of the module, as HF has it.
        default: where no pattern is for it.

    Raises:
        UserError: a pattern is more than a name.
    """
    for pattern, value in (config.get(key) or {}).items():
        if _is_for(where, key, pattern, module):
            return value
    return default


def _is_for(where: Path, key: str, pattern: str, module: str) -> bool:
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise UserError(
            f"{where}: {key} has {pattern[:80]!r}, which is no name; patterns are read as names of modules or their "
            r"last parts, such as q_proj, .*\.q_proj or ^model.layers.0.self_attn.q_proj: name each module"
        )
    name, before = re.sub(r"\\(.)", r"\1", match["name"]), match["any"]
    if before is None:
        return module == name or (match["whole"] is None and module.endswith(f".{name}"))
    return module.endswith(f".{name}" if before.endswith(".") else name)
