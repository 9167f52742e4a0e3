"""`llmsuite import SOURCE -o DIR`: bring a model from GGUF, HF or PaddleNLP files into a model directory."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.cli.places import ALLOW_NONFINITE
from llmsuite.errors import UserError
from llmsuite.hub.names import hub_name
from llmsuite.plugins.manager import Registry
from llmsuite.regular import exists, is_dir, is_file
from llmsuite.specs import Command

if TYPE_CHECKING:
    from llmsuite.checkpoint.model_dir import ModelDirectory

_PACKAGE = "package:"
_OWN_LAYOUTS = ("hf", "paddlenlp")


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "source",
        type=str,
        help="a .gguf file, a directory with safetensors in the HF or PaddleNLP layout or with .pdparams, package:NAME "
        "for an installed Python package that ships a .gguf file, or a name on a hub: hf:ORG/NAME, "
        "hf:ORG/NAME/FILE.gguf",
    )
    parser.add_argument("-o", "--output", type=str, required=True, help="directory to write; must not exist")
    parser.add_argument("--layout", type=str, default="hf", help="layout to write; see: llmsuite list layouts")
    parser.add_argument(
        "--config", type=str | None, default=None, help="directory of config.json, if not beside SOURCE"
    )
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read .pdparams, by a reader that runs nothing of what is in them"
    )
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_NONFINITE)


def run(args: Any, registry: Registry) -> int:
    from llmsuite.checkpoint.model_dir import open_model
    from llmsuite.convert.gguf import import_gguf
    from llmsuite.files import committed_directory

    target = Path(args.output)
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    if args.layout not in registry.exporters:
        raise UserError(registry.unknown("exporter", args.layout))
    source = _find_source(args.source)
    with committed_directory(target) as directory:
        if source.suffix == ".gguf":
            if args.layout not in _OWN_LAYOUTS:
                raise UserError(f"a GGUF file is imported as hf or paddlenlp; convert that to {args.layout} afterwards")
            import_gguf(source, directory, registry.models, args.layout, args.allow_nonfinite)
        else:
            found = _open(source, Path(args.config) if args.config else None, args.allow_pickle, registry)
            if found.ignored:
                print(f"{source}: {found.description}")
            found = dataclasses.replace(found, allow_nonfinite=args.allow_nonfinite)
            _write(found, directory, args.layout, registry)
    model = open_model(target, registry.models)
    size = sum(path.stat().st_size for path in model.files.paths)
    print(
        f"wrote {target}: {model.family.name}, {len(model.names)} tensors, {size / 1e6:,.0f} MB, {model.layout} layout"
    )
    return 0


def _write(model: ModelDirectory, directory: Path, layout: str, registry: Registry) -> None:
    """Write a model in a layout. Raises UserError, or what an exporter raises; NonFiniteError for values that are not
    finite, which an exporter of a plugin need not look for: they are found as it reads them, or in what it has
    written."""
    from llmsuite.checkpoint.finite import NonFiniteError, first_nonfinite
    from llmsuite.checkpoint.finite_model import checked

    write = registry.exporters[layout].write
    if layout in _OWN_LAYOUTS:  # these look while they write
        write(model, directory)
        return
    write(checked(model), directory)
    if not model.allow_nonfinite and (what := first_nonfinite(sorted(directory.rglob("*.safetensors")))):
        raise NonFiniteError(what.replace(str(directory), f"exporter {layout}: {model.path}"))


def _open(source: Path, config: Path | None, allow_pickle: bool, registry: Registry) -> ModelDirectory:
    from llmsuite.checkpoint.directory import of_gguf
    from llmsuite.checkpoint.model_dir import open_model
    from llmsuite.convert.pdparams import pdparams_files

    if not is_file(source / "config.json") and (way := of_gguf(source)) is not None:
        raise UserError(way)
    if not pdparams_files(source):
        if config is not None:
            raise UserError(f"--config: {source} has its own config.json; it is for .pdparams")
        return open_model(source, registry.models)
    from llmsuite.convert.sources import open_source
    from llmsuite.devices.start import start_paddle
    from llmsuite.inference.load import parameter_shapes

    start_paddle(registry.devices["cpu"].factory(), 1)  # for the shapes a model has to have
    return open_source(source, registry.models, parameter_shapes, config, allow_pickle)


def _find_source(source: str) -> Path:
    if source.startswith(_PACKAGE):
        name = source.removeprefix(_PACKAGE)
        # locates, does not import: nobody's code runs, but that of the package around one with a dot
        found = importlib.util.find_spec(name) if name.isidentifier() else None
        if found is None or found.origin is None:
            raise UserError(f"{source}: no Python package {name!r} is installed")
        files = sorted(Path(found.origin).parent.glob("*.gguf"))
        if len(files) != 1:
            raise UserError(f"{source}: the package ships {len(files)} .gguf files; one is needed")
        return files[0]
    from llmsuite.cli.places import find_place

    path = find_place(source) if hub_name(source) is not None else Path(source)
    if is_dir(path) or (is_file(path) and path.suffix == ".gguf"):
        return path
    raise UserError(
        f"{source}: is neither a .gguf file, a model directory, package:NAME nor a name such as hf:ORG/NAME"
    )


COMMAND = Command(
    name="import", help="import a model from GGUF, HF or PaddleNLP files", add_arguments=add_arguments, run=run
)
