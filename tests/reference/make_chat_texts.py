"""Writes chat_texts.json: what transformers renders for the rows of `tests.support.chat_rows` with published templates.

README.md of chat_templates/ has the sources and licences of the templates. The tokens are those of
`apply_chat_template` with the tokenizer of `write_tokenizer`. Where trl's training variant of a template, with
{% generation %}, renders the same text, the spans of its blocks are kept as well, in characters and, by
`return_assistant_tokens_mask`, in tokens. Run it with the directory of these variants, from the root, where
transformers 5.24.0 is installed:

    python -m tests.reference.make_chat_texts SITE_PACKAGES/trl/chat_templates
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import itertools
import json
import sys
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

import jinja2

from tests.support.chat_rows import rows, write_tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class FixedDay(datetime.datetime):
    """The day that llmsuite fixes."""

    @classmethod
    def now(cls, tz: Any = None) -> FixedDay:
        return cls(2024, 7, 26)


def tokens(tokenizer: Any, row: dict[str, Any], source: str, text: str) -> list[int]:
    """Token ids of a row that is rendered as `text`."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if all(turn["content"] is not None for turn in row["messages"]):  # apply_chat_template removes null
        found = tokenizer.apply_chat_template(
            copy.deepcopy(row["messages"]),
            tools=copy.deepcopy(row.get("tools")),
            chat_template=source,
            tokenize=True,
            return_dict=True,
            **row.get("chat_template_kwargs", {}),
        )
        assert found["input_ids"] == ids, row
    return list(ids)


def masked(tokenizer: Any, row: dict[str, Any], source: str) -> list[tuple[int, int]]:
    """Begin and end of the spans of tokens that transformers masks as the assistant's."""
    found = tokenizer.apply_chat_template(
        copy.deepcopy(row["messages"]),
        tools=copy.deepcopy(row.get("tools")),
        chat_template=source,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **row.get("chat_template_kwargs", {}),
    )
    spans = []
    position = 0
    for value, group in itertools.groupby(found["assistant_masks"]):
        length = len(list(group))
        if value:
            spans.append((position, position + length))
        position += length
    return spans


def rendered(row: dict[str, Any], source: str, with_spans: bool) -> tuple[str, list[list[int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(  # type: ignore[misc]
        conversations=[copy.deepcopy(row["messages"])],
        tools=copy.deepcopy(row.get("tools")),
        chat_template=source,
        return_assistant_tokens_mask=with_spans,
        **TOKENS,
        **row.get("chat_template_kwargs", {}),
    )
    return texts[0], [list(span) for span in spans[0]] if with_spans else []


class Refused(Exception):
    """A template refuses a row."""


def accepted(row: dict[str, Any], source: str, name: str) -> tuple[dict[str, Any], str]:
    """The row with calls in the form that a template accepts, and its text. DeepSeek's take arguments as text, and that
    of R1 drops a call beside an empty text instead of null."""
    forms = [(False, ""), (True, "")]
    if name.startswith("deepseek_r1"):
        forms = [(True, None)]
    for as_text, content in forms:
        found = copy.deepcopy(row)
        for turn in found["messages"]:
            for call in turn.get("tool_calls", ()):
                turn["content"] = content
                if as_text:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        try:
            return found, rendered(found, source, False)[0]
        except TypeError:
            continue
        except jinja2.TemplateError as error:
            raise Refused(str(error)) from error
    raise SystemExit(f"{name} accepts no form of a call")


def main(variants: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        unittest.mock.patch("transformers.utils.chat_template_utils.datetime", FixedDay),
    ):
        write(variants, write_tokenizer(Path(place)))


def write(variants: Path, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **TOKENS)
    found: dict[str, list[dict[str, Any] | None]] = {}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        of_template: list[dict[str, Any] | None] = []
        for row in rows():
            row = json.loads(json.dumps(row))
            if "message.thinking" in source:  # gpt-oss has another key for thoughts
                for turn in row["messages"]:
                    if "reasoning_content" in turn:
                        turn["thinking"] = turn.pop("reasoning_content")
            if any(name not in source for name in row.get("chat_template_kwargs", {})):
                of_template.append(None)
                continue
            try:
                row, text = accepted(row, source, path.stem)
            except Refused as error:
                of_template.append({"refused": str(error)})
                continue
            entry: dict[str, Any] = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
            variant = variants / f"{path.stem}_training.jinja"
            if path.stem.endswith("_training"):
                variant = path
            if variant.is_file():
                same, spans = rendered(row, variant.read_text(encoding="utf-8"), True)
                if same == text:
                    entry["spans"] = spans
                    if all(turn["content"] is not None for turn in row["messages"]):
                        entry["mask"] = masked(tokenizer, row, variant.read_text(encoding="utf-8"))
            ids = tokens(tokenizer, row, source, text)
            entry["ids"] = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
            of_template.append(entry)
        found[path.stem] = of_template
    target = Path(__file__).parent / "chat_texts.json"
    lines = [f'"{name}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]" for name, entries in found.items()]
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
