"""What is trained beside a model and runs beside it, as no matrix of the model can take it in: interventions on hidden
states (`reft_dir`) and prefixes (`prefix_dir`). PaddleNLP's are pickles, see `llmsuite.convert.beside`."""

from __future__ import annotations

from pathlib import Path

from llmsuite.checkpoint.prefix_dir import SavedPrefixes, has_prefixes, open_prefixes
from llmsuite.checkpoint.reft_dir import CONFIG, SavedInterventions, open_interventions
from llmsuite.errors import UserError
from llmsuite.regular import is_file, listed

PREFIX_OF_PADDLENLP = "prefix_config.json"
"""Says that a directory has a prefix that PaddleNLP has saved."""
_REFT_OF_PADDLENLP = "intkey_layer.*.bin"


def open_beside(directory: Path) -> SavedInterventions | SavedPrefixes | None:
    """What is in a directory that a run or HF PEFT has written; None for adapters of matrices.

    Raises:
        UserError: its files are broken.
    """
    if is_file(directory / CONFIG):
        return open_interventions(directory)
    return open_prefixes(directory) if has_prefixes(directory) else None


def files_of_paddlenlp(directory: Path) -> list[Path]:
    """The files of each layer's intervention that PaddleNLP has saved in a directory."""
    return listed(directory, _REFT_OF_PADDLENLP)


def is_beside(directory: Path) -> bool:
    """Whether a directory has such, whoever has written it."""
    return _kind(directory) is not None


def refuse_beside(directory: Path) -> None:
    """Raises UserError where a directory has such, for what makes one model of a model and its adapters."""
    if (what := _kind(directory)) is not None:
        raise UserError(
            f"{directory}: has {what}, which no matrix of a model can take in, so there is nothing to merge or export. "
            f"They run beside their model: llmsuite generate {directory}"
        )


def _kind(directory: Path) -> str | None:
    if is_file(directory / CONFIG) or files_of_paddlenlp(directory):
        return "interventions on hidden states (reft)"
    is_prefix = is_file(directory / PREFIX_OF_PADDLENLP) or has_prefixes(directory)
    return "keys and values in front of a text (prefix)" if is_prefix else None
