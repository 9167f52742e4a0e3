"""Chat templates of Axolotl for tokenizers with another end-of-sequence token than the one that ends an answer.

Axolotl supervises the content of an answer, and the token after it where that is the end-of-sequence token or one of
`eot_tokens`. A text has `{% generation %}` around what it supervises.
"""

from __future__ import annotations

_SYSTEMS = {"chatml": None, "qwen2.5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."}
"""Default system turn of the templates that have a text."""
_END = "<|im_end|>"


def text_of(template: str, supervises_end: bool) -> str | None:
    """Return the text of a template in the form of ChatML, for conversations without tools; None for another template.

    Args:
        template: a name of `data.chat_template`.
        supervises_end: True to supervise the token that ends an answer.
    """
    if template not in _SYSTEMS:
        return None
    system = _SYSTEMS[template]
    first = ""
    if system is not None:
        first = (
            f"{{%- if messages[0].role != 'system' %}}{{{{- '<|im_start|>system\\n{system}{_END}\\n' }}}}{{%- endif %}}"
        )
    inside, outside = (f" + '{_END}'", "\\n") if supervises_end else ("", f"{_END}\\n")
    return (
        "{%- if tools %}{{- raise_exception('this template writes no tools') }}{%- endif %}"
        f"{first}"
        "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}{{- raise_exception('this template writes no tools') }}{%- endif %}"
        "{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.role == 'assistant' %}"
        f"{{%- generation %}}{{{{- message.content{inside} }}}}{{%- endgeneration %}}{{{{- '{outside}' }}}}"
        "{%- else %}"
        f"{{{{- message.content + '{_END}\\n' }}}}"
        "{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
