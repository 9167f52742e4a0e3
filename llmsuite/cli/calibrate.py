"""The command `llmsuite calibrate`: rounds a model to 4 bits with the least error on given texts (GPTQ)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists
from llmsuite.cli.model_paths import ALLOW_NONFINITE_HELP
from llmsuite.contract.registry import Registry


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument("source", type=str, help="a run, a checkpoint or model directory, or a LoRA adapter")
    parser.add_argument("-o", "--output", type=str, required=True, help="directory to write; must not exist")
    parser.add_argument(
        "--texts", type=str, required=True, help="a text file or JSON Lines, like the texts that the model will see"
    )
    parser.add_argument("--key", type=str, default="text", help="key of the texts in JSON Lines")
    parser.add_argument(
        "--precision",
        type=Literal["nf4", "fp4", "int4"],
        default="nf4",
        help="the --precision for generate, serve and eval later; int4 is written in the layout of GPTQ checkpoints",
    )
    parser.add_argument("--max_length", type=PositiveInt, default=512, help="tokens of each window of the texts")
    parser.add_argument("--windows", type=PositiveInt, default=128, help="most windows to use")
    parser.add_argument("--base", type=str | None, default=None, help="base model of an adapter that names none")
    parser.add_argument("--config", type=str | None, default=None, help="directory of config.json, if not in SOURCE")
    parser.add_argument("--allow-pickle", action="store_true", help="read .pdparams, without running any code in them")
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_NONFINITE_HELP)


def run(args: Any, registry: Registry) -> int:
    from llmsuite.cli.evaluate import read_texts
    from llmsuite.cli.model_paths import optional_path, resolve_model_arguments
    from llmsuite.devices.start import start_paddle

    target = Path(args.output)
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    resolve_model_arguments(args)
    texts = read_texts(Path(args.texts), args.key)
    backend = registry.devices["cpu"].factory()
    start_paddle(backend, 1)
    backend.activate(0)
    from llmsuite.base.progress import track_bytes
    from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite
    from llmsuite.checkpoint.gptq_writer import write_gptq
    from llmsuite.data.tokenizer import TextTokenizer
    from llmsuite.inference.calibrate import (
        calibrate_model,
        check_calibratable,
        common_group_size,
        rounded_matrices,
        token_windows,
    )
    from llmsuite.inference.load import open_any

    source = Path(args.source)
    base = optional_path(args.base)
    config = optional_path(args.config)
    model = open_any(source, registry.models, base, config, args.allow_pickle)
    check_calibratable(model)
    model = dataclasses.replace(model, allow_nonfinite=args.allow_nonfinite)
    tokenizer = TextTokenizer(model.tokenizer_directory)
    longest = min(args.max_length, model.config.max_position_embeddings)
    sequences = [tokenizer.with_special_tokens(ids, is_complete=True) for ids in tokenizer.encode_batch(texts)]
    windows = token_windows(sequences, longest, args.windows)
    layers = model.config.num_hidden_layers
    group = None
    if args.precision == "int4":
        group = common_group_size(model)
    found = calibrate_model(model, windows, args.precision)
    if group is not None:
        write_gptq(found, target, rounded_matrices(found), group)
    else:
        rewrite = Rewrite(found, OutputFormat("hf"))
        with track_bytes(rewrite.num_bytes, f"writing {target}") as progress:
            rewrite.write(target, progress)
    print(
        f"wrote {target}: {layers} layers rounded to {args.precision}, calibrated on {windows.size} tokens; try it "
        f"with: llmsuite generate {target} --precision {args.precision}"
    )
    return 0
