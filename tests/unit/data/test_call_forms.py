"""Turns with calls in the form that their template takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmsuite.data.chat_template import BUILTIN, ChatTemplate
from llmsuite.data.rows import Message
from llmsuite.data.turns import parse_message

ARGUMENTS = {"city": "Rome", "days": 2}
AS_TEXT = '{"city":"Rome",  "days":2}'
"""With white space of its own, which a template that shows text keeps."""
WHO = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
END = "{% endfor %}"
EACH = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>"
CALLS = "{% endfor %}"
TEMPLATES = {
    # Qwen2.5, Hermes, Llama 3.1: an object is wanted
    "tojson": WHO + EACH + "{{ c.function.arguments | tojson }}" + CALLS + END,
    # Qwen3 and GLM-4 take both
    "either": WHO + EACH + "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}"
    + CALLS + END,
    # DeepSeek-V3 and R1 join text
    "text": WHO + EACH + "{{ '```json\n' + c['function']['arguments'] + '\n```' }}" + CALLS + END,
    # Qwen3-Coder writes each argument
    "items": WHO + EACH + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}" + CALLS + END,
    # as the first templates of DeepSeek did: a call is where nothing is said
    "null": "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}" + EACH
    + "{{ c.function.arguments | tojson }}" + CALLS + "{% else %}{{ m.content }}{% endif %}" + END,
    # one that writes what is said as it is
    "plain content": "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + EACH
    + "{{ c.function.arguments | tojson }}" + CALLS + END,
}  # fmt: skip
WANTED = {
    "tojson": ['{"city": "Rome", "days": 2}'] * 2,
    "either": [AS_TEXT, '{"city": "Rome", "days": 2}'],
    "text": [f"```json\n{AS_TEXT}\n```", '```json\n{"city": "Rome", "days": 2}\n```'],
    "items": ["city=Rome;days=2;"] * 2,
    "null": ['{"city": "Rome", "days": 2}'] * 2,
    "plain content": ['{"city": "Rome", "days": 2}'] * 2,
}


def talk(content: str | None, arguments: Any) -> list[Message]:
    call = {"id": "call0001x", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
    ]
    return [parse_message(turn, f"messages[{number}]") for number, turn in enumerate(turns)]


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_gets_a_form_that_it_accepts(name: str, content: str | None) -> None:
    template = ChatTemplate(TEMPLATES[name], {}, name)
    for arguments, wanted in zip((AS_TEXT, ARGUMENTS), WANTED[name], strict=True):
        assert template.render(talk(content, arguments)) == f"[user]Rome?[assistant]<weather>{wanted}"


def test_content_next_to_a_call_is_kept() -> None:
    template = ChatTemplate(TEMPLATES["text"], {}, "text")
    assert "I look.<weather>```json" in template.render(talk("I look.", ARGUMENTS))


def test_a_template_that_accepts_no_form_has_its_own_error() -> None:
    refuses = "{% if messages[-1].tool_calls %}{{ raise_exception('no tools here') }}{% endif %}x"
    with pytest.raises(Exception, match="no tools here"):
        ChatTemplate(refuses, {}, "refusing").render(talk(None, ARGUMENTS))


@pytest.mark.parametrize("content", [None, ""])
def test_the_builtin_template_writes_no_null(content: str | None) -> None:
    text = ChatTemplate(BUILTIN["chatml"], {}, "chatml").render(talk(content, json.dumps(ARGUMENTS)))
    assert "None" not in text
    assert '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}' in text
