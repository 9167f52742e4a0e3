"""BLEU and ROUGE are those of PaddleNLP, and 0 where those divide by 0."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.engine.text_scores import common_subsequence, scores

BLEU, ROUGE = import_alone("paddlenlp.metrics.bleu", "paddlenlp.metrics.rouge")
TEXT = st.text("ab 是\U0001f600", max_size=9)


def of_paddlenlp(texts: list[str], references: list[str]) -> dict[str, float]:
    """As `compute_metrics_do_generation` of its run_finetune.py."""
    bleu = BLEU.BLEU(n_size=4)
    rouge_l = ROUGE.RougeL()
    for text, reference in zip(texts, references):
        bleu.add_inst(text, [reference])
        rouge_l.add_inst(text, [reference])
    found = {"rouge1": ROUGE.Rouge1().score(texts, references), "rouge2": ROUGE.Rouge2().score(texts, references)}
    return {**found, "rougel": float(rouge_l.score()), "bleu4": bleu.score()}


@settings(deadline=None, max_examples=150)
@given(pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_scores_are_those_of_paddlenlp(pairs: list[tuple[str, str]]) -> None:
    texts = [text for text, _ in pairs]
    references = [reference for _, reference in pairs]
    found = scores(texts, references)
    assert found.pop("exact_match") == sum(a == b for a, b in pairs) / len(pairs)
    try:
        wanted = of_paddlenlp(texts, references)
    except ZeroDivisionError:
        assert 0 in (found["rouge1"], found["rouge2"], found["bleu4"])
        return
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_scores_of_equal_texts() -> None:
    found = scores(["a cat sat", "猫坐在那里"], ["a cat sat", "猫坐在那里"])
    assert found == pytest.approx(dict.fromkeys(("bleu4", "rouge1", "rouge2", "rougel", "exact_match"), 1.0))


def test_scores_of_empty_texts() -> None:
    assert set(scores([""], ["yes"]).values()) == {0.0}


@settings(max_examples=100)
@given(a=TEXT, b=TEXT)
def test_the_common_subsequence_is_that_of_the_table(a: str, b: str) -> None:
    assert common_subsequence(a, b) == ROUGE.RougeL().lcs(a, b)
