"""Layouts of data: rows of every format in every kind of file, tables, corpora of token ids, templates and
tokenizers."""

from __future__ import annotations

import csv
import functools
import gzip
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import zstandard
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import load_plugins
from llmsuite.data.chat_template import load_template
from llmsuite.data.documents import read_documents
from llmsuite.data.indexed_corpus import CorpusWriter, IndexedCorpus
from llmsuite.data.read import data_files, read_rows
from llmsuite.data.render_checks import check_rendered
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.damage import damaged, damages
from tests.support.tiny_llama import TOKENIZER
from tests.support.tool_turns import CALL, ROWS, TOOLS
from tests.tools.lies.base import MANY, Layout, lie_in_bytes, lie_in_tree

_KINDS = ("conversation", "preference", "unpaired", "prompt")
_TALK = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sun", "tool_call_id": CALL["id"]},
        {"role": "assistant", "content": "It is sunny.", "weight": 1},
    ],
    "tools": TOOLS,
}
GOOD = [*ROWS.values(), _TALK, {"text": "a document"}]
"""A row of each format."""


# reading


@functools.cache
def _registry() -> Any:
    return load_plugins()


def read_as_rows(directory: Path) -> None:
    """As every kind of rows, and what a template makes of them."""
    template = load_template("chatml", TOKENIZER, {"bos_token": "<s>", "eos_token": "</s>"})
    faults = []
    for path in data_files(directory):
        for kind in _KINDS:
            try:
                for row in read_rows(path, kind, "auto", _registry().data_formats):
                    check_rendered(template, row)
            except UserError as error:
                faults.append(str(error))
        if len(faults) == len(_KINDS):
            raise UserError("\n".join(faults))


def read_as_documents(directory: Path) -> None:
    """As texts to train on."""
    for path in data_files(directory):
        for text, _ in read_documents(path, "blank_lines", "text"):
            assert isinstance(text, str)


def read_corpus(directory: Path) -> None:
    """Every document of token ids; together they are all tokens, each once."""
    corpus = IndexedCorpus(directory / "corpus.idx")
    count = sum(len(corpus.document(number)) for number in range(corpus.num_documents))
    assert count == len(corpus.tokens), f"{count} tokens in documents of {len(corpus.tokens)}"


def read_template(directory: Path) -> None:
    """Render a conversation."""
    template = load_template("tokenizer", directory, {"bos_token": "<s>", "eos_token": "</s>"})
    template.render([Message("system", "be brief"), Message("user", "hi"), Message("assistant", "yes")])


def read_tokenizer(directory: Path) -> None:
    """Encode and decode a text."""
    tokenizer = TextTokenizer(directory)
    tokenizer.decode(tokenizer.encode("The quick brown fox, 3.14!"))


# making


def _packed(name: str, pack: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def make(directory: Path, base: Path) -> None:
        directory.mkdir()
        text = "".join(json.dumps(row) + "\n" for row in [_TALK] * 3)
        (directory / name).write_bytes(pack(text.encode()))

    return make


def make_list(directory: Path, base: Path) -> None:
    directory.mkdir()
    (directory / "rows.json").write_text(json.dumps([_TALK] * 3))


def make_csv(directory: Path, base: Path) -> None:
    directory.mkdir()
    with open(directory / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([["instruction", "output", "text"], ["a", "b", "c"], ['x "y"', "two\nlines", "é"]])


_COLUMNS: dict[str, Any] = {"instruction": ["a", "b"], "output": ["c", "d"], "text": ["e", "f"], "n": [1, 2]}


def make_parquet(directory: Path, base: Path) -> None:
    directory.mkdir()
    pyarrow.parquet.write_table(pa.table(_COLUMNS), directory / "rows.parquet")


def make_arrow(directory: Path, base: Path) -> None:
    """In a directory of rows, which are read; the table of Arrow is not."""
    directory.mkdir()
    table = pa.table(_COLUMNS)
    with pyarrow.ipc.new_file(directory / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    (directory / "rows.jsonl").write_text(json.dumps(_TALK) + "\n")


def make_corpus(directory: Path, base: Path) -> None:
    directory.mkdir()
    with CorpusWriter(directory / "corpus", "<u2") as writer:
        for size in (3, 1, 0, 5):
            writer.add(np.arange(size, dtype="<u2").tobytes(), np.array([size], "<i4").tobytes())
        writer.commit()


def make_template(directory: Path, base: Path) -> None:
    directory.mkdir()
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    template = {"chat_template": [{"name": "default", "template": "{{ messages[0]['content'] }}"}]}
    (directory / "tokenizer_config.json").write_text(json.dumps(template))


def make_tokenizer(directory: Path, base: Path) -> None:
    shutil.copytree(TOKENIZER, directory)


# lying


def lie_in_lines(path: Path, data: st.DataObject) -> None:
    """Tell a lie in one row of some, of any format."""
    if data.draw(st.integers(0, 6)) == 0:
        return lie_in_bytes(path, data)
    row = json.loads(json.dumps(data.draw(st.sampled_from(GOOD))))
    good = json.dumps(row)
    lines = [good, lie_in_tree(row, data)]
    if data.draw(st.booleans()):
        lines.reverse()
    joined = f"[{lines[0]},\n{lines[1]}]" if path.suffix == ".json" else "\n".join(lines)
    path.write_bytes(joined.encode("utf-8", "surrogatepass"))
    return None


def lie_in_packed(path: Path, data: st.DataObject) -> None:
    """Damage a compressed file, or what is compressed in it; or pack very much of nothing."""
    pack = gzip.compress if path.suffix == ".gz" else zstandard.compress
    unpack = gzip.decompress if path.suffix == ".gz" else zstandard.decompress
    kind = data.draw(st.sampled_from(["bytes", "inside", "bomb", "twice", "cut"]))
    content = path.read_bytes()
    if kind == "bytes":
        lie_in_bytes(path, data)
    elif kind == "inside":
        path.write_bytes(pack(damaged(unpack(content), data.draw(damages))))
    elif kind == "bomb":
        path.write_bytes(pack(data.draw(st.sampled_from([b"\n", b" ", b"[", b'{"a":'])) * (100 << 20)))
    else:
        path.write_bytes(content * 2 if kind == "twice" else content + content[: len(content) // 2])


_CELLS = ["", '"', '""', '"a', "a\0", "\ufeff", "=1+1", "x" * 5000, '"a\nb"', "text", "text,text", "\r", "a" * 200_000]


def lie_in_csv(path: Path, data: st.DataObject) -> None:
    """Tell a lie in a table: in its bytes, its cells, or the number of these."""
    kind = data.draw(st.sampled_from(["bytes", "cells", "cells", "columns", "rows", "encoding"]))
    if kind == "bytes":
        return lie_in_bytes(path, data)
    text = path.read_text()
    if kind == "cells":
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(_CELLS)) + text[at:]
    elif kind == "columns":
        text = data.draw(st.sampled_from(["a," * MANY, ",".join(f"c{i}" for i in range(MANY))])) + "\n" + text
    elif kind == "rows":
        text += data.draw(st.sampled_from(["a\n", "\n", ",,\n", '"\n"'])) * (MANY // 10)
    content = text.encode("utf-16" if kind == "encoding" else "utf-8")
    path.write_bytes(content)
    return None


def lie_in_parquet(path: Path, data: st.DataObject) -> None:
    """Tell a lie in a Parquet file: in its bytes, or in what a column is."""
    if data.draw(st.booleans()):
        content = path.read_bytes()
        damage = data.draw(damages)
        if data.draw(st.booleans()):  # the footer, which says what there is
            damage = [(0.5 + place / 2, what, bytes_) for place, what, bytes_ in damage]
        path.write_bytes(damaged(content, damage))
        return
    odd: dict[str, Any] = {
        "numbers": pa.array([1, 2]),
        "floats": pa.array([float("nan"), 1e308]),
        "bytes": pa.array([b"\xff", b"a"]),
        "no text": pa.array([b"\xff", b"a"]).view("string"),
        "dates": pa.array([2**62, 5]).cast(pa.timestamp("ns")),
        "lists": pa.array([["a"], None]),
        "nulls": pa.nulls(2),
        "structs": pa.array([{"role": "user", "content": 1}, None]),
        "turns": pa.array([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2),
        "decimals": pa.array([1, 2]).cast(pa.decimal128(30, 2)),
        "times": pa.array([1, 2]).cast(pa.duration("ns")),
        "many turns": pa.array([[{"role": "user", "content": "a"}] * MANY, None]),
    }
    name = data.draw(st.sampled_from([*_COLUMNS, "messages", "images", "a.b", "", "text"]))
    table = pa.table({**_COLUMNS, name: data.draw(st.sampled_from(sorted(odd.items())))[1]})
    if data.draw(st.integers(0, 9)) == 0:
        table = pa.table({**_COLUMNS, **{f"c{i}": [1, 2] for i in range(3000)}})
    pyarrow.parquet.write_table(table, path)


_WORDS = [0, 1, 2, 3, -1, 2**31 - 1, 2**62, -(2**62)]


def lie_in_corpus(path: Path, data: st.DataObject) -> None:
    """Tell a lie in the index of a corpus, in one of its numbers, or in the bytes of either file."""
    if path.suffix != ".idx" or data.draw(st.integers(0, 3)) == 0:
        return lie_in_bytes(path, data)
    content = bytearray(path.read_bytes())
    count = struct.unpack_from("<Q", content, 18)[0]
    places = [(9, "<q"), (18, "<q"), (26, "<q"), *((34 + 4 * i, "<i") for i in range(count))]
    places += [(34 + 4 * count + 8 * i, "<q") for i in range(2 * count + 1)]
    at, form = data.draw(st.sampled_from(places))
    struct.pack_into(form, content, at, int(np.array(data.draw(st.sampled_from(_WORDS))).astype(form)))
    path.write_bytes(content)
    return None


_PIECES = [
    "{% for m in messages %}", "{% endfor %}", "{{ m['content'] }}", "{{ 'a' * 10 ** 9 }}", "{{ x.y.z }}",
    "{% for i in range(10 ** 9) %}", "{{ ''.__class__.__mro__ }}", "{{ messages[0]['content'].format(1) }}",
    "{{ range(10 ** 9) | list }}", "{{ self._TemplateReference__context }}", "{% set ns = namespace(a=[]) %}",
    "{% include '/etc/passwd' %}", "{{ raise_exception('x') }}", "{{ 9 ** 9 ** 9 }}",
    "{{ cycler.__init__.__globals__ }}", "{{ '%1000000000d' % 1 }}", "{{ 'a'.join(messages * 9999) }}",
]  # fmt: skip


def lie_in_template(path: Path, data: st.DataObject) -> None:
    """Another template, or a damaged one."""
    if data.draw(st.integers(0, 3)) == 0:
        return lie_in_bytes(path, data)
    text = "".join(data.draw(st.lists(st.sampled_from(_PIECES), max_size=4)))
    path.write_bytes(text.encode())
    return None


_BOTH = (read_as_rows, read_as_documents)
LAYOUTS = {
    "jsonl": Layout(_packed("rows.jsonl", bytes), _BOTH[:1], seconds=4),
    "json": Layout(make_list, _BOTH[:1], lie=lie_in_lines, seconds=4),
    "gz": Layout(_packed("rows.jsonl.gz", gzip.compress), _BOTH[:1], share=2, seconds=20),
    "zst": Layout(_packed("rows.jsonl.zst", zstandard.compress), _BOTH[:1], share=2, seconds=20),
    "csv": Layout(make_csv, _BOTH, seconds=4),
    "parquet": Layout(make_parquet, _BOTH, seconds=4),
    "arrow": Layout(make_arrow, _BOTH[:1], share=2),
    "corpus": Layout(make_corpus, (read_corpus,)),
    "template": Layout(make_template, (read_template,), share=3),
    "tokenizer": Layout(make_tokenizer, (read_tokenizer,), share=1),
}
"""Rows, documents, corpora, templates and tokenizers."""
LIES = {
    ".jsonl": lie_in_lines, ".gz": lie_in_packed, ".zst": lie_in_packed, ".csv": lie_in_csv,
    ".parquet": lie_in_parquet, ".idx": lie_in_corpus, ".bin": lie_in_corpus, ".jinja": lie_in_template,
}  # fmt: skip
