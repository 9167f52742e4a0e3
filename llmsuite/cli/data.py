"""`llmsuite data index IN… -o OUT`: text to a corpus that is trained on as it lies on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from llmsuite.errors import UserError
from llmsuite.plugins.hookspecs import Command
from llmsuite.plugins.manager import Registry


def add_arguments(parser: Any) -> None:
    from jsonargparse.typing import PositiveInt

    parser.add_argument("action", type=Literal["index"], help="index: tokenise into OUT.bin and OUT.idx")
    parser.add_argument("inputs", type=str, nargs="+", help=".txt, .jsonl (also .gz, .zst) or .parquet files")
    parser.add_argument("-o", "--output", type=str, required=True, help="prefix of the two files; must not exist")
    parser.add_argument("--tokenizer", type=str, required=True, help="directory of a tokenizer or a model")
    parser.add_argument(
        "--documents",
        type=Literal["blank_lines", "lines", "files"],
        default="blank_lines",
        help="what parts the documents of a .txt",
    )
    parser.add_argument("--key", type=str, default="text", help="where rows have their text")
    parser.add_argument(
        "--workers",
        type=PositiveInt | None,
        default=None,
        help="processes; by default one for each 8 MB, at most one a core; on up to 4 cores one, which uses them all",
    )


def run(args: Any, registry: Registry) -> int:
    from llmsuite.data.documents import kind_of
    from llmsuite.data.index import build_corpus
    from llmsuite.data.tokenizer import TextTokenizer
    from llmsuite.observe.progress import track_bytes
    from llmsuite.resources import find

    inputs = [find(name) for name in args.inputs]
    for path in inputs:
        kind_of(path)
        if not path.is_file():
            raise UserError(f"{path}: is not a file")
    prefix = Path(args.output)
    with track_bytes(sum(path.stat().st_size for path in inputs), f"indexing {prefix}") as progress:
        documents, tokens = build_corpus(
            inputs, prefix, TextTokenizer(find(args.tokenizer)), args.documents, args.key, args.workers, progress
        )
    print(f"wrote {prefix}.bin and {prefix}.idx: {documents:,} documents, {tokens:,} tokens")
    return 0


COMMAND = Command(name="data", help="text to an indexed corpus for pretraining", add_arguments=add_arguments, run=run)
