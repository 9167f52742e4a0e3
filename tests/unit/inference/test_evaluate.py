"""Evaluation: against the same numbers computed one token at a time."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.data.chat_template import load_template
from llmsuite.data.rows import Message, Preference, conversations_of
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.evaluate import perplexity, preference_accuracy, scorer
from llmsuite.inference.sampling import log_softmax
from tests.support.families import load
from tests.support.tiny_llama import TOKENIZER
from tests.support.written_family import write_family

TEXTS = ["The cat sat on the mat, and the dog did not.", "One.", "", "a b c d e f g h i j k l m n o p"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("eval") / "model", "qwen")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


def alone(model: Any, ids: list[int], start: int = 1) -> list[float]:
    """Log-probability of each token from `start`, each from a pass of its own."""
    found = []
    for i in range(start, len(ids)):
        with paddle.no_grad():
            logits = model(paddle.to_tensor([ids[:i]])).numpy()[0, -1]
        found.append(float(log_softmax(logits)[ids[i]]))
    return found


def test_perplexity_predicts_every_token_once(model: Any, directory: Path) -> None:
    tokenizer = TextTokenizer(directory)
    for batch_size in (1, 3):
        found = perplexity(scorer(model, batch_size), tokenizer, TEXTS, max_length=7)
        total = 0.0
        count = 0
        size = 0
        for text in TEXTS:
            ids = tokenizer.encode(text)
            for i in range(1, len(ids)):
                first = (i - 1) // 6 * 6  # where its window begins
                total -= alone(model, ids[first : i + 1], i - first)[0]
                count += 1
            size += len(text.encode()) if len(ids) > 1 else 0
        assert found.num_tokens == count
        assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
        assert found.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=1e-5)
    with pytest.raises(UserError, match="nothing to predict"):
        perplexity(scorer(model, 1), tokenizer, [""], 7)


def test_a_whole_text_has_what_the_tokenizer_puts_around_it(model: Any, directory: Path, tmp_path: Path) -> None:
    framing = shutil.copytree(TOKENIZER, tmp_path / "begun")
    config = json.loads((framing / "tokenizer_config.json").read_text())
    (framing / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True, "add_eos_token": True}))
    tokenizer = TextTokenizer(framing)
    ids = [1, *tokenizer.encode("One."), 2]
    found = perplexity(scorer(model, 1), tokenizer, ["One."], 20)
    assert found.num_tokens == len(ids) - 1
    assert found.perplexity == pytest.approx(math.exp(-np.mean(alone(model, ids))), rel=1e-5)


def pair(question: str, chosen: str, rejected: str) -> Preference:
    return Preference((Message("user", question),), Message("assistant", chosen), Message("assistant", rejected))


def test_preference_accuracy_is_that_of_the_sums(model: Any, directory: Path) -> None:
    tokenizer = TextTokenizer(directory)
    template = load_template("tokenizer", directory, tokenizer.special_tokens)
    words = ["yes", "no, never", "a cat", "the dog and the cat", "1", "2 and 3"]
    rows = [pair(f"Why {i}?", words[i % 6], words[(i * 5 + 1) % 6]) for i in range(10)]
    rows.append(pair("Same?", "yes", "yes"))
    sums = []
    means = []
    for row in rows:
        before = tokenizer.encode(template.render(row.prompt, add_generation_prompt=True))
        values = [
            alone(model, tokenizer.encode(template.split(conversation)[1]), len(before))
            for conversation in conversations_of(row)
        ]
        sums.append(np.sign(sum(values[0]) - sum(values[1])))
        means.append(np.sign(np.mean(values[0]) - np.mean(values[1])))
    found = preference_accuracy(scorer(model, 4), tokenizer, template, rows, 200)
    assert found.num_pairs == 11
    assert found.share == pytest.approx(np.mean([(s + 1) / 2 for s in sums]))
    assert found.share_per_token == pytest.approx(np.mean([(s + 1) / 2 for s in means]))
    assert 0 < found.share < 1
    with pytest.raises(UserError, match="row 1: has"):
        preference_accuracy(scorer(model, 4), tokenizer, template, rows, 5)


def test_equal_answers_tie_where_rows_of_a_batch_round_otherwise(directory: Path) -> None:
    tokenizer = TextTokenizer(directory)
    template = load_template("tokenizer", directory, tokenizer.special_tokens)

    def score(texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.full(len(text) - 1, -1 - 1e-7 * row) for row, text in enumerate(texts)]

    rows = [pair("Same?", answer, answer) for answer in ("yes", "no", "yes")]
    found = preference_accuracy(score, tokenizer, template, rows, 200)
    assert found.share == found.share_per_token == 0.5


def test_eval_on_files(directory: Path, tmp_path: Path, capsys: Any) -> None:
    questions = tmp_path / "questions.jsonl"
    answers = tmp_path / "answers.jsonl"
    questions.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "What?", "1 2 3")))
    words = ["--max_new_tokens", "5"]
    assert main(["generate", str(directory), "--input", str(questions), "--output", str(answers), *words]) == 0
    message = [json.loads(line)["answers"][0]["text"] for line in answers.read_text().splitlines()]
    wanted = [f" {message[0]}\n", message[1], "something else"]
    rows = zip(("Hi", "What?", "1 2 3"), wanted)
    questions.write_text("".join(json.dumps({"prompt": text, "answer": a}) + "\n" for text, a in rows))
    texts = tmp_path / "texts.jsonl"
    numbers = tmp_path / "numbers.json"
    texts.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    command = ["eval", str(directory), "--exact_match", str(questions), *words, "--perplexity", str(texts)]
    assert main([*command, "--key", "body", "--output", str(numbers)]) == 0
    found = json.loads(numbers.read_text())
    assert found["exact_match"]["share"] == pytest.approx(2 / 3)
    assert found["exact_match"]["wrong"] == [[message[2].strip(), "something else"]]
    assert found["perplexity"]["perplexity"] > 1
    capsys.readouterr()
    assert main(command) == 2
    assert "texts.jsonl:1: has no text 'text'; name another with --key" in capsys.readouterr().err
    assert main(["eval", str(directory)]) == 2


TASK = """
task: weather
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: KIND
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
doc_to_choice: ["sun", "rain and wind"]
metric_list: [{metric: METRIC}]
"""


@pytest.mark.further
def test_tasks_of_the_harness_see_the_models_own_log_probabilities(
    directory: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = TextTokenizer(directory)
    rows = []
    right = 0
    for number in range(6):
        question = f"Tomorrow {number} there is"
        sums = []
        for choice in (" sun", " rain and wind"):
            before = tokenizer.encode(question)
            after = tokenizer.encode(question + choice)
            sums.append(sum(alone(model, after, len(before))))
        rows.append({"question": question, "label": number % 2})
        right += (sums[1] > sums[0]) == (number % 2)
    assert 0 < right < 6
    data = tmp_path / "rows.jsonl"
    tasks = tmp_path / "tasks"
    numbers = tmp_path / "numbers.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks.mkdir()
    text = TASK.replace("FILE", str(data)).replace("KIND", "multiple_choice").replace("METRIC", "acc")
    (tasks / "weather.yaml").write_text(text)
    command = ["eval", str(directory), "--include_path", str(tasks), "--output", str(numbers)]
    assert main([*command, "--tasks", "weather"]) == 0
    assert json.loads(numbers.read_text())["weather"]["acc,none"] == pytest.approx(right / 6)
    assert main([*command, "--tasks", "weather,no_such_task"]) == 2


def test_the_harness_gets_greedy_answers_and_rolling_sums(directory: Path, model: Any) -> None:
    from lm_eval.api.instance import Instance

    from llmsuite.inference.decoder import ModelDecoder
    from llmsuite.inference.generate import Generator, generate
    from llmsuite.inference.harness import HarnessModel
    from llmsuite.inference.sampling import Sampling

    tokenizer = TextTokenizer(directory)
    decoder = ModelDecoder(model)
    harness = HarnessModel(model, Generator(decoder, tokenizer), batch_size=3)
    answer = list(generate(decoder, tokenizer.encode("Once"), {tokenizer.eos_id}, Sampling(max_new_tokens=6)))
    text = tokenizer.decode(answer)

    def ask(kind: Any, *arguments: Any) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    assert harness.generate_until([ask("generate_until", "Once", {"until": [], "max_gen_toks": 6})]) == [text]
    short = harness.generate_until([ask("generate_until", "Once", {"until": [text[3:5]], "max_gen_toks": 6})])
    assert short == [text[: text.index(text[3:5])]]
    ids = tokenizer.encode("One two three")
    (rolling,) = harness.loglikelihood_rolling([ask("loglikelihood_rolling", "One two three")])
    assert rolling == pytest.approx(
        sum(alone(model, [tokenizer.token_id(tokenizer.special_tokens["bos_token"]), *ids])), rel=1e-5
    )
    greedy = [((""), tokenizer.encode("Once"), answer), ("", tokenizer.encode("Once"), [*answer[:-1], 5])]
    assert [is_greedy for _, is_greedy in harness._loglikelihood_tokens(greedy)] == [True, False]
