"""The engine's switches as slots, and the master switch on every kind of environment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from made_slots import registry_of

from sgl_mega_plugin.contract import Slot, Stage
from sgl_mega_plugin.contract.errors import SwitchError
from sgl_mega_plugin.switch import (
    BOOKKEEPING,
    ENGINE_SLOTS,
    KNOWN_VARIABLES,
    MASTER_SWITCH,
    MASTER_VARIABLES,
    SLOTS_VARIABLE,
    apply_master_switch,
    engine_reads,
    master_switch,
    unknown_variables,
    user_value,
    variable_changes,
)

POST_FOLD = "SGLANG_OPT_DSV41_DSPARK_POST_FOLD"
MID_FOLD = "SGLANG_OPT_DSV41_DSPARK_MID_FOLD"
SIM_DRAW_AHEAD = "SGLANG_OPT_DSV41_DSPARK_SIM_DRAW_AHEAD"

#: The engine's sixteen and where each acts, written out once more from its documentation.
SIXTEEN = {
    "SGLANG_DSPARK_FUSED_ACCEPT_TAIL": Stage.VERIFY_ACCEPT,
    "SGLANG_OPT_DSV41_BLOCKWISE_REJECTION": Stage.VERIFY_ACCEPT,
    "SGLANG_OPT_DSV41_SAMPLING_ACCEPT_GRAPH": Stage.VERIFY_ACCEPT,
    "SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE": Stage.GLUE,
    MID_FOLD: Stage.GLUE,
    POST_FOLD: Stage.GLUE,
    "SGLANG_OPT_DSV41_TARGET_VERIFY_METADATA_GLUE": Stage.GLUE,
    "SGLANG_OPT_DSV41_TARGET_METADATA_EARLY": Stage.GLUE,
    "SGLANG_OPT_SKIP_GLUED_REPLAY_VIEW": Stage.GLUE,
    "SGLANG_OPT_DSV41_DSPARK_SKIP_PREFILLED_INPUTS": Stage.GLUE,
    "SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH": Stage.GLUE,
    "SGLANG_OPT_DSV41_DSPARK_DRAFT_PREP_FORK": Stage.DRAFT,
    "SGLANG_DSPARK_DEFER_CONTEXT_KV": Stage.COMMIT,
    "SGLANG_OPT_DSV41_DSPARK_ONE_LAUNCH_COMMIT_STAGE": Stage.COMMIT,
    "SGLANG_OPT_DSV41_POST_FORWARD_CUDA_GRAPH": Stage.COMMIT,
    "SGLANG_OPT_MXFP4_DEFERRED_FINALIZED_SHAPE": Stage.TARGET,
}
#: Names that kernels of ours have or will have.
RESERVED = {
    "accept_tail",
    "blockwise_rejection",
    "markov",
    "draft_lm_head",
    "step_inputs",
    "attn_metadata",
    "relay",
    "params_once",
    "context_kv",
    "deferred_kv",
    "histories",
    "target_argmax_head",
}


def test_every_engine_switch_is_a_slot_of_its_stage() -> None:
    stages = {slot.engine_switch: slot.stage for slot in ENGINE_SLOTS}
    assert stages == {**SIXTEEN, SIM_DRAW_AHEAD: Stage.VERIFY_ACCEPT}
    assert set(MASTER_VARIABLES) == set(SIXTEEN)
    assert len(MASTER_VARIABLES) == 16


@pytest.mark.parametrize("slot", ENGINE_SLOTS, ids=lambda slot: slot.name)
def test_an_engine_slot_is_named_after_its_variable(slot: Slot) -> None:
    assert slot in registry_of().slots()
    base = str(slot.engine_switch).removeprefix("SGLANG_").removeprefix("OPT_").removeprefix("DSV41_")
    base = base.removeprefix("DSPARK_").lower()
    assert slot.name == (f"engine_{base}" if base in RESERVED else base)
    assert slot.name not in RESERVED
    assert slot.engine_backed
    assert not slot.default
    assert slot.requires.engine_versions == {"0.5.23"}


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "y", "Y", "on", "On", " 1 "])
def test_on(value: str) -> None:
    assert master_switch({MASTER_SWITCH: value})


@pytest.mark.parametrize("value", [None, "", "  ", "0", "false", "no", "N", "off", "OFF"])
def test_off_touches_nothing(value: str | None) -> None:
    environ = {"PATH": "/bin", POST_FOLD: "1"} | ({} if value is None else {MASTER_SWITCH: value})
    before = dict(environ)
    for engine_has_own in (False, True):
        record = apply_master_switch(environ, engine_has_own=engine_has_own)
        assert not record.on
        assert (record.set_now, record.set_before, record.kept) == ((), {}, {})
    assert environ == before


@pytest.mark.parametrize("value", ["2", "enable", "tru", "1,", "None", "on off"])
def test_no_spelling_is_refused_and_touches_nothing(value: str) -> None:
    environ = {MASTER_SWITCH: value}
    with pytest.raises(SwitchError) as caught:
        apply_master_switch(environ, engine_has_own=False)
    missing = [
        part for part in (MASTER_SWITCH, repr(value), "'on'", "'off'", "'1'", "'0'") if part not in str(caught.value)
    ]
    assert not missing, f"{missing} not in {caught.value}"
    assert environ == {MASTER_SWITCH: value}


def test_on_sets_the_sixteen_and_nothing_else() -> None:
    environ = {MASTER_SWITCH: "on"}
    record = apply_master_switch(environ, engine_has_own=False)
    assert record.on
    assert not record.left_to_engine
    assert set(record.set_now) == set(SIXTEEN)
    assert {name: environ.pop(name) for name in SIXTEEN} == dict.fromkeys(SIXTEEN, "1")
    assert set(environ) == {MASTER_SWITCH, BOOKKEEPING}


@pytest.mark.parametrize("value", ["0", "1", "no", "anything"])
def test_a_value_that_is_set_wins(value: str) -> None:
    environ = {MASTER_SWITCH: "1", POST_FOLD: value}
    record = apply_master_switch(environ, engine_has_own=False)
    assert environ[POST_FOLD] == value
    assert record.kept == {POST_FOLD: value}
    assert POST_FOLD not in record.set_now


def test_an_empty_value_counts_as_unset() -> None:
    environ = {MASTER_SWITCH: "1", POST_FOLD: ""}
    assert POST_FOLD in apply_master_switch(environ, engine_has_own=False).set_now
    assert environ[POST_FOLD] == "1"


def test_applying_twice_changes_nothing_and_knows_its_own_values() -> None:
    environ = {MASTER_SWITCH: "1", MID_FOLD: "0"}
    first = apply_master_switch(environ, engine_has_own=False)
    before = dict(environ)
    second = apply_master_switch(environ, engine_has_own=False)
    assert environ == before
    assert second.set_now == ()
    assert second.set_before == dict.fromkeys(first.set_now, "1")
    assert second.kept == first.kept == {MID_FOLD: "0"}


def test_what_someone_changed_afterwards_is_theirs() -> None:
    environ = {MASTER_SWITCH: "1"}
    apply_master_switch(environ, engine_has_own=False)
    assert user_value(environ, POST_FOLD) is None
    environ[POST_FOLD] = "0"
    assert user_value(environ, POST_FOLD) == "0"
    assert apply_master_switch(environ, engine_has_own=False).kept == {POST_FOLD: "0"}
    assert variable_changes(environ, {POST_FOLD: "1"}) == {}


@pytest.mark.parametrize(("value", "left"), [("1", "1"), ("TRUE", "TRUE"), ("on", "1"), (" yes ", "1")])
def test_an_engine_with_its_own_switch_is_left_alone(value: str, left: str) -> None:
    environ = {MASTER_SWITCH: value}
    record = apply_master_switch(environ, engine_has_own=True)
    assert record.left_to_engine
    assert environ == {MASTER_SWITCH: left}


def test_child_processes_inherit_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned process sees the variables, and does not take them for the user's."""
    for name in KNOWN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    program = """
import json, os, subprocess, sys
from sgl_mega_plugin.switch import apply_master_switch
record = apply_master_switch(os.environ, engine_has_own=False)
if sys.argv[1:]:
    print(json.dumps([dict(os.environ), record.model_dump(mode="json")]))
else:
    subprocess.run([sys.executable, "-c", os.environ["PROGRAM"], "child"], check=True)
"""
    monkeypatch.setenv("PROGRAM", program)
    monkeypatch.setenv(MASTER_SWITCH, "1")
    monkeypatch.setenv(MID_FOLD, "0")
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    environ, record = json.loads(done.stdout)
    assert {name: environ[name] for name in SIXTEEN} == {**dict.fromkeys(SIXTEEN, "1"), MID_FOLD: "0"}
    assert SIM_DRAW_AHEAD not in environ
    assert record["kept"] == {MID_FOLD: "0"}
    assert set(record["set_before"]) == set(SIXTEEN) - {MID_FOLD}


@pytest.mark.parametrize(
    ("value", "reads"),
    [("1", True), ("YES", True), ("y", True), ("0", False), ("No", False), ("on", None), ("off", None), (" 1", None)],
)
def test_how_the_engine_reads_its_switches(value: str, reads: bool | None) -> None:
    assert engine_reads(value) is reads


def test_changes_carry_the_bookkeeping_and_keep_earlier_entries() -> None:
    environ = variable_changes({}, {POST_FOLD: "1", MID_FOLD: "1"})
    assert environ == {POST_FOLD: "1", MID_FOLD: "1", BOOKKEEPING: f"{MID_FOLD}=1,{POST_FOLD}=1"}
    assert variable_changes(environ, {POST_FOLD: "1"}) == {}
    assert variable_changes(environ, {POST_FOLD: "0"}) == {POST_FOLD: "0", BOOKKEEPING: f"{MID_FOLD}=1,{POST_FOLD}=0"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SGLANG_NVIDIA_MEGAKERNEL_SLOT", SLOTS_VARIABLE),
        ("SGLANG_NVIDIA_MEGAKERNELS_SLOTS", SLOTS_VARIABLE),
        ("sglang_nvidia_megakernel_slots", SLOTS_VARIABLE),
        ("SGLANG_NVIDIA_MEGAKERNEL_TRACE_EVERY_STEP", None),
        ("SGLANG_ENABLE_NV_MEGA_RUNTIME_OPTIMIZATIONS", MASTER_SWITCH),
        ("SGL_ENABLE_NV_MEGA_RUNTIME_OPTIMISATION", MASTER_SWITCH),
    ],
)
def test_variables_that_nobody_reads_are_listed(name: str, meant: str | None) -> None:
    found = unknown_variables({name: "1", "PATH": "/bin"})
    assert [(variable.name, variable.meant) for variable in found] == [(name, meant)]


def test_known_and_foreign_variables_are_not() -> None:
    foreign = ["SGLANG_ENABLE_SPEC_V2", "SGLANG_DSPARK_FAST_KERNEL", "SGLANG_PLUGINS", "HOME"]
    assert unknown_variables(dict.fromkeys([*KNOWN_VARIABLES, *foreign], "1")) == ()
