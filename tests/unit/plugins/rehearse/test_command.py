"""The words of `llmsuite rehearse`; what it measures is in tests/multi/test_rehearse.py."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.plugins.rehearse.command import first_stage_rank, ranks_in_order, ranks_to_rehearse, sent_to

DEGREES = Degrees(pp=4, dp=2, sharding=1, tp=2)


def test_one_rank_of_the_first_and_the_last_stage_is_rehearsed() -> None:
    assert ranks_to_rehearse(None, DEGREES) == [0, 12]
    assert ranks_to_rehearse(None, Degrees(2, 1, 2, 2)) == [0, 4]
    assert ranks_to_rehearse(None, Degrees(1, 8, 1, 1)) == [0]


def test_ranks_are_given_by_number() -> None:
    assert ranks_to_rehearse("13,3,13", DEGREES) == [3, 13]
    assert ranks_to_rehearse("stages", DEGREES) == [0, 4, 8, 12]
    for wrong in ("a", "1,", "-1", ""):
        with pytest.raises(UserError, match=r"--ranks: .*such as 0,5"):
            ranks_to_rehearse(wrong, DEGREES)
    with pytest.raises(UserError, match=r"--ranks: 16 is none of the 16 ranks"):
        ranks_to_rehearse("0,16", DEGREES)


def test_a_later_stage_comes_after_the_first() -> None:
    assert [first_stage_rank(rank, DEGREES) for rank in (0, 3, 4, 7, 13)] == [0, 3, 0, 3, 1]
    assert ranks_in_order([7, 13], DEGREES) == [1, 3, 7, 13]


def test_a_later_stage_gets_the_numbers_of_its_own_pipeline() -> None:
    sent = [{"headers": [[number]], "numbers": []} for number in (1, 3)]
    reports: list[dict[str, Any]] = [{"rank": 1, "sent": sent[0]}, {"rank": 3, "sent": sent[1]}]
    assert sent_to(reports, 3, DEGREES) == {"headers": [], "numbers": []}
    assert sent_to(reports, 7, DEGREES) == sent[1]
    reports[1]["error"] = {"text": "Out of memory"}
    with pytest.raises(UserError, match=r"rank 3, which sends to rank 7, failed: Out of memory"):
        sent_to(reports, 7, DEGREES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes/llama/infer.json"], "stage infer, which does not train"),
        (["recipes/llama/sft.json", "--hardware=abacus"], "'abacus' is not known"),
        (["recipes/llama/sft.json", "--ranks=999"], "--ranks: 999"),
        (["recipes/llama/sft.json", "--trace=a.json"], "--trace: shows times, which need --hardware"),
        (
            [
                "recipes/qwen/gkd.json",
                "--model.family=qwen_moe",
                "--model.weights=null",
                "--model.preset=qwen3-30b-a3b",
                "--model.tokenizer=data/tokenizer",
                "--gkd.teacher=null",
                "--gkd.teacher_preset=qwen3-30b-a3b",
            ],
            "gkd.teacher: is a model with experts, which cannot be rehearsed as a teacher yet",
        ),
        (["recipes/llama/sft-program.json"], "engine.program: is step, which cannot be rehearsed yet"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert main(["rehearse", *words]) != 0
    assert said in "".join(capsys.readouterr())
