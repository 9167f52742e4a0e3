"""`llmsuite merge` and `llmsuite convert`: a model in the layout, dtype and files wanted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from llmsuite.cli.amounts import parse_amount
from llmsuite.cli.places import ALLOW_NONFINITE
from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.regular import exists
from llmsuite.specs import Command

_LAYOUT = Literal["hf", "paddlenlp", "distcp", "gguf"]
_LAYOUT_HELP = (
    "distcp: what dist.load_state_dict of Paddle reads, by PaddleNLP's names; gguf: one file for llama.cpp, with a "
    "Modelfile for Ollama; needs the package gguf"
)


def _common_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument("-o", "--output", type=str, required=True, help="directory to write; must not exist")
    parser.add_argument(
        "--dtype",
        type=Literal["fp32", "bf16", "fp16", "fp8", "int8", "q8_0", "q5_1", "q4_1", "q4_k_m"] | None,
        default=None,
        help="default: unchanged, or bf16 for FP8 models; fp8 has one scale for each block of 128 x 128; int8, with "
        "scales, only for a run trained with qat.weight_bits; q8_0, q5_1, q4_1, q4_k_m are of GGUF, default fp16",
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
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_NONFINITE)


def _merge_arguments(parser: Any) -> None:
    parser.add_argument(
        "source",
        type=str,
        help="a run, a checkpoint or model directory, a directory of dist.save_state_dict, PaddleNLP's "
        "model_state.tp0X_pp0Y.pdparams, or a LoRA adapter",
    )
    parser.add_argument(
        "more", type=str, nargs="*", help="the other parts of a checkpoint of machines that share no output_dir"
    )
    parser.add_argument(
        "--base", type=str | None, default=None, help="base model of an adapter that does not name its own"
    )
    parser.add_argument("--layout", type=_LAYOUT, default="hf", help=_LAYOUT_HELP)
    _common_arguments(parser)


def _convert_arguments(parser: Any) -> None:
    parser.add_argument(
        "source", type=str, help="a model in the HF, PaddleNLP or llmsuite layout, a LoRA adapter, or a run"
    )
    parser.add_argument("--layout", type=_LAYOUT, required=True, help=_LAYOUT_HELP)
    _common_arguments(parser)


def run(args: Any, registry: Registry) -> int:
    from llmsuite.devices.start import start_paddle

    start_paddle(registry.devices["cpu"].factory(), 1)  # for the shapes a model has to have
    from llmsuite.checkpoint.adapter_base import CONFIGS, Base, base_path, check_base, stored_format
    from llmsuite.checkpoint.directory import find_adapter
    from llmsuite.checkpoint.int8 import quantised, rounded_layers
    from llmsuite.checkpoint.model_dir import Layout
    from llmsuite.checkpoint.tensor_writer import MAX_FILE_BYTES
    from llmsuite.cli.places import find_model_arguments
    from llmsuite.convert.adapter import add_adapter
    from llmsuite.convert.distcp_export import write_distcp
    from llmsuite.convert.rewrite import DTYPES, OutputFormat, Rewrite
    from llmsuite.convert.sources import open_source
    from llmsuite.inference.load import parameter_shapes
    from llmsuite.progress import track_bytes

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
    find_model_arguments(args)
    source = Path(args.source)
    adapter = find_adapter(source)
    if args.get("base") and adapter is None:
        raise UserError(f"--base: {source} is no LoRA adapter: it has neither {' nor '.join(CONFIGS)}")
    is_int8 = args.dtype == "int8"
    if is_int8 and (adapter is not None or args.fused):
        reason = "--fused matrices have none" if args.fused else f"{source} is a LoRA adapter, which was not trained so"
        raise UserError(f"--dtype int8: has a scale for each output of a layer, and {reason}; leave one of the two out")
    config = Path(args.config) if args.config else None
    given = Path(args.base) if args.get("base") else None
    base = source if adapter is None else given or base_path(adapter)
    model = open_source(base, registry.models, parameter_shapes, config, args.allow_pickle)
    if adapter is not None:
        if given is None:
            check_base(adapter, Base(str(base), model.digest()))
        model, format = add_adapter(model, adapter, args.allow_pickle), stored_format(adapter)
        if format is not None:
            print(
                f"{adapter} was trained on matrices stored as {format.dtype} in blocks of {format.block}; merged are "
                "the values that these stand for"
            )
    model = dataclasses.replace(model, allow_nonfinite=args.allow_nonfinite)
    if args.layout == "gguf":
        return _write_gguf(model, target, args)
    if is_int8:
        model = quantised(model, rounded_layers(model.path))
    size = (
        max(1, int(parse_amount("--max-shard-size", args.max_shard_size, "bytes")))
        if args.max_shard_size
        else MAX_FILE_BYTES
    )
    dtype = DTYPES[args.dtype] if args.dtype and not is_int8 else None
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


def _check_gguf(args: Any) -> None:
    """Raises UserError for options that contradict --layout."""
    own = ("q8_0", "q5_1", "q4_1", "q4_k_m")
    if args.layout != "gguf":
        if args.dtype in own:
            raise UserError(
                f"--dtype {args.dtype}: is a dtype of GGUF; add --layout gguf, or choose fp32, bf16 or fp16"
            )
        return
    if args.dtype in ("fp8", "int8"):
        raise UserError(f"--dtype {args.dtype}: GGUF has none; choose fp32, bf16, fp16, {', '.join(own)}")
    if idle := [key for key in ("max_shard_size", "split_num") if args.get(key)]:
        raise UserError(f"--{idle[0].replace('_', '-')}: a GGUF model is one file")


def _write_gguf(model: Any, target: Path, args: Any) -> int:
    from llmsuite.convert.gguf_export import GgufExport
    from llmsuite.files import check_disk, committed_directory
    from llmsuite.inference.ollama import MODELFILE, modelfile, read_dialogue
    from llmsuite.progress import track_bytes

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
    from llmsuite.checkpoint.own_disks import gathered

    if not args.more:
        return run(args, registry)
    parts = [Path(args.source), *map(Path, args.more)]
    with gathered(parts, Path(f"{args.output}.gathered")) as directory:
        args.source = str(directory)
        return run(args, registry)


def run_convert(args: Any, registry: Registry) -> int:
    from llmsuite.checkpoint.directory import find_adapter
    from llmsuite.cli.places import find_model_arguments

    find_model_arguments(args, needs_base=not args.config)  # for the config of an adapter's model
    adapter = find_adapter(Path(args.source))
    return run(args, registry) if adapter is None else _convert_adapter(adapter, args, registry)


def _convert_adapter(source: Path, args: Any, registry: Registry) -> int:
    from llmsuite.checkpoint.adapter_base import base_path
    from llmsuite.checkpoint.adapter_dir import open_adapters
    from llmsuite.checkpoint.adapter_writer import write_adapters
    from llmsuite.checkpoint.beside import is_beside
    from llmsuite.checkpoint.finite import NonFiniteError, first_nonfinite
    from llmsuite.checkpoint.model_dir import read_config
    from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
    from llmsuite.convert.paddlenlp_lokr import is_lokr, write_lokr
    from llmsuite.convert.vera import write_vera
    from llmsuite.devices.start import start_paddle
    from llmsuite.files import committed_directory
    from llmsuite.inference.load import parameter_shapes
    from llmsuite.models.shard_plan import FIRST_FACTOR, SECOND_FACTOR

    if args.layout in ("gguf", "distcp"):
        raise UserError(
            f"--layout {args.layout}: {source} is an adapter; llmsuite merge writes it into its base, so too"
        )
    keys = ["dtype", "max_shard_size", "split_num", "fused", *["allow_pickle"] * (not is_beside(source))]
    if idle := [key for key in keys if args.get(key)]:
        raise UserError(f"--{idle[0].replace('_', '-')}: {source} is an adapter, which is written as it is")
    target = Path(args.output)
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    start_paddle(registry.devices["cpu"].factory(), 1)  # before paddlenlp, whose configuration they have
    family, config = read_config(Path(args.config) if args.config else base_path(source), registry.models)
    if not args.allow_nonfinite and (what := first_nonfinite(sorted(source.glob("*.safetensors")))):
        raise NonFiniteError(what)
    if is_beside(source):
        return _convert_beside(source, target, family, config, args)
    if args.layout == "paddlenlp" and is_lokr(source):
        with committed_directory(target, {"format": 1}) as directory:
            count = write_lokr(directory, source, family, config)
            copy_tokenizer(source, directory)
        print(f"wrote {target}: LoKr of {count} matrices of a {family.name}, paddlenlp layout")
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
        twice = args.layout == "paddlenlp" and write_vera(directory, source, adapters, family, config)
    kind = ", as VeRA and as LoRA" if twice else ""
    print(
        f"wrote {target}: adapters of {len(adapters.modules)} matrices of a {family.name}, {args.layout} layout{kind}"
    )
    return 0


def _convert_beside(source: Path, target: Path, family: Any, config: Any, args: Any) -> int:
    from llmsuite.checkpoint.adapter_base import Base
    from llmsuite.checkpoint.finite import NonFiniteError, count_nonfinite, told
    from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
    from llmsuite.convert.beside import open_any_beside, write_beside
    from llmsuite.files import committed_directory

    named = Base(str(Path(args.config).resolve()) if args.config else None, "")
    saved = open_any_beside(source, family, config, args.allow_pickle, named)
    assert saved is not None, "the caller has asked"
    for name in () if args.allow_nonfinite else saved.files.names:
        value = saved.files.read(name)
        if count := count_nonfinite(value):
            raise NonFiniteError(told(source, name, count, value.size))
    with committed_directory(target, {"format": 1}) as directory:
        write_beside(directory, saved, family, config, args.layout)
        copy_tokenizer(source, directory)
    kind = type(saved.told).__name__.lower()
    print(f"wrote {target}: {kind} of a {family.name}, {args.layout} layout")
    return 0


MERGE = Command(
    name="merge",
    help="merge the files of many ranks, or a model and its LoRA adapter",
    add_arguments=_merge_arguments,
    run=run_merge,
)
CONVERT = Command(
    name="convert",
    help="convert a model to another layout, dtype or number of files, or an adapter to another layout",
    add_arguments=_convert_arguments,
    run=run_convert,
)
