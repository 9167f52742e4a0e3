"""Every rank of a launch: the programs of ranks, and live models that are cut so, beside one that is whole.

tests.multi.rank_programs DIRECTORY TP PP FAMILY...
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.export import export
from llmsuite.inference.load import load_model
from llmsuite.inference.predictor import Predictor
from llmsuite.inference.verify import compare, compare_loop
from llmsuite.parallel import collective
from tests.support.families import FAMILIES
from tests.support.written_family import write_family

VARIATIONS = {
    "llama-odd": ("llama", {"vocab_size": 515}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("llama", {"model_type": "mistral", "sliding_window": 5}),
}


def main(place: str, tp: str, pp: str, *names: str) -> int:
    """Compare everything with the model on one process; ends with 0."""
    degrees = Degrees(int(pp), 1, 1, int(tp))
    directory = Path(place)
    backend = CpuBackend()
    mesh = collective.start(degrees)
    has_loop = degrees.pp == 1
    for name in names:
        family, shape = VARIATIONS.get(name, (name, {}))
        model = directory / name
        static = directory / f"{name} {degrees}"
        if mesh.rank == 0:
            with contextlib.suppress(FileExistsError):
                write_family(model, family, **shape)
            source = open_model(model, FAMILIES)
            export(source, static, backend, model, decoding_loop=has_loop, degrees=degrees)
        collective.barrier()
        source = open_model(model, FAMILIES)
        alone = ModelDecoder(load_model(source, backend))
        live = ModelDecoder(load_model(source, backend, mesh=mesh), mesh)
        predictor = Predictor(static, mesh=mesh)
        logits, of_program, tokens = compare(predictor, alone, "fp32", seed=5)
        _, of_model, _ = compare(live, alone, "fp32", seed=5)
        if has_loop:
            tokens += compare_loop(predictor, alone)
        if mesh.rank == 0:
            print(f"{name}: {logits} logits, {of_program:.1e}, {of_model:.1e}, {tokens} tokens", flush=True)
    return 0
