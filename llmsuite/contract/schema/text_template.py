"""Values of `data.text_template`: text with fields in braces, in place of a chat template."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.columns import columns_of, is_template

_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{{instruction}}\n\n{context}### Response:\n{{output}}"
)
TEXT_TEMPLATES: dict[str, tuple[str, ...]] = {
    "alpaca": (
        _ALPACA.format(
            paired=", paired with an input that provides further context", context="### Input:\n{input}\n\n"
        ),
        _ALPACA.format(paired="", context=""),
    ),
    "completion": ("{prompt}{completion}",),
}
"""Templates by name, each with its variants: a row takes the first one for which it has all fields.

alpaca: the words of Stanford Alpaca, with and without an input, as in the column `text` of tatsu-lab/alpaca.
completion: rows of TRL in its standard format, whose texts it joins."""


def variants_of(given: str) -> tuple[str, ...]:
    """Return the variants of a value of `data.text_template`: a name, or a text with fields."""
    return TEXT_TEMPLATES.get(given, (given,))


def text_template_problems(given: str | None) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for a faulty value of the key `text_template`."""
    if given is None or given in TEXT_TEMPLATES:
        return
    if not is_template(given):
        known = ", ".join(TEXT_TEMPLATES)
        own = "a text of your own names its fields in braces, such as {output}"
        yield "text_template", f"is {given!r}; known: {known}; {own}"
        return
    try:
        columns_of(given)
    except ValueError as error:
        yield "text_template", f"is {given!r}, which {error}"
