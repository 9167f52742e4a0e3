"""Writes chat_texts.json: what transformers renders for the rows of `tests.support.chat_rows` with published templates.

The templates in chat_templates/ come with trl 1.16.0; README.md there has their licences. Where trl's training variant
of a template, with {% generation %}, renders the same text, the spans of its blocks are kept as well. Run it with the
directory of these variants, from the root, where transformers 5.24.0 is installed:

    python -m tests.reference.make_chat_texts SITE_PACKAGES/trl/chat_templates
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.support.chat_rows import rows

TEMPLATES = Path(__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DATE = "2024-07-26"


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
    # the day of the run, which llmsuite fixes
    return re.sub(r"\d{4}-\d\d-\d\d", DATE, texts[0]), [list(span) for span in spans[0]] if with_spans else []


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
    raise SystemExit(f"{name} accepts no form of a call")


def main(variants: Path) -> None:
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
            row, text = accepted(row, source, path.stem)
            entry: dict[str, Any] = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
            variant = variants / f"{path.stem}_training.jinja"
            if path.stem.endswith("_training"):
                variant = path
            if variant.is_file():
                same, spans = rendered(row, variant.read_text(encoding="utf-8"), True)
                if same == text:
                    entry["spans"] = spans
            of_template.append(entry)
        found[path.stem] = of_template
    target = Path(__file__).parent / "chat_texts.json"
    lines = [f'"{name}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]" for name, entries in found.items()]
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
