"""Reads the configuration of adapters, of HF PEFT or PaddleNLP; has the types of its keys and those of base.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object
from llmsuite.base.strict_json import FLAG, NULL, NUMBER, TEXT, Kind, by_name, check_kinds, integer, list_of
from llmsuite.models.block_quant import LEVELS

_RANK = integer(1, 1 << 20)
_SIZE = integer(1, 1 << 30)
_NAMES = list_of(TEXT) | TEXT | NULL
_FLAG = FLAG | NULL
KINDS: Mapping[str, Kind] = {
    "alpha": NUMBER | NULL,
    "alpha_pattern": by_name(NUMBER) | NULL,
    "base_model_name_or_path": TEXT | NULL,
    "ensure_weight_tying": _FLAG,
    "init_lora_weights": FLAG | TEXT | NULL,
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
}
"""Types of the keys that are read; null counts as a missing key."""
BASE_KINDS: Mapping[str, Kind] = {
    "path": TEXT | NULL,
    "sha256": TEXT,
    "stored_as": Kind("an object", lambda value: isinstance(value, dict)) | NULL,
}
"""Types of the keys of base.json."""
STORED_KINDS: Mapping[str, Kind] = {
    "dtype": Kind(f"one of {', '.join(LEVELS)}, int8", lambda value: value in ("int8", *LEVELS)),
    "block": Kind("an even number above 0", lambda value: type(value) is int and value > 0 and value % 2 == 0),
    "double_quant": _FLAG,
}
"""Types of the keys of its `stored_as`."""
_PATTERN = re.compile(r"(?P<full>\^)?(?P<any>\.\*(?:\\\.)?)?(?P<name>(?:[\w.-]|\\[.-])+)\$?")


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Read a configuration of adapters. Raises UserError that names a key whose type is not that of `KINDS`."""
    config = read_json_object(path)
    check_kinds(path, config, KINDS)
    return config


def value_for(where: Path, config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Return the value of a module by `rank_pattern` or `alpha_pattern`: that of the first matching pattern.

    PEFT uses the patterns as regular expressions, which an untrusted author can write so that a match never ends. Here
    they are names: `q_proj` and `.*\\.q_proj` match every module whose name ends so, `^model.layers.0.self_attn.q_proj`
    matches one.

    Args:
        where: the file, for messages.
        config: its content.
        key: of the patterns.
        module: HF's name of the module.
        default: if no pattern matches it.

    Raises:
        UserError: a pattern is more than a name.
    """
    for pattern, value in (config.get(key) or {}).items():
        if _matches(where, key, pattern, module):
            return value
    return default


def _matches(where: Path, key: str, pattern: str, module: str) -> bool:
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise UserError(
            f"{where}: {key} has {pattern[:80]!r}, which is not a name; patterns are read as names of modules or their "
            r"last parts, such as q_proj, .*\.q_proj or ^model.layers.0.self_attn.q_proj: name each module"
        )
    name = re.sub(r"\\(.)", r"\1", match["name"])
    before = match["any"]
    if before is None:
        return module == name or (match["full"] is None and module.endswith(f".{name}"))
    return module.endswith(f".{name}" if before.endswith(".") else name)
