"""docs/guide/plugin-examples.md, stages.md and python.md: their code, called by hand; tests/multi runs it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model, read_config
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.recipe import DataSection
from llmsuite.contract.specs import Turn
from llmsuite.data.chat_template import load_template
from llmsuite.data.rows import Conversation, Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine import stage as engine_stage
from llmsuite.engine.stage import DropCounts, Stage, StageContext
from llmsuite.inference.frozen import build_frozen
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_services import RewardServices
from tests.support import dpo_case, tiny_llama
from tests.support.paths import DATA, ROOT

PAGE_NAMES = ("plugin-examples", "stages", "python")
PAGES = {name: (ROOT / "docs" / "guide" / f"{name}.md").read_text("utf-8") for name in PAGE_NAMES}
SHAPE = dataclasses.replace(tiny_llama.CONFIG, vocab_size=512)


def block(page: str, name: str, language: str = "python") -> str:
    """The code on a page whose first line is the name of a file."""
    (found,) = re.findall(rf"```{language}\n(# {re.escape(name)}\n.*?)```", PAGES[page], re.DOTALL)
    return str(found)


def module(page: str, name: str, directory: Path) -> ModuleType:
    """A file of a page, imported under a name of its own."""
    (directory / name).write_text(block(page, name), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{name[:-3]}_of_the_guide", directory / name)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models whose tokens are those of data/tokenizer, and one with others."""
    directory = tmp_path_factory.mktemp("teachers")
    for seed, name in enumerate(("student", "teacher")):
        tiny_llama.write(directory / name, SHAPE, tokenizer=tiny_llama.TOKENIZER, seed=seed)
    tiny_llama.write(directory / "stranger", SHAPE, tokenizer=tiny_llama.TOKENIZER)
    path = directory / "stranger" / "tokenizer.json"
    words = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(words), encoding="utf-8")
    return directory


def context(directory: Path) -> StageContext:
    tokenizer = TextTokenizer(DATA / "tokenizer")
    return StageContext(
        stage_name="sft",
        data=DataSection(train="none", max_length=256),
        train=dpo_case.train_section(),
        seed=42,
        tokenizer=tokenizer,
        template=lambda: load_template("tokenizer", tokenizer.directory, tokenizer.special_tokens),
        data_formats={},
        initial_digest=lambda: "model",
        length_multiple=1,
        report=lambda text: None,
        reward_services=RewardServices(families=tiny_llama.FAMILIES, device=CpuBackend(), precision="fp32"),
        padding_free=True,
    )


def live(path: Path) -> Any:
    return build_frozen(open_model(path, tiny_llama.FAMILIES), CpuBackend(), "fp32")


# a second model


@pytest.mark.parametrize(
    ("name", "why"),
    [("stranger", "teacher: .* has other tokens than"), ("nothing", "teacher: .* is not a directory with a model")],
)
def test_a_second_model_has_to_be_there_and_have_the_same_tokens(teachers: Path, name: str, why: str) -> None:
    with pytest.raises(UserError, match=f"^distil.{why}"):
        context(teachers).frozen_model("distil.teacher", str(teachers / name))


@pytest.mark.parametrize(("weight", "top_k"), [(0.3, 4), (0.0, 4), (1.0, 512)])
def test_the_loss_is_the_divergence_from_the_teacher(teachers: Path, tmp_path: Path, weight: float, top_k: int) -> None:
    """By whole distributions, row by row, without documents in one row."""
    made = module("plugin-examples", "distil.py", tmp_path)
    section = made.DistilSection(teacher=str(teachers / "teacher"), weight=weight, top_k=top_k)
    (spec,) = made.llmsuite_register_stages()
    stage = spec.factory()(section, context(teachers))
    student = live(teachers / "student")
    rows = [
        Conversation((Message("user", "Say hello."), Message("assistant", text)), (False, True))
        for text in ("Hello!", "Good day to you.")
    ]
    samples = stage.make_samples(rows, DropCounts(Path("rows"), len(rows)))
    assert len(samples) == 2
    stage.before_training(student, samples)
    terms = stage.loss(student, stage.collate(samples))
    own = taught = 0.0
    for sample in samples:
        ids = paddle.to_tensor(sample.ids[:-1].astype("int64")).unsqueeze(0)
        at = np.nonzero(sample.weights[1:])[0]
        p, q = (_log_softmax(model(ids).numpy()[0, at]) for model in (student, live(teachers / "teacher")))
        best = np.argsort(-q, -1)[:, :top_k]
        q = _log_softmax(np.take_along_axis(q, best, -1))
        own -= p[np.arange(len(at)), sample.ids[1:][at]].sum()
        taught += (np.exp(q) * (q - np.take_along_axis(p, best, -1))).sum()
    assert terms.weight == sum(sample.weights.sum() for sample in samples)
    assert float(terms.sums["distil/nll"][0]) == pytest.approx(own, rel=1e-5)
    assert float(terms.sums["distil/kl"][0]) == pytest.approx(taught, rel=1e-5)
    assert float(terms.total) == pytest.approx((1 - weight) * own + weight * taught, rel=1e-5)
    assert set(spec.profile(section).checked(terms.sums)) == {"distil/kl", "distil/nll"}
    assert taught > 0.1, "the two models are different"


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype("float64") - x.max(-1, keepdims=True)
    found: np.ndarray = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return found


# a reward


def _completions(*texts: str) -> list[Completion]:
    more: dict[str, Any] = {"finish_reason": "stop", "columns": {}, "group": 0}
    return [Completion(prompt_ids=[1], ids=[2], logprobs=[-1.0], text=t, number=i, **more) for i, t in enumerate(texts)]


def test_the_majority_is_rewarded(tmp_path: Path) -> None:
    made = module("plugin-examples", "majority.py", tmp_path)
    score = made.majority(made.MajoritySection())
    votes = score(_completions("it is 7", "first 3, so 7", "8", "I do not know"))
    assert votes == [{"score": s, "agreement": 0.5} for s in (1.0, 1.0, 0.0, 0.0)]
    assert score(_completions("no", "none")) == [None, None]
    assert [key for key, _ in made.MajoritySection(pattern="[").problems()] == ["pattern"]


# an environment


def test_the_table_answers_calls(tmp_path: Path) -> None:
    made = module("plugin-examples", "lookup.py", tmp_path)
    (rows,) = (b for b in re.findall(r"```json\n(.*?)```", PAGES["plugin-examples"], re.DOTALL) if '"table"' in b)
    row = json.loads(rows.splitlines()[0])
    game = made.Lookup(made.LookupSection(price=0.25))
    assert game.begin({**row, "messages": [{"role": "user", "content": row["prompt"]}]}, 0)[0]["role"] == "user"

    def said(text: str) -> Any:
        return game.step(Turn(text=text, ids=[1], finish_reason="stop"))

    first = said("<get>Ada</get>")
    assert (first.done, first.reward) == (False, {"score": -0.25, "calls": 1.0})
    assert first.messages == [{"role": "tool", "content": "36"}]
    assert said("<get>Eve</get>").messages[0]["content"] == "nothing is known of that"
    assert [said(text).reward["score"] for text in (" 36\n", "7")] == [1.0, 0.0]


# the page on stages


def test_the_kinds_of_rows_are_those_of_formats(registry: Registry) -> None:
    named = re.findall(r'^\| "(\w+)" \| `', PAGES["stages"], re.MULTILINE)
    assert {data_format.kind for data_format in registry.data_formats.values()} == set(named)


def _is_base(cls: object) -> bool:
    """True for a base class of stages that do more than `Stage`."""
    return isinstance(cls, type) and issubclass(cls, Stage) and cls is not Stage


def test_methods_and_services_on_the_page_exist() -> None:
    called = PAGES["stages"].partition("## What is called when")[2].partition("## Rows")[0]
    rows = re.findall(r"^\| `(\w+Stage)` \| [^|]* \| (.*) \|$", called, re.MULTILINE)
    classes = {name: getattr(engine_stage, name) for name, _ in rows}
    assert set(classes.values()) == {cls for cls in vars(engine_stage).values() if _is_base(cls)}
    for name in re.findall(r"`(\w+)\(", called.partition("| class | for |")[0]):
        assert hasattr(Stage, name), name
    for cls, methods in rows:
        for name in re.findall(r"`(\w+)", methods):
            assert name in vars(classes[cls]), name
    services = PAGES["stages"].partition("## Context")[2].partition("## Loss")[0]
    names = {field.name for field in dataclasses.fields(StageContext)} | set(dir(StageContext))
    named = re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|", services, re.MULTILINE)
    assert len(named) == 10
    assert set(named) <= names


def test_the_logger_writes_what_it_gets(tmp_path: Path) -> None:
    made = module("stages", "csv_logger.py", tmp_path)
    (spec,) = made.llmsuite_register_loggers()
    logger = spec.factory(tmp_path)
    logger.log(3, {"loss": 0.5, "rewards/margin": 1.0})
    logger.close()
    assert (tmp_path / "metrics.csv").read_text().split() == ["3,loss,0.5", "3,rewards/margin,1.0"]


def test_checkpoints_of_a_network_of_ones_own_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "squared_relu_of_the_guide", ModuleType("squared_relu_of_the_guide"))
    family = module("python", "squared_relu.py", tmp_path).FAMILY
    config = family.config_cls(**family.smoke)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    found, again = read_config(tmp_path, {family.name: family})
    assert (found, type(again), again.to_hf()) == (family, type(config), config.to_hf())


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with paddle.no_grad():
        yield
