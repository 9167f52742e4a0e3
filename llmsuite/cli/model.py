"""Loads the model that a command line names, ready to generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file
from llmsuite.cli.ranks import settle_degrees
from llmsuite.contract.registry import Registry, left_out_precision

if TYPE_CHECKING:
    from llmsuite.checkpoint.model_dir import ModelDirectory
    from llmsuite.devices.base import DeviceBackend
    from llmsuite.inference.generate import Generator


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model with its tokenizer, ready to generate."""

    generator: Generator
    is_main_rank: bool
    """True in the first rank, which prints and writes for all."""
    path: Path
    """The path of the model."""
    configs: tuple[Path, ...]
    """Directories whose generation_config.json and config.json are about it: of its tokenizer, and of the model."""
    model: Any = None
    """The live model; None for an exported one."""
    refreshable: Any = None
    """The live model as a `llmsuite.inference.refresh.RefreshableModel`, which can take new weights; None unless
    requested."""
    adapter_generators: Mapping[str, Generator] = dataclasses.field(default_factory=dict)
    """Generators by the name of an adapter: the same model, with the tokenizer of the adapter if it has one."""


def open_generator(
    args: Any,
    registry: Registry,
    cached: bool = True,
    refreshable: bool = False,
    adapters: Mapping[str, Path] | None = None,
) -> OpenedModel:
    """Start Paddle and load the model.

    Args:
        args: the arguments of `llmsuite.cli.generate.add_model_arguments`.
        registry: of devices and families.
        cached: use a KV cache.
        refreshable: the weights will be replaced later; only on one device, and not for an exported model.
        adapters: directories of adapters by the name that requests give; only on one device.

    Raises:
        UserError: there is no such model, device or precision.
    """
    backend = registry.device(args.device).factory()
    stored = stored_precision(args, backend, refreshable)
    precision = "fp32" if stored else args.precision
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.launch import is_worker

    start_paddle(backend, args.num_devices, join=is_worker(), inference_only=True)
    from llmsuite.cli.model_paths import optional_path
    from llmsuite.data.tokenizer import TextTokenizer
    from llmsuite.inference.adapters import MultiLoRADecoder, adapter_tokenizers, read_adapters
    from llmsuite.inference.decoder import Decoder, ModelDecoder
    from llmsuite.inference.export_manifest import find_program, find_weights
    from llmsuite.inference.fused import fuse
    from llmsuite.inference.generate import Generator
    from llmsuite.inference.load import AS_TRAINED, broadcast_tokens, load_model, open_any
    from llmsuite.inference.refresh import RefreshableModel
    from llmsuite.inference.uncached import UncachedDecoder
    from llmsuite.parallel import collective

    if reason := backend.unavailable(args.num_devices):
        raise UserError(f"--device {args.device}: {reason}")
    backend.activate(collective.local_rank())
    backend.check_precision(precision)
    mesh = collective.start(settle_degrees(args))
    decoder: Decoder
    models: tuple[Path, ...]
    model = None
    refreshable_model = None
    places: dict[str, Path] = {}
    if args.engine == "static":
        from llmsuite.inference.predictor import Predictor

        where = find_program(Path(args.model))
        decoder = Predictor(where, backend, mesh=mesh)
        models = (where,)
        directory = optional_path(args.tokenizer) or where
    else:
        config = optional_path(args.config)
        where = find_weights(Path(args.model))
        source = open_any(where, registry.models, optional_path(args.base), config, args.allow_pickle, runs=True)
        directory = optional_path(args.tokenizer) or source.tokenizer_directory
        models = tuple(path for path in (source.path, config) if path)
        if refreshable:
            check_refreshable(where, source)
        model = load_model(source, backend, precision, mesh, AS_TRAINED if refreshable else stored)
        if refreshable:
            refreshable_model = RefreshableModel(model, backend.ops(precision))
        elif args.num_devices == 1 and not adapters:  # fused matrices do not fit the modules of adapters
            fuse(model, backend.ops(precision), cache_dtype="bfloat16" if stored == "bf16" else None)
        decoder = ModelDecoder(model, mesh)
        if adapters:
            decoder = MultiLoRADecoder(model, read_adapters(adapters, source, args.allow_pickle))
            places = adapter_tokenizers(adapters, source, optional_path(args.tokenizer))
    if not cached:
        decoder = UncachedDecoder(decoder)
    generators: dict[Path, Generator] = {}
    for place in (directory, *places.values()):
        if place not in generators:
            tokenizer = TextTokenizer(place)
            generators[place] = Generator(decoder, tokenizer, tokenizer.stop_token_ids(*models), broadcast_tokens)
    adapter_generators = {name: generators[place] for name, place in places.items()}
    is_main_rank = collective.rank() == 0
    return OpenedModel(
        generators[directory], is_main_rank, where, (directory, *models), model, refreshable_model, adapter_generators
    )


def check_refreshable(where: Path, source: ModelDirectory) -> None:
    """Raise UserError for a model with more parts than the weights that a trainer sends: they would keep old values."""
    from llmsuite.checkpoint.int8 import input_scales

    if source.side_adapter is not None:
        raise UserError(f"--rl: {where} is a side adapter of a model, and only the weights of a model can be replaced")
    if input_scales(source):
        raise UserError(
            f"--rl: {where} rounds its inputs with scales that new weights do not have; serve the run's checkpoint"
        )


def check_ranks(args: Any, registry: Registry) -> None:
    """Raise UserError for a precision or a number of ranks that ranks would refuse, before they are started. It does
    not import Paddle; for files without a config.json the ranks check it themselves."""
    if (device := registry.find_device(args.device)) is not None:
        stored_precision(args, device.factory())
    if args.engine == "static":
        return
    from llmsuite.checkpoint.adapter_base import base_path
    from llmsuite.checkpoint.directory import find_adapter, find_model, is_run
    from llmsuite.checkpoint.model_dir import read_config
    from llmsuite.inference.export_manifest import find_weights
    from llmsuite.inference.load import check_cut

    place = find_weights(Path(args.model))
    if (adapter := find_adapter(place)) is not None:
        place = Path(args.base) if args.base else base_path(adapter)
    if args.config:
        place = Path(args.config)
    elif is_run(place):
        place = find_model(place)
    if is_file(place / "config.json"):
        check_cut(*read_config(place, registry.models), settle_degrees(args))


def stored_precision(args: Any, backend: DeviceBackend, refreshable: bool = False) -> str | None:
    """The precision of weight-only quantised matrices; None for a model of one precision. Does not import Paddle.

    Raises:
        UserError: the device does not support the precision, or not for this command.
    """
    if args.engine == "static":
        if args.precision != "fp32":
            raise UserError("--precision: of an exported program is set by `llmsuite export`; leave it out")
        return None
    known = (*backend.precisions, *(p for p in backend.weight_only_precisions if p not in backend.precisions))
    if args.precision not in known:
        hint = left_out_precision(backend.name, args.precision)
        raise UserError(f"--precision {args.precision}: {backend.name} has {', '.join(known)}{hint}")
    if args.precision not in backend.weight_only_precisions:
        return None
    if args.num_devices > 1:
        raise UserError(f"--precision {args.precision}: on {backend.name} for one device; leave out --num_devices")
    if not refreshable:
        return str(args.precision)
    known = backend.precisions_of(trains=True)
    if args.precision not in known:
        raise UserError(
            f"--precision {args.precision}: weights that are replaced (--rl) are {' or '.join(known)}; choose one"
        )
    return None  # it computes as the model in training
