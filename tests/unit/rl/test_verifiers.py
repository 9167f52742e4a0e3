"""Environments of the package verifiers: what they say, score and remember is what its own rollout would have."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.specs import Turn
from llmsuite.rl.environment_sections import BUILTIN, VerifiersSection
from llmsuite.rl.environments import Begin, Step, StepResult, environment_source

verifiers = pytest.importorskip("verifiers", reason="the extra verifiers is not installed")

GAMES = '''
import random

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": "Find my number, 0 to 9.", "answer": "7", "info": {"least": 0}}]


class Higher(vf.MultiTurnEnv):
    """A number to find, with one random lie."""

    async def setup_state(self, state):
        state["lie"] = random.randrange(10**9)
        state["guesses"] = []

    async def env_response(self, messages, state, **more):
        guess = messages[-1].content.strip()
        state["guesses"].append(guess)
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        if guess == "crash":
            raise vf.ToolError("out of order")
        way = "higher" if guess < state["answer"] else "lower"
        return [{"role": "user", "content": f"{way} {state['lie']} {random.randrange(10**9)}"}]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if "forget" in state["guesses"] else messages


def found(state, answer):
    if state["guesses"][-1] == "unfair":
        raise KeyError("no score")
    return 1.0 if state["guesses"][-1] == answer else 0.0


async def quick(state):
    return 1.0 / len(state["trajectory"])


def together(completions):
    return [1.0 for _ in completions]


def load_environment(turns=3, group=False, single=False):
    data, rubric = Dataset.from_list(ROWS), vf.Rubric(funcs=[found, quick], weights=[1.0, 0.5])
    if single:
        return vf.EnvGroup([load_environment()])
    if group:
        rubric.add_reward_func(together)
    return Higher(dataset=data, rubric=rubric, system_prompt="Play.", max_turns=turns)
'''
TOOLS = '''
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def right(completion, answer):
    return float(completion[-1].content == answer)


def load_environment():
    rows = Dataset.from_list([{"question": "19 + 23?", "answer": "42"}])
    return vf.ToolEnv(tools=[add], dataset=rows, rubric=vf.Rubric(funcs=[right]))
'''
PROMPT = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Find my number, 0 to 9."}]
ROW = {"messages": PROMPT, "answer": "7", "info": {"least": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("environments")
    (place / "games_of_verifiers.py").write_text(GAMES)
    (place / "tools_of_verifiers.py").write_text(TOOLS)
    return place


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """An environment of verifiers takes over Ctrl-C."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def serve(folder: Path, file: str = "games_of_verifiers.py", **args: Any) -> Any:
    """What a process without Paddle calls."""

    class Keys(EnvironmentSection):
        verifiers = VerifiersSection(id=str(folder / file), args=args)

    return environment_source(Keys(name="verifiers"), {spec.name: spec for spec in BUILTIN}).make_handler()


def turn(text: str, finish_reason: Any = "stop") -> Turn:
    return Turn(text=text, ids=[5] * len(text), finish_reason=finish_reason)


def play(call: Any, texts: list[str], seed: int = 3, row: Any = ROW) -> tuple[list[StepResult], str]:
    """The answers of the environment, and why there is no further one."""
    answer, why = call(Begin(row, seed))
    answers = [answer]
    for text in texts:
        if answer is None or answer.done:
            break
        answer, why = call(Step(answer.state, turn(text)))
        answers.append(answer)
    return answers, why


def own_rollout(folder: Path, texts: list[str], seed: int) -> Any:
    """By verifiers alone, whose client answers with these texts."""
    import games_of_verifiers  # type: ignore[import-not-found]  # next to the file that was loaded
    from verifiers.types import Response, ResponseMessage

    environment = games_of_verifiers.load_environment()
    number = iter(range(9))

    class Fixed(verifiers.clients.Client):  # type: ignore[name-defined, misc]
        async def get_response(self, **asked: Any) -> Any:
            i = next(number)
            random.seed(seed + i + 1)  # for what the environment draws next
            message = ResponseMessage(content=texts[i], finish_reason="stop", is_truncated=False)
            return Response(id="", created=0, model="", message=message)

        setup_client = to_native_tool = to_native_prompt = get_native_response = None
        raise_from_native_response = from_native_response = close = None

    async def run() -> Any:
        random.seed(seed)
        row = {"prompt": PROMPT, "answer": "7", "info": {"least": 0}, "example_id": 0}
        state = await environment.rollout(row, Fixed(None), "model", {})
        await environment.rubric.score_rollout(state)
        return state

    return asyncio.run(run())


@pytest.mark.parametrize("texts", [["3", "7"], ["7"], ["9", "8", "1"]])
def test_an_episode_is_the_rollout_of_verifiers(folder: Path, texts: list[str]) -> None:
    answers, why = play(serve(folder), texts)
    assert (why, answers[-1].done) == ("", True)
    expected = own_rollout(folder, texts, seed=3)
    said = [m.content for answer in answers[1:-1] for m in answer.messages]
    asked = expected["trajectory"][-1]["prompt"]
    assert [{"role": m.role, "content": m.content} for m in answers[0].messages] == PROMPT
    assert said == [m.content for m in asked if m.role == "user"][1:]
    assert answers[-1].scores == (expected["reward"],)
    assert expected["reward"] == (texts[-1] == "7") + 0.5 / len(texts)


def test_the_seed_decides_the_random_numbers(folder: Path) -> None:
    call = serve(folder)
    first, again, other = (play(call, ["3", "4"], seed)[0] for seed in (3, 3, 4))
    assert [a.messages for a in first] == [a.messages for a in again]
    assert [a.messages for a in first] != [a.messages for a in other]


def test_episodes_are_independent_and_continue_in_any_process(folder: Path) -> None:
    call = serve(folder)
    started, _ = call(Begin(ROW, 3))
    one, _ = call(Step(started.state, turn("3")))
    two, _ = serve(folder)(Step(started.state, turn("8")))
    ends = [call(Step(found.state, turn("7")))[0].scores for found in (one, two)]
    assert ends == [(1.25,), (1.25,)]
    assert one.messages != two.messages
    episode = pickle.loads(one.state)
    assert "client" not in episode._state
    assert episode._usage == {"input_tokens": 0.0, "output_tokens": 1.0}


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["crash"], "ToolError: out of order"),
        (["forget"], "it has changed earlier turns"),
        (["3", "unfair", "4"], "Error calling reward function found: 'no score'"),
    ],
)
def test_a_failing_reward_is_missing(folder: Path, texts: list[str], why: str) -> None:
    answers, said = play(serve(folder), texts)
    assert answers[-1] is None
    assert why in said


def test_tools_are_offered_called_and_answered(folder: Path) -> None:
    call = serve(folder, "tools_of_verifiers.py")
    row = {"messages": [{"role": "user", "content": "19 + 23?"}], "answer": "42"}
    call_text = '<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": 23}}\n</tool_call>'
    both = call_text + "\n" + call_text.replace("23", "1")
    answers, why = play(call, [f"Let me see. {both}", call_text.replace("add", "sub"), "42"], row=row)
    (tool,) = json.loads(answers[0].tools)
    assert (tool["type"], tool["function"]["name"]) == ("function", "add")
    assert sorted(tool["function"]["parameters"]["properties"]) == ["a", "b"]
    assert [(m.role, m.content) for m in answers[1].messages] == [("tool", "42"), ("tool", "20")]
    assert [m.role for m in answers[2].messages] == ["tool"]  # with the message that there is no sub
    assert (why, answers[3].done, answers[3].scores) == ("", True, (1.0,))
    assert play(call, ["<tool_call>add</tool_call>"], row=row)[0][-1].scores == (0.0,)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"group": True}, "scores the completions of a prompt together"),
        ({"single": True}, "is a EnvGroup, not a MultiTurnEnv"),
        ({"no": 1}, "cannot be loaded: TypeError"),
    ],
)
def test_environments_that_cannot_be_played(folder: Path, args: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        serve(folder, **args)


def test_the_name_of_an_environment_is_required() -> None:
    from llmsuite.rl.verifiers_environment import VerifiersEpisode

    with pytest.raises(UserError, match=r"environment\.verifiers\.id: is required"):
        VerifiersEpisode(VerifiersSection())
    with pytest.raises(ValueError, match="Could not import 'no-such-environment'"):
        VerifiersEpisode(VerifiersSection(id="no-such-environment"))
