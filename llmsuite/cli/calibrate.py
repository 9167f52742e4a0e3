"""`llmsuite calibrate`: a model whose layers lose least when they are stored in 4 bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from llmsuite.cli.places import ALLOW_NONFINITE
from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.regular import exists
from llmsuite.specs import Command


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument("source", type=str, help="a run, a checkpoint or model directory, or a LoRA adapter")
    parser.add_argument("-o", "--output", type=str, required=True, help="directory to write; must not exist")
    parser.add_argument(
        "--texts", type=str, required=True, help="a text file, or JSON Lines: what the model will be used for"
    )
    parser.add_argument("--key", type=str, default="text", help="of the texts in JSON Lines")
    parser.add_argument(
        "--precision",
        type=Literal["nf4", "fp4", "int4"],
        default="nf4",
        help="what generate, serve and eval will be given; int4 is written in the layout of GPTQ checkpoints",
    )
    parser.add_argument("--max_length", type=PositiveInt, default=512, help="tokens of a window of texts")
    parser.add_argument("--windows", type=PositiveInt, default=128, help="windows, at most")
    parser.add_argument("--base", type=str | None, default=None, help="base model of an adapter that names none")
    parser.add_argument("--config", type=str | None, default=None, help="directory of config.json, if not in SOURCE")
    parser.add_argument("--allow-pickle", action="store_true", help="read .pdparams, without running any code in them")
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_NONFINITE)


def run(args: Any, registry: Registry) -> int:
    from llmsuite.cli.evaluate import read_texts
    from llmsuite.cli.places import find_model_arguments
    from llmsuite.devices.start import start_paddle

    target = Path(args.output)
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    find_model_arguments(args)
    texts = read_texts(Path(args.texts), args.key)
    backend = registry.devices["cpu"].factory()
    start_paddle(backend, 1)
    backend.activate(0)
    from llmsuite.checkpoint.gptq_writer import write_gptq
    from llmsuite.convert.rewrite import OutputFormat, Rewrite
    from llmsuite.data.tokenizer import TextTokenizer
    from llmsuite.inference.calibrate import calibrated, check_layers, group_of, matrices_of, windows_of
    from llmsuite.inference.load import open_any
    from llmsuite.progress import track_bytes

    source = Path(args.source)
    base, config = (Path(value) if value else None for value in (args.base, args.config))
    model = open_any(source, registry.models, base, config, args.allow_pickle)
    check_layers(model)
    model = dataclasses.replace(model, allow_nonfinite=args.allow_nonfinite)
    tokenizer = TextTokenizer(model.tokenizer_directory)
    longest = min(args.max_length, model.config.max_position_embeddings)
    whole = [tokenizer.framed(ids, is_whole=True) for ids in tokenizer.encode_batch(texts)]
    windows = windows_of(whole, longest, args.windows)
    layers, group = model.config.num_hidden_layers, group_of(model) if args.precision == "int4" else None
    found = calibrated(model, windows, args.precision)
    if group is not None:
        write_gptq(found, target, matrices_of(found), group)
    else:
        rewrite = Rewrite(found, OutputFormat("hf"))
        with track_bytes(rewrite.num_bytes, f"writing {target}") as progress:
            rewrite.write(target, progress)
    print(
        f"wrote {target}: {layers} layers on the levels of {args.precision}, by {windows.size} tokens; answer with: "
        f"llmsuite generate {target} --precision {args.precision}"
    )
    return 0


COMMAND = Command(
    name="calibrate",
    help="round a model to 4 bits by what its layers see of texts (GPTQ)",
    add_arguments=add_arguments,
    run=run,
)
