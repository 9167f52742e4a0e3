"""Side adapters, which cannot be merged into a matrix of the model: interventions on hidden states (`reft_dir`) and
prefixes (`prefix_dir`). PaddleNLP's are pickles, see `llmsuite.checkpoint.convert.side_adapters`."""

from __future__ import annotations

from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file, listed
from llmsuite.checkpoint.prefix_dir import SavedPrefixes, has_prefixes, open_prefixes
from llmsuite.checkpoint.reft_dir import CONFIG, SavedInterventions, open_interventions

PREFIX_OF_PADDLENLP = "prefix_config.json"
"""File of a directory with a prefix that PaddleNLP has saved."""
_REFT_OF_PADDLENLP = "intkey_layer.*.bin"


def open_side_adapter(directory: Path) -> SavedInterventions | SavedPrefixes | None:
    """Open the side adapter in a directory that a run or HF PEFT has written; None for adapters of matrices.

    Raises:
        UserError: its files are broken.
    """
    if is_file(directory / CONFIG):
        return open_interventions(directory)
    if has_prefixes(directory):
        return open_prefixes(directory)
    return None


def paddlenlp_reft_files(directory: Path) -> list[Path]:
    """Return the files of each layer's intervention that PaddleNLP has saved in a directory."""
    return listed(directory, _REFT_OF_PADDLENLP)


def is_side_adapter(directory: Path) -> bool:
    """Return True if a directory has a side adapter, written by any library."""
    return _kind(directory) is not None


def refuse_side_adapter(directory: Path) -> None:
    """Raise UserError if a directory has a side adapter, for commands that merge adapters into their model."""
    what = _kind(directory)
    if what is not None:
        raise UserError(
            f"{directory}: has {what}, which cannot be merged into a matrix of the model, so there is nothing to merge "
            f"or export. They run next to their model: llmsuite generate {directory}"
        )


def _kind(directory: Path) -> str | None:
    if is_file(directory / CONFIG) or paddlenlp_reft_files(directory):
        return "interventions on hidden states (reft)"
    is_prefix = is_file(directory / PREFIX_OF_PADDLENLP) or has_prefixes(directory)
    if is_prefix:
        return "keys and values in front of a text (prefix)"
    return None
