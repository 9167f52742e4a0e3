"""The commands `llmsuite export`, `verify` and `deploy`: write a trained model as a Paddle Inference program, and check
that both give the same results."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.files import claimed_directory, os_errors, remove_content
from llmsuite.base.safe_files import exists, is_dir, is_file
from llmsuite.cli.model_paths import ALLOW_NONFINITE_HELP, optional_path, resolve_model_arguments
from llmsuite.cli.ranks import add_degrees, launch_ranks
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.variables import LOCAL_RANK, RANK, number_in

if TYPE_CHECKING:
    from llmsuite.checkpoint.model_dir import ModelDirectory
    from llmsuite.devices.base import DeviceBackend
    from llmsuite.inference.export_manifest import ExportManifest

_SINGLE_RANK = Degrees(1, 1, 1, 1)


def deploy_arguments(parser: Any) -> None:
    parser.add_argument("source", type=str, help="a run, a checkpoint or model directory of any layout, or an adapter")
    parser.add_argument("-o", "--output", type=str, required=True, help="directory to write; must not exist")
    parser.add_argument("--base", type=str | None, default=None, help="base model of an adapter")
    parser.add_argument(
        "--config", type=str | None, default=None, help="directory of config.json, if not with the weights"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="read .pdparams; see: llmsuite merge --help")
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_NONFINITE_HELP)
    parser.add_argument(
        "--precision",
        type=Literal["fp32", "bf16", "fp16", "int8", "nf4", "fp4", "int4"],
        default="fp32",
        help="precision of the program; on cpu, of its weight matrices only",
    )
    parser.add_argument(
        "--decoding_loop", action="store_true", help="also export greedy decoding as one program (loop.json)"
    )
    parser.add_argument("--device", type=str, default="cpu", help="see: llmsuite list devices")


def export_arguments(parser: Any) -> None:
    deploy_arguments(parser)
    add_degrees(parser)


def verify_arguments(parser: Any) -> None:
    parser.add_argument("model", type=str, help="output directory of `llmsuite export` or `llmsuite deploy`")
    parser.add_argument(
        "--source", type=str | None, default=None, help="the trained model, if it was moved since the export"
    )
    parser.add_argument("--base", type=str | None, default=None, help="base model of an adapter")
    parser.add_argument(
        "--config", type=str | None, default=None, help="directory of config.json, if not with the weights"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="read .pdparams; see: llmsuite merge --help")
    parser.add_argument("--device", type=str, default="cpu", help="see: llmsuite list devices")


def run_export(args: Any, registry: Registry) -> int:
    resolve_model_arguments(args)
    backend = _start(args, registry)
    target = Path(args.output)
    degrees = Degrees(args.pipeline_parallel_degree, 1, 1, args.tensor_parallel_degree or 1)
    _export(Path(args.source), target, backend, args, registry, degrees)
    size = sum(path.stat().st_size for path in target.rglob("*") if is_file(path))
    ranks = ""
    if degrees.num_ranks != 1:
        ranks = f" for each of {degrees.num_ranks} ranks"
    print(f"wrote {target}: program and parameters{ranks}, {args.precision}, {size / 1e6:,.0f} MB")
    return 0


def run_verify(args: Any, registry: Registry) -> int:
    resolve_model_arguments(args, ("source",))
    from llmsuite.inference.export_manifest import find_program, read_manifest
    from llmsuite.launch.launch import is_worker

    program = find_program(Path(args.model))
    args.num_devices = read_manifest(program).degrees.num_ranks
    if args.num_devices > 1 and not is_worker():
        return launch_ranks(args, registry)
    backend = _start(args, registry, args.num_devices)
    result = _verify(program, backend, args, registry)
    if _is_first_rank():
        print(result)
    return 0


def run_deploy(args: Any, registry: Registry) -> int:
    resolve_model_arguments(args)
    backend = _start(args, registry)
    from llmsuite.checkpoint.int8 import input_scales
    from llmsuite.inference.export_manifest import DEPLOYED_PROGRAM, DEPLOYED_WEIGHTS

    target = Path(args.output)
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    model = _open(Path(args.source), args, registry)
    if input_scales(model):
        raise UserError(f"{args.source}: rounds its inputs, which HF's files cannot express; use `llmsuite export`")
    part = target.with_name(target.name + ".part")
    with claimed_directory(part, target), os_errors(target):
        try:
            remove_content(part)
            _deploy(model, part, target, backend, args, registry)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    print(f"wrote {target}: {DEPLOYED_WEIGHTS} for `llmsuite generate`, {DEPLOYED_PROGRAM} for Paddle Inference")
    return 0


def _deploy(
    model: ModelDirectory, part: Path, target: Path, backend: DeviceBackend, args: Any, registry: Registry
) -> None:
    """Write the merged model and its program into the directory `part`, which becomes `target`, and verify them."""
    from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite
    from llmsuite.inference.export_manifest import DEPLOYED_PROGRAM, DEPLOYED_WEIGHTS

    rewrite = Rewrite(model, OutputFormat("hf"))
    rewrite.write(part / DEPLOYED_WEIGHTS)
    print(f"[1/3] merged: {len(rewrite.specs)} tensors, {rewrite.num_bytes / 1e6:,.1f} MB", flush=True)
    args.base = args.config = None  # they belong to the original source; from here on the source is the merged model
    merged = target / DEPLOYED_WEIGHTS
    _export(part / DEPLOYED_WEIGHTS, part / DEPLOYED_PROGRAM, backend, args, registry, moved_to=merged)
    print(f"[2/3] exported: {args.precision} on {backend.name}", flush=True)
    args.source = str(part / DEPLOYED_WEIGHTS)
    print(f"[3/3] verified: {_verify(part / DEPLOYED_PROGRAM, backend, args, registry)}", flush=True)


def _is_first_rank() -> bool:
    return number_in(os.environ, RANK, 0) == 0


def _start(args: Any, registry: Registry, num_ranks: int = 1) -> DeviceBackend:
    """Start Paddle, as a single process or one of several ranks, on a device that Paddle Inference supports."""
    backend: DeviceBackend = registry.device(args.device).factory()
    from llmsuite.devices.start import start_paddle
    from llmsuite.inference.exported_readme import predictor_calls

    start_paddle(backend, num_ranks, join=num_ranks > 1, inference_only=True)
    if reason := backend.unavailable(num_ranks):
        raise UserError(f"--device {args.device}: {reason}")
    backend.activate(number_in(os.environ, LOCAL_RANK, 0) if num_ranks > 1 else 0)
    predictor_calls(backend)  # refused before anything is read or written
    return backend


def _open(path: Path, args: Any, registry: Registry) -> ModelDirectory:
    from llmsuite.inference.export_manifest import find_weights
    from llmsuite.inference.load import open_any

    base = optional_path(args.base)
    config = optional_path(args.config)
    model = open_any(find_weights(path), registry.models, base, config, args.allow_pickle)
    return dataclasses.replace(model, allow_nonfinite=bool(args.get("allow_nonfinite")))


def _export(
    source: Path,
    target: Path,
    backend: DeviceBackend,
    args: Any,
    registry: Registry,
    degrees: Degrees = _SINGLE_RANK,
    moved_to: Path | None = None,
) -> None:
    from llmsuite.inference.export import export

    model = _open(source, args, registry)
    tokenizer = model.tokenizer_directory
    export(model, target, backend, tokenizer, args.precision, args.decoding_loop, degrees, moved_to)


def _verify(program: Path, backend: DeviceBackend, args: Any, registry: Registry) -> str:
    from llmsuite.checkpoint.directory import find_adapter
    from llmsuite.checkpoint.int8 import input_scales
    from llmsuite.inference.decoder import ModelDecoder
    from llmsuite.inference.export_manifest import DEPLOYED_WEIGHTS, read_manifest
    from llmsuite.inference.fused import fuse
    from llmsuite.inference.load import load_model
    from llmsuite.inference.predictor import Predictor
    from llmsuite.inference.verify import LogitsMismatch, check_files, compare, compare_loop
    from llmsuite.parallel import collective

    exported = read_manifest(program)
    mesh = None
    if exported.degrees != _SINGLE_RANK:
        mesh = collective.start(exported.degrees)
    merged = program.parent / DEPLOYED_WEIGHTS  # written by `deploy`
    if args.source:
        source = Path(args.source)
    elif is_dir(merged):
        source = merged
    else:
        source = Path(exported.adapter or exported.source)
    adapter = find_adapter(source)
    if adapter is not None and args.base is None:
        args.base = exported.source
    base = source if adapter is None else Path(args.base)
    num_files = 0
    if _is_first_rank():
        num_files = check_files(program, base, adapter)
    opened = _open(source, args, registry)
    tolerance = exported.precision
    if exported.has_kernels:  # its kernels round inputs to bfloat16, in any precision of the matrices
        model = load_model(opened, backend, mesh=mesh, packed=exported.precision)
        fuse(model, backend.ops("fp32"))  # the same kernels as `generate` uses
        tolerance = "bf16"
    else:
        model = load_model(opened, backend, "bf16" if exported.precision == "int8" else exported.precision, mesh)
    if input_scales(opened):
        tolerance = "int8"  # a difference in the last bit may round an input to the next int8 value
    trained = ModelDecoder(model, mesh)
    predictor = Predictor(program, backend, mesh=mesh)
    try:
        count, difference, num_tokens = compare(predictor, trained, tolerance)
    except LogitsMismatch as error:
        raise UserError(f"{error}; {_first_difference(opened, backend, exported)}") from error
    if predictor.has_loop:
        num_tokens += compare_loop(predictor, trained, tolerance)
    return (
        f"{num_files} digests match, {count:,} logits differ by at most {difference:.1e} of the largest, "
        f"{num_tokens} greedy tokens are the same"
    )


def _first_difference(source: ModelDirectory, backend: DeviceBackend, exported: ExportManifest) -> str:
    """Describe the first module in which a program for one device, exported now, differs from the model."""
    from llmsuite.inference.decoder import ModelDecoder
    from llmsuite.inference.export import record_export
    from llmsuite.inference.fused import disable_decoder_kernels, fuse
    from llmsuite.inference.load import load_model
    from llmsuite.inference.parity import TokenRows, first_difference, record_decoding, side

    precision = exported.precision
    rows = TokenRows.random(source.config.vocab_size, 12)
    if exported.has_kernels:
        model = load_model(source, backend, packed=precision)
        close = "bf16"
        fuse(model)
        disable_decoder_kernels(model)
    else:
        model = load_model(source, backend, "bf16" if precision == "int8" else precision)
        close = precision
    trained = side([record_decoding(model, ModelDecoder(model).forward, rows)], "bf16" if close == "int8" else close)
    found = first_difference(trained, side([record_export(source, backend, precision, rows)], trained.precision), model)
    if found is None:
        return "all modules of a newly exported program for one device agree: export it again"
    return f"first module that differs: {found}"
