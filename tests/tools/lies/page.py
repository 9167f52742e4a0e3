"""The table of docs/notes/layouts.md: what each layout is checked for when it is read.

python -m tests.tools.lies.page        # write it
"""

from __future__ import annotations

from pathlib import Path

from llmsuite.base.safe_files import MAX_JSON_BYTES
from llmsuite.base.strict_json import MAX_DEPTH
from llmsuite.checkpoint.convert import blocks, pickled
from llmsuite.checkpoint.convert.gguf_header import MAX_ITEMS
from llmsuite.data import compressed, row_limits
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "notes" / "layouts.md"
_BEGIN = "<!-- begin: table -->"
_END = "<!-- end: table -->"
_ROW = (
    f"a fault is named with file and row; strict JSON; at most {row_limits.MAX_COLUMNS:,} columns, "
    f"{row_limits.MAX_TURNS:,} turns, {row_limits.MAX_TOOLS:,} tools, as many calls in a turn, and "
    f"{row_limits.MAX_RENDERED_CHARS:,} characters times supervised turns; {row_limits.MAX_RENDERED_TURNS:,} turns are "
    "rendered in all by a template that may render a turn differently once others follow"
)
_PACKED = (
    f"unpacks to at most 100 times its size, or {compressed._MIN_BUDGET_BYTES >> 20} MiB, where a row or value counts "
    f"for {compressed._MIN_ITEM_BYTES} bytes at least; then as .jsonl"
)
_PICKLE = (
    "nothing is run and nothing imported but words of a list; lengths against the file; dtype, dims (at most "
    f"{pickled._MAX_DIMS}) and size of each array; nested at most {pickled._MAX_DEPTH} deep; values named again are "
    f"at most {pickled._MAX_REPEATED} for each byte of the file"
)
CHECKS = {
    "plain": (
        "a model in safetensors, one file or several with an index",
        f"JSON of at most {MAX_JSON_BYTES >> 20} MiB, strict and at most {MAX_DEPTH} deep; plain names of files; "
        "dtype, at most 8 dims, offsets and size of each tensor, which follow each other to the end of the file; every "
        "tensor of the config and no other, in its shape",
    ),
    "committed": (
        "a model or a checkpoint with a manifest",
        "as above; names below the directory only; whole sizes; every byte of a file in one range with a digest",
    ),
    "fp8": ("FP8 with scales of blocks", "two dims; scales that are floats, one for each block, and finite"),
    "gptq": (
        "GPTQ of 4 or 8 bits",
        "words are int32, whole outputs in each; zeros and scales of each group; scales finite; groups in range",
    ),
    "awq": ("AWQ of 4 bits", "words are int32; zeros and scales of each group of whole size; scales finite"),
    "int8": (
        "int8 of quantisation-aware training",
        "a scale for each output, finite; that of inputs is one number above 0",
    ),
    "lora": (
        "LoRA, DoRA, rsLoRA of PEFT",
        "a table of the kind and range of each key; patterns are names, never expressions; tensors are floats, fit "
        "each other, the rank and the base; nothing is left over",
    ),
    "lokr": ("LoKr of PEFT", "as LoRA; factors whose product has the shape of the matrix"),
    "vera": ("VeRA of PaddleNLP, a pickle", "as .pdparams and LoRA; each matrix has all four parts"),
    "prefix": ("prefixes of PEFT", "sizes in range; the one tensor has the shape that they say"),
    "reft": (
        "interventions (ReFT)",
        "rank, layers and places are whole numbers in range; shapes are those of the model",
    ),
    "gguf": (
        "GGUF",
        f"counts, lengths and types against the file before anything is read, at most {MAX_ITEMS:,} items; fields of "
        "the shape in range; names, and dims by the fields; the tokenizer is whole",
    ),
    "gguf-blocks": ("GGUF with matrices in blocks", "as above; what blocks stand for is finite when it is written"),
    "distcp": (
        "`dist.save_state_dict`",
        f"{_PICKLE}; kinds of all fields; plain names of files; blocks cover each tensor once, at most "
        f"{blocks._MAX_BLOCKS:,} of them",
    ),
    "pdparams": (
        "`.pdparams` of PaddleNLP",
        f"{_PICKLE}; names are texts; numbers in names of files are those of files that are there",
    ),
    "jsonl": (".jsonl", f"lines of at most {compressed.MAX_LINE_BYTES >> 20} MiB, in UTF-8; {_ROW}"),
    "json": (".json, a list of rows or one a line", "as .jsonl; the list ends, and nothing is behind it"),
    "gz": (".gz", _PACKED),
    "zst": (".zst", _PACKED),
    "csv": (".csv, .tsv", "quotes; names of columns differ; as many cells as columns; then as .jsonl"),
    "parquet": (
        ".parquet",
        "values by the footer, and the size of each batch before it is made, as of .gz; a row as large as a line; "
        "then as .jsonl",
    ),
    "arrow": (".arrow, .feather and sheets", "not read, and named; save_to_disk of datasets is converted first"),
    "corpus": (
        "`.bin` and `.idx`",
        "version and dtype; sizes of both files; sequences lie one behind the other, documents in order; ids against "
        "the vocabulary",
    ),
    "template": (
        "chat templates",
        "a sandbox without attributes, in a process of its own with 2 s and 1 GiB for a text",
    ),
    "tokenizer": (
        "tokenizers",
        "tried on common texts in a process of its own with 20 s and 4 GiB; strict JSON of all files beside it",
    ),
}
"""What each layout of `tests.tools.lies` is, and what it is checked for."""


def table() -> str:
    """The table in Markdown."""
    rows = [f"| {what} | {checks} |" for what, checks in CHECKS.values()]
    return "\n".join(["| layout | checked for |", "|---|---|", *rows])


def with_table(page: str) -> str:
    """A page with the table between its marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, behind = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{behind}"


def write(path: Path = PAGE) -> None:
    """Put the table into its page."""
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
