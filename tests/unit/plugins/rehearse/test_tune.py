"""`llmsuite recipe tune` without rehearsals; tests/multi/test_tune.py has one with them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llmsuite.cli.main import main
from llmsuite.contract.registry import load_plugins
from llmsuite.planning.cost import HARDWARE
from llmsuite.planning.search import Candidates, Fitting, Strategy, candidates_of, plan_for_search, refine, search_all
from llmsuite.plugins.rehearse.show_tuned import Rehearsed, Result, model_flops, recommended, show_changes, show_results
from llmsuite.plugins.rehearse.tune import different, words_of
from llmsuite.recipe.document import read_document
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT

RECIPE = "recipes/llama/pretrain.json"
MODEL = {"family": "llama", "preset": "llama-3.1-8b", "tokenizer": "data/tokenizer", "config": {"num_hidden_layers": 4}}
WORDS = [f"--model={json.dumps(MODEL)}"]
GIB = 2.0**30


def candidates(*words: str, limit: float = 80e9) -> Candidates:
    plan = plan_for_search(RECIPE, [*WORDS, *words], load_plugins())
    return candidates_of(plan.loaded, plan.model, plan.data, plan.parallel, plan.train, limit, HARDWARE["h100"])


def test_a_refined_search_finds_better_layouts() -> None:
    given = candidates("--train.global_batch_size=64")
    fitting, rejected = search_all(given)
    found = refine(given, fitting, rejected)
    assert {f.strategy for f in fitting} <= {f.strategy for f in found}
    assert found == sorted(found, key=lambda f: f.rank_key)
    best = found[0].strategy
    assert (best.micro_batch or 1) > 1  # fewer launches
    assert any(f.strategy.chunks > 1 for f in found)
    # what is found is what the recipe with these keys takes
    plan = plan_run(RECIPE, words_of(best, [*WORDS, "--train.global_batch_size=64"]), load_plugins())
    assert plan.parallel.section.tensor_parallel_degree == best.tp
    assert plan.train.section.micro_batch_size == best.micro_batch
    assert plan.parallel.accumulate_steps == found[0].estimate.num_micro_batches


def test_offloading_is_tried_where_nothing_fits() -> None:
    fitting, rejected = search_all(candidates(limit=1e15))
    least = min(f.estimate.peak for f in fitting)
    given = candidates(limit=least - GIB)
    fitting, rejected = search_all(given)
    found = refine(given, [], rejected)
    assert found
    assert all(f.strategy.offload for f in found)
    (again,) = [given.try_strategy(found[0].strategy)]
    assert isinstance(again, Fitting)
    # the copies to and from the host take time
    assert again.seconds[0] > again.estimate.step_seconds(HARDWARE["h100"])[0]


def test_the_layouts_to_rehearse_differ() -> None:
    given = candidates("--train.global_batch_size=64")
    found = different(refine(given, *search_all(given)), 3)
    assert len({(f.strategy.tp, f.strategy.pp, f.strategy.sharding, f.strategy.chunks > 1) for f in found}) == 3


def test_words_of_the_user_give_way_to_the_layout() -> None:
    strategy = Strategy(2, 2, "none", 1, "full", chunks=2, micro_batch=4, offload=True)
    given = ["--seed=3", "--parallel.sharding=stage1", "--engine.recompute=none", "--parallel={}"]
    parallel = {
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
        "pipeline_parallel_degree": 2,
        "pipeline_schedule": "interleaved",
        "virtual_pipeline_degree": 2,
    }
    assert words_of(strategy, given) == [
        "--seed=3",
        f"--parallel={json.dumps(parallel)}",
        "--engine.recompute=full",
        "--engine.recompute_every=1",
        "--engine.offload_optimizer=true",
        "--train.micro_batch_size=4",
    ]
    assert words_of(Strategy(1, 1, "stage3", 1, "none"), []) == [
        '--parallel={"sharding": "stage3"}',
        "--engine.recompute=none",
        "--engine.recompute_every=1",
    ]


def test_the_written_recipe_keeps_everything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.jsonc"
    text = (
        (ROOT / RECIPE).read_text().replace('"engine": {', '// kernels\n  "engine": {').replace("8},", "8}, // all", 1)
    )
    source.write_text(text)
    output = tmp_path / "tuned.jsonc"
    words = ["recipe", "tune", str(source), "--hardware=h100", "--devices=16", "--rehearse=0", "-o", str(output)]
    assert main([*words, *WORDS, "--seed=5"]) == 0
    out, err = capsys.readouterr()
    written = output.read_text()
    assert "// kernels\n" in written
    assert "// all\n" in written
    tree = read_document(output).value
    before = json.loads((ROOT / RECIPE).read_text())
    assert (tree["seed"], tree["launch"]["nnodes"], tree["model"]) == (5, 2, MODEL)
    for section in ("data", "pretrain", "checkpoint", "source", "output_dir"):
        assert tree[section] == before[section]
    assert tree["train"]["global_batch_size"] == before["train"]["global_batch_size"]
    plan = plan_run(output, [], load_plugins())
    assert plan.parallel.degrees.num_ranks == 16
    assert f"wrote {output}\n" in out
    assert "the recipe as it is" in out
    assert "what each change gains" in out
    assert "layouts fit; ruled out by the plan" in out
    assert err == "searching layouts\n"
    # nothing is lost the second time
    assert main(words) == 2
    assert f"{output} exists; choose another --output" in capsys.readouterr().err


def test_a_recipe_without_a_file_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "tune", RECIPE, "--hardware=h100", "--rehearse=0", *WORDS]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["train"]["global_batch_size"] == 16
    assert "recommended" in err


def test_what_does_not_fit_is_said_with_the_nearest_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "tuned.json"
    model = json.dumps({**MODEL, "preset": "llama-3.1-405b", "config": {}})
    words = [f"--model={model}", "--train.optimizer=adamw", "-o", str(output), "--rehearse=0"]
    assert main(["recipe", "tune", RECIPE, "--hardware=h100", "--devices=2", *words]) == 3
    err = capsys.readouterr().err
    assert "no layout fits in 72.5 GiB (2 GiB are left to the driver and NCCL)" in err
    assert "nearest is tp" in err
    assert " GiB too much; give more --devices" in err
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([RECIPE, "--hardware=abacus"], "'abacus' is not known"),
        ([RECIPE], "--hardware is missing"),
        ([RECIPE, "--hardware=h100", "--devices=0"], "--devices: is 0"),
        ([RECIPE, "--hardware=h100", "-o", "a.yaml"], "has to end with .json, as the recipe does"),
        ([RECIPE, "--hardware=h100", "-o", "not/there/a.json"], "the directory of not/there/a.json does not exist"),
        (["recipes/llama/infer.json", "--hardware=h100"], "stage infer, which does not train"),
        ([RECIPE, "--hardware=h100", "--no.such=1"], "no"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "tune", *words]) == 2
    assert said in capsys.readouterr().err


def test_results_are_shown_side_by_side() -> None:
    given = candidates()
    own, best = (given.try_exactly(Strategy(1, pp, "stage1", 1, "none")) for pp in (2, 1))
    assert isinstance(own, Fitting)
    assert isinstance(best, Fitting)
    faster = Rehearsed(0.5, 4000.0, 0.4, 40 * GIB)
    slower = Rehearsed(1.0, 2000.0, 0.2, 30 * GIB, launch_bound=1.5)
    failed = Rehearsed(error="rank 0 fails: Out of memory")
    results = [Result(best, faster), Result(own, failed)]
    text = "\n".join(show_results(Result(own, slower), results, 50 * GIB, HARDWARE["h100"]))
    for part in ("launch-bound by 1.5", "+100%  recommended", "rank 0 fails: Out of memory", "4,000  40.0%  40.0"):
        assert part in text
    assert sorted(results, key=lambda r: r.rank_key(50 * GIB)) == results
    assert not Result(best, faster).is_possible(39 * GIB)
    assert recommended(Result(own, slower), results, 50 * GIB) is results[0]
    fastest = Result(own, Rehearsed(0.25, 8000.0, 0.8, 45 * GIB))
    assert recommended(fastest, results, 50 * GIB) is fastest
    assert recommended(fastest, results, 42 * GIB) is results[0]  # it does not fit
    text = "\n".join(show_changes(own, best, given))
    assert "pipeline  2     1" in text
    assert "slower" in text or "faster" in text or "as fast" in text
    assert "already" in "\n".join(show_changes(best, best, given))


def test_recompute_is_not_work_of_the_model() -> None:
    given = candidates()
    none, full = (given.try_exactly(Strategy(1, 1, "stage1", 1, kind)) for kind in ("none", "full"))
    assert isinstance(none, Fitting)
    assert isinstance(full, Fitting)
    assert model_flops(full.estimate) == model_flops(none.estimate) == none.estimate.flops < full.estimate.flops


def test_a_layout_is_as_slow_as_its_slowest_rank_and_as_large_as_its_fullest() -> None:
    predicted = {"step_seconds": 2.0, "tokens_per_second": 10.0, "mfu": 0.5, "busy_seconds": 1.0, "host_seconds": 0.5}
    reports = [{"rank": r, "predicted": {**predicted, "host_seconds": 0.5 + r}, "peak_bytes": r} for r in (0, 1)]
    assert Rehearsed.from_reports(reports) == Rehearsed(2.0, 10.0, 0.5, 1, 1.5)
    failed = {"rank": 4, "error": {"text": "Out of memory"}}
    assert Rehearsed.from_reports([reports[0], failed]).error == "rank 4 fails: Out of memory"
    assert Result("not possible", None).seconds == math.inf
