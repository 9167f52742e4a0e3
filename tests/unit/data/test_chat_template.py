"""Chat templates: rendered texts, and limits of untrusted templates."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data import chat_template
from llmsuite.data.chat_template import BUILTIN, ChatTemplate, load_template
from llmsuite.data.jinja import compiled, template_facts, turn_texts
from llmsuite.data.rows import Conversation, Message, Prompt, with_answer
from llmsuite.data.turns import parse_message
from tests.support.paths import DATA

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ASK = [Message("system", " Be brief. "), Message("user", "Hi?")]


def named(role: str, text: str, name: str) -> Message:
    return parse_message({"role": role, "content": text, "name": name}, "turn")


def built_in(name: str) -> ChatTemplate:
    return load_template(name, Path("/nowhere"), TOKENS)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, TOKENS, "stranger")


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        (
            "chatml",
            "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
            "Hello.<|im_end|>\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "Hello.<|eot_id|>",
        ),
        ("plain", " Be brief. \nHi?\n", "Hello.</s>"),
    ],
)
def test_builtin_templates_render_as_expected(name: str, prompt: str, answer: str) -> None:
    assert built_in(name).render(ASK, add_generation_prompt=True) == prompt
    assert built_in(name).render([*ASK, Message("assistant", "Hello.")]) == prompt + answer
    assert built_in(name).split(with_answer(ASK, Message("assistant", "Hello."))) == (prompt, prompt + answer)


@given(name=st.sampled_from(sorted(BUILTIN)), texts=st.lists(st.text(), min_size=1, max_size=4), answer=st.text())
def test_split_cuts_the_full_conversation(name: str, texts: list[str], answer: str) -> None:
    roles = ["user", "assistant"] * 2
    prompt = [Message(role, text) for role, text in zip(roles, texts)]
    before, whole = built_in(name).split(with_answer(prompt, Message("assistant", answer)))
    assert before == built_in(name).render(prompt, add_generation_prompt=True)
    assert whole == built_in(name).render([*prompt, Message("assistant", answer)])


REACHING = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages.__class__.__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')).mro() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{m.__class__.__mro__}'.format_map({'m': messages}) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception.__globals__['jinja2'] }}",
    "{{ raise_exception.__code__.co_consts }}",
    "{{ self.__init__.__globals__ }}",
    "{% set f = messages.__class__ %}{{ f() }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]
MUTATING = [
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages.pop() }}",
    "{{ messages.reverse() }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{{ messages[0].pop('content') }}",
    "{% set messages[0]['content'] = 'x' %}",
    "{% set ns = namespace() %}{% set ns.m = messages %}{{ ns.m.append(1) }}",
]
FAILING = [
    "{{ 1 / 0 }}",
    "{{ messages[0].content.index('absent') }}",
    "{{ 1 + none }}",
    "{{ 'a'.encode().decode('utf-16') }}",
    "{{ {}['a'].b }}",
    "{{ '%d' | format('a') }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{{ absent() }}",
]
BROKEN = ["{% if %}", "{% for m in messages %}", "{{ ", "{% nonsense %}", "{{ 1 +", "{{ " + "(" * 9999, "{% endif %}"]


@pytest.mark.parametrize("source", REACHING + MUTATING + FAILING)
def test_a_template_that_does_more_than_render_is_refused(source: str) -> None:
    turns = list(ASK)
    with pytest.raises(UserError, match="chat template of stranger"):
        template(source).render(turns)
    assert turns == ASK


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ messages | attr('__class__') }}", "{{ messages._x }}"])
def test_a_private_attribute_is_undefined(source: str) -> None:
    assert template(source).render(ASK) == ""


@pytest.mark.parametrize("source", BROKEN, ids=range(len(BROKEN)))
def test_broken_jinja_is_refused_before_any_row_is_read(source: str) -> None:
    with pytest.raises(UserError, match="chat template of stranger: "):
        template(source)


def test_raise_exception_is_in_the_message() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"
    with pytest.raises(UserError, match=r"stranger refuses the turns \(system, user\): user first"):
        template(source).render(ASK)
    assert template(source).render(ASK[1:]) == "ok"


def test_features_of_hub_templates_work() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}\n"
        "{% for m in messages %}\n"
        "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{% set ns.n = ns.n + 1 %}{{ m | tojson }}{{ m.tool_calls is defined }}\n"
        "{% break %}{% endfor %}\n"
        "{{ ns.n }}{{ tools is none }}{{ strftime_now is defined }}{{ bos_token }}"
    )
    row = [Message("system", "x"), Message("user", '\u4e16 "<b>"'), Message("user", "y")]
    assert template(source).render(row) == '{"role": "user", "content": "\u4e16 \\"<b>\\""}False\n1TrueFalse<s>'


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("", '{"b": "\u4e16", "a": 1}'),
        ("(ensure_ascii=True)", '{"b": "\\u4e16", "a": 1}'),
        ("(ensure_ascii=False, sort_keys=True)", '{"a": 1, "b": "\u4e16"}'),
        ("(separators=(',', ':'))", '{"b":"\u4e16","a":1}'),
        ("(indent=1)", '{\n "b": "\u4e16",\n "a": 1\n}'),
    ],
)
def test_tojson_has_the_options_of_transformers(options: str, text: str) -> None:
    assert template("{{ {'b': '\u4e16', 'a': 1} | tojson" + options + " }}").render(ASK) == text


def test_the_date_never_changes() -> None:
    guarded = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}fixed{% endif %}"
    assert template(guarded).render(ASK) == "fixed"
    assert template("{{ strftime_now('%d %b %Y') }}").render(ASK) == "26 Jul 2024"
    assert template("{% set f = strftime_now %}{{ f(format='%Y') }}").render(ASK) == "2024"
    with pytest.raises(UserError, match="stranger"):
        template("{{ strftime_now.__class__.__mro__ }}").render(ASK)


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{%- generation %}</s>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>:{% endif %}"
)
"""With a prompt of generation that no turn begins with."""
TALK = [Message("user", "Hi?"), Message("assistant", "Hello."), Message("user", "And?"), Message("assistant", "Bye.")]


def test_generation_blocks_are_supervised() -> None:
    before = "<user>Hi?\n<assistant>"
    later = before + "Hello.</s>\n<user>And?\n<assistant>"
    assert template(MARKED).render(TALK[:2]) == before + "Hello.</s>\n"
    both = Conversation(tuple(TALK), (False, True, False, True))
    assert template(MARKED).supervised_turns(both) == [(before, before + "Hello.</s>"), (later, later + "Bye.</s>")]
    last = Conversation(tuple(TALK), (False, False, False, True))
    assert template(MARKED).supervised_turns(last) == [(later, later + "Bye.</s>")]
    unmarked = re.sub(r"{%-? (end)?generation %}", "", MARKED)
    with pytest.raises(UserError, match="renders what is before messages"):
        template(unmarked).supervised_turns(both)


BLOCKS = (
    "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
PICKY = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _result_or_error(what: Any, *arguments: Any) -> Any:
    try:
        return what(*arguments)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("source", [BLOCKS, PICKY], ids=["marked", "picky"])
def test_prerendered_texts_are_the_same(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says = ["Hi?", "no", "Hello.", "x\ud800", ""]
    talks = [
        Conversation(tuple(Message(role, text) for role, text in zip(["user", "assistant"] * 2, texts)), supervised)
        for texts in itertools.product(says, repeat=4)
        for supervised in [(False, True, False, True), (False, False, False, True)]
    ]
    alone = template(source)
    turns = [_result_or_error(alone.supervised_turns, talk) for talk in talks[:300]]
    splits = [_result_or_error(alone.split, talk) for talk in talks[:300]]
    prompts = [_result_or_error(alone.prompt, talk.messages[:3]) for talk in talks[:300]]
    assert {type(found) for found in (*turns, *splits)} == {list, tuple, str}
    ahead = alone.prerender_turns(talks[:300]), alone.prerender_splits(talks[:300])
    of_prompts = alone.prerender_prompts(Prompt(talk.messages[:3]) for talk in talks[:300])
    monkeypatch.setattr(chat_template, "render", None)  # all is known
    assert [_result_or_error(ahead[0].supervised_turns, talk) for talk in talks[:300]] == turns
    assert [_result_or_error(ahead[1].split, talk) for talk in talks[:300]] == splits
    assert [_result_or_error(of_prompts.prompt, talk.messages[:3]) for talk in talks[:300]] == prompts


BACK = [
    # the turn alone, turns before it, the loop so far
    *["{{ m.content }}", "{{ messages[0].content }}", "{{ loop.index }}", "{{ ns.x }}", "{{ messages[1] }}"],
    *["{{ loop.previtem.role if loop.index0 }}", "{% set ns.x = ns.x + 1 %}"],
    *["{% set ns.x = m.content %}", "{% if loop.first %}:{% endif %}", "{{ now }}"],
    *["{% for c in m.content %}{{ c }}{{ loop.last }}{% endfor %}", "{% set now = m.role %}", "{{ f(m) }}"],
    *["{% if m.content == 'Bye.' %}{% break %}{% endif %}", "{% if m.role == 'user' %}{% continue %}{% endif %}"],
    *["{% generation %}{{ m.content }}{% endgeneration %}", "\ufdd3"],
]
AHEAD = [
    *["{{ loop.last }}", "{{ loop.nextitem }}", "{{ loop.length }}", "{{ loop.revindex }}", "{% set l = loop %}"],
    *["{{ messages[-1].content }}", "{{ messages | length }}", "{% for k in messages %}{{ k.role }}{% endfor %}"],
    # what is around the body of an inner loop has the outer `loop`
    *["{% for k in [] %}{% else %}{{ loop.last }}{% endfor %}", "{% for k in [1] if loop.last %}:{% endfor %}"],
    "{% for k in range(loop.length) %}:{% endfor %}",
]
"""Parts of a loop over turns that ask for later turns."""
ENDS = ["", ".", "{{ tools }}", "{% if add_generation_prompt %}{% for t in tools or [1] %}:{% endfor %}{% endif %}"]
OTHER_ENDS = ["{{ ns.x }}", "{{ messages[0].content }}", "{{ messages | length }}", "{{ f(1) }}", "{{ c.next() }}"]
"""Ends whose text may depend on the number of turns."""


@settings(deadline=None, max_examples=300)
@given(
    body=st.lists(st.sampled_from(BACK), max_size=4),
    ahead=st.sampled_from(["", "", *AHEAD]),
    end=st.sampled_from([*ENDS, *OTHER_ENDS]),
    roles=st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=5),
)
def test_cut_conversations_are_those_of_fewer_turns(body: list[str], ahead: str, end: str, roles: list[str]) -> None:
    source = (
        "{% set ns = namespace(x=0) %}{% set c = cycler(1, 2) %}{% set now = 1 %}"
        "{% macro f(m) %}{{ ns.x }}{% endmacro %}{% for m in messages %}<{{ m.role }}>"
        + "".join(body)
        + ahead
        + "</s>{% endfor %}"
        + end
    )
    num_first = template_facts(source).num_first
    assert (num_first is None) == (ahead != "" or end in OTHER_ENDS)
    if num_first is None:
        return
    marked = compiled(source, marks_turns=True)
    turns = [{"role": role, "content": text} for role, text in zip(roles, ["Hi?", "Bye.", "", "no", "\ufdd0"])]
    for flag in (False, True):
        cut = turn_texts(marked.render(messages=turns, add_generation_prompt=flag), len(turns))
        for count in range(num_first, len(turns) + 1):
            rendered = compiled(source).render(messages=turns[:count], add_generation_prompt=flag)
            assert cut is None or cut.first(count) == rendered


@pytest.mark.parametrize("name", [*BUILTIN, "phi3", "phi4"])
def test_simple_templates_render_a_conversation_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = built_in(name)
    long = Conversation(tuple(TALK * 1000), (False, True) * 2000)
    shorter = Conversation(tuple(TALK * 10), (False, True) * 20)
    first = source.supervised_turns(shorter)
    ahead = source.prerender_turns([long])
    monkeypatch.setattr(ChatTemplate, "render", None)
    found = ahead.supervised_turns(long)
    assert len(found) == 2000
    assert found[:20] == first


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1"])
def test_other_templates_refuse_conversations_of_too_many_turns(name: str) -> None:
    source = built_in(name)
    long = Conversation(tuple(TALK * 1000), (False, True) * 2000)
    with pytest.raises(UserError, match=r"of 4,000 turns with 2,000 supervised, that is 8,002,000 turns; at most 1,0"):
        source.prerender_turns([long]).supervised_turns(long)
    last = Conversation(tuple(TALK * 500), (*[False] * 1999, True))
    assert len(source.prerender_turns([last]).supervised_turns(last)) == 1


def test_a_conversation_of_many_unknown_keys_is_refused() -> None:
    source = template("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    turns = [parse_message({"role": "user", "content": "Hi?", f"k{i}": 1}, "turn") for i in range(100)]
    with pytest.raises(UserError, match=r"more than 64 unknown keys, such as 'k64' of messages\[64\]"):
        source.prompt(turns)


def test_a_turn_without_a_block_is_not_supervised() -> None:
    final = (
        "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    both = Conversation(tuple(TALK), (False, True, False, True))
    assert template(final).supervised_turns(both) == [("Hi?Hello.And?", "Hi?Hello.And?Bye.")]
    first = Conversation(tuple(TALK), (False, True, False, False))
    with pytest.raises(UserError, match="around no turn of it"):
        template(final).supervised_turns(first)
    with pytest.raises(UserError, match="a character that is reserved to mark"):
        template(final).render([Message("user", "a\ufdd0b")])
    with pytest.raises(UserError, match="a character that is reserved to mark"):
        template(final).render([named("user", "ab", "\ufdd1")])
    assert template("{{ messages[0].content }}").render([Message("user", "a\ufdd0b")]) == "a\ufdd0b"


def test_names_are_there_where_turns_have_them() -> None:
    source = template("{% for m in messages %}{{ m | tojson }}{{ 1 if m.name is defined else 0 }} {% endfor %}")
    turns = [named("user", "Hi?", "Ann"), Message("user", "Who?"), named("assistant", "", "")]
    expected = (
        '{"role": "user", "content": "Hi?", "name": "Ann"}1 {"role": "user", "content": "Who?"}0 '
        '{"role": "assistant", "content": "", "name": ""}1 '
    )
    assert source.render(turns) == expected
    # what was rendered ahead is that of the same names
    ahead = source.prerender_prompts([Prompt(tuple(turns))])
    other = [named("user", "Hi?", "Bob"), *turns[1:]]
    assert [ahead.render(each, True) for each in (turns, other)] == [expected, expected.replace("Ann", "Bob")]


def test_names_are_trained_on_where_the_template_shows_them() -> None:
    each = "{% for m in messages %}<{{ m.name or m.role }}>{{ m.content }}</s>{% endfor %}"
    source = template(each + "{{ '<assistant>' if add_generation_prompt }}")
    ask = named("user", "Hi?", "Ann")
    talk = Conversation((ask, Message("assistant", "Hello.")), (False, True))
    prompt = "<Ann>Hi?</s><assistant>"
    assert source.supervised_turns(talk) == [(prompt, f"{prompt}Hello.</s>")]
    # what the model would not be asked for is not trained on
    with pytest.raises(UserError, match="cannot be used to train on this conversation"):
        source.supervised_turns(Conversation((ask, named("assistant", "Hello.", "Bob")), (False, True)))


def test_only_templates_that_write_tools_are_proposed_for_tools() -> None:
    talk = Conversation(tuple(TALK), (False, True, False, True), '[{"type": "function", "function": {"name": "add"}}]')
    with pytest.raises(UserError, match=r"leaves out the tool 'add'.* data\.chat_template \(chatml\)"):
        built_in("llama3").supervised_turns(talk)


def test_nothing_is_escaped_as_html_and_no_text_is_run() -> None:
    text = "<b>&amp;</b> {{ 7 * 7 }} {% raw %}"
    assert template("{{ messages[0].content }}").render([Message("user", text)]) == text


@pytest.mark.parametrize(
    "source",
    [
        # drops the generation prompt, or an earlier turn, once an answer follows
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
    ],
)
def test_an_answer_that_cannot_be_separated_from_its_prompt(source: str) -> None:
    with pytest.raises(UserError, match=r"renders a prompt differently when an answer follows.*chatml, llama3, plain"):
        template(source).split(with_answer(ASK, Message("assistant", "Hello.")))


def directory(path: Path, config: Any = None, separate: str | None = None) -> Path:
    if config is not None:
        (path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if separate is not None:
        (path / "chat_template.jinja").write_text(separate, encoding="utf-8")
    return path


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plainly"}]


@pytest.mark.parametrize(
    ("config", "separate", "text"),
    [
        ({"chat_template": "config"}, None, "config"),
        ({"chat_template": NAMED}, None, "plainly"),
        ({"chat_template": ["junk", {}, *NAMED]}, None, "plainly"),
        ({"chat_template": "config"}, "file \u4e16", "file \u4e16"),
        ({"chat_template": NAMED}, "file", "file"),
        ({}, "file", "file"),
        (None, "file", "file"),
    ],
)
def test_template_files_are_found_in_their_order(tmp_path: Path, config: Any, separate: str | None, text: str) -> None:
    found = load_template("tokenizer", directory(tmp_path, config, separate), TOKENS)
    assert found.render(ASK) == text
    # a built-in one goes before what the tokenizer brings
    assert load_template("plain", tmp_path, TOKENS).source == BUILTIN["plain"]


@pytest.mark.parametrize(
    "config",
    [None, {}, {"chat_template": None}, {"chat_template": 3}, {"chat_template": []}, {"chat_template": NAMED[:1]}],
)
def test_a_tokenizer_without_template(tmp_path: Path, config: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"has no chat template; set data\.chat_template to one of: chatml, .*, llama3, .* it is --chat_template",
    ):
        load_template("tokenizer", directory(tmp_path, config), TOKENS)


def test_a_tokenizer_config_that_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer_config\.json: is a list, not an object"):
        load_template("tokenizer", directory(tmp_path, []), TOKENS)


def test_an_unknown_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"there is no 'chatmll'; did you mean 'chatml'\? it is one of tokenizer, chatml, "
    ):
        load_template("chatmll", directory(tmp_path, None), TOKENS)


def test_a_garbled_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer_config\.json: is not JSON"):
        load_template("tokenizer", directory(tmp_path, "{"), TOKENS)


def test_the_embedded_tokenizer_speaks_chatml() -> None:
    own = load_template("tokenizer", DATA / "tokenizer", TOKENS)
    for generation in (False, True):
        assert own.render(ASK, generation) == built_in("chatml").render(ASK, generation)


def test_a_separate_template_for_tools_is_used(tmp_path: Path) -> None:
    sources = {
        "tool_use": "\n  {{ tools | length }} tools{% for m in messages %} {{ m.content }}{% endfor %}\n",
        "default": "\nplainly  \n\n",
    }
    named = [{"name": name, "template": source} for name, source in sources.items()]
    found = load_template("tokenizer", directory(tmp_path, {"chat_template": named}), TOKENS)
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    for name, given_tools in (("tool_use", tools), ("default", "")):
        alone = template(sources[name]).render(ASK, tools=given_tools)
        assert found.render(ASK, tools=given_tools) == alone


def test_a_variable_is_one_that_the_template_reads() -> None:
    read = template("{% if not day is defined %}{% set day = 'Monday' %}{% endif %}{{ day }}{{ messages[0].mood }}")
    assert read.render(ASK, kwargs='{"day": "Friday"}') == "Friday"
    quoted = template(
        "{# enable_thinking #}{{ 'enable_thinking' }}{% set other = 1 %}{{ other }}{{ messages[0].mood }}"
    )
    for name in ("enable_thinking", "other", "mood", "raise_exception"):
        with pytest.raises(UserError, match=f"has no variable '{name}'"):
            quoted.render(ASK, kwargs=json.dumps({name: 1}))
    with pytest.raises(UserError, match="has no variable 'bos'"):
        built_in("llama3").render(ASK, kwargs='{"bos": 1}')


OPENING = (  # as DeepSeek-R1's: the prompt opens the thoughts, which are kept where there are some
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


def test_answers_are_cut_before_thoughts_that_the_prompt_opens() -> None:
    opening = template(OPENING)
    plain = with_answer(ASK[1:], Message("assistant", "Hello."))
    assert opening.split(plain) == ("<user>Hi?</s><assistant>", "<user>Hi?</s><assistant>Hello.</s>")
    thinking = with_answer(ASK[1:], Message("assistant", "<think>\nhm</think>Hello."))
    before, whole = opening.split(thinking)
    assert (before, whole[len(before) :]) == ("<user>Hi?</s><assistant><think>\n", "hm</think>Hello.</s>")
    both = opening.splits([thinking, plain])
    assert [before for before, _ in both] == ["<user>Hi?</s><assistant>"] * 2, "both answers have one prompt"
    assert both[0][1] == whole
