"""Interventions and prefixes in the files of llmsuite, HF PEFT or PaddleNLP, read and written for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.checkpoint.adapter_base import Base, read_base, write_base
from llmsuite.checkpoint.beside import PREFIX_OF_PADDLENLP, files_of_paddlenlp, open_beside
from llmsuite.checkpoint.model_dir import Layout
from llmsuite.checkpoint.prefix_dir import SavedPrefixes, write_prefixes
from llmsuite.checkpoint.reft_dir import SavedInterventions, write_interventions
from llmsuite.convert.paddlenlp_prefix import PICKLE, open_prefix, write_prefix
from llmsuite.convert.paddlenlp_reft import open_reft, write_reft
from llmsuite.errors import UserError
from llmsuite.models.shard_plan import WHOLE
from llmsuite.regular import is_file
from llmsuite.specs import ModelFamily

Beside = SavedInterventions | SavedPrefixes


def open_any_beside(
    directory: Path, family: ModelFamily, config: Any, allow_pickle: bool = False, base: Base | None = None
) -> Beside | None:
    """What runs beside a model, from a directory of any layout; None for adapters of matrices.

    Args:
        directory: where it is.
        family: of the model.
        config: its shape.
        allow_pickle: whether PaddleNLP's pickles are read.
        base: the model, where the directory does not say it.

    Raises:
        UserError: it is of another model, has no counterpart here, or is a pickle that is not to be read.
    """
    reft, is_prefix = files_of_paddlenlp(directory), is_file(directory / PREFIX_OF_PADDLENLP)
    if not reft and not is_prefix:
        return open_beside(directory)
    if not allow_pickle:
        raise UserError(
            f"{reft[0] if reft else directory / PICKLE}: is a pickle. With --allow-pickle it is read by a reader that "
            "runs nothing and refuses what is no tensor; llmsuite convert makes files of it that are none"
        )
    base = read_base(directory) or base or Base(None, "")
    if reft:
        return open_reft(directory, (family.shard_plan or WHOLE).layers, base)
    return open_prefix(directory, (family.shard_plan or WHOLE).layers, config, base)


def write_beside(directory: Path, saved: Beside, family: ModelFamily, config: Any, layout: Layout) -> None:
    """Write it in a layout, into an existing directory that the caller commits.

    Raises:
        UserError: PaddleNLP has nothing of the kind for this model.
    """
    layers = (family.shard_plan or WHOLE).layers
    if isinstance(saved, SavedInterventions):
        if layout == "hf":
            specs = [saved.files.spec(name) for name in saved.files.names]
            write_interventions(directory, saved.told, saved.files.read, specs)
        elif family.names().paddlenlp_prefix(config) != "llama.":
            raise UserError(f"{directory}: PaddleNLP edits layers of a llama only, and the model is another")
        else:
            write_reft(directory, saved, layers, config.hidden_size)
            write_base(directory, saved.told.base)
    elif layout == "hf":
        of_network = saved.network
        if of_network is None:
            write_prefixes(directory, saved.told, saved.files.read, saved.files.specs)
        else:
            specs = [of_network.spec(name) for name in of_network.names]
            write_prefixes(directory, saved.told, of_network.read, specs)
    else:
        write_prefix(directory, saved, config)
        write_base(directory, saved.told.base)
