"""Texts of chat templates that write the turns of other suites, for conversations without tools.

Suites write what is around a turn by rules of their own, such as a prefix and a suffix. A text here writes the same,
and has `{% generation %}` around what a suite supervises: an answer, and all that ends its turn. With it goes
`data.end_of_answer` template, as a suite also supervises a line break after the end-of-sequence token.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from llmsuite.plugins.suites.conversion.end_tokens import end_of_sequence
from llmsuite.plugins.suites.suite import Run

KEEPS_ENDS = {"end_of_answer": "template"}
"""Key of section `data` that goes with these texts."""
KEEPS_TEXT = {"end_of_answer": "token_in_text"}
"""Key of section `data` for a suite that keeps what a template writes after the last answer."""


@dataclasses.dataclass(frozen=True)
class Form:
    """Texts around turns. They are in quotes of Jinja, where \\n is a line break."""

    before: str
    """In front of all turns."""
    role: tuple[str, str]
    """Around the role."""
    end: str
    """After the content."""


CHATML = Form("", ("<|im_start|>", "\\n"), "<|im_end|>\\n")
LLAMA_3 = Form("<|begin_of_text|>", ("<|start_header_id|>", "<|end_header_id|>\\n\\n"), "<|eot_id|>")
_MODELS = {CHATML: r"qwen-?(1\.5|2|2\.5|3)-|smollm", LLAMA_3: r"llama-?3"}
"""Pattern of the models whose tokenizers have the tokens of a form; of the others whose end-of-sequence token is known,
none has them."""

EACH_ANSWER = "{{%- generation %}}{{{{- content + '{end}' }}}}{{%- endgeneration %}}"
"""Text that writes an answer and its end, which are supervised; `{end}` is that of the form."""
EMPTY_THOUGHT = (
    "{%- if '<think>' not in content and '</think>' not in content %}"
    # its white space would be joined with that of the thought, of which the suites make tokens of their own
    "{%- if content[:1] | trim != content[:1] %}"
    "{{- raise_exception('this template writes no answer without a thought that begins with white space') }}"
    "{%- endif %}"
    "{%- set content = '<think>\\n\\n</think>\\n\\n' + content %}"
    "{%- endif %}"
)
"""Text that begins an answer without a thought by an empty one, which is supervised."""
LAST_ANSWER = (
    "{{%- if loop.last %}}{{%- generation %}}{{{{- content + '{end}' }}}}{{%- endgeneration %}}"
    # suites make tokens of an answer alone; here they are those of all text up to the last answer
    "{{%- elif content[:1] | trim != content[:1] %}}"
    "{{{{- raise_exception('this template writes no earlier answer that begins with white space') }}}}"
    "{{%- else %}}{{{{- content + '{end}' }}}}{{%- endif %}}"
)
"""Text with which only the last answer is supervised."""


def turns_text(
    form: Form, system: str | None, thought: str = "", answer: str = EACH_ANSWER, fills_empty_system: bool = False
) -> str:
    """Return the text of a template for an optional system turn, and questions and answers in turn.

    Args:
        form: what is around turns.
        system: text of the system turn of rows without one; None for no turn.
        thought: text that changes `content`, that of an answer, before it is written.
        answer: text that writes `content`; `{end}` in it is that of the form.
        fills_empty_system: True to write `system` in place of an empty system turn, which is left out otherwise.
    """
    begin, after_role = form.role
    default = ""
    if system is not None:
        empty = " or not messages[0].content" if fills_empty_system else ""
        turn = f"{begin}system{after_role}{quoted(system)}{form.end}"
        default = f"{{%- if messages[0].role != 'system'{empty} %}}{{{{- '{turn}' }}}}{{%- endif %}}"
    before = f"{{{{- '{form.before}' }}}}" if form.before else ""
    return (
        "{%- if tools %}{{- raise_exception('this template writes no tools') }}{%- endif %}"
        f"{before}{default}"
        "{%- for message in messages %}"
        "{%- set content = message.content %}"
        "{%- set number = loop.index0 + (1 if messages[0].role != 'system' else 0) %}"
        "{%- if message.role == 'tool' %}{{- raise_exception('this template writes no tools') }}"
        "{%- elif number == 0 %}"
        # an empty system turn is none
        f"{{%- if content %}}{{{{- '{begin}system{after_role}' + content + '{form.end}' }}}}{{%- endif %}}"
        "{%- elif message.role != ('user' if number % 2 else 'assistant') %}"
        "{{- raise_exception('this template writes questions and answers in turn') }}"
        "{%- elif message.role == 'user' %}"
        f"{{{{- '{begin}user{after_role}' + content + '{form.end}' }}}}"
        "{%- else %}"
        f"{thought}"
        f"{{{{- '{begin}assistant{after_role}' }}}}"
        f"{answer.format(end=form.end)}"
        "{%- endif %}"
        "{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- '{begin}assistant{after_role}' }}}}{{%- endif %}}"
    )


def quoted(text: str) -> str:
    """Return a text as it is written in single quotes of Jinja."""
    return text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")


def check_tokens(run: Run, name: Any, form: Form) -> None:
    """Refuse a `template` whose tokens the tokenizer of the model does not have."""
    weights = str(run.given(run.suite.model_key))
    if re.search(_MODELS[form], weights, re.IGNORECASE) is not None:
        return
    if end_of_sequence(weights) is not None:
        run.refuse("template", name, f"writes {form.role[0]}, which is not a token of {weights}")
    run.note(f"data.chat_template: {form.role[0]} and the others have to be tokens of the tokenizer of {weights}")
