"""The commands `llmsuite merge` and `llmsuite convert`: write a model in another layout, dtype or number of files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists, real_path
from llmsuite.cli.amounts import parse_amount
from llmsuite.cli.model_paths import ALLOW_NONFINITE_HELP
from llmsuite.contract.registry import Registry

_LAYOUT = Literal["hf", "paddlenlp", "distcp", "gguf"]
_LAYOUT_HELP = (
    "hf, paddlenlp; distcp: for dist.load_state_dict of Paddle, with PaddleNLP's names; gguf: one file for llama.cpp, "
    "with a Modelfile for Ollama; needs the package gguf"
)


def _common_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument("-o", "--output", type=str, required=True, help="directory to write; must not exist")
    parser.add_argument(
        "--dtype",
        type=Literal["fp32", "bf16", "fp16", "fp8", "int8", "q8_0", "q5_1", "q4_1", "q4_k_m"] | None,
        default=None,
        help="default: unchanged, or bf16 for FP8 models, or fp16 for GGUF; fp8 has one scale for each block of 128 x "
        "128; int8, with scales, only for a run trained with qat.weight_bits; q8_0, q5_1, q4_1, q4_k_m only for GGUF",
    )
    parser.add_argument(
        "--max-shard-size", type=str, default=None, help="size limit of each file, such as 5GB (default: 4GiB)"
    )
    parser.add_argument("--split-num", type=PositiveInt | None, default=None, help="number of files, of equal size")
    parser.add_argument("--config", type=str | None, default=None, help="directory of config.json, if not in SRC")
    parser.add_argument(
        "--fused",
        action="store_true",
        help="with --layout paddlenlp or distcp: fuse qkv and gate-up into one matrix each",
    )
    parser.add_argument("--allow-pickle", action="store_true", help="read .pdparams, without running any code in them")
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_NONFINITE_HELP)


def merge_arguments(parser: Any) -> None:
    parser.add_argument(
        "source",
        type=str,
        help="a run, a checkpoint or model directory, a directory of dist.save_state_dict, PaddleNLP's "
        "model_state.tp0X_pp0Y.pdparams, or a LoRA adapter",
    )
    parser.add_argument(
        "more", type=str, nargs="*", help="the other parts of a checkpoint of machines without a shared output_dir"
    )
    parser.add_argument(
        "--base", type=str | None, default=None, help="base model of an adapter that does not name its own"
    )
    parser.add_argument("--layout", type=_LAYOUT, default="hf", help=_LAYOUT_HELP)
    _common_arguments(parser)


def convert_arguments(parser: Any) -> None:
    parser.add_argument(
        "source", type=str, help="a model in the HF, PaddleNLP or llmsuite layout, a LoRA adapter, or a run"
    )
    parser.add_argument("--layout", type=_LAYOUT, required=True, help=_LAYOUT_HELP)
    _common_arguments(parser)


def run(args: Any, registry: Registry) -> int:
    from llmsuite.devices.start import start_paddle

    start_paddle(registry.devices["cpu"].factory(), 1)  # for the expected shapes of the parameters
    from llmsuite.base.progress import track_bytes
    from llmsuite.checkpoint.adapter_base import Base, base_path, check_base, config_names, stored_format
    from llmsuite.checkpoint.convert.adapter import add_adapter
    from llmsuite.checkpoint.convert.distcp_export import write_distcp
    from llmsuite.checkpoint.convert.rewrite import DTYPES, OutputFormat, Rewrite
    from llmsuite.checkpoint.convert.sources import open_source
    from llmsuite.checkpoint.directory import find_adapter
    from llmsuite.checkpoint.int8 import quantise_model, rounded_layers
    from llmsuite.checkpoint.model_dir import Layout
    from llmsuite.cli.model_paths import resolve_model_arguments
    from llmsuite.inference.load import parameter_shapes

    target = Path(args.output)
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    _check_gguf(args)
    if args.fused and args.layout not in ("paddlenlp", "distcp"):
        raise UserError("--fused: only PaddleNLP has fused matrices; add --layout paddlenlp")
    if args.layout == "distcp" and args.dtype in ("fp8", "int8"):
        raise UserError(f"--dtype {args.dtype}: is not written with --layout distcp; choose fp32, bf16 or fp16")
    if args.max_shard_size is not None and args.split_num:
        raise UserError("--split-num: contradicts --max-shard-size; give one of them")
    resolve_model_arguments(args)
    source = Path(args.source)
    adapter = find_adapter(source)
    if args.get("base") and adapter is None:
        raise UserError(f"--base: {source} is no LoRA adapter: it has neither {' nor '.join(config_names())}")
    is_int8 = args.dtype == "int8"
    if is_int8:
        _check_int8(source, adapter is not None, args.fused)
    config = Path(args.config) if args.config else None
    given = Path(args.base) if args.get("base") else None
    base = source if adapter is None else given or base_path(adapter)
    model = open_source(base, registry.models, parameter_shapes, config, args.allow_pickle)
    if adapter is not None:
        if given is None:
            check_base(adapter, Base(str(base), model.digest()))
        model = add_adapter(model, adapter, args.allow_pickle)
        format = stored_format(adapter)
        if format is not None:
            print(
                f"{adapter} was trained on a base stored as {format.described}; it is merged into the dequantised "
                "values"
            )
    model = dataclasses.replace(model, allow_nonfinite=args.allow_nonfinite)
    if args.layout == "gguf":
        return _write_gguf(model, target, args)
    if is_int8:
        model = quantise_model(model, rounded_layers(model.path))
    size = _max_file_bytes(args)
    dtype = None
    if args.dtype and not is_int8:
        dtype = DTYPES[args.dtype]
    layout: Layout = "hf" if args.layout == "hf" else "paddlenlp"
    rewrite = Rewrite(model, OutputFormat(layout, dtype, size, args.split_num, args.fused))
    with track_bytes(rewrite.num_bytes, f"writing {target}") as progress:
        if args.layout == "distcp":
            files = write_distcp(rewrite, target, progress)
        else:
            rewrite.write(target, progress)
            files = len(list(target.glob("*.safetensors")))
    dtypes = "/".join(sorted({spec.dtype for spec in rewrite.specs}))
    print(
        f"wrote {target}: {model.family.name}, {len(rewrite.specs)} tensors in {files} file{'s' * (files > 1)}, "
        f"{rewrite.num_bytes / 1e6:,.0f} MB of {dtypes}, {args.layout} layout"
    )
    return 0


def _max_file_bytes(args: Any) -> int:
    from llmsuite.checkpoint.tensor_writer import MAX_FILE_BYTES

    if not args.max_shard_size:
        return MAX_FILE_BYTES
    return max(1, int(parse_amount("--max-shard-size", args.max_shard_size, "bytes")))


def _check_int8(source: Path, is_adapter: bool, fused: bool) -> None:
    """Raise UserError for a model that cannot be written in int8."""
    reason = ""
    if is_adapter:
        reason = f"{source} is a LoRA adapter, which was not trained for int8"
    if fused:
        reason = "--fused matrices have no such scales"
    if reason:
        raise UserError(f"--dtype int8: has a scale for each output of a layer, and {reason}; leave one of the two out")


def _check_gguf(args: Any) -> None:
    """Raise UserError for options that contradict --layout."""
    own = ("q8_0", "q5_1", "q4_1", "q4_k_m")
    if args.layout != "gguf":
        if args.dtype in own:
            raise UserError(
                f"--dtype {args.dtype}: is a dtype of GGUF; add --layout gguf, or choose fp32, bf16 or fp16"
            )
        return
    if args.dtype in ("fp8", "int8"):
        raise UserError(f"--dtype {args.dtype}: GGUF has no such dtype; choose fp32, bf16, fp16, {', '.join(own)}")
    if idle := [key for key in ("max_shard_size", "split_num") if args.get(key)]:
        raise UserError(f"--{idle[0].replace('_', '-')}: a GGUF model is one file")


def _write_gguf(model: Any, target: Path, args: Any) -> int:
    from llmsuite.base.files import check_disk, committed_directory
    from llmsuite.base.progress import track_bytes
    from llmsuite.checkpoint.convert.gguf_export import GgufExport
    from llmsuite.inference.ollama import MODELFILE, modelfile, read_dialogue

    export = GgufExport(model, args.dtype or "fp16")
    dialogue = read_dialogue(model.tokenizer_directory)
    check_disk(target, export.num_bytes)
    with committed_directory(target, {"format": 1}) as directory:
        with track_bytes(export.num_bytes, f"writing {target}") as progress:
            export.write(directory / "model.gguf", dialogue, progress)
        text = modelfile(model.tokenizer_directory, "model.gguf", dialogue.adds_bos)
        (directory / MODELFILE).write_text(text, encoding="utf-8")
    print(
        f"wrote {target / 'model.gguf'}: {export.architecture}, {len(export.tensors)} tensors, "
        f"{export.num_bytes / 1e6:,.0f} MB, matrices of {export.kinds}, tokenizer {export.vocabulary.split}"
    )
    for remark in export.remarks:
        print(f"note: {remark}")
    return 0


def run_merge(args: Any, registry: Registry) -> int:
    from llmsuite.checkpoint.local_storage import joined_directory

    if not args.more:
        return run(args, registry)
    parts = [Path(args.source), *map(Path, args.more)]
    with joined_directory(parts, Path(f"{args.output}.gathered")) as directory:
        args.source = str(directory)
        return run(args, registry)


def run_convert(args: Any, registry: Registry) -> int:
    from llmsuite.checkpoint.directory import find_adapter
    from llmsuite.cli.model_paths import resolve_model_arguments

    resolve_model_arguments(args, needs_base=not args.config)  # for the config of an adapter's model
    adapter = find_adapter(Path(args.source))
    if adapter is None:
        return run(args, registry)
    return _convert_adapter(adapter, args, registry)


def _convert_adapter(source: Path, args: Any, registry: Registry) -> int:
    from llmsuite.adapters.lora import FIRST_FACTOR, SECOND_FACTOR
    from llmsuite.base.files import committed_directory
    from llmsuite.checkpoint.adapter_base import base_path
    from llmsuite.checkpoint.adapter_dir import open_adapters
    from llmsuite.checkpoint.adapter_writer import write_adapters
    from llmsuite.checkpoint.convert.paddlenlp_methods import method_of, write_method
    from llmsuite.checkpoint.finite import NonFiniteError, first_nonfinite
    from llmsuite.checkpoint.model_dir import read_config
    from llmsuite.checkpoint.side_adapters import is_side_adapter
    from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
    from llmsuite.devices.start import start_paddle
    from llmsuite.inference.load import parameter_shapes

    if args.layout in ("gguf", "distcp"):
        raise UserError(
            f"--layout {args.layout}: {source} is an adapter; use llmsuite merge, which merges it into its base"
        )
    keys = ["dtype", "max_shard_size", "split_num", "fused"]
    if not is_side_adapter(source):
        keys.append("allow_pickle")
    if idle := [key for key in keys if args.get(key)]:
        raise UserError(f"--{idle[0].replace('_', '-')}: {source} is an adapter, which is written unchanged")
    target = Path(args.output)
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    start_paddle(registry.devices["cpu"].factory(), 1)  # before paddlenlp is imported
    config_directory = Path(args.config) if args.config else base_path(source)
    family, config = read_config(config_directory, registry.models)
    nonfinite = None if args.allow_nonfinite else first_nonfinite(sorted(source.glob("*.safetensors")))
    if nonfinite:
        raise NonFiniteError(nonfinite)
    if is_side_adapter(source):
        return _convert_side_adapter(source, target, family, config, args)
    method = None
    if args.layout == "paddlenlp":
        method = method_of(source)
    own = None if method is None else method.paddlenlp
    if method is not None and own is not None and not method.stores_pair:
        with committed_directory(target, {"format": 1}) as directory:
            count = write_method(directory, source, method, family, config)
            copy_tokenizer(source, directory)
        print(f"wrote {target}: {own.label} of {count} matrices of a {family.name}, paddlenlp layout")
        return 0
    adapters, saved, config = open_adapters(source, family, config)
    specs = [saved.spec(f"{m}.{factor}") for m in adapters.modules for factor in (FIRST_FACTOR, SECOND_FACTOR)]
    matrices = parameter_shapes(family, config)
    for first, second in zip(specs[::2], specs[1::2], strict=True):
        matrix = matrices[f"{first.name.rpartition('.')[0]}.weight"]
        if (*first.shape[:-1], second.shape[-1]) != matrix:
            raise UserError(
                f"{source}: {first.name} and {second.name} are {list(first.shape)} x {list(second.shape)}; the matrix "
                f"of the model is {list(matrix)}"
            )
    manifest: dict[str, Any] = {"format": 1}
    with committed_directory(target, manifest) as directory:
        written = write_adapters(directory, adapters, family, config, saved.read, specs, args.layout, source)
        manifest.update(dataclasses.asdict(written))
        if method is not None:
            write_method(directory, source, method, family, config)
    kind = "" if own is None else f", as {own.label} and as LoRA"
    print(
        f"wrote {target}: adapters of {len(adapters.modules)} matrices of a {family.name}, {args.layout} layout{kind}"
    )
    return 0


def _convert_side_adapter(source: Path, target: Path, family: Any, config: Any, args: Any) -> int:
    from llmsuite.base.files import committed_directory
    from llmsuite.checkpoint.adapter_base import Base
    from llmsuite.checkpoint.convert.side_adapters import open_any_side_adapter, write_side_adapter
    from llmsuite.checkpoint.finite import NonFiniteError, count_nonfinite, describe_nonfinite
    from llmsuite.checkpoint.tokenizer_files import copy_tokenizer

    named = Base(str(real_path(args.config)) if args.config else None, "")
    saved = open_any_side_adapter(source, family, config, args.allow_pickle, named)
    assert saved is not None, "the caller has checked that it is a side adapter"
    names = () if args.allow_nonfinite else saved.files.names
    for name in names:
        value = saved.files.read(name)
        if count := count_nonfinite(value):
            raise NonFiniteError(describe_nonfinite(source, name, count, value.size))
    with committed_directory(target, {"format": 1}) as directory:
        write_side_adapter(directory, saved, family, config, args.layout)
        copy_tokenizer(source, directory)
    kind = type(saved.metadata).__name__.lower()
    print(f"wrote {target}: {kind} of a {family.name}, {args.layout} layout")
    return 0
