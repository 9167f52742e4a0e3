"""The command `llmsuite import SOURCE -o DIR`: converts GGUF, HF or PaddleNLP files to a model directory."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.base.errors import UserError
from llmsuite.base.hub.names import hub_name
from llmsuite.base.safe_files import exists, is_dir, is_file
from llmsuite.cli.model_paths import ALLOW_NONFINITE_HELP, optional_path
from llmsuite.contract.registry import Registry

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
    parser.add_argument("--config", type=str | None, default=None, help="directory of config.json, if not with SOURCE")
    parser.add_argument("--allow-pickle", action="store_true", help="read .pdparams, without running any code in them")
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_NONFINITE_HELP)


def run(args: Any, registry: Registry) -> int:
    from llmsuite.base.files import committed_directory
    from llmsuite.checkpoint.convert.gguf import import_gguf
    from llmsuite.checkpoint.model_dir import open_model

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
            found = _open(source, optional_path(args.config), args.allow_pickle, registry)
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
    """Write a model in a layout.

    Raises:
        UserError: the model cannot be written; an exporter may raise others.
        NonFiniteError: values are not finite. An exporter of a plugin need not check: its input and output are checked.
    """
    from llmsuite.checkpoint.finite import NonFiniteError, first_nonfinite
    from llmsuite.checkpoint.finite_model import with_finite_check

    write = registry.exporters[layout].write
    if layout in _OWN_LAYOUTS:  # these exporters check values themselves
        write(model, directory)
        return
    write(with_finite_check(model), directory)
    if model.allow_nonfinite:
        return
    found = first_nonfinite(sorted(directory.rglob("*.safetensors")))
    if found:
        raise NonFiniteError(found.replace(str(directory), f"exporter {layout}: {model.path}"))


def _open(source: Path, config: Path | None, allow_pickle: bool, registry: Registry) -> ModelDirectory:
    from llmsuite.checkpoint.convert.pdparams import pdparams_files
    from llmsuite.checkpoint.directory import gguf_hint
    from llmsuite.checkpoint.model_dir import open_model

    hint = None if is_file(source / "config.json") else gguf_hint(source)
    if hint is not None:
        raise UserError(hint)
    if not pdparams_files(source):
        if config is not None:
            raise UserError(f"--config: {source} has its own config.json; it is for .pdparams")
        return open_model(source, registry.models)
    from llmsuite.checkpoint.convert.sources import open_source
    from llmsuite.devices.start import start_paddle
    from llmsuite.inference.load import parameter_shapes

    start_paddle(registry.devices["cpu"].factory(), 1)  # for the expected shapes of the parameters
    return open_source(source, registry.models, parameter_shapes, config, allow_pickle)


def _find_source(source: str) -> Path:
    if source.startswith(_PACKAGE):
        name = source.removeprefix(_PACKAGE)
        # locates the package without importing it; for a dotted name it would run code of the parent package
        found = None
        if name.isidentifier():
            found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise UserError(f"{source}: no Python package {name!r} is installed")
        files = sorted(Path(found.origin).parent.glob("*.gguf"))
        if len(files) != 1:
            raise UserError(f"{source}: the package ships {len(files)} .gguf files; one is needed")
        return files[0]
    from llmsuite.cli.model_paths import find_model_path

    path = find_model_path(source) if hub_name(source) is not None else Path(source)
    if is_dir(path) or (is_file(path) and path.suffix == ".gguf"):
        return path
    raise UserError(
        f"{source}: is neither a .gguf file, a model directory, package:NAME nor a name such as hf:ORG/NAME"
    )
