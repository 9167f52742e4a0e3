"""Opens the model that a command line names, ready to answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.cli.ranks import settle_degrees
from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.regular import is_file

if TYPE_CHECKING:
    from llmsuite.checkpoint.model_dir import ModelDirectory
    from llmsuite.devices.base import DeviceBackend
    from llmsuite.inference.generate import Generator


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model with its tokenizer, ready to answer."""

    generator: Generator
    speaks: bool
    """Whether this process prints and writes: the first rank does."""
    path: Path
    """Where the model was found."""
    configs: tuple[Path, ...]
    """Directories whose generation_config.json and config.json are about it: of its tokenizer, and of the model."""
    model: Any = None
    """The live model; None for an exported one."""
    refreshable: Any = None
    """The live model as one that can take new weights (`llmsuite.inference.refresh.RefreshableModel`), if asked for."""
    of_adapters: Mapping[str, Generator] = dataclasses.field(default_factory=dict)
    """By the names of adapters that rows may have: the same model, with the tokenizer of the adapter if it has one."""


def open_generator(
    args: Any,
    registry: Registry,
    cached: bool = True,
    refreshable: bool = False,
    adapters: Mapping[str, Path] | None = None,
) -> OpenedModel:
    """Start Paddle and load the model.

    Args:
        args: has what `llmsuite.cli.generate.add_model_arguments` adds.
        registry: of devices and families.
        cached: whether to keep keys and values between tokens.
        refreshable: whether its weights will be replaced; on one device, and not of an exported model.
        adapters: directories by the names of adapters that rows of a batch may have; on one device.

    Raises:
        UserError: there is no such model, device or precision.
    """
    if args.device not in registry.devices:
        raise UserError(registry.unknown("device", args.device))
    backend = registry.devices[args.device].factory()
    stored = stored_precision(args, backend, refreshable)
    precision = "fp32" if stored else args.precision
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.launch import is_worker

    start_paddle(backend, args.num_devices, join=is_worker(), answers=True)
    from llmsuite.cli.export import find_program, find_weights
    from llmsuite.data.tokenizer import TextTokenizer
    from llmsuite.inference.adapters import AdaptedDecoder, read_adapters, tokenizers_of
    from llmsuite.inference.decoder import Decoder, ModelDecoder
    from llmsuite.inference.fused import fuse
    from llmsuite.inference.generate import Generator
    from llmsuite.inference.load import AS_TRAINED, as_first_rank, load_model, open_any
    from llmsuite.inference.refresh import RefreshableModel
    from llmsuite.inference.uncached import Uncached
    from llmsuite.parallel import collective

    if reason := backend.unavailable(args.num_devices):
        raise UserError(f"--device {args.device}: {reason}")
    backend.activate(collective.local_rank())
    mesh = collective.start(settle_degrees(args))
    decoder: Decoder
    models: tuple[Path, ...]
    model = taking = None
    places: dict[str, Path] = {}
    if args.engine == "static":
        from llmsuite.inference.predictor import Predictor

        where = find_program(Path(args.model))
        decoder, models = Predictor(where, backend, mesh=mesh), (where,)
        directory = Path(args.tokenizer) if args.tokenizer else where
    else:
        base, config = (Path(value) if value else None for value in (args.base, args.config))
        where = find_weights(Path(args.model))
        source = open_any(where, registry.models, base, config, args.allow_pickle, runs=True)
        directory = Path(args.tokenizer) if args.tokenizer else source.tokenizer_directory
        models = (source.path, *([config] if config else []))
        if refreshable:
            check_refreshable(where, source)
        model = load_model(source, backend, precision, mesh, AS_TRAINED if refreshable else stored)
        if refreshable:
            taking = RefreshableModel(model, backend.ops(precision))
        elif args.num_devices == 1 and not adapters:  # joined matrices are not those of adapters
            fuse(model, backend.ops(precision), cache_dtype="bfloat16" if stored == "bf16" else None)
        decoder = ModelDecoder(model, mesh)
        if adapters:
            decoder = AdaptedDecoder(model, read_adapters(adapters, source, args.allow_pickle))
            places = tokenizers_of(adapters, source, directory if args.tokenizer else None)
    if not cached:
        decoder = Uncached(decoder)
    generators: dict[Path, Generator] = {}
    for place in (directory, *places.values()):
        if place not in generators:
            tokenizer = TextTokenizer(place)
            generators[place] = Generator(decoder, tokenizer, tokenizer.ends(*models), as_first_rank)
    of_adapters = {name: generators[place] for name, place in places.items()}
    speaks = collective.rank() == 0
    return OpenedModel(generators[directory], speaks, where, (directory, *models), model, taking, of_adapters)


def check_refreshable(where: Path, source: ModelDirectory) -> None:
    """Raise UserError for a model that is more than the weights that a trainer brings: what is more would stay."""
    from llmsuite.checkpoint.int8 import input_scales

    if source.beside is not None:
        raise UserError(f"--rl: {where} is what runs beside a model, and weights that are replaced are a model's alone")
    if input_scales(source):
        raise UserError(
            f"--rl: {where} rounds its inputs by scales that new weights do not bring; serve the run's checkpoint"
        )


def check_ranks(args: Any, registry: Registry) -> None:
    """Raise UserError for a precision or a number of ranks that ranks would refuse, before they are started. Imports no
    Paddle: of files without a config.json they tell it themselves."""
    if args.device in registry.devices:
        stored_precision(args, registry.devices[args.device].factory())
    if args.engine == "static":
        return
    from llmsuite.checkpoint.adapter_base import base_path
    from llmsuite.checkpoint.directory import find_adapter, find_model, is_run
    from llmsuite.checkpoint.model_dir import read_config
    from llmsuite.cli.export import find_weights
    from llmsuite.inference.load import check_cut

    place = find_weights(Path(args.model))
    if (adapter := find_adapter(place)) is not None:
        place = Path(args.base) if args.base else base_path(adapter)
    place = Path(args.config) if args.config else find_model(place) if is_run(place) else place
    if is_file(place / "config.json"):
        check_cut(*read_config(place, registry.models), settle_degrees(args))


def stored_precision(args: Any, backend: DeviceBackend, refreshable: bool = False) -> str | None:
    """What the matrices of the model are to be stored in; None for a model of one precision. Imports no Paddle.

    Raises:
        UserError: the device does not have the precision, or not for such a command.
    """
    if args.engine == "static":
        if args.precision != "fp32":
            raise UserError("--precision: an exported program has its own, given to `llmsuite export`; leave it out")
        return None
    known = (*backend.precisions, *(p for p in backend.stored_precisions if p not in backend.precisions))
    if args.precision not in known:
        raise UserError(f"--precision {args.precision}: {backend.name} has {', '.join(known)}")
    if args.precision not in backend.stored_precisions:
        return None
    if args.num_devices > 1:
        raise UserError(f"--precision {args.precision}: on {backend.name} for one device; leave out --num_devices")
    if refreshable and args.precision in (known := backend.precisions_of(trains=True)):
        return None  # it computes as the model that is trained
    if refreshable:
        raise UserError(
            f"--precision {args.precision}: weights that are replaced (--rl) are {' or '.join(known)}; choose one"
        )
    return str(args.precision)
