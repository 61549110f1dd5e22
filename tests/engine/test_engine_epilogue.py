"""SGLang's own epilogue and sampling-accept region of a DeepSeek-V4.1 target, run on the CPU under its switches.

Every combination of switches leaves the same behind, and the master switch builds what the variables build. What needs
a GPU is shown to refuse, and where.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_epilogue import (
    FEATURES,
    HISTORY,
    PADDED,
    ROWS,
    TOKENS,
    B,
    Built,
    greedy,
    interpreted,
    region,
    sampler,
    step,
)

from sgl_mega_plugin.engine.log.read import Answer, read_log
from sgl_mega_plugin.switch import MASTER_SWITCH, MASTER_VARIABLES, apply_master_switch

SECONDS = 240  # a spawned process imports SGLang's workers
LIVE = B - PADDED
TAIL, DEFER = "SGLANG_DSPARK_FUSED_ACCEPT_TAIL", "SGLANG_DSPARK_DEFER_CONTEXT_KV"
POST_FOLD, POST_FORWARD = "SGLANG_OPT_DSV41_DSPARK_POST_FOLD", "SGLANG_OPT_DSV41_POST_FORWARD_CUDA_GRAPH"
READ_HERE = (TAIL, DEFER, POST_FOLD, POST_FORWARD)  # what the epilogue depends on
SETS: dict[str, Mapping[str, str]] = {
    "off": {},
    **{name.removeprefix("SGLANG_").lower(): {name: "1"} for name in READ_HERE},
    "all": dict.fromkeys(READ_HERE, "1"),
}


def expected(io: Any, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The outputs of a step that accepts these lengths, written out once more."""
    best = io.logits.view(B, ROWS, -1).argmax(dim=-1)
    bonus = [int(best[row, length]) for row, length in enumerate(lengths)]
    tokens = [
        [*io.candidates[row, 1 : 1 + length].tolist(), bonus[row], *io.candidates[row, 2 + length :].tolist(), 0][:ROWS]
        for row, length in enumerate(lengths)
    ]
    kv = torch.full((TOKENS, FEATURES), -1.0)
    for row, length in enumerate(lengths):
        for place in range(row * ROWS, row * ROWS + length + 1):
            kv[io.out_cache_loc[place]] = io.hidden[place, :FEATURES]
    return {
        "correct_len": list(lengths),
        "bonus": bonus,
        "cap_trim_lens": [0] * len(lengths),
        "commit_lens": [length + 1 for length in lengths],
        "new_seq_lens": [int(io.seq_lens[row]) + length + 1 for row, length in enumerate(lengths)],
        "out_tokens": tokens,
        "kv": kv.tolist(),
    }


@pytest.mark.parametrize("environ", SETS.values(), ids=SETS)
@pytest.mark.parametrize("accepted", [(2, 5, 0), (0, 0, 3), (5, 1, 5)], ids=str)
def test_a_greedy_step_is_the_same_under_every_switch(environ: Mapping[str, str], accepted: tuple[int, ...]) -> None:
    os.environ.update(environ)
    built, io = Built(), step(7, accepted)
    built.arm()
    assert greedy(built, io) is False
    assert built.outputs() == expected(io, accepted[:LIVE])
    relay, block = built.epilogue.future_relay, built.epilogue.read_block_accept_lens(LIVE)
    assert (relay is not None) == (POST_FOLD in environ)
    if relay is not None:
        slots = io.req_pool_indices[:LIVE]
        assert relay.new_seq_lens[slots].tolist() == built.outputs()["new_seq_lens"]
        assert relay.output_tokens[slots].tolist() == built.outputs()["bonus"]
    assert (block is not None) == (POST_FORWARD in environ)
    assert block is None or block.tolist() == built.outputs()["commit_lens"]


@pytest.mark.parametrize("environ", SETS.values(), ids=SETS)
def test_a_step_that_is_not_armed_writes_no_kv(environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    built, io = Built(), step(8)
    built.arm()
    built.epilogue.begin_static_step(LIVE, armed=False)
    greedy(built, io)
    assert built.written() == []
    assert built.outputs()["commit_lens"] == [3, 6]


def _built_as(built: Built) -> dict[str, Any]:
    """What an epilogue was built with, tensors aside."""
    parts = vars(built.epilogue).items()
    return {name: value for name, value in parts if isinstance(value, bool | int | tuple)} | {
        "deferred": built.deferred is not None,
        "tensors": sorted(name for name, value in parts if isinstance(value, torch.Tensor)),
    }


def test_the_master_switch_builds_what_the_variables_build() -> None:
    bare = _built_as(Built())
    os.environ.update(dict.fromkeys(MASTER_VARIABLES, "1"))
    by_hand = _built_as(Built())
    for name in MASTER_VARIABLES:
        del os.environ[name]
    os.environ[MASTER_SWITCH] = "1"
    apply_master_switch(os.environ, engine_has_own=False)
    assert _built_as(Built()) == by_hand
    changed = {name for name in by_hand if by_hand[name] != bare[name]}
    assert changed == {"_fused_accept_tail", "_post_fold", "deferred", "tensors"}
    assert set(by_hand["tensors"]) - set(bare["tensors"]) == {"block_accept_lens_buf"}


@pytest.mark.parametrize("environ", [{}, {DEFER: "1"}, SETS["all"]], ids=["off", "deferred", "all"])
def test_the_sampling_region_is_the_block_wise_accept(environ: Mapping[str, str]) -> None:
    """The region's first call runs eagerly, on any device; its draws are counted, so that a twin can repeat them."""
    from sglang.kernels.ops.speculative.dspark.blockwise_rejection import BlockwiseRejection, make_rejection_noise

    os.environ.update(environ)
    built, io, draft_sampler = Built(), step(9), sampler(9)
    built.arm()
    noise, twin = make_rejection_noise(3, "cpu"), make_rejection_noise(3, "cpu")
    accept = region(built, io, draft_sampler, noise).run(bs=LIVE, target_logits=io.logits)
    temperatures = draft_sampler.params.temperatures
    lengths, bonus, _ = BlockwiseRejection.execute(
        candidates=io.candidates,
        target_logits=io.logits,
        draft_logits=draft_sampler.step_logits,
        target_temperatures=temperatures,
        draft_temperatures=temperatures,
        noise=twin,
    )
    assert accept.correct_len.tolist() == lengths[:LIVE].tolist()
    assert accept.bonus.tolist() == bonus[:LIVE].tolist()
    assert noise.counter.tolist() == twin.counter.tolist() == [1]
    commits = [length + 1 for length in lengths[:LIVE].tolist()]
    if built.deferred is not None:
        assert built.written() == [], "the commit was to wait"
        assert built.deferred.commit_lens.tolist() == [*commits, 0]
        assert built.deferred.cache_loc.tolist() == io.out_cache_loc.tolist()
        assert built.deferred.positions.tolist() == io.positions.tolist()
    else:
        wanted = [io.out_cache_loc.view(B, ROWS)[row, :commit] for row, commit in enumerate(commits)]
        assert built.written() == sorted(torch.cat(wanted).tolist())


def test_the_region_is_for_the_logits_that_it_was_recorded_with() -> None:
    built, io = Built(), step(9)
    graph = region(built, io, sampler(9), None)
    assert graph.run(bs=LIVE, target_logits=io.logits.clone()) is None
    assert graph.run(bs=B + 1, target_logits=io.logits) is None


def test_the_second_sampled_step_refuses_without_cuda() -> None:
    from sglang.kernels.ops.speculative.dspark.blockwise_rejection import make_rejection_noise

    built, io = Built(), step(9)
    graph = region(built, io, sampler(9), make_rejection_noise(3, "cpu"))
    graph.run(bs=LIVE, target_logits=io.logits)
    with pytest.raises(RuntimeError, match="CUDA"):
        graph.run(bs=LIVE, target_logits=io.logits)


def test_the_n_gram_history_refuses_without_a_driver() -> None:
    os.environ.update(SETS["all"])
    built = Built(history=torch.zeros(B + 5, HISTORY, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="0 active drivers"):
        greedy(built, step(9))


def test_the_older_rejection_refuses_without_a_driver() -> None:
    io = step(9)
    graph = region(Built(), io, sampler(9), None)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        graph.run(bs=LIVE, target_logits=io.logits)


@pytest.mark.slow
def test_the_same_parts_run_in_tritons_interpreter() -> None:
    os.environ.update({POST_FORWARD: "1", "TRITON_INTERPRET": "1"})
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply_async(interpreted, (9,)).get(SECONDS)
    assert found["committed"] is True
    wanted = [list(row) for row in found["before"]]
    for slot, tokens, commit in zip((5, 2), found["candidates"], found["commit_lens"], strict=False):
        wanted[slot] = (wanted[slot] + tokens[:commit])[-HISTORY:]
    assert found["history"] == wanted
    assert found["region"] == found["eager"]


def _answer(caplog: pytest.LogCaptureFixture, slot: str) -> tuple[Answer, tuple[str, ...]]:
    report = read_log(record.getMessage() for record in caplog.records)
    found = next(entry for entry in report.slots if entry.slot == slot)
    return found.answer, found.engine


def test_sglangs_refusal_of_the_accept_tail_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks that agree on the accept, as SGLANG_SPEC_TP_SYNC has them do by default."""
    from sglang.srt.speculative import spec_tp_sync

    caplog.set_level(logging.INFO)
    os.environ[TAIL] = "1"
    several = spec_tp_sync.SpecTpSync(SimpleNamespace(world_size=2, rank_in_group=1))
    monkeypatch.setattr(spec_tp_sync, "SpecTpSync", lambda group: several)
    assert Built().epilogue._fused_accept_tail is False
    answer, (line,) = _answer(caplog, "fused_accept_tail")
    assert answer is Answer.DECLINED
    assert "without SGLANG_DSPARK_SIMULATE_FOLD" in line


def test_without_that_agreement_the_accept_tail_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import spec_tp_sync

    os.environ.update({TAIL: "1", "SGLANG_SPEC_TP_SYNC": "all,-dspark-accept-graph"})
    several = spec_tp_sync.SpecTpSync(SimpleNamespace(world_size=2, rank_in_group=1))
    monkeypatch.setattr(spec_tp_sync, "SpecTpSync", lambda group: several)
    assert Built().epilogue._fused_accept_tail is True


def test_sglangs_line_about_block_wise_rejection_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.kernels.ops.speculative.dspark.blockwise_rejection import make_rejection_noise
    from sglang.srt.speculative.dspark_components import dspark_verify

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(dspark_verify, "_blockwise_rejection_noted", False)
    io = step(9)
    region(Built(), io, sampler(9), make_rejection_noise(3, "cpu")).run(bs=LIVE, target_logits=io.logits)
    assert _answer(caplog, "engine_blockwise_rejection")[0] is Answer.TAKEN


def test_sglangs_refusal_of_a_deferred_commit_is_read_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.speculative.dspark_components import dspark_worker_v2 as worker

    os.environ[DEFER] = "1"
    memory = SimpleNamespace(enable_unified_memory=False, enable_hierarchical_cache=True, hicache_storage_backend=None)
    monkeypatch.setattr(worker, "get_memory", lambda: memory)
    monkeypatch.setattr(worker, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    monkeypatch.setattr(worker, "get_parallel", lambda: SimpleNamespace(attn_dp_enabled=False))
    eligible = worker.DSparkWorkerV2._defer_context_kv_eligible(SimpleNamespace(_draft_is_moe=True), True)
    assert eligible is False
    answer, (line,) = _answer(caplog, "defer_context_kv")
    assert answer is Answer.DECLINED
    assert not line.endswith(": "), "the reason is missing"


def test_a_backend_that_does_not_glue_is_read_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    caplog.set_level(logging.INFO)
    os.environ["SGLANG_OPT_DSV41_TARGET_VERIFY_METADATA_GLUE"] = "1"
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(is_draft_worker=False, spec_algorithm=SimpleNamespace(is_dspark=lambda: True)),
        capture_forward_mode=ForwardMode.TARGET_VERIFY,
        attn_backend=SimpleNamespace(
            glue_target_verify_metadata=lambda: AttentionBackend.glue_target_verify_metadata(None)
        ),
    )
    assert DecodeCudaGraphRunner._glues_target_verify_metadata(runner) is False
    answer, (line,) = _answer(caplog, "target_verify_metadata_glue")
    assert answer is Answer.DECLINED
    assert AttentionBackend.glue_target_verify_metadata(None) in line
