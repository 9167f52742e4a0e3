"""Side adapters (interventions and prefixes), read and written in the layouts of llmsuite, HF PEFT and PaddleNLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file
from llmsuite.checkpoint.adapter_base import Base, read_base, write_base
from llmsuite.checkpoint.convert.paddlenlp_prefix import PICKLE, open_prefix, write_prefix
from llmsuite.checkpoint.convert.paddlenlp_reft import open_reft, write_reft
from llmsuite.checkpoint.model_dir import Layout
from llmsuite.checkpoint.prefix_dir import SavedPrefixes, write_prefixes
from llmsuite.checkpoint.reft_dir import SavedInterventions, write_interventions
from llmsuite.checkpoint.side_adapters import PREFIX_OF_PADDLENLP, open_side_adapter, paddlenlp_reft_files
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.shard_plan import UNSHARDED

SideAdapter = SavedInterventions | SavedPrefixes


def open_any_side_adapter(
    directory: Path, family: ModelFamily, config: Any, allow_pickle: bool = False, base: Base | None = None
) -> SideAdapter | None:
    """The side adapter in a directory of any layout; None for adapters of matrices.

    Args:
        directory: of the adapter.
        family: of the model.
        config: its shape.
        allow_pickle: read PaddleNLP's pickles.
        base: the model, where the directory does not name it.

    Raises:
        UserError: it belongs to another model, has no counterpart here, or is a pickle without `allow_pickle`.
    """
    reft = paddlenlp_reft_files(directory)
    is_prefix = is_file(directory / PREFIX_OF_PADDLENLP)
    if not reft and not is_prefix:
        return open_side_adapter(directory)
    if not allow_pickle:
        pickle = reft[0] if reft else directory / PICKLE
        raise UserError(
            f"{pickle}: is a pickle. With --allow-pickle it is read by a reader that "
            "runs no code and refuses anything but tensors; llmsuite convert writes it as safetensors"
        )
    base = read_base(directory) or base or Base(None, "")
    if reft:
        return open_reft(directory, (family.shard_plan or UNSHARDED).layers, base)
    return open_prefix(directory, (family.shard_plan or UNSHARDED).layers, config, base)


def write_side_adapter(directory: Path, saved: SideAdapter, family: ModelFamily, config: Any, layout: Layout) -> None:
    """Write a side adapter in a layout, into an existing directory that the caller commits.

    Raises:
        UserError: PaddleNLP does not support it for this model.
    """
    layers = (family.shard_plan or UNSHARDED).layers
    if isinstance(saved, SavedInterventions):
        if layout == "hf":
            specs = [saved.files.spec(name) for name in saved.files.names]
            write_interventions(directory, saved.metadata, saved.files.read, specs)
        elif family.names().paddlenlp_prefix(config) != "llama.":
            raise UserError(f"{directory}: PaddleNLP has interventions only for llama, and this is another model")
        else:
            write_reft(directory, saved, layers, config.hidden_size)
            write_base(directory, saved.metadata.base)
    elif layout == "hf":
        network = saved.network
        if network is None:
            write_prefixes(directory, saved.metadata, saved.files.read, saved.files.specs)
        else:
            specs = [network.spec(name) for name in network.names]
            write_prefixes(directory, saved.metadata, network.read, specs)
    else:
        write_prefix(directory, saved, config)
        write_base(directory, saved.metadata.base)
