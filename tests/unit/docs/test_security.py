"""Every promise of SECURITY.md has a test."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTED: dict[str, tuple[str, ...]] = {
    "A recipe is data, but for four keys": ("unit/recipe/test_code.py::test_nothing_else_imports_a_file",),
    "It says which, and refuses a file": (
        "unit/recipe/test_code.py::test_a_file_of_a_stranger_is_refused",
        "unit/recipe/test_code.py::test_a_link_to_a_file_of_a_stranger_is_refused",
        "unit/recipe/test_code.py::test_a_file_that_was_allowed_is_taken",
        "unit/recipe/test_code.py::test_a_file_that_the_command_line_names_is_taken",
    ),
    "Pickles (": ("unit/checkpoint/convert/test_pickled.py::test_a_malicious_pickle_is_refused_and_not_run",),
    "A small interpreter reads them": (
        "unit/checkpoint/convert/test_pickled.py::test_these_payloads_are_real",
        "unit/checkpoint/convert/test_pickled.py::test_a_damaged_file_is_read_or_refused_and_nothing_else",
    ),
    "`.pdparams` files are read only": ("unit/checkpoint/convert/test_pdparams.py::test_pickles_need_allow_pickle",),
    "Secrets are neither shown nor recorded": ("multi/test_secrets.py::test_a_command_keeps_secrets",),
    "In a URL these are the password": ("unit/base/test_redaction.py::test_urls_have_no_secrets",),
    "Elsewhere they are known by their values": ("unit/base/test_redaction.py::test_what_is_known_is_hidden_anywhere",),
    "What is printed (": (
        "multi/test_secrets.py::test_what_fails_by_a_fault_of_ours_keeps_secrets",
        "multi/test_secrets.py::test_a_run_keeps_secrets",
        "multi/test_secrets.py::test_a_reward_keeps_secrets",
    ),
    "A secret that is printed in several parts": (
        "unit/base/test_redaction.py::test_a_secret_in_several_parts_is_hidden",
        "unit/base/test_redaction.py::test_a_url_in_several_parts_is_hidden",
        "unit/base/test_redaction.py::test_what_is_held_at_the_end_of_a_stream",
    ),
    "A recipe that you let": ("multi/test_secrets.py::test_a_recipe_that_was_asked_for_keeps_its_urls",),
    "Archives of public data sets are read": ("unit/data/test_remote.py::test_public_sets_are_converted",),
    "Links, names that lead out": (
        "unit/data/test_remote.py::test_links_and_devices_in_archives_are_refused",
        "unit/data/test_remote.py::test_names_that_lead_out_of_an_archive_are_refused",
        "unit/data/test_remote.py::test_bombs_and_damaged_archives_are_refused",
        "unit/data/test_bombs.py::test_a_repeated_dictionary_value_counts_each_time",
    ),
    "Time and memory are in proportion": (
        "unit/data/test_archives.py::test_many_members_take_time_by_their_number",
        "unit/data/test_archives.py::test_many_members_of_a_zip_are_read",
    ),
    "A chat template runs in a sandbox": (
        "unit/data/test_chat_template.py::test_a_template_that_does_more_than_render_is_refused",
        "unit/data/test_untrusted.py::test_a_template_has_a_time_limit",
        "unit/data/test_untrusted.py::test_a_template_has_a_memory_limit",
    ),
    "Templates that are built in run without it": (
        "unit/data/test_chat_template.py::test_builtin_templates_render_as_expected",
    ),
    "A conversation of many turns": (
        "unit/data/test_chat_template.py::test_simple_templates_render_a_conversation_once",
        "unit/data/test_chat_template.py::test_other_templates_refuse_conversations_of_too_many_turns",
    ),
    "A tokenizer.json is tried out": ("unit/data/test_untrusted.py::test_a_tokenizer_is_probed",),
    "A text made for a certain tokenizer": (
        "unit/data/test_untrusted.py::test_a_text_that_a_tokenizer_cannot_process",
    ),
    "Weights, configs, tokenizers and data": (
        "unit/base/test_safe_files.py::test_no_reader_waits_for_a_pipe",
        "unit/base/test_safe_files.py::test_no_reader_reads_a_device",
        "unit/checkpoint/convert/test_gguf.py::test_counts_that_no_file_has",
        "unit/checkpoint/convert/test_gguf.py::test_a_shape_that_no_model_has",
    ),
    "Their JSON is read strictly": (
        "unit/base/test_strict_json.py::test_what_is_no_json_is_refused",
        "unit/checkpoint/test_adapter_config.py::test_a_long_pattern_matches_fast",
    ),
    "A tokenizer is copied into outputs": (
        "unit/base/test_safe_files.py::test_links_within_a_directory_or_a_hubs_cache_are_copied",
        "unit/base/test_safe_files.py::test_what_lies_elsewhere_is_not_copied",
        "unit/base/test_safe_files.py::test_what_is_no_tokenizer_is_not_copied",
    ),
    "What other machines answer": ("unit/base/web/test_client.py::test_no_reader_follows_a_lie",),
    "An answer has a deadline": (
        "unit/base/web/test_client.py::test_no_reader_takes_other_json",
        "unit/base/web/test_client.py::test_the_depth_of_json",
        "unit/base/web/test_client.py::test_a_file_that_comes_fast_enough_is_waited_for",
    ),
    "A server that is asked to draw": (
        "unit/base/web/test_client.py::test_allowed_redirects_of_files",
        "unit/base/web/test_client.py::test_a_file_is_followed_on_its_host_with_its_password",
    ),
    "No key goes along": ("unit/base/web/test_client.py::test_no_reader_follows_a_lie",),
    "Token ids have to be of the vocabulary": (
        "unit/rl/test_checks.py::test_a_reward_with_an_invalid_value_is_missing_and_the_others_are_not",
        "unit/rl/test_checks.py::test_an_invalid_completion_of_a_plugin_engine_is_named",
        "unit/rl/test_checks.py::test_a_score_of_a_server_that_is_none_is_named",
    ),
    "`llmsuite watch` and `llmsuite studio` listen": (
        "unit/observe/test_report.py::test_without_the_token_nothing_is_served",
        "unit/plugins/studio/test_studio.py::test_nothing_is_served_without_the_token",
        "unit/plugins/studio/test_studio.py::test_requests_of_other_pages_are_refused",
    ),
    "A server that the studio starts": ("unit/plugins/studio/test_studio.py::test_a_server_of_the_studio_has_a_key",),
    "`llmsuite serve` listens on the loopback": ("multi/test_serve.py::test_it_listens_on_this_machine_only",),
    "With `LLMSUITE_API_KEY`": ("unit/serving/test_requests.py::test_with_a_key_a_server_asks_for_it",),
    "The size of a body": (
        "unit/serving/test_bodies.py::test_what_is_too_much_is_named_with_its_bound",
        "unit/serving/test_fair_queue.py::test_too_many_answers_get_429_and_when_to_come_back",
        "unit/serving/test_requests.py::test_what_takes_too_long_at_the_end_gets_503",
    ),
    "What rewards and environments start": (
        "unit/base/test_supervisor.py::test_nothing_is_left_of_what_is_ended",
        "unit/base/test_supervisor.py::test_nothing_is_left_when_who_has_started_it_is_killed",
        "unit/rl/test_rewards.py::test_children_of_rewards_end_with_their_processes",
    ),
    "What they print is cut off": (
        "unit/base/test_supervisor.py::test_what_it_prints_has_a_bound",
        "unit/base/test_supervisor.py::test_what_takes_too_much_memory_is_ended",
    ),
    "Of what other programs print": (
        "unit/base/test_commands.py::test_output_without_end_is_cut_and_the_command_killed",
        "unit/base/test_commands.py::test_no_other_module_takes_all_output_of_a_command",
    ),
    "One that prints without end": (
        "unit/base/test_commands.py::test_output_without_end_is_cut_and_the_command_killed",
    ),
    "They end, with all that they": (
        "unit/base/test_commands.py::test_nothing_is_left_when_who_has_started_it_is_killed",
    ),
    "Of what a rank prints": ("unit/launch/test_logs.py::test_a_log_without_end_takes_a_bounded_space",),
}
"""Tests of each sentence, which is known by how it begins."""
EXPLAINS = ("Look at such files as at a script", "`environment.verifiers.id` may also name")
"""Sentences that promise nothing."""


def _sentences() -> list[str]:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promises = text.partition("## What counts\n")[2].partition("These are not promises:")[0]
    bullets = [" ".join(bullet.split()) for bullet in re.split(r"^- ", promises, flags=re.MULTILINE)[1:]]
    return [sentence for bullet in bullets for sentence in re.split(r"(?<=[.)]) (?=[A-Z`])", bullet)]


@functools.cache
def _names(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_sentence_has_a_test() -> None:
    known = [*TESTED, *EXPLAINS]
    unknown = [text for text in _sentences() if not text.startswith(tuple(known))]
    assert not unknown, "name its test, or say that it promises nothing"
    gone = [beginning for beginning in known if not any(text.startswith(beginning) for text in _sentences())]
    assert not gone, "such a sentence is not there any more"


@pytest.mark.parametrize("test", sorted({test for tests in TESTED.values() for test in tests}))
def test_the_test_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert name in _names(ROOT / "tests" / path)
