"""Chat templates of Axolotl, as texts with what it supervises.

Axolotl supervises the content of an answer, and the token after it where that is the end-of-sequence token or one of
`eot_tokens`. A text has `{% generation %}` around both. It finds an answer by the first and the last token that differ
once "[[dummy_message]]" is in its place, so a text refuses answers of which it would find another part.
"""

from __future__ import annotations

import re

from llmsuite.plugins.suites.conversion.end_tokens import end_of_sequence
from llmsuite.plugins.suites.turn_texts import CHATML, LLAMA_3, Form

_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_TEMPLATES: dict[str, tuple[Form, str | None]] = {
    "chatml": (CHATML, None),
    "qwen2.5": (CHATML, _SYSTEM),
    "qwen3": (CHATML, None),
    "llama3": (LLAMA_3, None),
}
"""Templates that have a text: what they write around turns, and their default system turn."""
_OF_MODELS = {r"qwen-?2\.5-(coder-)?[\d.]+b-instruct/?$": "qwen2.5", r"llama-?3-(8|70)b-instruct/?$": "llama3"}
"""Models whose tokenizers have one of these templates, as conversations without tools show it."""
_FOUND_ELSEWHERE = (
    "{%- if content.startswith('[[') or content.endswith(']]') %}"
    "{{- raise_exception('this template writes no answer that begins with [[ or ends with ]]') }}"
    "{%- endif %}"
    "{%- if '\\n' in content[:content | length - content.lstrip() | length] %}"
    "{{- raise_exception('this template writes no answer that begins with a line break') }}"
    "{%- endif %}"
)


_EMPTY_THOUGHT = (
    "{%- if '</think>' in content %}"
    "{{- raise_exception('this template writes no thoughts') }}"
    "{%- elif not loop.last %}"  # whose text depends on the turns after it
    "{{- raise_exception('this template writes no answer that other turns follow') }}"
    "{%- endif %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
)
"""Text in front of the content of an answer with qwen3: the last turn alone has a thought, which is empty."""


def name_of(template: str, model: str) -> str:
    """Return the template that a tokenizer has, for the choice "tokenizer" and a model where it is known; else the
    choice."""
    if template != "tokenizer":
        return template
    return next((name for pattern, name in _OF_MODELS.items() if re.search(pattern, model, re.IGNORECASE)), template)


def end_of(template: str) -> str | None:
    """Return the token that ends the answers of a template; None for a template that is not known."""
    return _TEMPLATES[template][0].end.removesuffix("\\n") if template in _TEMPLATES else None


def text_of(template: str, model: str, ends: list[str]) -> str | None:
    """Return the text of a template, for conversations without tools; None for another template, or a model whose
    end-of-sequence token is not known.

    Args:
        template: a name of `data.chat_template`.
        model: name of the model.
        ends: `eot_tokens`; without them Axolotl looks for the end-of-sequence token alone.
    """
    eos = end_of_sequence(model)
    if template not in _TEMPLATES or eos is None:
        return None
    form, system = _TEMPLATES[template]
    begin, after_role = form.role
    token = form.end.removesuffix("\\n")
    inside = ""
    outside = form.end
    if token in (eos, *ends):
        inside = f" + '{token}'"
        outside = form.end.removeprefix(token)
    trim = " | trim" if form is LLAMA_3 else ""
    first = f"{{{{- '{form.before}' }}}}" if form.before else ""
    if system is not None:
        turn = f"{begin}system{after_role}{system}{form.end}"
        first += f"{{%- if messages[0].role != 'system' %}}{{{{- '{turn}' }}}}{{%- endif %}}"
    rest = f"{{{{- '{outside}' }}}}" if outside else ""
    return (
        "{%- if tools %}{{- raise_exception('this template writes no tools') }}{%- endif %}"
        f"{first}"
        "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}{{- raise_exception('this template writes no tools') }}{%- endif %}"
        f"{{%- set content = message.content{trim} %}}"
        f"{{{{- '{begin}' + message.role + '{after_role}' }}}}"
        "{%- if message.role == 'assistant' %}"
        f"{_FOUND_ELSEWHERE}{_EMPTY_THOUGHT if template == 'qwen3' else ''}"
        f"{{%- generation %}}{{{{- content{inside} }}}}{{%- endgeneration %}}{rest}"
        "{%- else %}"
        f"{{{{- content + '{form.end}' }}}}"
        "{%- endif %}"
        "{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- '{begin}assistant{after_role}' }}}}{{%- endif %}}"
    )
