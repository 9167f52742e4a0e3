"""No converted file trains on other tokens than its suite: the tokens and the supervised positions of small rows, of
every template that conversions give, by an independent reference of each suite's rules."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.recipe import DataSection
from llmsuite.data.chat_template import load_template
from llmsuite.data.rows import Conversation, Message, Preference, Unpaired
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.stage import DropCounts, Stage, StageContext
from llmsuite.plugins.suites import axolotl, llamafactory, paddleformers, swift_templates
from llmsuite.plugins.suites.convert import convert
from llmsuite.plugins.suites.known import SUITES
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.gkd import GkdStage
from llmsuite.stages.gkd_section import GkdSection
from llmsuite.stages.kto import KtoStage
from llmsuite.stages.rm import RmStage
from llmsuite.stages.sections import DpoSection, KtoSection, RmSection, SftSection
from llmsuite.stages.sft import SftStage
from tests.support import axolotl as axolotl_files
from tests.support import dpo_case
from tests.support import llamafactory as llamafactory_files
from tests.support import paddleformers as paddleformers_files
from tests.support import swift as swift_files
from tests.support.suite_rules import (
    CHATML,
    LLAMA_3,
    Axolotl,
    LlamaFactory,
    PaddleFormers,
    Rule,
    Swift,
    Turn,
    tokenizer,
)

QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_2 = "You are a helpful assistant."
MATH = "Please reason step by step, and put your final answer within \\boxed{}."
SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
ODD = "It's \\ mine: {{ x }}\n{% y %}"
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
IM_END, ENDOFTEXT, EOT, END_OF_TEXT = "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>"


def _talk(*texts: str, system: str | None = None) -> list[Turn]:
    turns = [("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    return turns if system is None else [("system", system), *turns]


PLAIN = {
    "one": _talk("Hi?", "Hello."),
    "system": _talk("2+2?", "4", system="Be brief."),
    "two": _talk("Hi?", "Hello.", "And 10 + 15?", "It is 25!"),
    "three": _talk("a", "b c", "d\n", "```py\nx = 1\n```", "…", "好的。", system="Be brief."),
    "odd": _talk("'q'", '"a" \\n', system=ODD),
}
"""Rows that every template writes."""
OTHERS = {
    "empty system": _talk("Hi?", "Hello.", system=""),
    "thought": _talk("2+2?", THOUGHT + "4"),
    "thoughts": _talk("2+2?", THOUGHT + "4", "3+3?", THOUGHT + "6"),
    "first thought": _talk("2+2?", THOUGHT + "4", "3+3?", "6"),
    "last thought": _talk("2+2?", "4", "3+3?", THOUGHT + "6"),
    "empty thought": _talk("2+2?", "<think>\n\n</think>\n\n4"),
    "tags": _talk("Hi?", "a <think> b", "x", "a </think> b"),
    "end of a thought": _talk("x", "</think>\n\ny"),
    "spaces": _talk("  Hi?  \n", "  Hello.  "),
    "spaces later": _talk("Hi?", "Hello.  \n", "x ", "y \n\n"),
    "line break": _talk("Hi?", "\n\nHello.\n"),
    "line breaks": _talk("Hi?", "\nHello.\n", "again", "\nYes"),
    "brackets": _talk("list", "[[1, 2], [3, 4]]"),
    "last brackets": _talk("list", "[1, [3, 4]]", "more", "[1]"),
    "empty question": _talk("", "Hello."),
    "answer first": [("assistant", "Welcome."), *_talk("Hi?", "Hello.")],
    "two questions": [("user", "Hi?"), *_talk("Are you there?", "Hello.")],
    "two answers": [*_talk("Hi?", "Hello."), ("assistant", "How are you?")],
    "late system": [("user", "Hi?"), ("system", "Be brief."), ("assistant", "Hello.")],
}
"""Rows that a template may refuse, or drop, but never write in another way."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A file of a suite, and what the suite trains on."""

    action: str
    values: dict[str, Any]
    eos: str
    rule: Rule
    stages: tuple[str, ...]

    def __str__(self) -> str:
        model = self.values.get("model") or self.values.get("base_model") or self.values["model_name_or_path"]
        words = ("template", "chat_template", "default_system", "system", "loss_scale", "add_non_thinking_prefix")
        given = {word: self.values[word] for word in (*words, "eot_tokens") if word in self.values}
        return f"{self.action} {model} {given}"


def _llamafactory(name: str | None, model: str, eos: str, rule: Rule, **more: Any) -> Case:
    values = {**llamafactory_files.SFT, "model_name_or_path": model, "template": name, **more}
    return Case("from-llamafactory", values, eos, rule, ("sft", "dpo", "kto"))


def _swift(model: str, eos: str, rule: Rule, stages: str = "sft dpo kto rm gkd", **more: Any) -> Case:
    return Case("from-swift", {**swift_files.BARE, "model": model, **more}, eos, rule, tuple(stages.split()))


def _axolotl(name: str | None, model: str, eos: str, rule: Rule, **more: Any) -> Case:
    values = {**axolotl_files.BARE, "base_model": model, **({"chat_template": name} if name else {}), **more}
    return Case("from-axolotl", values, eos, rule, ("sft",))


def _paddleformers(name: str, model: str, eos: str, rule: Rule) -> Case:
    values = {**paddleformers_files.BARE, "model_name_or_path": model, "template": name, "fine_tuning": "full"}
    return Case("from-paddleformers", values, eos, rule, ("sft", "dpo"))


LLAMA_INSTRUCT = "NousResearch/Meta-Llama-3-8B-Instruct"
PLAIN_CHATML = LlamaFactory(CHATML)
THINKS = LlamaFactory(CHATML, has_thoughts=True)
QWEN_3 = Swift(CHATML, has_thoughts=True)
CASES = [
    _llamafactory("chatml", "Qwen/Qwen2.5-7B-Instruct", IM_END, PLAIN_CHATML),
    _llamafactory("chatml", "Qwen/Qwen2.5-7B", ENDOFTEXT, PLAIN_CHATML),
    _llamafactory("qwen", "Qwen/Qwen2.5-7B-Instruct", IM_END, LlamaFactory(CHATML, QWEN)),
    _llamafactory(None, "Qwen/Qwen2.5-7B-Instruct", IM_END, LlamaFactory(CHATML, QWEN)),
    _llamafactory("qwen", "Qwen/Qwen2-7B", ENDOFTEXT, LlamaFactory(CHATML, QWEN)),
    _llamafactory("qwen", "Qwen/Qwen2.5-7B", ENDOFTEXT, PLAIN_CHATML, default_system=""),
    _llamafactory("qwen", "Qwen/Qwen2.5-7B", ENDOFTEXT, LlamaFactory(CHATML, ODD), default_system=ODD),
    _llamafactory("qwen3", "Qwen/Qwen3-8B", IM_END, THINKS),
    _llamafactory("qwen3", "Qwen/Qwen3-8B-Base", ENDOFTEXT, THINKS),
    _llamafactory("qwen3_nothink", "Qwen/Qwen3-8B", IM_END, PLAIN_CHATML),
    _llamafactory("smollm", "HuggingFaceTB/SmolLM-135M", ENDOFTEXT, PLAIN_CHATML),
    _llamafactory("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", IM_END, LlamaFactory(CHATML, SMOLLM)),
    _llamafactory("llama3", LLAMA_INSTRUCT, EOT, LlamaFactory(LLAMA_3)),
    _llamafactory("llama3", "meta-llama/Meta-Llama-3-8B", END_OF_TEXT, LlamaFactory(LLAMA_3)),
    _swift("Qwen/Qwen2.5-7B-Instruct", IM_END, Swift(CHATML, QWEN)),
    _swift("Qwen/Qwen2.5-7B", ENDOFTEXT, Swift(CHATML, QWEN)),
    _swift("Qwen/Qwen2.5-7B-Instruct", IM_END, Swift(CHATML, None), "sft dpo", system=""),
    _swift("Qwen/Qwen2.5-Coder-7B-Instruct", IM_END, Swift(CHATML, QWEN), "sft gkd", loss_scale="last_round"),
    _swift("Qwen/Qwen2.5-7B", ENDOFTEXT, Swift(CHATML, QWEN), "sft gkd", loss_scale="default"),
    _swift("Qwen/Qwen2-7B-Instruct", IM_END, Swift(CHATML, QWEN_2)),
    _swift("Qwen/Qwen2.5-Math-7B", ENDOFTEXT, Swift(CHATML, MATH)),
    _swift("Qwen/Qwen3-4B-Instruct-2507", IM_END, Swift(CHATML)),
    _swift("LLM-Research/Meta-Llama-3-8B-Instruct", EOT, Swift(LLAMA_3)),
    _swift("LLM-Research/Meta-Llama-3-8B", END_OF_TEXT, Swift(LLAMA_3)),
    _swift("Qwen/Qwen3-8B", IM_END, QWEN_3, "sft dpo kto rm"),
    _swift("Qwen/Qwen3-8B-Base", ENDOFTEXT, QWEN_3, "sft dpo", template="qwen3"),
    _swift("Qwen/Qwen3-8B", IM_END, Swift(CHATML), "sft", add_non_thinking_prefix=False),
    _swift("Qwen/Qwen3-8B", IM_END, Swift(CHATML, None, True, True), "sft", loss_scale="ignore_empty_think"),
    _swift("Qwen/Qwen3-8B", IM_END, Swift(CHATML, QWEN), "sft dpo", template="qwen2_5"),
    _swift("Qwen/Qwen2.5-3B", ENDOFTEXT, Swift(CHATML, QWEN_2), "sft dpo", template="qwen"),
    _swift("Qwen/Qwen2.5-3B", ENDOFTEXT, Swift(CHATML, MATH), "sft dpo", template="qwen2_5_math"),
    _swift("Qwen/Qwen2.5-3B", ENDOFTEXT, Swift(CHATML), "sft dpo", template="qwen3_nothinking"),
    _axolotl("chatml", "Qwen/Qwen2.5-7B-Instruct", IM_END, Axolotl(CHATML, IM_END)),
    _axolotl("chatml", "Qwen/Qwen2.5-7B", ENDOFTEXT, Axolotl(CHATML, None)),
    _axolotl("chatml", "Qwen/Qwen2.5-7B", ENDOFTEXT, Axolotl(CHATML, IM_END), eot_tokens=[IM_END]),
    _axolotl("qwen_25", "Qwen/Qwen2.5-7B-Instruct", IM_END, Axolotl(CHATML, IM_END, QWEN)),
    _axolotl("qwen_25", "Qwen/Qwen2.5-7B", ENDOFTEXT, Axolotl(CHATML, None, QWEN)),
    _axolotl("llama3", LLAMA_INSTRUCT, EOT, Axolotl(LLAMA_3, EOT, trims=True)),
    _axolotl("llama3", "NousResearch/Meta-Llama-3-8B", END_OF_TEXT, Axolotl(LLAMA_3, None, trims=True)),
    _axolotl("qwen3", "Qwen/Qwen3-8B", IM_END, Axolotl(CHATML, IM_END, has_thoughts=True)),
    _axolotl("qwen3", "Qwen/Qwen3-8B-Base", ENDOFTEXT, Axolotl(CHATML, None, has_thoughts=True)),
    _axolotl(None, "Qwen/Qwen2.5-7B-Instruct", IM_END, Axolotl(CHATML, IM_END, QWEN)),
    _axolotl("tokenizer_default", LLAMA_INSTRUCT, EOT, Axolotl(LLAMA_3, EOT, trims=True)),
    _paddleformers("qwen3", "Qwen/Qwen3-8B", IM_END, PaddleFormers(CHATML, has_thoughts=True)),
    _paddleformers("qwen3", "Qwen/Qwen3-0.6B-Base", ENDOFTEXT, PaddleFormers(CHATML, has_thoughts=True)),
    _paddleformers("qwen3_nothink", "Qwen/Qwen3-8B", IM_END, PaddleFormers(CHATML)),
    _paddleformers("llama3", LLAMA_INSTRUCT, EOT, PaddleFormers(LLAMA_3)),
]


def test_every_template_of_a_conversion_has_a_case() -> None:
    def given(action: str, key: str) -> set[Any]:
        return {case.values[key] for case in CASES if case.action == action and key in case.values}

    assert given("from-llamafactory", "template") - {None} == set(llamafactory._TEMPLATES)
    assert given("from-paddleformers", "template") == set(paddleformers._TEMPLATES)
    assert given("from-swift", "template") == {*swift_templates._NAMED, "qwen3"}  # "default" is in the next test
    models = given("from-swift", "model")
    assert all(any(swift_templates._form(None, model) == found[1:] for model in models) for found in _forms())
    assert given("from-axolotl", "chat_template") == set(axolotl._TEMPLATES)


def _forms() -> list[tuple[Any, ...]]:
    return [(pattern, form, system) for pattern, form, system in swift_templates._FORMS]


def _file(case: Case, stage: str) -> dict[str, Any]:
    """The values of a file for another stage of the suite."""
    if case.action == "from-llamafactory":
        return {**case.values, "stage": stage}
    if case.action == "from-paddleformers":
        return {**case.values, "stage": stage.upper()}
    if case.action == "from-swift" and stage != "sft":
        values = {**case.values, "command": "swift rlhf", "rlhf_type": stage}
        if stage == "gkd":
            values |= {"teacher_model": values["model"], "lmbda": 0}
        return values
    return case.values


def _made(name: str, recipe: dict[str, Any], directory: Path) -> Stage[Any]:
    """The stage of a recipe with a tokenizer."""
    tokens = TextTokenizer(directory)
    keys = ("chat_template", "end_of_answer", "max_length", "system", "ignore_columns")
    data = DataSection(train="rows.jsonl", **{key: recipe["data"][key] for key in keys if key in recipe["data"]})
    context = StageContext(
        stage_name=name,
        data=data,
        train=dpo_case.train_section(),
        seed=42,
        tokenizer=tokens,
        template=lambda: load_template(data.chat_template, directory, tokens.special_tokens),
        data_formats={},
        initial_digest=lambda: "model",
        length_multiple=1,
        report=lambda text: None,
    )
    if name == "gkd":
        return GkdStage(GkdSection(teacher="t", last_turn=recipe["gkd"].get("last_turn", False)), context)
    if name == "kto":
        return KtoStage(KtoSection(loss="apo_zero"), context)
    if name == "rm":
        return RmStage(RmSection(), context)
    return DpoStage(DpoSection(), context) if name == "dpo" else SftStage(SftSection(), context)


def _row(name: str, turns: list[Turn], system: str | None) -> Any:
    if system is not None and turns[0][0] != "system":  # as the reader of rows adds it
        turns = [("system", system), *turns]
    messages = tuple(Message(role, content) for role, content in turns)
    if name in ("sft", "gkd"):
        return Conversation(messages, tuple(message.role == "assistant" for message in messages))
    if name == "kto":
        return Unpaired(messages[:-1], messages[-1], desirable=True)
    return Preference(messages[:-1], messages[-1], Message("assistant", "No, it is not."))


def _tokens(made: Stage[Any], name: str, row: Any) -> list[tuple[int, bool]] | None:
    """The tokens of a row, each with True if it is supervised; None if the row is refused or dropped."""
    try:
        found = made.make_samples([row], DropCounts(Path("rows.jsonl"), read=1))
    except UserError:
        return None
    if not found:
        return None
    (sample,) = found
    if name in ("sft", "gkd"):
        return list(zip(sample.ids.tolist(), (sample.weights > 0).tolist()))
    answer = sample.answer if name == "kto" else sample.answers[0]
    supervised = [False] * len(answer.prompt) + [True] * len(answer.ids)
    return list(zip([*answer.prompt, *answer.ids], supervised))


def _counted(tokens: list[tuple[int, bool]] | None) -> list[tuple[int, bool]]:
    """The tokens up to the last supervised one: those after it have no part in the loss."""
    tokens = tokens or []
    last = max((i for i, (_, is_supervised) in enumerate(tokens) if is_supervised), default=-1)
    return tokens[: last + 1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_supervision_are_those_of_the_suite(case: Case, registry: Registry, tmp_path: Path) -> None:
    directory = tokenizer(tmp_path / "tokenizer", case.eos)
    encoder = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for name in case.stages:
        recipe = convert(SUITES[case.action], _file(case, name), "x.yaml", registry).recipe
        made = _made(name, recipe, directory)
        last_only = name not in ("sft", "gkd") or recipe.get("gkd", {}).get("last_turn", False)
        last_only = last_only or case.values.get("loss_scale") == "last_round"
        for title, turns in {**PLAIN, **OTHERS}.items():
            found = _tokens(made, name, _row(name, turns, recipe["data"].get("system")))
            expected = case.rule.tokens(turns, encoder, last_only)
            has_one_answer = [role for role, _ in turns].count("assistant") == 1
            is_written = has_one_answer or not (isinstance(case.rule, Axolotl) and case.rule.has_thoughts)
            assert found is not None or title in OTHERS or not is_written, (name, title)
            if found is not None and recipe["data"]["end_of_answer"] == "token_in_text":
                assert found == expected, (name, title)
            elif found is not None:
                assert _counted(found) == _counted(expected), (name, title)
