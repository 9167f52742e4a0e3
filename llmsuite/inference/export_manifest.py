"""Files and manifest of an exported model. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.files import MANIFEST, read_json_object
from llmsuite.base.safe_files import is_dir, is_file
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.base import PADDLE_DTYPE
from llmsuite.parallel.mesh import Mesh

FORMAT = 2
KIND = "llmsuite static program"
PROGRAM = "model.json"
PARAMETERS = "model.pdiparams"
LOOP = "loop.json"
"""The program with the decoding loop, where it was exported."""
KERNELS = "kernels"
"""Directory of the custom operations of a program with packed matrices: their sources, and a script that builds and
registers them with Paddle's own tools."""
DEPLOYED_WEIGHTS = "hf"
DEPLOYED_PROGRAM = "static"
"""Directories that `llmsuite deploy` writes: weights in the HF layout, and an exported model."""
ALONE = Degrees(1, 1, 1, 1)
_LATER = ("tensor_parallel_degree", "pipeline_parallel_degree", "stages", "has_kernels", "adapter")
"""Fields that manifests of earlier versions do not have."""


@dataclasses.dataclass(frozen=True)
class ExportManifest:
    """The manifest of an exported model."""

    precision: str
    cache_shapes: list[list[int]]
    """Shape of each tensor of a rank's cache, without the batch and with 0 positions; of all pipeline stages."""
    source: str
    """Directory of the exported model; of an adapter, that of its base model."""
    source_sha256: dict[str, str]
    """Digest of each file of the model, and of the recipe of its run if there is one."""
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    stages: list[int] = dataclasses.field(default_factory=lambda: [0])
    """Number of the first tensor of the cache of each pipeline stage."""
    has_kernels: bool = False
    """True where matrices are packed in the precision and all else is float32; then there is `KERNELS`."""
    adapter: str | None = None
    """Directory of the adapter that was added."""

    @property
    def dtype(self) -> str:
        """Paddle's name for the dtype of the cache, and of hidden states between stages."""
        if self.has_kernels:
            return PADDLE_DTYPE["fp32"]
        return PADDLE_DTYPE["bf16" if self.precision == "int8" else self.precision]

    @property
    def degrees(self) -> Degrees:
        """The ranks that the programs are for."""
        return Degrees(self.pipeline_parallel_degree, 1, 1, self.tensor_parallel_degree)

    def cache_shapes_of(self, stage: int) -> list[list[int]]:
        """The `cache_shapes` of a pipeline stage."""
        bounds = [*self.stages, len(self.cache_shapes)]
        return self.cache_shapes[bounds[stage] : bounds[stage + 1]]


def rank_directory(directory: Path, mesh: Mesh) -> Path:
    """Directory of the programs of a rank, in that of an exported model."""
    return directory if mesh.degrees.num_ranks == 1 else directory / f"rank_{mesh.rank}"


def is_exported(path: Path) -> bool:
    """True where a directory has a program that `export` wrote."""
    return is_file(path / MANIFEST) and any(is_file(path / name / PROGRAM) for name in ("", "rank_0"))


def find_program(path: Path) -> Path:
    """The directory of the exported model, given that directory or the output of `deploy`."""
    if not is_exported(path) and is_exported(path / DEPLOYED_PROGRAM):
        return path / DEPLOYED_PROGRAM
    return path


def find_weights(path: Path) -> Path:
    """The directory of the weights in the output of `deploy`; any other path unchanged."""
    if is_file(path / DEPLOYED_WEIGHTS / "config.json") and is_dir(path / DEPLOYED_PROGRAM):
        return path / DEPLOYED_WEIGHTS
    return path


def read_manifest(path: Path) -> ExportManifest:
    """Read the manifest of an exported model. Raises UserError when the directory has no exported model, or one of
    another version."""
    if not is_exported(path):
        arguments = f"{path} -o DIR" if is_dir(path) else f"MODEL -o {path}"  # a model or a run may be there
        raise UserError(f"{path}: holds no exported model; make one with `llmsuite export {arguments}`")
    manifest = read_json_object(path / MANIFEST)
    try:
        if (manifest["kind"], manifest["format"]) != (KIND, FORMAT):
            raise UserError(f"{path / MANIFEST}: is of another kind or version; export the model again")
        names = [field.name for field in dataclasses.fields(ExportManifest)]
        return ExportManifest(**{name: manifest[name] for name in names if name in manifest or name not in _LATER})
    except (KeyError, TypeError) as error:
        raise UserError(f"{path / MANIFEST}: has no {error}; export the model again") from error
