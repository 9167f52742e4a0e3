"""The model that LoRA adapters belong to, as their directory names it: in base.json, or in their configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.adapter_config import BASE_KINDS, STORED_KINDS, read_adapter_config
from llmsuite.errors import UserError
from llmsuite.files import read_json_object, write_json
from llmsuite.hub.here import cached
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.models.block_quant import BlockFormat
from llmsuite.regular import is_file
from llmsuite.strict_json import check_kinds

BASE = "base.json"
LOKR_OF_PADDLENLP, VERA_OF_PADDLENLP = "lokr_config.json", "vera_config.json"
NAME_BASE = "name it with --base DIR, or in `llmsuite convert` its config.json with --config DIR"
CONFIGS = ("adapter_config.json", "lora_config.json", LOKR_OF_PADDLENLP, VERA_OF_PADDLENLP)
"""The configuration file beside the factors, of HF PEFT and of PaddleNLP, which has more for its other methods."""


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that adapters were trained on."""

    path: str | None
    """Its directory; None for a model that was initialised from a seed and is on no disk."""
    digest: str
    """`ModelDirectory.digest`; for a model from a seed, the digest of its shape and seed."""
    format: BlockFormat | None = None
    """How its matrices were stored while they were trained on; None for in the precision of the run."""

    def to_json(self) -> dict[str, Any]:
        """The content of base.json."""
        stored = {} if self.format is None else {"stored_as": dataclasses.asdict(self.format)}
        return {"path": self.path, "sha256": self.digest, **stored}


def read_base(directory: Path) -> Base | None:
    """The model that adapters in a directory belong to; None when base.json is missing."""
    if not is_file(directory / BASE):
        return None
    data = read_json_object(directory / BASE)
    check_kinds(directory / BASE, data, BASE_KINDS)
    stored = data.get("stored_as")
    if stored is not None:
        check_kinds(f"{directory / BASE}: stored_as", stored, STORED_KINDS)
        stored = BlockFormat(stored["dtype"], stored["block"])
    return Base(data.get("path"), data["sha256"], stored)


def write_base(directory: Path, base: Base) -> None:
    """Write base.json; of a model whose sha256 nobody has said there is none, and it is not compared."""
    if base.digest:
        write_json(directory / BASE, base.to_json())


def stored_format(directory: Path) -> BlockFormat | None:
    """How the matrices of the base were stored while adapters in a directory were trained; None for unquantised."""
    base = read_base(directory)
    return None if base is None else base.format


def _named_base(directory: Path) -> Base:
    """The base model in the configuration of PEFT or PaddleNLP: its path, or its name on a hub."""
    found = [path for name in CONFIGS if is_file(path := directory / name)]
    config = read_adapter_config(found[0]) if found else {}
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if named and revision and (name := hub_name(named)) is not None:
        return Base(str(name.at(name.hub, revision)), "")
    if not named:
        raise UserError(f"{directory}: is a LoRA adapter and does not say of which model; {NAME_BASE}")
    return Base(named, "")


def base_keys(base: Base) -> dict[str, str | None]:
    """The model that adapters were trained on, as PEFT writes it: of a name on a hub, the commit stands by itself."""
    name = hub_name(base.path) if base.path is not None else None
    if name is None or name.hub != "hf":
        return {"base_model_name_or_path": base.path}
    return {"base_model_name_or_path": name.repo, "revision": name.revision}


def base_name(directory: Path) -> str:
    """Path or name on a hub of the model that adapters were trained on. Raises UserError when it is on no disk."""
    base = read_base(directory) or _named_base(directory)
    if base.path is None:
        raise UserError(
            f"{directory}: its adapters were trained on a model that was drawn from a seed and lies nowhere; adapters "
            "of a run with model.weights can be used"
        )
    return base.path


def base_path(directory: Path) -> Path:
    """Directory of the model that adapters were trained on; one of a hub has to be on this machine.

    Raises:
        UserError: it is on no disk, or not here.
    """
    named = base_name(directory)
    if is_file(Path(named) / "config.json"):
        return Path(named)
    found = cached(name, Want.MODEL) if (name := hub_name(named)) is not None else None
    if found is None:
        raise UserError(f"{directory}: the model of its adapters, {named}, is not there; {NAME_BASE}")
    return found.directory


def check_base(directory: Path, base: Base) -> None:
    """Raises UserError when adapters in a directory belong to another model."""
    found = read_base(directory)
    if found is not None and found.digest != base.digest:
        what = base.path or "the one that is drawn from the seed"
        raise UserError(
            f"{directory}: its adapters were trained on {found.path or 'a model drawn from a seed'} as it had sha256 "
            f"{found.digest[:12]}…; {what} has {base.digest[:12]}…. Bring that model back, or start a new run"
        )
