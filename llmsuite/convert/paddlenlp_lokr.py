"""LoKr as PaddleNLP has it (`paddlenlp.peft.LoKrModel`), written.

    lokr_config.json              `lokr_dim`, `lokr_alpha`
    lokr_model_state.pdparams     a pickle with what was trained, of each matrix: lokr_w1, and lokr_w2 or its
                                  factors lokr_w2_a and lokr_w2_b

Its layers choose the sizes of both as ours do. `adapter.py` reads it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.adapter_base import LOKR_OF_PADDLENLP, read_base, write_base
from llmsuite.checkpoint.adapter_config import read_adapter_config
from llmsuite.checkpoint.adapter_dir import CONFIG_NAMES, LOKR, STATE
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles
from llmsuite.convert.paddle_save import write_pickle
from llmsuite.errors import UserError
from llmsuite.files import write_json
from llmsuite.regular import is_file
from llmsuite.specs import ModelFamily

PICKLE = "lokr_model_state.pdparams"


def is_lokr(source: Path) -> bool:
    """Whether a directory has LoKr as a run saves it, or PEFT."""
    path = source / CONFIG_NAMES["hf"]
    return is_file(path) and read_adapter_config(path).get("peft_type") == LOKR


def write_lokr(directory: Path, source: Path, family: ModelFamily, config: Any) -> int:
    """Write LoKr of a run as `paddlenlp.peft.LoKrModel.from_pretrained` reads it, into an existing directory.

    Args:
        directory: where to; the caller commits it.
        source: what a run has saved.
        family: of the model.
        config: its shape.

    Returns:
        The number of matrices that have an adapter.

    Raises:
        UserError: the adapters are not those of a run, or PaddleNLP has no place for them.
    """
    if not is_file(source / f"{STATE}{SUFFIX}"):
        raise UserError(f"{source}: has no {STATE}{SUFFIX}, as adapters of a run have; merge them instead")
    names = family.names()
    prefix = names.paddlenlp_prefix(config)
    if prefix is None:
        raise UserError(f"{source}: PaddleNLP's names of a {family.name} are not known; merge the adapters instead")
    files, values, modules = TensorFiles(source, STATE), {}, dict[str, None]()
    for name in files.names:
        module, _, kind = name.rpartition(".")
        place = names.hf_tensors(f"{module}.weight", config)
        if place.stacked or place.num_parts > 1 or len(place.names) > 1:
            raise UserError(f"{source}: {module} is not one matrix in PaddleNLP; merge the adapters instead")
        theirs = re.sub(r"^model\.", prefix, place.names[0].removesuffix(".weight"))
        modules[re.escape(theirs)] = None
        values[f"{theirs}.{kind}"] = files.read(name)
    write_pickle(directory / PICKLE, values)
    told, base = read_adapter_config(source / CONFIG_NAMES["hf"]), read_base(source)
    if base is not None:
        write_base(directory, base)
    write_json(
        directory / LOKR_OF_PADDLENLP,
        {
            "base_model_name_or_path": None if base is None else base.path,
            "decompose_both": False,
            "dtype": "float32",
            "factor": -1,
            "lokr_alpha": told["alpha"],
            "lokr_dim": told["r"],
            "merge_weight": False,
            "target_modules": [*modules],
            "tensor_parallel_degree": -1,
            "trainable_bias": None,
            "trainable_modules": None,
        },
    )
    return len(modules)
