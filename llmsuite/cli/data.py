"""`llmsuite data ACTION …`: prepare data, index text for pretraining, and show what a run makes of its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from llmsuite.errors import UserError
from llmsuite.extras import check_plot
from llmsuite.plugins.manager import Registry
from llmsuite.regular import exists, is_file
from llmsuite.specs import Command


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument(
        "action",
        type=Literal["explain", "stats", "index", "prepare"],
        help="explain RECIPE: each token of a row as it is trained; stats RECIPE: lengths, dropped rows, padding; "
        "index IN…: tokenise text into OUT.bin and OUT.idx; prepare NAME: fetch a public set of data",
    )
    parser.add_argument("inputs", type=str, nargs="+", help="a recipe; files of text; a name")
    parser.add_argument("--smoke", action="store_true", help="explain, stats: of the small run that --smoke makes")
    parser.add_argument("--row", type=PositiveInt | None, default=None, help="explain: which one, from 1")
    parser.add_argument(
        "--plot", type=str | None, default=None, help="stats: also draw the lengths, into a .png or .svg"
    )
    parser.add_argument(
        "-o", "--output", type=str | None, default=None, help="index: prefix of the two files; prepare: a new directory"
    )
    parser.add_argument("--url", type=str | None, default=None, help="prepare: of a mirror")
    parser.add_argument("--sha256", type=str | None, default=None, help="prepare: what the archive has to have")
    parser.add_argument("--tokenizer", type=str | None, default=None, help="index: directory of a tokenizer or a model")
    parser.add_argument(
        "--documents",
        type=Literal["blank_lines", "lines", "files"] | None,
        default=None,
        help="index: what parts the documents of a .txt (default: blank_lines)",
    )
    parser.add_argument(
        "--key", type=str | None, default=None, help="index: where rows have their text (default: text)"
    )
    parser.add_argument(
        "--on_bad_row",
        type=Literal["error", "skip"] | None,
        default=None,
        help="index: what a row or a line that cannot be read does: stop it, or be left out and counted (default: "
        "error)",
    )
    parser.add_argument(
        "--workers",
        type=PositiveInt | None,
        default=None,
        help="index: processes; by default one for each 8 MB, at most one a core; on up to 4 cores one, which uses "
        "them all",
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
        raise UserError(f"data {args.action}: {args.overrides[0]}: it takes no keys of a recipe")
    if args.action == "index":
        return _index(args)
    if args.action == "prepare":
        return _prepare(args, registry)
    if len(args.inputs) != 1:
        raise UserError(f"data {args.action}: takes one recipe, and got {len(args.inputs)}")
    if args.plot is not None:
        check_plot(Path(args.plot))
    from llmsuite.cli import show_data
    from llmsuite.recipe.resolve import plan_run

    plan = plan_run(args.inputs[0], args.overrides, registry, args.smoke)
    plan.check_trains(f"data {args.action}")
    plan = show_data.prepare(plan, registry)
    if args.action == "explain":
        return show_data.explain(plan, registry, args.row or 1)
    return show_data.stats(plan, registry, args.plot)


def _prepare(args: Any, registry: Registry) -> int:
    from llmsuite.data.prepare import SETS, prepare

    (name, *more) = args.inputs
    if more or name not in SETS:
        known = "; ".join(f"{known} ({SETS[known].help})" for known in SETS)
        raise UserError(f"data prepare: {' '.join(args.inputs)!r} is none of the sets it knows: {known}")
    if args.output is None:
        raise UserError("data prepare: say where to write: -o DIRECTORY")
    prepare(name, Path(args.output), registry.data_formats, print, args.url, args.sha256)
    return 0


def _index(args: Any) -> int:
    from llmsuite.cli.places import find_place
    from llmsuite.data.documents import kind_of
    from llmsuite.data.faults import Faults
    from llmsuite.data.index import build_corpus
    from llmsuite.data.tokenizer import TextTokenizer
    from llmsuite.hub.listing import Want
    from llmsuite.progress import track_bytes
    from llmsuite.resources import find

    if args.output is None or args.tokenizer is None:
        raise UserError("data index: say where to write and with which tokenizer: -o PREFIX --tokenizer DIR")
    inputs = [find(name) for name in args.inputs]
    for path in inputs:
        kind_of(path)
        if not is_file(path):
            raise UserError(f"{path}: is not a file")
    tokenizer = find(args.tokenizer)
    tokenizer = tokenizer if exists(tokenizer) else find_place(args.tokenizer, Want.TOKENIZER, "--tokenizer")
    prefix, faults = Path(args.output), Faults(args.on_bad_row or "error")
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


COMMAND = Command(
    name="data",
    help="show what a run makes of its data; text to an indexed corpus for pretraining",
    add_arguments=add_arguments,
    run=run,
    takes_overrides=True,
)
