"""The words of `llmsuite rehearse`; what it measures is in tests/multi/test_rehearse.py."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.plugins.rehearse.command import first_stage_rank, headers_for, ranks_in_order, ranks_to_rehearse

DEGREES = Degrees(pp=4, dp=2, sharding=1, tp=2)


def test_one_rank_of_the_first_and_the_last_stage_is_rehearsed() -> None:
    assert ranks_to_rehearse(None, DEGREES) == [0, 12]
    assert ranks_to_rehearse(None, Degrees(2, 1, 2, 2)) == [0, 4]
    assert ranks_to_rehearse(None, Degrees(1, 8, 1, 1)) == [0]


def test_ranks_are_given_by_number() -> None:
    assert ranks_to_rehearse("13,3,13", DEGREES) == [3, 13]
    with pytest.raises(
        UserError, match=r"--ranks: 5 is in the middle of a pipeline.* 0 to 3, or of the last, 12 to 15"
    ):
        ranks_to_rehearse("3,5", DEGREES)
    for wrong in ("a", "1,", "-1", ""):
        with pytest.raises(UserError, match=r"--ranks: .*such as 0,5"):
            ranks_to_rehearse(wrong, DEGREES)
    with pytest.raises(UserError, match=r"--ranks: 16 is none of the 16 ranks"):
        ranks_to_rehearse("0,16", DEGREES)


def test_a_later_stage_comes_after_the_first() -> None:
    assert [first_stage_rank(rank, DEGREES) for rank in (0, 3, 4, 7, 13)] == [0, 3, 0, 3, 1]
    assert ranks_in_order([7, 13], DEGREES) == [1, 3, 7, 13]


def test_a_later_stage_gets_the_headers_of_its_own_pipeline() -> None:
    reports: list[dict[str, Any]] = [{"rank": 1, "headers": [[1]]}, {"rank": 3, "headers": [[3]]}]
    assert headers_for(reports, 3, DEGREES) == []
    assert headers_for(reports, 7, DEGREES) == [[3]]
    reports[1]["error"] = {"text": "Out of memory"}
    with pytest.raises(UserError, match=r"rank 3, which sends to rank 7, failed: Out of memory"):
        headers_for(reports, 7, DEGREES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes/llama/infer.json"], "stage 'infer', which does not train"),
        (["recipes/llama/sft.json", "--hardware=abacus"], "'abacus' is not known"),
        (["recipes/llama/sft.json", "--ranks=999"], "--ranks: 999"),
        (["recipes/llama/sft.json", "--trace=a.json"], "--trace: shows times, which need --hardware"),
        (["recipes/llama/grpo.json"], "stage grpo samples completions, which cannot be rehearsed yet"),
        (["recipes/llama/sft.json", "--engine.offload_optimizer=true"], "engine.offload_optimizer: is true"),
        (["recipes/llama/sft.json", "--engine.mode=to_static", "--engine.program=step"], "engine.program: is step"),
        (["recipes/qwen_moe/sft.json"], "qwen_moe sends tokens to experts"),
        (
            [
                "recipes/llama/sft.json",
                "--parallel.pipeline_schedule=interleaved",
                "--parallel.virtual_pipeline_degree=2",
            ],
            "is interleaved, which cannot be rehearsed yet",
        ),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert main(["rehearse", *words]) != 0
    assert said in "".join(capsys.readouterr())
