"""The master switch against the sixteen variables set by hand, as a spawned worker of SGLang sees them."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_deepseek_v41
import pytest
import torch
from engine_server import resolve, switches_in_child
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context

from sgl_mega_plugin.engine.log import watch
from sgl_mega_plugin.engine.log.lines import LINES, STARTED, Says
from sgl_mega_plugin.engine.log.read import Answer, LogReport, SlotAnswer, read_log
from sgl_mega_plugin.switch import ENGINE_SLOTS, KNOWN_VARIABLES, MASTER_SWITCH, MASTER_VARIABLES, SLOTS_VARIABLE

SECONDS = 180  # a spawned process imports SGLang, which takes about ten
SIM_DRAW_AHEAD = "SGLANG_OPT_DSV41_DSPARK_SIM_DRAW_AHEAD"
POST_FOLD, MID_FOLD = "SGLANG_OPT_DSV41_DSPARK_POST_FOLD", "SGLANG_OPT_DSV41_DSPARK_MID_FOLD"
ALL_SIXTEEN = dict.fromkeys(MASTER_VARIABLES, "1")
ONE_USER: dict[str, Any] = {"attention_backend": None, "speculative_algorithm": "DSPARK", "max_running_requests": 1}


@pytest.fixture
def v41(tmp_path: Path) -> str:
    make_deepseek_v41.main([str(tmp_path / "v41"), "--layers", "4", "--experts", "8"])
    return str(tmp_path / "v41")


def _child(environ: dict[str, str]) -> dict[str, Any]:
    """What a worker reads that is spawned with these variables, none of ours being set otherwise."""
    before = dict(os.environ)
    for name in KNOWN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environ)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return dict(pool.apply_async(switches_in_child).get(SECONDS))
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    return _child(ALL_SIXTEEN)


@pytest.mark.slow
def test_a_worker_reads_under_the_switch_what_it_reads_of_the_sixteen(by_hand: dict[str, Any]) -> None:
    """Every variable that SGLang knows, not the sixteen alone."""
    assert {name for name in MASTER_VARIABLES if by_hand[name]} == set(MASTER_VARIABLES)
    assert len(by_hand) > 500
    assert _child({MASTER_SWITCH: "1"}) == by_hand


@pytest.mark.slow
def test_a_workers_own_value_and_the_simulated_draw_stay_explicit(by_hand: dict[str, Any]) -> None:
    assert by_hand[SIM_DRAW_AHEAD] is False
    mine = {POST_FOLD: "0", SIM_DRAW_AHEAD: "1"}
    assert _child({MASTER_SWITCH: "1", **mine}) == by_hand | {POST_FOLD: False, SIM_DRAW_AHEAD: True}
    assert _child(mine) == dict(by_hand) | dict.fromkeys(MASTER_VARIABLES, False) | {SIM_DRAW_AHEAD: True}


@pytest.mark.slow
def test_a_slot_that_the_list_removes_is_off_in_the_worker(by_hand: dict[str, Any], v41: str) -> None:
    os.environ.update({MASTER_SWITCH: "1", SLOTS_VARIABLE: "-post_fold,-mid_fold", MID_FOLD: "1"})
    resolve(v41, None, **ONE_USER)  # the launch, whose environment the worker inherits
    changes = {name: value for name, value in os.environ.items() if name in (MASTER_SWITCH, *MASTER_VARIABLES)}
    assert changes[POST_FOLD] == "0"
    assert _child(changes) == by_hand | {POST_FOLD: False}, "and what the user set wins over the list"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A worker's process with one rank; what it asks the GPU for is made up."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return caplog


def _serve(folder: str) -> None:
    """Resolve and publish the settings, and build the target's spec, as a scheduler process does."""
    record = resolve(folder, None, **ONE_USER)
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    try:
        with get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
            binding.install_megakernel(
                model=torch.nn.Linear(2, 2),
                hf_config=SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v41"),
                capture_tail_hooks=[],
                is_draft=False,
            )
    finally:
        reset_context()


def _report(caplog: pytest.LogCaptureFixture) -> LogReport:
    return read_log(record.getMessage() for record in caplog.records)


def _of(report: LogReport, name: str) -> SlotAnswer:
    return next(slot for slot in report.slots if slot.slot == name)


def test_a_slot_that_is_turned_off_shows_in_the_servers_log(v41: str, worker: pytest.LogCaptureFixture) -> None:
    os.environ.update({MASTER_SWITCH: "1", SLOTS_VARIABLE: "-post_fold", MID_FOLD: "0"})
    _serve(v41)
    report = _report(worker)
    assert (report.flag, report.plugin) == (True, True)
    assert {slot.slot for slot in report.slots if slot.on} == {
        slot.name for slot in ENGINE_SLOTS if slot.engine_switch in set(MASTER_VARIABLES) - {POST_FOLD, MID_FOLD}
    }
    assert _of(report, "post_fold").because == f"switched off by {SLOTS_VARIABLE}='-post_fold'"
    assert _of(report, "mid_fold").because.startswith(f"{MID_FOLD}='0' in the environment")


def test_without_the_switch_the_log_keeps_quiet_about_what_nobody_asked_for(
    v41: str, worker: pytest.LogCaptureFixture
) -> None:
    os.environ[SLOTS_VARIABLE] = "default,mid_fold"
    _serve(v41)
    told = [record.getMessage() for record in worker.records if "slot '" in record.getMessage()]
    assert any("'mid_fold' is on" in line for line in told)
    assert not [line for line in told if "'post_fold'" in line]


def test_a_worker_sums_up_what_sglang_said_while_it_started(v41: str, worker: pytest.LogCaptureFixture) -> None:
    os.environ[MASTER_SWITCH] = "1"
    _serve(v41)
    engine = logging.getLogger("sglang.srt.anywhere")
    taken = next(line for line in LINES if line.slot == "draft_prep_fork")
    declined = next(line for line in LINES if line.slot == "target_verify_metadata_glue" and line.says is Says.DECLINED)
    engine.info(taken.text)
    engine.info(declined.text, "a request window")
    logging.getLogger(STARTED.logger).info(f"{STARTED.text}1, chunked_prefill_size=2")
    summary = [record.getMessage() for record in worker.records if record.name == watch.__name__]
    assert summary[0].endswith("engine switches taken: draft_prep_fork")
    assert summary[1].endswith("target_verify_metadata_glue: Target verify metadata glue graph off: a request window.")
    assert _of(_report(worker), "fused_accept_tail").answer is Answer.NOT_TAKEN


def test_the_simulated_draw_acts_under_simulated_acceptance_alone() -> None:
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import sim_draw_ahead_enabled

    length = torch.zeros(1, dtype=torch.int64)
    os.environ[MASTER_SWITCH] = "1"
    load_plugins()
    assert not sim_draw_ahead_enabled(length)
    os.environ[SIM_DRAW_AHEAD] = "1"
    assert sim_draw_ahead_enabled(length)
    assert not sim_draw_ahead_enabled(None)
