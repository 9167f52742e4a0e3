"""The stage `next_token` keeps the contract of stages: half a minute on a laptop."""

import json

from llmsuite.testing import assert_stage_contract


def test_stage_keeps_the_contract(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{i} plus {i} is {2 * i}."}) + "\n" for i in range(50)))
    directory = tmp_path / "runs"
    directory.mkdir()
    assert_stage_contract("next_token", directory, {"data.train": str(rows)})
