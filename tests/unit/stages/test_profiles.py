"""The profile of a stage: its metrics and pre-passes, stated once."""

from __future__ import annotations

import pytest

from llmsuite import builtin
from llmsuite.contract.hookspecs import PrePass, StageProfile, StageSpec
from llmsuite.stages.sections import DpoSection, KtoSection


def kinds(profile: StageProfile) -> list[str]:
    return [prepass.kind for prepass in profile.prepasses]


def test_a_term_with_a_weight_of_its_own_adds_a_metric_and_a_pre_pass() -> None:
    plain = DpoSection().profile()
    weighted = DpoSection(sft_weight=0.5).profile()
    assert weighted.sums == (*plain.sums, "nll/chosen")
    assert plain.prepasses == ()
    assert weighted.prepasses == (PrePass(kind="batch", sums=("pairs_per_token",)),)
    of_answers = DpoSection(sft_weight=0.5, sft_mean="answers").profile()
    assert (of_answers.sums, of_answers.prepasses) == (weighted.sums, ())


def test_pre_passes_run_in_the_order_in_which_they_need_each_other() -> None:
    section = DpoSection(loss="kto_pair", reference="adapter_off", sft_weight=0.5)
    assert kinds(section.profile()) == ["batch", "adapters_off", "model"]
    assert kinds(KtoSection(reference="adapter_off").profile()) == ["adapters_off", "model"]


def test_the_reference_of_related_and_unrelated_answers_is_one_pass() -> None:
    assert [prepass.rows for prepass in KtoSection(reference="adapter_off").profile().prepasses] == [2, 1]
    assert [p.rows for p in KtoSection(loss="apo_zero", reference="adapter_off").profile().prepasses] == [1]


def test_the_kind_of_a_pre_pass_switches_adapters_off() -> None:
    assert [PrePass(kind=kind).with_adapters for kind in ("batch", "model", "adapters_off")] == [True, True, False]


def test_every_built_in_stage_that_trains_has_a_profile_of_its_defaults() -> None:
    for spec in builtin.llmsuite_register_stages():
        if isinstance(spec, StageSpec):
            assert isinstance(spec.profile(spec.config_cls()), StageProfile), spec.name


def test_a_metric_that_the_profile_does_not_list_is_an_error() -> None:
    profile = StageProfile(sums=("accuracy",))
    assert profile.checked({"accuracy": 1.0}) == {"accuracy": 1.0}
    for sums in ({}, {"accuracy": 1.0, "margin": 1.0}):
        with pytest.raises(AssertionError, match=r"its profile lists \['accuracy'\]"):
            profile.checked(sums)
