"""What is trained beside a model and runs beside it, as no matrix of the model can take it in: interventions on hidden
states (`reft_dir`) and prefixes (`prefix_dir`)."""

from __future__ import annotations

from pathlib import Path

from llmsuite.checkpoint.prefix_dir import SavedPrefixes, has_prefixes, open_prefixes
from llmsuite.checkpoint.reft_dir import CONFIG, SavedInterventions, open_interventions
from llmsuite.errors import UserError


def open_beside(directory: Path) -> SavedInterventions | SavedPrefixes | None:
    """What is in a directory of adapters; None for adapters of matrices. Raises UserError for files that are broken."""
    if (directory / CONFIG).is_file():
        return open_interventions(directory)
    return open_prefixes(directory) if has_prefixes(directory) else None


def refuse_beside(directory: Path) -> None:
    """Raises UserError where a directory has such, for what makes one model of a model and its adapters."""
    what = "interventions on hidden states (reft)" if (directory / CONFIG).is_file() else None
    if has_prefixes(directory):
        what = "keys and values in front of a text (prefix)"
    if what is not None:
        raise UserError(
            f"{directory}: has {what}, which no matrix of a model can take in, so there is nothing to merge, convert "
            f"or export. They run beside their model: llmsuite generate {directory}"
        )
