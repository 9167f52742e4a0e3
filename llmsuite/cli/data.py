"""The command `llmsuite data ACTION …`: prepare data, index text for pretraining, and show how a run reads its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.extras import check_plot
from llmsuite.base.safe_files import exists, is_file
from llmsuite.contract.registry import Registry


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "action",
        type=Literal["explain", "stats", "index", "prepare"],
        help="explain RECIPE: each token of a row as it is trained; stats RECIPE: lengths, dropped rows, padding; "
        "index IN…: tokenise text into OUT.bin and OUT.idx; prepare NAME: download a public data set",
    )
    parser.add_argument("inputs", type=str, nargs="+", help="a recipe; text files; the name of a data set")
    parser.add_argument("--smoke", action="store_true", help="explain, stats: use the reduced run of --smoke")
    parser.add_argument("--row", type=PositiveInt | None, default=None, help="explain: number of the row, from 1")
    parser.add_argument(
        "--plot", type=str | None, default=None, help="stats: also plot the lengths into a .png or .svg file"
    )
    parser.add_argument(
        "-o", "--output", type=str | None, default=None, help="index: prefix of the two files; prepare: a new directory"
    )
    parser.add_argument("--url", type=str | None, default=None, help="prepare: URL of a mirror")
    parser.add_argument("--sha256", type=str | None, default=None, help="prepare: expected hash of the archive")
    parser.add_argument("--tokenizer", type=str | None, default=None, help="index: directory of a tokenizer or a model")
    parser.add_argument(
        "--documents",
        type=Literal["blank_lines", "lines", "files"] | None,
        default=None,
        help="index: what separates the documents of a .txt file (default: blank_lines)",
    )
    parser.add_argument("--key", type=str | None, default=None, help="index: key of the text in rows (default: text)")
    parser.add_argument(
        "--on_bad_row",
        type=Literal["error", "skip"] | None,
        default=None,
        help="index: stop at a row or line that cannot be read, or skip and count it (default: error)",
    )
    parser.add_argument(
        "--workers",
        type=PositiveInt | None,
        default=None,
        help="index: number of processes (default: one for each 8 MB, at most one per core; on up to 4 cores a single "
        "one, which uses them all)",
    )


_OPTIONS = {
    "explain": {"smoke", "row"},
    "stats": {"smoke", "plot"},
    "prepare": {"output", "url", "sha256"},
    "index": {"output", "tokenizer", "documents", "key", "on_bad_row", "workers"},
}


def run(args: Any, registry: Registry) -> int:
    own = _OPTIONS[args.action]
    for name in sorted(set().union(*_OPTIONS.values()) - own):
        if getattr(args, name):
            raise UserError(f"data {args.action}: has no option --{name}; it has --{', --'.join(sorted(own))}")
    if args.overrides and "smoke" not in own:
        raise UserError(f"data {args.action}: {args.overrides[0]}: this action takes no recipe keys")
    if args.action == "index":
        return _index(args)
    if args.action == "prepare":
        return _prepare(args, registry)
    if len(args.inputs) != 1:
        raise UserError(f"data {args.action}: takes one recipe, and got {len(args.inputs)}")
    if args.plot is not None:
        check_plot(Path(args.plot))
    from llmsuite.cli import show_data

    plan, stage = show_data.prepare(args, registry)
    if args.action == "explain":
        return show_data.explain(stage, plan.data.train_path, args.row or 1)
    from llmsuite.engine.data import padding_free

    is_padding_free = padding_free(plan.model, plan.parallel, plan.parallel.device.factory())
    return show_data.stats(stage, plan.data, is_padding_free, args.plot)


def _prepare(args: Any, registry: Registry) -> int:
    from llmsuite.data.prepare import DATASETS, prepare

    (name, *more) = args.inputs
    if more or name not in DATASETS:
        known = "; ".join(f"{known} ({DATASETS[known].help})" for known in DATASETS)
        raise UserError(f"data prepare: {' '.join(args.inputs)!r} is no known data set; there are: {known}")
    if args.output is None:
        raise UserError("data prepare: give the directory to write: -o DIRECTORY")
    prepare(name, Path(args.output), registry.data_formats, print, args.url, args.sha256)
    return 0


def _index(args: Any) -> int:
    from llmsuite.base.hub.listing import Want
    from llmsuite.base.progress import track_bytes
    from llmsuite.base.resources import find
    from llmsuite.cli.model_paths import find_model_path
    from llmsuite.data.corpus_builder import build_corpus
    from llmsuite.data.documents import kind_of
    from llmsuite.data.faults import Faults
    from llmsuite.data.tokenizer import TextTokenizer

    if args.output is None or args.tokenizer is None:
        raise UserError("data index: give the output and the tokenizer: -o PREFIX --tokenizer DIR")
    inputs = [find(name) for name in args.inputs]
    for path in inputs:
        kind_of(path)
        if not is_file(path):
            raise UserError(f"{path}: is not a file")
    tokenizer = find(args.tokenizer)
    if not exists(tokenizer):
        tokenizer = find_model_path(args.tokenizer, Want.TOKENIZER, "--tokenizer")
    prefix = Path(args.output)
    faults = Faults(args.on_bad_row or "error")
    with track_bytes(sum(path.stat().st_size for path in inputs), f"indexing {prefix}") as progress:
        documents, tokens = build_corpus(
            inputs,
            prefix,
            TextTokenizer(tokenizer),
            args.documents or "blank_lines",
            args.key or "text",
            args.workers,
            progress,
            faults,
        )
    if faults.total:
        print(f"left out {faults.summary()}")
    print(f"wrote {prefix}.bin and {prefix}.idx: {documents:,} documents, {tokens:,} tokens")
    return 0
