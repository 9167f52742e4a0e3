"""LangChain against `llmsuite serve`: conversations, streams, tools, structured answers, embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.multi.conftest import Runner
from tests.support.server import KEY, Server
from tests.support.written_family import write_family

langchain_openai = pytest.importorskip("langchain_openai", reason="the extra test brings it")
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.output_parsers import StrOutputParser  # noqa: E402
from langchain_core.prompts import ChatPromptTemplate  # noqa: E402

TURNS = [SystemMessage("Be brief."), HumanMessage("Hi?"), AIMessage("Hello."), HumanMessage("And now?")]
SAME: list[Any] = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And now?"},
]  # fmt: skip


class Lamp(BaseModel):
    """Switches the lamp."""

    model_config = ConfigDict(extra="forbid")  # a model with random weights would not come to an end of keys
    on: bool = Field(description="whether it is to be on")
    colour: Literal["red", "green"]


@pytest.fixture(scope="module")
def server(runner: Runner) -> Iterator[Server]:
    model = write_family(runner.directory / "langchain", "llama")
    started = Server(runner, model, "--max_new_tokens", "256", "--chat_template", "chatml", LLMSUITE_API_KEY=KEY)
    yield started
    assert started.stop() == 0


def chat(server: Server, **options: Any) -> Any:
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 12, "max_retries": 0, **options}
    return langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key=KEY, **asked)


def test_a_conversation_gets_what_the_official_client_gets(server: Server) -> None:
    wanted = server.client().chat.completions.create(model="tiny", messages=SAME, temperature=0, max_tokens=12)
    found = chat(server).invoke(TURNS)
    assert found.content == wanted.choices[0].message.content
    assert found.response_metadata["finish_reason"] == "length"
    assert found.response_metadata["model_name"] == "tiny"
    assert wanted.usage is not None
    told = found.usage_metadata
    assert (told["input_tokens"], told["output_tokens"]) == (wanted.usage.prompt_tokens, 12)


def test_streams_are_the_answer_in_pieces(server: Server) -> None:
    model = chat(server, stream_usage=True)
    pieces = list(model.stream(TURNS))
    assert len([piece for piece in pieces if piece.content]) > 6
    whole = model.invoke(TURNS)
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert (joined.content, joined.usage_metadata) == (whole.content, whole.usage_metadata)


def test_many_at_once_and_chains(server: Server) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "Say {word}.")]) | chat(server) | StrOutputParser()
    words = [{"word": word} for word in ("one", "two", "three", "four", "five")]
    alone = [chain.invoke(word) for word in words]
    assert len({*alone}) > 1
    assert chain.batch(words) == alone
    assert asyncio.run(chain.abatch(words)) == alone


def test_tools_are_called_and_their_results_read(server: Server) -> None:
    model = chat(server, max_tokens=128)
    called = model.bind_tools([Lamp], tool_choice="Lamp").invoke("Light!")
    (call,) = called.tool_calls
    assert (call["name"], call["type"], called.invalid_tool_calls) == ("Lamp", "tool_call", [])
    Lamp.model_validate(call["args"])
    streamed = list(model.bind_tools([Lamp], tool_choice="Lamp").stream("Light!"))
    joined = streamed[0]
    for piece in streamed[1:]:
        joined += piece
    assert [(one["name"], one["args"]) for one in joined.tool_calls] == [(call["name"], call["args"])]
    result = ToolMessage("it is on", tool_call_id=call["id"])
    answer = model.bind_tools([Lamp], tool_choice="none").invoke([HumanMessage("Light!"), called, result])
    assert answer.content
    assert answer.tool_calls == []


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_answers(server: Server, method: str) -> None:
    found = chat(server, max_tokens=128).with_structured_output(Lamp, method=method).invoke("Light!")
    assert isinstance(found, Lamp)


def test_log_probabilities_and_several_answers(server: Server) -> None:
    found = chat(server, logprobs=True, top_logprobs=2).invoke(TURNS)
    told = found.response_metadata["logprobs"]["content"]
    assert [entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in told] == [True] * 12
    drawn = chat(server, temperature=1, n=3, seed=5).generate([TURNS])
    assert len({generation.text for generation in drawn.generations[0]}) == 3


def test_the_responses_api(server: Server) -> None:
    found = chat(server, use_responses_api=True).invoke(TURNS)
    assert found.text == chat(server).invoke(TURNS).content


def test_embeddings_of_a_text_are_equal_alone_and_in_a_list(server: Server) -> None:
    # else it parts the texts with a tokenizer that it fetches, of another model
    model = langchain_openai.OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key=KEY, model="tiny", check_embedding_ctx_length=False
    )
    one, other = model.embed_documents(["Hello there", "How are you?"])
    assert model.embed_query("Hello there") == pytest.approx(one, abs=1e-6)
    assert sum(a * b for a, b in zip(one, other)) < 1 - 1e-4


def test_errors_are_those_of_the_official_client(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 256"):
        chat(server, max_tokens=1000).invoke(TURNS)
    with pytest.raises(openai.AuthenticationError):
        langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key="wrong", model="tiny").invoke(TURNS)
