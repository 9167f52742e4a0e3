"""Plans: traffic counted by hand, schedules in time, FLOPs, files, the search, and the output of the command."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.cli.amounts import Unit, parse_amount
from llmsuite.cli.main import main
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.timeline import length, orders, peak_in_flight, simulate, timeline_text, topological_order_of
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.communication import Message, Traffic
from llmsuite.planning.cost import HARDWARE, part_costs, wire_bytes
from llmsuite.planning.estimate import Estimate, shape_spec_of
from llmsuite.planning.layout import Layout, ModelParameters, ranks
from llmsuite.planning.memory import full_micro_batch
from llmsuite.planning.report import show_search
from llmsuite.planning.search import Candidates, Strategy, strategies
from tests.support.allocated import RECIPE, run_plan
from tests.support.paths import ROOT
from tests.support.planned_runs import estimated, searched
from tests.support.schedules import peak_live


@given(st.integers(1, 6), st.integers(1, 24), st.sampled_from(["1F1B", "FThenB"]))
def test_the_bubble_is_that_of_the_formula(stages: int, count: int, kind: str) -> None:
    """(p - 1) / (m + p - 1) of the time, for equal stages (Narayanan et al. 2021, arXiv 2104.04473)."""
    simulated = simulate(orders(kind, stages, count, 1), [1.0] * stages, [2.0] * stages)  # type: ignore[arg-type]
    assert simulated.bubble == pytest.approx((stages - 1) / (count + stages - 1))
    live = peak_live(kind, stages, count)  # type: ignore[arg-type]
    assert [peak_in_flight(rank) for rank in simulated.ranks] == live


def test_ranks_do_in_time_what_the_engine_orders() -> None:
    wanted = orders("interleaved", 2, 4, 2)
    simulated = simulate(wanted, [1.0] * 4, [2.0] * 4)
    assert tuple(tuple(timed.action for timed in rank) for rank in simulated.ranks) == wanted
    done: dict[tuple[bool, int, int], float] = {}
    for stage, rank in enumerate(simulated.ranks):
        for timed in rank:
            done[timed.action.forward, timed.action.chunk * 2 + stage, timed.action.micro_batch] = timed.end
    for stage, rank in enumerate(simulated.ranks):
        for timed in rank:
            part = timed.action.chunk * 2 + stage
            step = -1 if timed.action.forward else 1
            before = done.get((timed.action.forward, part + step, timed.action.micro_batch))
            assert before is None or before <= timed.start


@given(st.sampled_from(["1F1B", "FThenB", "interleaved"]), st.integers(1, 5), st.integers(1, 12), st.data())
def test_how_long_it_takes_is_known_without_when(kind: Any, stages: int, count: int, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, 3)) if kind == "interleaved" else 1
    seconds = st.lists(st.floats(0.1, 9.0), min_size=stages * chunks, max_size=stages * chunks)
    forward = data.draw(seconds)
    backward = data.draw(seconds)
    transfer = data.draw(st.floats(0, 2.0))
    simulated = simulate(orders(kind, stages, count, chunks), forward, backward, transfer)
    assert length(topological_order_of(kind, stages, count, chunks), forward, backward, transfer) == simulated.length


def test_a_schedule_is_shown_as_text() -> None:
    simulated = simulate(orders("1F1B", 2, 2, 1), [1.0, 1.0], [2.0, 2.0])
    assert timeline_text(simulated) == ["stage   0 |01..--.--|", "stage   1 |.0--1--..|"]
    assert timeline_text(simulated, 4) == ["stage   0 |01.. …", "stage   1 |.0-- …"]
    assert simulated.ranks[0][0].action == Action(True, 0)


def test_micro_batches_that_are_not_played_take_as_long() -> None:
    """A step of many micro-batches is as long as if all of them were played."""
    words = ("--engine.precision=bf16", "--train.global_batch_size=128")
    found = estimated(run_plan(RECIPE, *words))
    assert len(found.timeline.ranks[0]) < 2 * found.num_micro_batches
    costs = [c.forward for c in found.costs], [c.backward for c in found.costs]
    assert found.bubble == pytest.approx(simulate(orders("1F1B", 2, found.num_micro_batches, 1), *costs).bubble)


@pytest.mark.parametrize(
    # matrices of 16 MiB, of which two are too large for one call, have the norms with them
    ("parallel", "calls"),
    [('{"gradient_bucket_bytes": 0}', 291), ("{}", 291 - 65)],
    ids=["alone", "together"],
)
def test_data_ranks_send_every_gradient_once(parallel: str, calls: int) -> None:
    plan = run_plan(RECIPE, f"--parallel={parallel}", "--launch.num_devices=4", "--engine.precision=fp32")
    layout = Layout(plan.model, plan.parallel)
    (mesh,) = ranks(plan.parallel.degrees)
    batches = [MicroBatch(1, 64, 64)] * 4
    sent = Traffic(layout, plan.train, shape_spec_of(plan.model), mesh, batches, [], True).counts
    gradients = {message: count for message, count in sent.items() if message.axis == "data"}
    assert sum(math.prod(m.shape) * m.num_bytes * count for m, count in gradients.items()) == 4 * layout.num_parameters
    assert len(layout.shapes) == 291
    assert sum(gradients.values()) == calls


def test_rings_send_parts() -> None:
    message = Message("data", "all_reduce", (1000,), 4, "")
    assert wire_bytes(message, 4) == 6000
    assert wire_bytes(Message("data", "all_gather", (1000,), 4, ""), 4) == 12000
    assert wire_bytes(Message("pp", "send", (1000,), 4, ""), 2) == 4000


def test_flops_are_six_for_each_weight_and_token() -> None:
    """But for the embedding, which multiplies nothing, and attention."""
    plan = run_plan(RECIPE, "--parallel={}", "--launch.num_devices=1", "--engine.recompute=none")
    shape_spec = shape_spec_of(plan.model)
    layout = Layout(plan.model, plan.parallel)
    (cost,) = part_costs(layout, plan.train, shape_spec, MicroBatch(1, 1, 1))
    weights = sum(math.prod(s) for n, s in layout.shapes.items() if len(s) == 2 and "embed" not in n)
    pairs = 3 * 2 * 32 * 128 * 32
    assert cost.forward + cost.backward == 6 * weights + pairs
    again = run_plan(RECIPE, "--parallel={}", "--launch.num_devices=1")
    (more,) = part_costs(Layout(again.model, again.parallel), again.train, shape_spec, MicroBatch(1, 1, 1))
    head = 2 * shape_spec.hidden * shape_spec.vocabulary
    assert more.backward - cost.backward == cost.forward - head


def test_attention_computes_with_a_prefix_too() -> None:
    words = ("--parallel={}", "--launch.num_devices=1", "--engine.recompute=none")
    name = str(RECIPE).replace("pretrain", "sft")
    plain, prefixed = (run_plan(type(RECIPE)(name), *words, *more) for more in ((), ("--prefix.tokens=24",)))
    batch = MicroBatch(2, 40, 1)
    shape_spec = shape_spec_of(plain.model)
    (alone,), (cost,) = (
        part_costs(Layout(plan.model, plan.parallel), plan.train, shape_spec, batch) for plan in (plain, prefixed)
    )
    each = 2 * 32 * 128 * 32  # queries and values of all heads of all layers
    assert cost.forward - alone.forward == 2 * each * (64**2 - 40**2)
    assert cost.backward == cost.forward, "the model is frozen"


def test_a_search_says_what_fits_and_why_others_do_not() -> None:
    plan = run_plan(RECIPE)
    fitting, rejected = searched(plan, 30 * 2.0**30, HARDWARE["a100"])
    assert [f.seconds for f in fitting] == sorted(f.seconds for f in fitting)
    assert all(f.estimate.peak <= 30 * 2.0**30 for f in fitting)
    reasons = {str(r.strategy): r.reason for r in rejected}
    assert reasons["tp1, pp1, sharding none, recompute full"].startswith("takes ")
    # as validate would say it
    assert "sharding: is stage1, but there is one data rank" not in str(reasons)
    words = fitting[0].strategy.overrides.replace("'", "").split(" --engine")
    again = run_plan(RECIPE, words[0], f"--engine{words[1]}")
    assert estimated(again).peak == fitting[0].estimate.peak


def test_a_search_names_a_strategy_that_its_recipe_can_have(tmp_path: Path) -> None:
    """The recipe recomputes some layers only, which a search does not try."""
    recipe = json.loads((ROOT / RECIPE).read_text())
    recipe["engine"] |= {"recompute": "full", "recompute_every": 2}
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe))
    fitting, rejected = searched(run_plan(str(path)), 30 * 2.0**30, HARDWARE["a100"])
    (line,) = (line for line in show_search(fitting, rejected, 1, True) if line.startswith("the first: "))
    again = run_plan(str(path), *shlex.split(line)[5:])
    assert estimated(again).peak == fitting[0].estimate.peak


def test_a_search_of_a_family_that_names_no_layers() -> None:
    """Strategies that need layers are rejected with that reason, and the others are planned without recompute."""
    plan = run_plan("recipes/llama/sft.json", "--launch.num_devices=4", "--parallel={}", "--engine.recompute=none")
    family = dataclasses.replace(plan.model.family, shard_plan=None)
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, family=family))
    fitting, rejected = searched(plan, 1e15, HARDWARE["a100"])
    assert {(f.strategy.tp, f.strategy.pp, f.strategy.recompute) for f in fitting} == {(1, 1, "none")}
    reasons = {str(r.strategy): r.reason for r in rejected}
    assert "names no layers to split" in reasons["tp1, pp2, sharding none, recompute none"]
    assert "names no modules to gather" in reasons["tp1, pp1, sharding stage3, recompute none"]


SEARCHED = {
    "llama": ("recipes/llama/sft.json", ("--launch.num_devices=4", "--parallel={}")),
    "adapters": ("recipes/llama/lora.json", ("--launch.num_devices=4", "--parallel={}")),
    "interventions": ("recipes/llama/reft.json", ("--launch.num_devices=4", "--parallel={}", "--reft.layers=[20]")),
    "deepseek": ("recipes/deepseek/sft.json", ("--launch.num_devices=8", "--model.config.num_hidden_layers=4")),
}


@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_finds_what_single_plans_say(name: str) -> None:
    """Whatever the limit: each strategy planned by itself, in full, with every way of computing again in turn."""
    recipe, words = SEARCHED[name]
    plan = run_plan(recipe, *words)
    device = HARDWARE["a100"]
    single: dict[Strategy, list[tuple[str, Estimate | str]]] = {}
    parameters = ModelParameters(plan.model, plan.parallel)
    candidates = Candidates(
        loaded=plan.loaded,
        model_plan=plan.model,
        data_plan=plan.data,
        own_parallel_plan=plan.parallel,
        train_plan=plan.train,
        parameters=parameters,
        shape_spec=shape_spec_of(plan.model),
        limit=1e15,
        device=device,
    )
    for strategy in strategies(plan.model, plan.parallel):
        single[strategy] = []
        for recompute in ("none", "selective", "full"):
            tried = candidates.parallel_plan(dataclasses.replace(strategy, recompute=recompute))
            found = candidates.violations(tried) or [estimated(dataclasses.replace(plan, parallel=tried))]
            single[strategy].append((recompute, found[0]))
    peaks = sorted(found.peak for tries in single.values() for _, found in tries if not isinstance(found, str))

    @settings(max_examples=5)
    @given(st.sampled_from(peaks), st.sampled_from([0.999, 1.0]))
    def check(peak: float, part: float) -> None:
        limit = peak * part
        fitting, rejected = searched(plan, limit, device)
        fits = {}
        others = set()
        for strategy, tries in single.items():
            well = [(r, found) for r, found in tries if not isinstance(found, str) and found.peak <= limit]
            if well:
                fits[dataclasses.replace(strategy, recompute=well[0][0])] = well[0][1]
            else:
                others.add((strategy.tp, strategy.pp, strategy.sharding, strategy.ep))
        assert {f.strategy: f.estimate.peak for f in fitting} == {s: found.peak for s, found in fits.items()}
        assert {(s.tp, s.pp, s.sharding, s.ep) for s in (r.strategy for r in rejected)} == others
        for found in fitting:
            assert found.seconds == pytest.approx(fits[found.strategy].step_seconds(device), rel=1e-12)
        assert [f.seconds for f in fitting] == sorted(f.seconds for f in fitting)

    check()


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80GiB", "bytes", 80 * 2.0**30),
        ("500 MB", "bytes", 5e8),
        ("80g", "bytes", 80e9),
        ("50GB/s", "bytes/s", 5e10),
        ("989 TFLOPS", "FLOPS", 989e12),
        ("4e11", "FLOPS", 4e11),
    ],
)
def test_amounts_are_read_with_their_units(text: str, unit: Unit, value: float) -> None:
    assert parse_amount("--x", text, unit) == value


@pytest.mark.parametrize(
    ("text", "unit"), [("80GiB", "FLOPS"), ("989TFLOPS", "bytes"), ("400Gb/s", "bytes/s"), ("1.2.3GB", "bytes")]
)
def test_amounts_of_another_unit_are_refused(text: str, unit: Unit) -> None:
    with pytest.raises(UserError, match=f"--x: '{text}' is no amount of {unit}; write it such as"):
        parse_amount("--x", text, unit)


def test_the_command_says_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, "--hardware", "a100"]) == 0
    said = capsys.readouterr().out
    parts = ("memory of a rank", "fits in 72.5 GiB", "messages of a rank in a step", "pipeline 1F1B", "tokens a day")
    for part in (*parts, "a checkpoint:"):
        assert part in said
    assert main(["plan", RECIPE, "--hardware", "abacus"]) == 2
    assert "--hardware: 'abacus' is not known" in capsys.readouterr().err
    assert main(["plan", RECIPE, "--search"]) == 2
    assert "--search: needs a device" in capsys.readouterr().err


def test_a_search_needs_no_degrees_that_fit_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """The degrees of the recipe are tensor 2 and pipeline 2, with stage 2, and its batch is 64: on 128 devices every
    strategy needs such degrees."""
    recipe = str(RECIPE).replace("pretrain", "sft")
    for devices, found in (("4", "tp2, pp1, sharding stage1"), ("128", "tp8, pp4")):
        words = ["plan", recipe, "--devices", devices, "--hardware", "a100"]
        assert main([*words, *(["--parallel={}"] if devices == "128" else [])]) == 2
        capsys.readouterr()
        assert main([*words, "--search"]) == 0
        assert found in capsys.readouterr().out.splitlines()[2]


PAGE = (ROOT / "docs" / "notes" / "planning.md").read_text()
PUBLISHED = PAGE[PAGE.index("## Published layouts") :]
COMMANDS = [line for line in PUBLISHED.splitlines() if line.startswith("llmsuite plan ")]


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_the_pages_numbers_are_those_of_the_command(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The peak; for the command whose point is another number, the parameters of a stage."""
    main(shlex.split(COMMANDS[number])[1:])
    output = capsys.readouterr().out
    pattern = r"\npeak (\S+ GiB)"
    if "--devices 16 " in COMMANDS[number]:
        pattern = r"\n  1 +[\d,]+ +(\S+ GiB)"
    found = re.search(pattern, output)
    assert found is not None
    assert found[1] in PUBLISHED, found[1]


def test_the_page_compares_what_the_plan_says() -> None:
    words = shlex.split(next(line for line in COMMANDS if line.endswith("=selective")))
    assert words[3:7] == ["--devices", "256", "--hardware", "h100"]
    words = ["--launch.num_devices=8", "--launch.nnodes=32", *words[7:-1]]
    whole, without = (
        estimated(run_plan("recipes/deepseek/deepseek-v3-pretrain.json", *words, f"--engine.recompute={how}")).stages[1]
        for how in ("none", "selective")
    )
    assert f"{(whole.parameters + whole.gradients) / 1e9:.1f} GB on the second stage" in PUBLISHED
    assert f"| {(whole.masters + whole.moments) / 1e9:.1f} GB |" in PUBLISHED
    kept = f"{whole.activations / 1e9:.0f} GB on the second stage, {without.activations / 1e9:.0f} GB with `recompute"
    assert kept in PUBLISHED


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_schedule_becomes_a_picture(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"schedule.{kind}"
    assert main(["plan", RECIPE, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_a_picture_of_another_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("a.gif", "has to end in .png or .svg"), ("nowhere/a.png", "cannot be written")):
        assert main(["plan", RECIPE, "--plot", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


def test_a_search_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, "--search", "--hardware=h100", "--plot", str(tmp_path / "a.png")]) == 2
    assert "--plot: shows one plan, not a search" in capsys.readouterr().err


def test_a_plan_reads_json_alike(tmp_path: Path) -> None:
    """Overrides and file say the same."""
    recipe = json.loads(Path(RECIPE).read_text())
    recipe["train"]["micro_batch_size"] = 2
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe))
    found = estimated(run_plan(str(path)))
    other = estimated(run_plan(RECIPE, "--train.micro_batch_size=2"))
    assert found.peak == other.peak


@pytest.mark.parametrize(("mode", "length"), [("dynamic", 150), ("to_static", 192)])
def test_a_full_micro_batch_is_padded_as_batches_are(mode: str, length: int) -> None:
    """In programs to multiples of 64 tokens that 6 ranks share under sequence parallel."""
    sizes = {"num_attention_heads": 48, "num_key_value_heads": 12, "hidden_size": 6144, "intermediate_size": 6144}
    words = [f"--model.config.{key}={value}" for key, value in sizes.items()]
    mesh = '--parallel={"tensor_parallel_degree": 6, "sequence_parallel": true}', "--launch.num_devices=6"
    plan = run_plan("recipes/llama/sft.json", *mesh, f"--engine.mode={mode}", "--data.max_length=150", *words)
    assert full_micro_batch(plan.model, plan.data, plan.parallel, plan.train).length == length
