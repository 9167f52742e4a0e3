"""Projections of one input that share an operation: as in one process, and two sums a layer in place of five.

One run here; `tests/parity/test_fused_projections.py` has further meshes and families.
"""

from __future__ import annotations

import collections
import dataclasses
import json

from tests.multi.conftest import Runner
from tests.parity.cases import compare, many_processes, one_process, plan_of, run_cases
from tests.parity.planned import check_truth
from tests.parity.points import point

RUN = point(tp=2, stage="tokens", optimizer="sgd", micro_batch_size=2)
LAYERS = 4


def test_a_layer_sums_two_gradients_of_inputs_in_place_of_five(runner: Runner) -> None:
    apart = dataclasses.replace(many_processes(RUN), name="apart", trace=True)
    fused = dataclasses.replace(apart, name="fused", words=[*apart.words, "--parallel.fuse_projections=true"])
    one = one_process(RUN)
    assert run_cases(runner, [one, apart, fused]) == {}
    for case in (apart, fused):
        assert compare(runner, one.name, case.name).problems == []
        check_truth(runner.directory / case.name, plan_of(case))
    for rank in range(2):
        sent = {}
        sizes = {}
        for case in (apart, fused):
            record = json.loads((runner.directory / case.name / f"traffic-{rank}.json").read_text())
            sent[case.name] = collections.Counter({(what, tuple(shape)): n for what, shape, n in record["sent"]})
            sizes[case.name] = record["micro_batches"]
        assert sizes["apart"] == sizes["fused"]
        saved = sent["apart"] - sent["fused"]
        assert {what for what, _ in saved} == {"all_reduce"}
        assert sum(saved.values()) == 3 * LAYERS * len(sizes["fused"]), "each of q, k, v, gate and up has a sum"
        assert not sent["fused"] - sent["apart"]
