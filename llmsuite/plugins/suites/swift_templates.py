"""Chat templates of ms-swift: those that the tokenizer or llmsuite has too, and texts that write the same turns.

A text has `{% generation %}` around what ms-swift supervises: an answer, and the end of its turn with the line break.
"""

from __future__ import annotations

import re
from typing import Any

from llmsuite.plugins.suites.conversion.family import unquantised
from llmsuite.plugins.suites.conversion.kinds import is_on
from llmsuite.plugins.suites.suite import Run

_WITH_SYSTEM = r"qwen-?2-(57b-a14b|[\d.]+b)-instruct/?$|qwen-?2\.5-(coder-)?[\d.]+b-instruct/?$"
"""Models whose tokenizers have the templates of ms-swift, with the same default system turn. Others, such as
Qwen1.5, Qwen2.5-Math and Qwen2.5-1M, have another text in it."""
_QWEN_2_BASE = r"qwen-?2-(57b-a14b|[\d.]+b)/?$"
_QWEN_2_5_BASE = r"qwen-?2\.5-(coder-|math-)?[\d.]+b/?$"
"""Models for which ms-swift has the template of the Instruct ones, whose turns end with <|im_end|>. It is not the
end-of-sequence token of their tokenizers, which other templates write at the end of a conversation."""
_QWEN_2_5_MATH = r"qwen-?2\.5-math-[\d.]+b(-instruct)?/?$"
"""Models that differ from these only in the default system turn."""
_WITHOUT_SYSTEM = r"qwen-?3-.*instruct-2507|llama-?3-(8|70)b-instruct"
"""Models whose tokenizers have the templates of ms-swift, without a default system turn."""
_QWEN_3 = r"(?:^|/)qwen-?3-[\d.]+b(-a[\d.]+b)?(-base)?/?$"
"""Models with and without thoughts, for which ms-swift begins each answer without one by an empty thought; the template
of their tokenizers, only the last."""
_QWEN_2_5_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_QWEN_2_SYSTEM = "You are a helpful assistant."
_ANSWERS = {
    "default": "{%- generation %}{{- content + '<|im_end|>\\n' }}{%- endgeneration %}",
    # the empty thought, with the white space after it, is not supervised
    "ignore_empty_think": (
        "{%- set rest = content %}"
        "{%- if '</think>' in content and content.split('</think>', 1)[0] | trim == '<think>' %}"
        "{%- set rest = content.split('</think>', 1)[1].lstrip() %}"
        "{%- endif %}"
        "{{- content[:content | length - rest | length] }}"
        "{%- generation %}{{- rest + '<|im_end|>\\n' }}{%- endgeneration %}"
    ),
    "last_round": (
        "{%- if loop.last %}{%- generation %}{{- content + '<|im_end|>\\n' }}{%- endgeneration %}"
        "{%- else %}{{- content + '<|im_end|>\\n' }}{%- endif %}"
    ),
}
"""Text that writes an answer, by `loss_scale`."""


def has_no_system(model: str) -> bool:
    """Return True for a model whose template of ms-swift has no default system turn."""
    return re.search(f"{_WITHOUT_SYSTEM}|{_QWEN_3}", model, re.IGNORECASE) is not None


def template(run: Run) -> dict[str, Any]:
    """Return `data.chat_template`; refuse templates, and models whose template of ms-swift is not known to be that of
    the tokenizer or a built-in one. Takes the values of `loss_scale` that the template expresses."""
    weights = unquantised(str(run.given(run.suite.model_key)))
    given = run.take("template")
    if run.section in ("sft", "gkd"):
        text = _text(run, weights) if given is None else _named_text(given, weights)
        if text is not None:
            run.note("data.chat_template: the text of ms-swift's template, which refuses rows that it does not write "
                     "alike; what it has in {% generation %} is supervised")  # fmt: skip
            return {"chat_template": text}
    if given is None and _is_math(run, weights):
        run.note("data.chat_template: qwen2.5, ms-swift's for this model; that of its tokenizer has another system "
                 "turn. Tokens after the end of an answer are not supervised")  # fmt: skip
        return {"chat_template": "qwen2.5"}
    if given is not None or not re.search(f"{_WITH_SYSTEM}|{_WITHOUT_SYSTEM}", weights, re.IGNORECASE):
        why = "is a template of ms-swift, which may differ from the tokenizer's in system turns or thoughts"
        if run.section != "sft" and re.search(f"{_QWEN_2_BASE}|{_QWEN_2_5_BASE}", weights, re.IGNORECASE):
            why = "ends answers with <|im_end|>, which is not the end-of-sequence token of the tokenizer"
        elif re.search(r"qwen-?2\.5", weights, re.IGNORECASE):
            why = f"{why}; nearest key: data.chat_template qwen2.5"
        run.refuse("template", given or "not given", f"for {weights} it {why}")
    run.note("data.chat_template: that of the tokenizer, which equals ms-swift's; tokens after the end of an answer "
             "are not supervised")  # fmt: skip
    return {}


def _is_math(run: Run, weights: str) -> bool:
    """Return True for an Instruct model of Qwen2.5-Math with a system turn: rows have the turns of Qwen2.5-Instruct."""
    is_instruct = re.search(r"-instruct/?$", weights, re.IGNORECASE) is not None
    return is_instruct and re.search(_QWEN_2_5_MATH, weights, re.IGNORECASE) is not None and is_on(run.given("system"))


def _system_of_base(run: Run, weights: str) -> str | None:
    """Return the default system turn that ms-swift has for a base model of Qwen2 or Qwen2.5; None for another model."""
    if re.search(_QWEN_2_BASE, weights, re.IGNORECASE):
        return _QWEN_2_SYSTEM
    if not re.search(_QWEN_2_5_BASE, weights, re.IGNORECASE):
        return None
    if re.search(_QWEN_2_5_MATH, weights, re.IGNORECASE) and not is_on(run.given("system")):
        return None  # its default system turn is another one
    return _QWEN_2_5_SYSTEM


def _text(run: Run, weights: str) -> str | None:
    """Return the text of a template that neither the tokenizer nor llmsuite has; None for another."""
    scale = run.given("loss_scale")
    if run.section == "gkd" and scale is None:
        scale = "last_round"  # its default
    is_qwen_3 = re.search(_QWEN_3, weights, re.IGNORECASE) is not None
    if is_qwen_3 and scale in (None, "default", "ignore_empty_think"):
        run.take("loss_scale")
        adds = run.take("add_non_thinking_prefix")
        return chatml(None, adds is None or is_on(adds), scale or "default")
    system = _system_of_base(run, weights)
    if system is not None and scale in (None, "default", "last_round"):
        run.take("loss_scale")
        run.note("data.chat_template: the text of ms-swift's template, which ends answers with <|im_end|>, not with "
                 "the end-of-sequence token of the tokenizer")  # fmt: skip
        return chatml(system, False, scale or "default")
    if scale != "last_round":
        return None
    for pattern, default in (
        (r"qwen-?2\.5-", _QWEN_2_5_SYSTEM), (r"qwen-?2-", _QWEN_2_SYSTEM), (r"qwen-?3-.*instruct-2507", None),
    ):  # fmt: skip
        is_known = re.search(f"{_WITH_SYSTEM}|{_WITHOUT_SYSTEM}", weights, re.IGNORECASE)
        if is_known and re.search(pattern, weights, re.IGNORECASE):
            run.take("loss_scale")
            return chatml(default, False, scale)
    return None


def _named_text(name: Any, weights: str) -> str | None:
    """Return the text of a template with a name in ms-swift, for a tokenizer without a BOS token; None for another."""
    known = f"{_WITH_SYSTEM}|{_QWEN_2_BASE}|{_QWEN_2_5_BASE}"
    is_known = re.search(known, weights, re.IGNORECASE) is not None
    return DEFAULT if name == "default" and is_known else None


DEFAULT = (
    "{%- if tools %}{{- raise_exception('this template writes no tools') }}{%- endif %}"
    f"{{%- set system = '{_QWEN_2_SYSTEM}' %}}"
    "{%- set turns = messages %}"
    "{%- if messages[0].role == 'system' %}"
    "{%- set system = messages[0].content %}{%- set turns = messages[1:] %}"
    "{%- endif %}"
    # the line breaks after an answer are tokens of their own in ms-swift, and here they may be a part of others
    "{%- if turns | length > 2 %}{{- raise_exception('this template writes one question and its answer') }}{%- endif %}"
    "{%- if system %}{{- system + '\n\n' }}{%- endif %}"
    "{%- for message in turns %}"
    "{%- if message.role == 'user' %}"
    "{{- '### Human:\n' + message.content + '\n\n### Assistant:\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- generation %}{{- message.content + eos_token }}{%- endgeneration %}"
    "{%- else %}{{- raise_exception('this template writes no tools') }}"
    "{%- endif %}"
    "{%- endfor %}"
)
"""Text of the template "default", for conversations of one question."""


def chatml(system: str | None, has_thoughts: bool, loss_scale: str) -> str:
    """Return the text of a template in the form of ChatML, for conversations without tools.

    Args:
        system: text of the system turn of rows without one; None for no turn.
        has_thoughts: True to begin each answer without a thought by an empty one.
        loss_scale: one of `_ANSWERS`.
    """
    return chatml_text(system, _EMPTY_THOUGHT if has_thoughts else "", _ANSWERS[loss_scale])


SUPERVISED_ANSWER = _ANSWERS["default"]
"""Text that writes an answer and the end of its turn with the line break, all of it supervised."""
_EMPTY_THOUGHT = (
    "{%- if not content.startswith('<think>') %}"
    "{%- set content = '<think>\\n\\n</think>\\n\\n' + content %}"
    "{%- endif %}"
)


def chatml_text(system: str | None, thought: str, answer: str) -> str:
    """Return the text of a template in the form of ChatML, for conversations without tools.

    Args:
        system: text of the system turn of rows without one; None for no turn.
        thought: text that changes `content`, that of an answer, before it is written.
        answer: text that writes `content`.
    """
    first = ""
    if system is not None:
        first = (
            "{%- if messages[0].role != 'system' %}"
            f"{{{{- '<|im_start|>system\\n{system}<|im_end|>\\n' }}}}"
            "{%- endif %}"
        )
    return (
        "{%- if tools %}{{- raise_exception('this template writes no tools') }}{%- endif %}"
        f"{first}"
        "{%- for message in messages %}"
        "{%- set content = message.content %}"
        "{%- if message.role == 'assistant' %}"
        f"{thought}"
        "{{- '<|im_start|>assistant\\n' }}"
        f"{answer}"
        "{%- elif message.role == 'tool' %}"
        "{{- raise_exception('this template writes no tools') }}"
        # an empty system turn is none
        "{%- elif content or message.role != 'system' %}"
        "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
        "{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
