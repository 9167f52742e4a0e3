"""The base model of LoRA adapters, as their directory names it: in base.json, or in their configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmsuite.adapters.methods import METHODS
from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object, write_json
from llmsuite.base.hub.listing import Want
from llmsuite.base.hub.local_copies import cached
from llmsuite.base.hub.names import hub_name
from llmsuite.base.safe_files import is_file
from llmsuite.base.strict_json import check_kinds
from llmsuite.checkpoint.adapter_config import BASE_KINDS, STORED_KINDS, read_adapter_config
from llmsuite.contract.registry import left_out, left_out_reason
from llmsuite.models.block_quant import BlockFormat

BASE = "base.json"
NAME_BASE = "name it with --base DIR, or in `llmsuite convert` its config.json with --config DIR"
CONFIGS = ("adapter_config.json", "lora_config.json")
"""Configuration files of LoRA: of HF PEFT and of PaddleNLP."""


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that adapters were trained on."""

    path: str | None
    """Its directory; None for a model that was initialised from a seed and is not saved."""
    digest: str
    """`ModelDirectory.digest`; for a model from a seed, the digest of its shape and seed."""
    format: BlockFormat | None = None
    """Quantisation of its matrices during training; None for the precision of the run."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of base.json."""
        stored = {} if self.format is None else {"stored_as": self.format.to_json()}
        return {"path": self.path, "sha256": self.digest, **stored}


def config_names() -> list[str]:
    """Return the names of configuration files of adapters: those of LoRA, and those of other methods of PaddleNLP.

    The files of methods that --no-plugins leaves out are among them, so that `refuse_left_out` can say so.
    """
    methods = [*METHODS.values(), *(method for _, method in left_out("adapter method").values())]
    own = [method.paddlenlp.config_name for method in methods if method.paddlenlp is not None]
    return [*CONFIGS, *dict.fromkeys(own)]


def refuse_left_out(directory: Path) -> None:
    """Raise UserError for adapters in a directory that need a method that --no-plugins leaves out."""
    methods = left_out("adapter method")
    path = next((directory / name for name in config_names() if is_file(directory / name)), None)
    if not methods or path is None:
        return
    config = read_adapter_config(path)
    for name, (plugin, method) in methods.items():
        if method.stores_pair:
            is_its = bool(method.flag and config.get(method.flag))
        else:
            is_its = config.get("peft_type") == method.type_in_files()
        if is_its or (method.paddlenlp is not None and method.paddlenlp.config_name == path.name):
            raise UserError(f"{path}: {left_out_reason('adapter method', name, plugin)}")


def read_base(directory: Path) -> Base | None:
    """Return the base model of adapters in a directory; None without base.json."""
    if not is_file(directory / BASE):
        return None
    data = read_json_object(directory / BASE)
    check_kinds(directory / BASE, data, BASE_KINDS)
    stored = data.get("stored_as")
    if stored is not None:
        check_kinds(f"{directory / BASE}: stored_as", stored, STORED_KINDS)
        stored = BlockFormat.from_json(stored)
    return Base(data.get("path"), data["sha256"], stored)


def write_base(directory: Path, base: Base) -> None:
    """Write base.json, unless the digest of the model is unknown: then it is not compared later."""
    if base.digest:
        write_json(directory / BASE, base.to_json())


def stored_format(directory: Path) -> BlockFormat | None:
    """Return the quantisation of the base while adapters in a directory were trained; None for unquantised."""
    base = read_base(directory)
    return None if base is None else base.format


def _named_base(directory: Path) -> Base:
    """Return the base model in the configuration of PEFT or PaddleNLP: its path, or its name on a hub."""
    found = [path for name in config_names() if is_file(path := directory / name)]
    config = read_adapter_config(found[0]) if found else {}
    named = config.get("base_model_name_or_path")
    if not named:
        raise UserError(f"{directory}: is a LoRA adapter and does not name its base model; {NAME_BASE}")
    revision = config.get("revision")
    name = hub_name(named) if revision else None
    if name is not None:
        return Base(str(name.at(name.hub, revision)), "")
    return Base(named, "")


def base_keys(base: Base) -> dict[str, str | None]:
    """Return the keys of PEFT's configuration for a base model: the commit of a hub name is a separate key."""
    name = None
    if base.path is not None:
        name = hub_name(base.path)
    if name is None or name.hub != "hf":
        return {"base_model_name_or_path": base.path}
    return {"base_model_name_or_path": name.repo, "revision": name.revision}


def base_name(directory: Path) -> str:
    """Return the path or hub name of the base model of adapters. Raises UserError when it was not saved."""
    base = read_base(directory) or _named_base(directory)
    if base.path is None:
        raise UserError(
            f"{directory}: its adapters were trained on a model that was initialised from a seed and is not saved; "
            "adapters of a run with model.weights can be used"
        )
    return base.path


def base_path(directory: Path) -> Path:
    """Return the directory of the base model of adapters; one of a hub has to be on this machine.

    Raises:
        UserError: it is not saved, or not on this machine.
    """
    named = base_name(directory)
    if is_file(Path(named) / "config.json"):
        return Path(named)
    name = hub_name(named)
    found = None
    if name is not None:
        found = cached(name, Want.MODEL)
    if found is None:
        raise UserError(f"{directory}: the model of its adapters, {named[:300]}, is not there; {NAME_BASE}")
    return found.directory


def check_base(directory: Path, base: Base) -> None:
    """Raise UserError if adapters in a directory belong to another model."""
    found = read_base(directory)
    if found is not None and found.digest != base.digest:
        trained_on = found.path or "a model initialised from a seed"
        what = base.path or "the one that is initialised from the seed"
        raise UserError(
            f"{directory}: its adapters were trained on {trained_on} with the sha256 {found.digest[:12]}…; {what} has "
            f"{base.digest[:12]}…. Restore that model, or start a new run"
        )
