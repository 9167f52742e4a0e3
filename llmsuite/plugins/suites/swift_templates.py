"""Chat templates of ms-swift, as texts that write the same turns.

A text has `{% generation %}` around what ms-swift supervises: an answer, and the end of its turn with the line break.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmsuite.plugins.suites.conversion.end_tokens import end_of_sequence
from llmsuite.plugins.suites.conversion.family import unquantised
from llmsuite.plugins.suites.conversion.kinds import is_on
from llmsuite.plugins.suites.suite import Run
from llmsuite.plugins.suites.turn_texts import CHATML, EACH_ANSWER, KEEPS_ENDS, LAST_ANSWER, LLAMA_3, Form, turns_text

_QWEN_2_SYSTEM = "You are a helpful assistant."
_QWEN_2_5_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_MATH_SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
"""Default system turns."""
_FORMS: tuple[tuple[str, Form, str | None], ...] = (
    (r"(?:^|/)qwen-?2-(57b-a14b|[\d.]+b)(-instruct)?/?$", CHATML, _QWEN_2_SYSTEM),
    (r"(?:^|/)qwen-?2\.5-(coder-)?[\d.]+b(-instruct)?/?$", CHATML, _QWEN_2_5_SYSTEM),
    (r"(?:^|/)qwen-?2\.5-math-[\d.]+b(-instruct)?/?$", CHATML, _MATH_SYSTEM),
    (r"(?:^|/)qwen-?3-[\d.]+b(-a[\d.]+b)?-instruct-2507/?$", CHATML, None),
    (r"(?:^|/)(meta-)?llama-?3-(8|70)b(-instruct)?/?$", LLAMA_3, None),
)
"""Names of models -> what ms-swift writes around their turns, and the system turn of rows without one. Base models have
the form of the Instruct ones: their answers end with <|im_end|> or <|eot_id|> too."""
_QWEN_3 = r"(?:^|/)qwen-?3-[\d.]+b(-a[\d.]+b)?(-base)?/?$"
"""Models with and without thoughts, for which ms-swift begins each answer without one by an empty thought."""
_EMPTY_THOUGHT = (
    "{%- if not content.startswith('<think>') %}"
    "{%- set content = '<think>\\n\\n</think>\\n\\n' + content %}"
    "{%- endif %}"
)
_ANSWERS = {
    "default": EACH_ANSWER,
    # the empty thought, with the white space after it, is not supervised
    "ignore_empty_think": (
        "{{%- set rest = content %}}"
        "{{%- if '</think>' in content and content.split('</think>', 1)[0] | trim == '<think>' %}}"
        "{{%- set rest = content.split('</think>', 1)[1].lstrip() %}}"
        "{{%- endif %}}"
        "{{%- if rest.startswith('</think>') %}}"
        "{{{{- raise_exception('this template writes no answer that ends a thought twice') }}}}"
        "{{%- endif %}}"
        "{{{{- content[:content | length - rest | length] }}}}"
        "{{%- generation %}}{{{{- rest + '{end}' }}}}{{%- endgeneration %}}"
    ),
    "last_round": LAST_ANSWER,
}
"""Text that writes an answer, by `loss_scale`."""
_OF_LAST_ROUND = (
    "{%- if not loop.last %}{%- set content = content.split('</think>')[-1] | trim %}"
    f"{_EMPTY_THOUGHT.replace('{%- if', '{%- elif', 1)}"
)
"""Text that changes answers of Qwen3 where only the last one is trained on: earlier ones have no thoughts."""
_NAMED: dict[str, str | None] = {
    "qwen": _QWEN_2_SYSTEM,
    "qwen2_5": _QWEN_2_5_SYSTEM,
    "qwen2_5_math": _MATH_SYSTEM,
    "qwen3_nothinking": None,
}
"""Names of templates in the form of ChatML, with the system turn of rows without one."""
_CHATML_MODELS = r"(?:^|/)qwen-?(1\.5|2|2\.5|3)-[\d.]+b"
"""Models whose tokenizers have the tokens of ChatML, and no token in front of a text."""
_OF_TOKENIZER = (
    r"qwen-?2-(57b-a14b|[\d.]+b)-instruct/?$|qwen-?2\.5-(coder-)?[\d.]+b-instruct/?$|qwen-?3-.*instruct-2507"
)
"""Models whose tokenizers have templates with the same prompts as ms-swift."""
_NOTE = (
    "data.chat_template: the text of ms-swift's template, which refuses rows that it does not write alike; what it has "
    "in {% generation %} is supervised"
)


def may_add_system(run: Run) -> bool:
    """Return True where the recipe may have a template that adds a system turn of its own."""
    return run.section == "grpo" and re.search("2507|llama", str(run.given(run.suite.model_key)), re.IGNORECASE) is None


def template(run: Run) -> dict[str, Any]:
    """Return `data.chat_template`, and how answers end; refuse templates and models that are not known. Takes the
    values of `loss_scale` that the template expresses."""
    weights = unquantised(str(run.given(run.suite.model_key)))
    name = run.take("template")
    if run.section == "grpo" and name is None and re.search(_OF_TOKENIZER, weights, re.IGNORECASE):
        run.note("data.chat_template: that of the tokenizer, whose prompts equal those of ms-swift")
        return {}
    text = _text(run, name, weights)
    if text is None:
        run.refuse("template", name or "not given", f"for {weights} it is a template of ms-swift, which may differ "
                   "from the tokenizer's in system turns, thoughts or the end of answers")  # fmt: skip
        return {}
    run.note(_NOTE)
    return {"chat_template": text} | ({} if run.section == "grpo" else KEEPS_ENDS)


def stop_of(run: Run, data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return `rollout.stop` where ms-swift ends answers with another token than the end-of-sequence token: it stops at
    both."""
    eos = end_of_sequence(unquantised(str(run.given(run.suite.model_key))))
    ends = [form.end.removesuffix("\\n") for form in (CHATML, LLAMA_3)]
    found = [end for end in ends if end != eos and end in data.get("chat_template", "")]
    return {"stop": found} if found else {}


def _text(run: Run, name: Any, weights: str) -> str | None:
    """Return the text of a template; None for one that is not known."""
    is_qwen_3 = name in (None, "qwen3") and re.search(_QWEN_3, weights, re.IGNORECASE) is not None
    if is_qwen_3 and run.section != "grpo":
        return _with_thoughts(run)
    if name == "default":
        is_known = re.search(r"(?:^|/)qwen-?2(\.5)?-[\d.]+b", weights, re.IGNORECASE) is not None
        return DEFAULT if is_known and run.section == "sft" and run.given("system") != "" else None
    found = _form(name, weights)
    if found is None:
        return None
    form, system = found
    scale = _loss_scale(run, ("default", "last_round"))
    if run.given("system") == "":
        system = None
    return turns_text(form, system, answer=_ANSWERS[scale])


def _form(name: Any, weights: str) -> tuple[Form, str | None] | None:
    """Return the form of turns and the default system turn, of a template by its name or by that of the model."""
    if name is None:
        found = ((form, system) for pattern, form, system in _FORMS if re.search(pattern, weights, re.IGNORECASE))
        return next(found, None)
    if name in _NAMED and re.search(_CHATML_MODELS, weights, re.IGNORECASE):
        return CHATML, _NAMED[name]
    return None


def _with_thoughts(run: Run) -> str | None:
    """Return the text of the template of Qwen3; None for a job whose thoughts are not known."""
    adds = run.take("add_non_thinking_prefix")
    is_added = adds is None or is_on(adds)
    if run.section == "gkd" or (run.section == "sft" and run.given("loss_scale") == "last_round"):
        return None
    if run.section != "sft":
        return turns_text(CHATML, None, _OF_LAST_ROUND, LAST_ANSWER) if is_added else None
    scale = _loss_scale(run, ("default", "ignore_empty_think"))
    return turns_text(CHATML, None, _EMPTY_THOUGHT if is_added else "", _ANSWERS[scale])


def _loss_scale(run: Run, known: tuple[str, ...]) -> str:
    """Return the value of `loss_scale` that a text expresses; other values stay, to be refused. Stages that train on
    the last answer alone have no choice."""
    scale = run.given("loss_scale")
    if run.section not in ("sft", "gkd"):
        return "last_round"
    if scale is None:
        return "last_round" if run.section == "gkd" else "default"
    if scale not in known:
        return "default"
    run.take("loss_scale")
    return str(scale)


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
