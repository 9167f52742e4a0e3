"""Episodes: what the model reads and what it is trained on, whatever else is played, and what fails of them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.specs import EnvironmentSpec, Reply, Turn
from llmsuite.data.chat_template import BUILTIN, PLACEHOLDER, ChatTemplate
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.group_sampling import SampleRequest, SamplingParams, fill_completions, request_key, uniforms
from llmsuite.inference.sampling import sample_by_uniform
from llmsuite.rl import reward_sections
from llmsuite.rl.completion import Completion
from llmsuite.rl.episodes import Episodes, with_parts
from llmsuite.rl.rewards import Rewards
from llmsuite.rl.rollouts import RolloutPrompt
from tests.support.sampled import sampled_positions
from tests.support.toy_decoder import ToyDecoder

LETTERS = "$abcdefghu"
"""Tokens of the toy model; the first ends a turn."""
TEMPLATE = (
    "{% for m in messages %}{{ 'a' if m.role == 'assistant' else 'u' }}{{ m.content }}${% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
PROMPTS = ["bc", "d", "bc", "efg"]
PARAMS = SamplingParams(num_generations=3, max_completion_length=24, temperature=1.0, batch_size=4)
STEP = 5


class Echo:
    """Repeats the turns of the model in other letters. The seed decides the number of turns."""

    def __init__(self, section: Any = None):
        self.received: list[str] = []

    def begin(self, row: Any, seed: int) -> Any:
        self.left = 2 + seed % 3
        return [*row["messages"], {"role": "user", "content": "abc"[seed % 3]}]

    def step(self, turn: Turn) -> Reply:
        self.received.append(turn.text)
        self.left -= 1
        parts = {"score": 1.0 + len(turn.text), "turns": 1.0}
        return Reply(messages=[{"role": "user", "content": "h" + turn.text[:2]}], done=not self.left, reward=parts)


def echo(section: Any) -> Echo:
    return Echo()


SPEC = EnvironmentSpec(name="echo", help="", factory=echo, parts=("turns",))


def encode(texts: Sequence[str]) -> list[list[int]]:
    return [[LETTERS.index(letter) for letter in text] for text in texts]


class Letters(TextTokenizer):
    """A token for each letter."""

    anchors = ()

    def __init__(self) -> None:
        """Reads no files."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return encode(texts)


def decode(ids: Sequence[int]) -> str:
    return "".join(LETTERS[i] for i in ids if i)


def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, {}, "toy")


class Table:
    """Makes episodes and ends their processes; plays them with a toy model."""

    def __init__(self) -> None:
        self.made: list[Episodes] = []
        self.decoder = ToyDecoder(len(LETTERS), seed=1, max_length=64)

    def sit(self, name: str = "echo", **keys: Any) -> Episodes:
        section = EnvironmentSection(name=name, **{"workers": 1, "time_limit": 20.0, **keys})
        self.made.append(Episodes(section, {"echo": SPEC}, template(), Letters(), max_length=30))
        return self.made[-1]

    def play(
        self,
        episodes: Episodes,
        numbers: Sequence[int] = range(len(PROMPTS)),
        sampling_params: SamplingParams = PARAMS,
    ) -> list[Completion]:
        requests, prompts = zip(*(row(number) for number in numbers))
        fill = functools.partial(fill_completions, self.decoder, sampling_params=sampling_params, stop_ids={0})
        return episodes.play(requests, prompts, numbers, sampling_params, fill, {0}, decode)


def row(number: int) -> tuple[SampleRequest, RolloutPrompt]:
    messages = (Message("user", PROMPTS[number]),)
    (ids,) = encode([template().render(messages, add_generation_prompt=True)])
    key = request_key(7, STEP, ids, PROMPTS[:number].count(PROMPTS[number]))
    return SampleRequest(tuple(ids), key), RolloutPrompt(tuple(ids), {"answer": "x"}, "text", messages)


@pytest.fixture
def table() -> Iterator[Table]:
    found = Table()
    yield found
    for episodes in found.made:
        episodes.close()


def file(folder: Path, body: str) -> str:
    """A file with the environment `Own`, with a method `step` of its own."""
    code = "import os, time\nfrom llmsuite.contract.hookspecs import Reply\n\n\nclass Own:\n"
    begin = "    def begin(self, row, seed):\n        self.turns = 0\n        return row['messages']\n\n"
    path = folder / "own_games.py"
    path.write_text(code + ("" if "def begin" in body else begin) + textwrap.indent(body, "    ") + "\n")
    return f"{path}:Own"


def _alone(decoder: ToyDecoder, request: SampleRequest, number: int, seed_of: int, max_turns: int) -> dict[str, Any]:
    """An episode, token by token, in one process."""
    environment = Echo()
    messages = [{"role": "user", "content": PROMPTS[seed_of]}]
    digest = hashlib.sha256(b"environment" + np.asarray(request.key, "uint64").tobytes()).digest()
    started = environment.begin({"messages": messages}, int.from_bytes(digest[:8], "little") >> 1)
    text = [*encode(["".join(f"u{m['content']}$" for m in started) + "a"])[0]]
    room = min(PARAMS.max_completion_length, 30 - len(text))
    numbers = iter(uniforms(request.key, number, room))
    ids: list[int] = []
    own: list[int] = []
    score = 0.0
    done = False
    for turn in range(max_turns):
        start = len(ids)
        while len(ids) < room and (len(ids) == start or ids[-1]):
            token, _ = sample_by_uniform(decoder.logits([*text, *ids]), 1.0, next(numbers))
            ids.append(token)
            own.append(len(ids) - 1)
        stopped = ids[-1] == 0
        reply = environment.step(
            Turn(text=decode(ids[start:]), ids=ids[start:], finish_reason="stop" if stopped else "length")
        )
        assert isinstance(reply.reward, dict)
        score = score + reply.reward["score"]
        done = reply.done and stopped
        said = encode([f"u{reply.messages[0]['content']}$a"])[0]  # type: ignore[index]
        if reply.done or turn == max_turns - 1 or len(ids) + len(said) >= room:
            break
        ids += said
    return {"ids": ids, "own": own, "score": score, "finish_reason": "stop" if done else "length"}


@pytest.mark.parametrize(("batch_size", "max_turns"), [(1, 8), (4, 2), (100, 8)])
def test_an_episode_does_not_depend_on_what_else_is_played(table: Table, batch_size: int, max_turns: int) -> None:
    sampling_params = SamplingParams(3, PARAMS.max_completion_length, 1.0, batch_size)
    found = table.play(table.sit(max_turns=max_turns), sampling_params=sampling_params)
    assert [(c.group, c.number) for c in found] == [(g, n) for g in range(len(PROMPTS)) for n in range(3)]
    for completion in found:
        request, _ = row(completion.group)
        expected = _alone(table.decoder, request, completion.number, completion.group, max_turns)
        assert list(completion.ids) == expected["ids"]
        assert sampled_positions(completion) == expected["own"]
        assert completion.episode_scores == {"score": expected["score"], "turns": len(completion.turns[::2])}
        assert completion.finish_reason == expected["finish_reason"]
        assert len(completion.logprobs) == completion.num_sampled == sum(completion.sampled_mask)
    assert {len(c.turns) > 1 for c in found} == {True, False} or max_turns == 2
    assert {c.finish_reason for c in found} == {"stop", "length"} or max_turns == 2


def test_a_rank_that_plays_some_of_the_prompts_plays_the_same(table: Table) -> None:
    episodes = table.sit()
    everything = {(c.group, c.number): c.ids for c in table.play(episodes)}
    some = {(c.group, c.number): c.ids for c in table.play(episodes, [1, 3])}
    assert some == {key: ids for key, ids in everything.items() if key[0] in (1, 3)}
    first, third = (everything[group, 0] for group in (0, 2))
    assert first != third  # the same prompt twice has random numbers of its own


def test_sampled_tokens_are_never_tokenized_again(table: Table) -> None:
    """The tokens between two turns are those of the template, and the end of a turn stands there once."""
    for completion in table.play(table.sit()):
        assert len(completion.prompt_ids) + len(completion.ids) <= 30
        parts = np.split(np.array(completion.ids), np.flatnonzero(np.diff(completion.sampled_mask)) + 1)
        own = parts[::2]
        observed = parts[1::2]
        assert [decode(part) for part in own] == [turn.content for turn in completion.turns[::2]]
        said = [f"u{turn.content}$a" for turn in completion.turns[1::2]]
        assert [part.tolist() for part in observed] == encode(said)


OFFERED = (
    "def begin(self, row, seed):\n    self.turns, self.tools = 0, [{'name': row['answer']}]\n"
    "    return row['messages']\n\n"
    "def step(self, turn):\n    self.turns += 1\n"
    "    return Reply(messages=[{'role': 'tool', 'content': 'h'}], done=self.turns == 2, reward=1)"
)
TOOLS = "{% for t in tools or [] %}{{ t.function.name }}${% endfor %}"


@pytest.mark.parametrize("own", ["", '[{"type": "function", "function": {"name": "gg"}}]'])
def test_the_template_gets_the_tools_of_the_environment_in_every_turn(table: Table, tmp_path: Path, own: str) -> None:
    """In place of those of the row, if it has some."""
    episodes = table.sit(file(tmp_path, OFFERED))
    episodes._template = ChatTemplate(TOOLS + TEMPLATE, {}, "toy")
    request, prompt = row(1)
    prompt = dataclasses.replace(prompt, columns={"answer": "fe"}, tools=own)
    fill = functools.partial(fill_completions, table.decoder, sampling_params=PARAMS, stop_ids={0})
    found = episodes.play([request], [prompt], [0], PARAMS, fill, {0}, decode)
    assert [decode(c.prompt_ids) for c in found] == ["feuda"] * 3  # decode leaves out ends of turns
    assert {c.prompt for c in found} == {"fe$ud$a"}
    assert all(c.turns[1::2] == (Message("tool", "h"),) for c in found)


def test_a_template_that_leaves_out_tools_ends_the_run(table: Table, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat template of toy leaves out the tool 'x'.*data.chat_template \(chatml"):
        table.play(table.sit(file(tmp_path, OFFERED)))


def test_long_turns_are_truncated_and_answered(table: Table) -> None:
    found = table.play(table.sit(max_turn_length=2))
    turns = [turn.content for c in found for turn in c.turns if turn.role == "assistant"]
    assert max(map(len, turns)) == 2
    for completion in found:
        for at in np.flatnonzero(np.diff(np.array(completion.sampled_mask, int)) == -1):
            closed = completion.ids[at] == 0, completion.ids[at + 1] == 0
            assert sum(closed) == 1  # by the model, or else by the template
    assert any(len(turn) == 2 for turn in turns)


def test_its_reward_and_parts_are_those_of_the_environment(table: Table) -> None:
    episodes = table.sit()
    known = {spec.name: spec for spec in reward_sections.BUILTIN}
    rewards = Rewards(RewardSection(functions={"environment": 2.0}), with_parts(known, episodes))
    assert rewards.names == ("environment", "environment/turns")
    found = table.play(episodes)
    scores = rewards.score(found)
    assert scores.tolist() == [[*(c.episode_scores or {}).values()] for c in found]
    assert rewards.total(scores).tolist() == [2 * (c.episode_scores or {})["score"] for c in found]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("def step(self, turn):\n    raise KeyError('nobody')", "KeyError: 'nobody'.*own_games.py"),
        ("def step(self, turn):\n    return 1.0", "not a llmsuite.contract.hookspecs.Reply"),
        ("def step(self, turn):\n    return Reply()", "its messages are"),
        (
            "def step(self, turn):\n    return Reply(messages=[{'role': 'me', 'content': ''}])",
            r"messages\[0\]' has the unknown role",
        ),
        ("def step(self, turn):\n    return Reply(done=True, reward=float('nan'))", "its reward is nan"),
        ("def step(self, turn):\n    return Reply(done=True, reward={'score': 1, 'a': 2})", "the keys"),
        ("def begin(self, row, seed): pass\ndef step(self, turn): pass", "begin returned None, not a list with"),
        ("def step(self, turn):\n    return Reply(messages='No.')", "its messages are 'No.', not a list"),
        ("def step(self, turn):\n    os._exit(3)", "exit code 3"),
        ("def step(self, turn):\n    time.sleep(60)", "environment.time_limit"),
        (
            "def step(self, turn):\n    self.f = lambda: 0\n"
            "    return Reply(messages=[{'role': 'user', 'content': 'a'}])",
            "cannot be pickled",
        ),
        (
            "def begin(self, row, seed):\n    raise ValueError('no game today')\n\n"
            "def step(self, turn):\n    return Reply(done=True)",
            "no game today",
        ),
        (
            "def begin(self, row, seed):\n    self.tools = [{}]\n    return row['messages']\n\n"
            "def step(self, turn):\n    return Reply(done=True)",
            r"'tools\[0\]' is not a function with a name",
        ),
        (
            "def begin(self, row, seed):\n    return [{'role': 'user', 'content': 'abc' * 20}]\n\n"
            "def step(self, turn):\n    return Reply(done=True)",
            "data.max_length is 30",
        ),
    ],
)
def test_a_failing_episode_is_missing_and_counted(
    table: Table, tmp_path: Path, capfd: pytest.CaptureFixture[str], body: str, why: str
) -> None:
    """One prompt, two episodes: both have one turn, without a reward."""
    sampling_params = SamplingParams(2, 8, 1.0, 4)
    found = table.play(table.sit(file(tmp_path, body), time_limit=1.0), [1], sampling_params)
    assert [len(c.turns) for c in found] == [1, 1]
    assert all(c.episode_scores is None and c.truncated for c in found)
    assert all(re.search(why, c.failure) for c in found), found[0].failure
    assert capfd.readouterr().err.count("warning: an environment failed") == 1
    known = {spec.name: spec for spec in reward_sections.BUILTIN}
    section = RewardSection(functions={"environment": 1.0})
    with pytest.raises(UserError, match=why):
        Rewards(section, known).score(found)
    section.max_failed = 1.0
    assert np.isnan(Rewards(section, known).score(found)).all()


def test_an_async_environment_is_run_to_its_end(table: Table, tmp_path: Path) -> None:
    body = "async def begin(self, row, seed):\n    return row['messages']\n\n"
    body += "async def step(self, turn):\n    return Reply(done=True, reward=0.5)"
    found = table.play(table.sit(file(tmp_path, body)), [1], SamplingParams(2, 8, 1.0, 4))
    assert [c.episode_scores for c in found] == [{"score": 0.5}] * 2


def test_one_episode_that_fails_does_not_end_the_others(table: Table, tmp_path: Path) -> None:
    body = (
        "def step(self, turn):\n    self.turns += 1\n"
        "    if 'b' in turn.text:\n        os._exit(1)\n"
        "    return Reply(messages=[{'role': 'user', 'content': 'a'}], done=self.turns == 3, reward=1)"
    )
    found = table.play(table.sit(file(tmp_path, body)))
    for completion in found:
        own = [turn.content for turn in completion.turns if turn.role == "assistant"]
        assert not any("b" in text for text in own[:-1])
        assert bool(completion.failure) == ("b" in own[-1])
        assert (completion.episode_scores or {}).get("score") == (None if completion.failure else len(own))
    assert {bool(c.failure) for c in found} == {True, False}


@pytest.mark.parametrize(
    ("body", "message"),
    [("def steps(self): pass", "has no method step"), ("def step(self, turn): pass\nx = 1 / 0", "division by zero")],
)
def test_an_environment_that_cannot_be_loaded_ends_the_run(
    table: Table, tmp_path: Path, body: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        table.play(table.sit(file(tmp_path, body)))


def test_a_factory_that_cannot_travel_is_refused() -> None:
    section = EnvironmentSection(name="echo")
    spec = EnvironmentSpec(name="echo", help="", factory=lambda section: Echo())
    with pytest.raises(UserError, match="cannot be sent to another process"):
        Episodes(section, {"echo": spec}, template(), Letters(), 30)


# templates

FORGETFUL = (  # as Qwen3's: only the last turns keep what was thought
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and messages[-1].role == 'user' %}"
    "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [Message("user", "6 x 7?"), Message("assistant", PLACEHOLDER)]


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_templates_keep_what_was_written(name: str) -> None:
    made = ChatTemplate(BUILTIN[name], {"bos_token": "<s>", "eos_token": "</s>"}, name)
    reply = [Message("user", "no")]
    text = made.continuation(ASKED, reply)
    before = made.render(ASKED[:1], add_generation_prompt=True)
    assert before + PLACEHOLDER + text == made.render([*ASKED, *reply], add_generation_prompt=True)
    assert PLACEHOLDER not in text
    again = [*ASKED, *reply, Message("assistant", PLACEHOLDER)]
    assert made.continuation(again, reply) == text


def test_a_template_that_rewrites_history_is_named() -> None:
    made = ChatTemplate(FORGETFUL, {}, "models/forgetful")
    with pytest.raises(UserError, match=r"models/forgetful.*thoughts of the model.*data.chat_template \(chatml"):
        made.continuation(ASKED, [Message("user", "no")])
    assert made.continuation(ASKED, [Message("tool", "42")]) == (
        "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_run_with_such_a_template_ends(table: Table) -> None:
    episodes = table.sit()
    episodes._template = ChatTemplate("{{ messages[-1].content }}$", {}, "short")
    with pytest.raises(UserError, match="chat template of short"):
        table.play(episodes)
