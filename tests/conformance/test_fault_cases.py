"""Faults of speculative decoding that users of public engines reported, and what here holds each of them.

A table, and checks that every test and every slot's case that it names exists. The input of a fault and its right value
are in those; what concerns a server and is not proven says so in ``open``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from sgl_mega_plugin.contract import Provided
from sgl_mega_plugin.registry import load_cases
from sgl_mega_slots import SLOTS

_ROOT = Path(__file__).parents[2]
_PROJECTS = "SGLang|vLLM|vllm-ascend|TensorRT-LLM|FlashInfer|transformers|Megatron-LM"


@dataclass(frozen=True)
class Fault:
    """``cases`` are "slot/case"; ``tests`` are "file below tests::function", server tests among them."""

    name: str
    sources: tuple[str, ...]
    wanted: str
    cases: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    open: str = ""  # "not yet: ..." where a part of the fault is not proven


FAULTS = (
    Fault(
        "a target row of NaN or -inf only",
        ("vLLM issue 45060",),
        "an id in the vocabulary, a token at least; the finite entry where there is one; what pads a tile unread",
        (
            "accept_tail/dead_row_nan", "accept_tail/dead_row_minus_inf", "accept_tail/one_finite_entry",
            "accept_tail/one_finite_among_nan", "blockwise_rejection/target_row_nan",
            "blockwise_rejection/bonus_row_minus_inf", "blockwise_rejection/draft_row_one_finite_among_nan",
            "target_argmax_head/dead_rows_bfloat16", "target_argmax_head/one_live_id_among_nan",
            "sampling_cutoffs/odd_rows", "markov/dead_row_nan_sampled", "draft_lm_head/dead_rows_float16",
        ),
        (
            "conformance/test_references.py::test_dead_target_row",
            "conformance/test_blockwise_rejection.py::test_dead_target_rows",
            "conformance/test_kit_checks.py::test_relocated_arguments_are_equal_and_one_element_off",
        ),
    ),
    Fault(
        "ids out of range, rows without candidates",
        ("SGLang issue 37472", "FlashInfer issue 879"),
        "live rows as in a batch of their own, padding rows commit 0; such an id is refused and read nowhere",
        (
            "accept_tail/draft_minus_one", "accept_tail/draft_at_vocab", "accept_tail/draft_huge",
            "accept_tail/padded_rows", "accept_tail/simulated_drafts_out_of_range", "accept_tail/tokens_out_of_range",
            "blockwise_rejection/draft_minus_one", "blockwise_rejection/draft_huge", "blockwise_rejection/padded_rows",
            "markov/anchors_out_of_range", "markov/gated_anchor_out_of_range",
        ),
        (
            "conformance/test_references.py::test_live_rows_do_not_depend_on_padding",
            "conformance/test_kit_checks.py::test_ranges_hold_for_every_output",
        ),
    ),
    Fault(
        "stale rows in a replay of a larger graph",
        ("SGLang issue 18647",),
        "the live row as in a step of its own; the others write no KV, whatever parameters they hold",
        ("params_once/fewer_rows_than_the_graph", "params_once/padding_beyond_n", "kv_staging/two_requests_of_four"),
        (
            "conformance/test_references_glue.py::test_a_smaller_batch_leaves_nothing_of_a_larger_one",
            "conformance/test_commit_references.py::test_a_smaller_staging_leaves_nothing_of_a_larger_one",
            "unit/test_embedded_runtime.py::test_a_padded_step_equals_a_step_of_one_row",
            "unit/test_embedded_engine.py::test_rows_of_a_shrunken_batch_write_nothing",
            "engine/test_engine_twins_glue.py::test_params_once_is_sglangs_staging",
        ),
    ),
    Fault(
        "a deferred commit after an abort, a flush or a preemption",
        ("SGLang issue 35049", "vLLM issue 49620"),
        "written once before any read, not at all after a flush; what a new owner put there survives",
        ("deferred_kv/armed_rows_that_write_nothing", "kv_staging/padding_in_the_batch"),
        (
            "conformance/test_deferred_kv.py::test_the_write_comes_once_and_before_any_read",
            "conformance/test_deferred_kv.py::test_a_new_owners_sentinel_survives",
            "unit/test_deferral.py::test_what_could_read_or_overwrite_is_preceded_by_the_write",
            "unit/test_deferral.py::test_dropped_rows_are_not_pending_and_are_named_once",
            "unit/test_embedded_context.py::test_a_staged_commit_is_written_once_before_anything_else",
            "unit/test_embedded_context.py::test_what_a_finished_request_staged_is_not_written",
            "unit/test_embedded_context.py::test_what_an_aborted_run_staged_is_not_written",
            "engine/test_engine_twins_commit.py::test_the_host_writes_when_sglangs_does",
        ),
        open="not yet: abort, flush and retraction on a server, which calls no slot at these seams",
    ),
    Fault(
        "which rows are greedy",
        ("vLLM issue 27077", "TensorRT-LLM issue 19390"),
        "temperature 0, and top_k 1 at any temperature; such a row leaves block-wise rejection on for the others",
        ("params_once/which_rows_are_greedy", "blockwise_rejection/b6_mixed_strided", "markov/b3_mixed_strided"),
        (
            "conformance/test_references_glue.py::test_which_rows_are_greedy",
            "conformance/test_blockwise_rejection.py::test_greedy_rows_among_sampled_ones_accept_as_alone",
            "unit/test_embedded_request.py::test_which_rows_are_greedy",
            "unit/test_embedded_engine.py::test_greedy_rows_are_the_same_beside_sampled_ones",
            "engine/test_engine_fold.py::test_which_sampled_steps_are_folded",
        ),
    ),
    Fault(
        "q is not what the draft was drawn from",
        ("transformers issue 47932",),
        "the target's law; an argmax draft is certain of itself",
        ("blockwise_rejection/one_hot_drafts", "blockwise_rejection/argmax_drafts_with_logits"),
        (
            "conformance/test_blockwise_rejection.py::test_argmax_drafts_are_certain_of_themselves",
            "conformance/test_blockwise_rejection.py::test_twenty_thousand_blocks_have_the_targets_law",
            "unit/test_embedded_sampling.py::test_argmax_draft_with_its_one_hot_law",
            "unit/test_embedded_law.py::test_frequencies_of_the_first_tokens",
        ),
    ),
    Fault(
        "logit adjustments that reach one row of a request, or none",
        ("SGLang issue 11555", "TensorRT-LLM issue 17701"),
        "all rows of the request move, or the whole step is declined; min-p, top-k and top-p filter every row",
        (
            "sampling_cutoffs/min_p", "sampling_cutoffs/all_three_bf16",
            "sampling_cutoffs/rows_of_a_batch_differ_strided", "blockwise_rejection/cutoffs_mixed",
        ),
        (
            "unit/test_embedded_engine.py::test_a_token_that_a_filter_leaves_out_is_never_drawn",
            "unit/test_embedded_law.py::test_frequencies_of_the_first_tokens",
            "unit/test_plan.py::test_reasons_of_the_host",
            "engine/test_engine_fold.py::test_which_sampled_steps_are_folded",
            "engine/test_engine_fold.py::test_a_greedy_step_is_one_whose_logits_stand",
        ),
    ),
    Fault(
        "a grammar whose mask misses the bonus row",
        ("SGLang issue 31753", "vLLM issue 44292"),
        "the step is declined, and the engine's own path masks",
        tests=(
            "unit/test_plan.py::test_reasons_of_the_host",
            "engine/test_engine_fold.py::test_which_sampled_steps_are_folded",
            "engine/test_engine_fold.py::test_a_greedy_step_is_one_whose_logits_stand",
        ),
        open="not yet: a constrained request on a server with slots on",
    ),
    Fault(
        "random streams under graphs",
        ("Megatron-LM issue 5697", "TensorRT-LLM issue 17599"),
        "a replay draws anew, as the eager step of its counter; equal rows draw apart; a greedy block costs no number",
        ("markov/equal_rows_draw_apart", "markov/late_offset", "blockwise_rejection/equal_rows_draw_apart"),
        (
            "conformance/interpreted/test_interpreted_markov.py::test_each_offset_draws_anew_and_the_same_again",
            "conformance/interpreted/test_interpreted_blockwise.py::test_each_offset_draws_anew_and_the_same_again",
            "gpu/test_slots_gpu.py::test_a_captured_step_draws_anew_at_each_offset",
            "unit/test_embedded_engine.py::test_noise_moves_with_sampled_blocks_and_with_seeds",
        ),
    ),
    Fault(
        "ranks disagree on a near tie",
        ("SGLang issue 31071",),
        "each rank decides by its inputs alone, so equal logits give equal lengths, bonus and trim on every rank",
        ("accept_tail/ties_take_the_lowest_id", "markov/ties_take_the_lowest_id"),
        (
            "conformance/test_kit_checks.py::test_a_fault_is_named",
            "conformance/test_kit_checks.py::test_a_near_tie_is_one_step_of_the_dtype",
            "conformance/test_kit_checks.py::test_near_ties_of_a_mixed_batch_are_in_its_greedy_rows",
        ),
        open="not yet: ranks of a server whose logits differ in the last bit take rank 0's decision",
    ),
    Fault(
        "padding rows that write KV",
        ("SGLang issue 36207", "vLLM issue 56734"),
        "the padding slot unchanged, NaN and addresses of padding rows never read",
        (
            "context_kv/padded_hidden_nan", "context_kv/padded_locations_minus_one", "context_kv/padded_locations_huge",
            "context_kv/ring_padding_locations", "deferred_kv/padded_hidden_nan", "step_inputs/row_and_padding",
            "histories/padding_shares_a_row", "relay/padding_names_a_live_row", "attn_metadata/padding",
        ),
        (
            "conformance/test_commit_references.py::test_padding_rows_write_nothing_and_are_not_read",
            "conformance/test_references_glue.py::test_relay_writes_the_rows_of_live_requests_only",
            "unit/test_embedded_engine.py::test_rows_of_a_shrunken_batch_write_nothing",
            "unit/test_embedded_engine.py::test_lengths_and_anchors_come_from_the_device_alone",
        ),
    ),
    Fault(
        "the end of the context",
        ("SGLang issue 33579", "vllm-ascend issue 9098"),
        "no write past a request's row, its neighbour unchanged, the same tokens as without speculation",
        (
            "step_inputs/context_end", "step_inputs/context_end_by_positions", "step_inputs/context_end_by_columns",
            "step_inputs/context_end_with_spare_columns", "step_inputs/context_end_page_256",
            "attn_metadata/context_end_64_columns", "attn_metadata/context_end_76_columns",
            "attn_metadata/context_end_page_256", "attn_metadata/context_end_by_pages", "context_kv/context_end",
            "context_kv/position_out_of_range", "deferred_kv/context_end",
        ),
        (
            "conformance/test_references.py::test_step_inputs_at_the_end_of_the_context",
            "conformance/test_references_glue.py::test_metadata_at_the_end_of_the_context",
            "conformance/test_references_glue.py::test_metadata_at_the_end_of_the_context_with_large_pages",
            "unit/test_embedded_engine.py::test_context_end",
            "unit/test_embedded_engine.py::test_nothing_is_written_outside_a_request",
            "unit/test_embedded_runtime.py::test_context_end_with_slots",
        ),
    ),
    Fault(
        "buffers refilled before they were read",
        ("SGLang issue 26380", "SGLang issue 34076"),
        "a step's outputs equal the serial run's while the host prepares the next; any allocator's addresses do",
        tests=(
            "conformance/test_references_glue.py::test_the_host_fills_the_next_step_before_this_one_has_lengths",
            "conformance/test_kit_checks.py::test_a_fault_is_named",
            "unit/test_embedded_engine.py::test_lengths_and_anchors_come_from_the_device_alone",
            "engine/test_engine_fold.py::test_results_outlive_the_replays_that_follow",
            "engine/test_engine_fold.py::test_snapshots_share_no_memory_with_what_the_graph_writes",
            "engine/test_engine_fold.py::test_a_steady_step_launches_in_order_and_hands_on_what_was_accepted",
        ),
        open="not yet: a delayed verify on a GPU under the overlap schedule, and the asynchronous allocator there",
    ),
    Fault(
        "acceptance rule and residual",
        ("transformers issue 28508", "vllm-ascend issue 7807"),
        "a draft stands iff coin * q < p; what replaces it comes from max(p - q, 0); equal laws accept everything",
        (
            "blockwise_rejection/known_laws", "blockwise_rejection/equal_laws_fp32",
            "blockwise_rejection/equal_laws_bf16", "blockwise_rejection/b5_every_position_refused",
        ),
        (
            "conformance/test_blockwise_rejection.py::test_the_coin_decides_and_only_id_0_is_left",
            "conformance/test_blockwise_rejection.py::test_equal_laws_accept_every_coin",
            "conformance/test_blockwise_rejection.py::test_a_refusal_with_nothing_left_takes_p",
            "unit/test_embedded_sampling.py::test_coin_below_the_ratio_accepts_and_the_residual_has_one_id",
            "unit/test_embedded_sampling.py::test_equal_laws_accept_everything",
            "engine/test_engine_twins.py::test_blockwise_rejection_decides_as_sglang_does",
        ),
    ),
    Fault(
        "draft context that was never written",
        ("vLLM issue 47930",),
        "finite, and equal to the run whose memory was not poisoned",
        tests=(
            "unit/test_embedded_engine.py::test_the_draft_reads_only_context_that_was_written",
            "unit/test_embedded_engine.py::test_a_row_reused_by_a_shorter_request_reads_nothing_stale",
            "unit/test_embedded_engine.py::test_poison_does_not_change_output",
            "unit/test_embedded_context.py::test_every_draft_sees_the_context_that_a_commit_at_once_leaves",
            "conformance/test_commit_references.py::test_a_reused_slot_holds_nothing_of_its_last_owner",
        ),
        open="not yet: a prefix hit and a resumed request on a server; the embedded engine shares no prefixes",
    ),
    Fault(
        "not active where the model runs",
        ("SGLang issue 38464", "vLLM issue 18326"),
        "a spawned worker registers and proves it by itself; registering twice is harmless",
        tests=(
            "engine/test_engine_processes.py::test_a_spawned_process_registers_and_inherits_the_switches",
            "engine/test_engine_processes.py::test_a_spawned_process_refuses_a_wrong_slot_list",
            "engine/test_engine_resolution.py::test_registering_twice_changes_nothing",
            "engine/test_engine_install.py::test_a_worker_makes_the_plan_of_the_launch",
            "engine/test_engine_fold.py::test_a_graph_without_the_epilogue_stops_the_server",
        ),
        open="not yet: two ranks of one server",
    ),
    Fault(
        "a failure swallowed, a name unknown",
        ("vLLM issue 48277", "vLLM issue 43987"),
        "with the flag given, a refusal that names the cause",
        tests=(
            "engine/test_engine_resolution.py::test_an_entry_function_that_raises_is_reported_by_sglang",
            "engine/test_engine_resolution.py::test_no_engine_is_put_into_words",
            "engine/test_engine_processes.py::test_a_fresh_process_names_what_is_wrong",
            "unit/test_selection.py::test_unknown_names",
            "unit/test_registry.py::test_broken_entry_points",
            "unit/test_registry.py::test_what_does_not_fit_is_refused_at_load",
            "conformance/test_kit.py::test_a_slot_that_does_not_fit_its_seam_fails_as_a_whole",
        ),
    ),
    Fault(
        "a stop inside the block",
        ("SGLang issue 31599",),
        "the device commits the full length, the host trims; nothing behind the bonus is read",
        ("histories/shorter_than_the_history",),
        (
            "unit/test_embedded_engine.py::test_a_stop_inside_the_block_is_trimmed_by_the_host",
            "unit/test_embedded_request.py::test_where_an_output_ends",
            "conformance/test_commit_references.py::"
            "test_a_stop_inside_the_block_commits_the_whole_length_and_nothing_behind_it",
        ),
    ),
    Fault(
        "weights and memory over captures",
        ("SGLang issue 29384", "SGLang issue 31674"),
        "after an update and a recapture the draft follows its weights, memory stays flat, no old graph writes",
        tests=(
            "unit/test_deferral.py::test_after_a_recapture_only_new_graphs_write",
            "unit/test_embedded_commit.py::test_the_drafts_projection_is_joined_once_and_follows_its_weights",
        ),
        open="not yet: capture, update and recapture three times on a server, release and resume, memory flat",
    ),
)  # fmt: skip


@cache
def _functions(file: str) -> frozenset[str]:
    path = _ROOT / "tests" / file
    if not path.exists():
        return frozenset()
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


@cache
def _cases() -> frozenset[str]:
    entries = [Provided(slot=slot, distribution="sgl-mega-plugin", version="0") for slot in SLOTS]
    return frozenset(f"{entry.slot.name}/{case.id}" for entry in entries for case in load_cases(entry))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_holds_a_fault_exists(fault: Fault) -> None:
    missing = [name for name in fault.cases if name not in _cases()]
    missing += [name for name in fault.tests if name.partition("::")[2] not in _functions(name.partition("::")[0])]
    assert not missing, f"{fault.name}: no {missing}; name what holds the fault now"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_held_and_has_a_public_source(fault: Fault) -> None:
    assert fault.tests, "a fault is held by a test at least, whose assertion states the right value"
    assert all(name.startswith("test_") for name in (test.partition("::")[2] for test in fault.tests))
    assert fault.sources
    wrong = [source for source in fault.sources if not re.fullmatch(rf"({_PROJECTS}) issue \d+", source)]
    assert not wrong, f"{wrong}: write '{_PROJECTS.partition('|')[0]} issue 1'"
    assert not fault.open or fault.open.startswith("not yet: ")


def test_faults_and_what_holds_them_are_named_once() -> None:
    names = [fault.name for fault in FAULTS]
    sources = [source for fault in FAULTS for source in fault.sources]
    assert len(set(names)) == len(names)
    assert len(set(sources)) == len(sources)
    for fault in FAULTS:
        for held in (fault.cases, fault.tests):
            assert len(set(held)) == len(held), fault.name


def test_a_name_that_does_not_exist_is_found() -> None:
    lost = Fault("lost", ("SGLang issue 1",), "", ("accept_tail/no_such_case",), ("unit/no_such_file.py::test_x",))
    with pytest.raises(AssertionError, match=r"no_such_case.*no_such_file"):
        test_what_holds_a_fault_exists(lost)
