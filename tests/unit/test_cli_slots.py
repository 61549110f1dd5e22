"""``sgl-mega slots``: what it lists, and what the environment chooses of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_tools import answer, invoke, use_clean_environment
from made_slots import install

from sgl_mega_plugin.contract import Stage
from sgl_mega_plugin.switch import ENGINE_SLOTS, MASTER_SWITCH, MASTER_VARIABLES, SLOTS_VARIABLE
from sgl_mega_slots import SLOTS

OURS = {slot.name for slot in SLOTS}
DEFAULTS = {slot.name for slot in SLOTS if slot.default}
MASTERED = {slot.name for slot in ENGINE_SLOTS if slot.engine_switch in MASTER_VARIABLES}

THIRD_PARTY = """
from sgl_mega_plugin.contract import Slot, Stage
SLOTS = [Slot(name="their_accept", stage=Stage.VERIFY_ACCEPT, seam="greedy_accept", summary="made up [1/2]",
              implementation="their:Accept", reference="their:reference", cases="their:cases")]
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clean_environment(monkeypatch)


def chosen() -> set[str]:
    return {slot["name"] for slot in answer("slots", "--json")["slots"] if slot["chosen"]}


def test_every_stage_is_populated_and_the_engines_switches_are_there() -> None:
    listing = answer("slots", "--json")
    slots = {slot["name"]: slot for slot in listing["slots"]}
    assert set(listing["stages"]) == {slot["stage"] for slot in slots.values()} == {stage.value for stage in Stage}
    assert slots.keys() >= OURS
    for slot in ENGINE_SLOTS:
        found = slots[slot.name]
        assert (found["engine_backed"], found["engine_switch"]) == (True, slot.engine_switch)


def test_a_slot_in_full() -> None:
    found = answer("slots", "accept_tail", "--json")
    assert found["stage"] == "verify_accept"
    assert found["provider"].split()[0] == "sgl-mega-plugin"
    assert found["default"]
    assert "sm_90" in found["requires"]["isas"]
    text = invoke("slots", "accept_tail").stdout
    assert "sgl_mega_slots.verify_accept.accept_tail.launch:AcceptTail" in text


def test_the_table_names_every_slot_and_both_variables() -> None:
    text = invoke("slots").stdout
    names = OURS | {slot.name for slot in ENGINE_SLOTS} | {stage.value for stage in Stage}
    assert not [name for name in (*names, SLOTS_VARIABLE, MASTER_SWITCH) if name not in text]


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, DEFAULTS),
        ({SLOTS_VARIABLE: "none"}, set()),
        ({SLOTS_VARIABLE: "-markov"}, DEFAULTS - {"markov"}),
        ({SLOTS_VARIABLE: "@glue,-post_fold"}, None),
        ({MASTER_SWITCH: "on"}, DEFAULTS | MASTERED),
        ({MASTER_SWITCH: "on", SLOTS_VARIABLE: "default,-post_fold"}, DEFAULTS | MASTERED - {"post_fold"}),
        ({"SGLANG_OPT_DSV41_DSPARK_MID_FOLD": "1"}, DEFAULTS | {"mid_fold"}),
        ({MASTER_SWITCH: "on", "SGLANG_OPT_DSV41_DSPARK_MID_FOLD": "0"}, DEFAULTS | MASTERED - {"mid_fold"}),
    ],
    ids=["unset", "none", "-markov", "@glue", "switch", "switch and removal", "variable", "switch and variable"],
)
def test_what_the_environment_chooses(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], names: set[str] | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if names is None:
        glue = {slot.name for slot in (*SLOTS, *ENGINE_SLOTS) if slot.stage is Stage.GLUE}
        names = glue - {"post_fold"}
    assert chosen() == names


@pytest.mark.parametrize(
    ("environ", "arguments", "says"),
    [
        ({SLOTS_VARIABLE: "accept_tial"}, [], "Did you mean 'accept_tail'"),
        ({SLOTS_VARIABLE: "@glu"}, [], "'@glue'"),
        ({SLOTS_VARIABLE: "hop_a"}, [], "NVIDIA's DeepSeek-V4.1 kernel set"),
        ({MASTER_SWITCH: "maybe"}, [], "'maybe' is no switch value"),
        ({}, ["acept_tail"], "Did you mean 'accept_tail'"),
    ],
    ids=["near miss", "stage", "upstream name", "switch", "argument"],
)
def test_wrong_use(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], arguments: list[str], says: str) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert says in answer("slots", "--json", *arguments, code=2)["error"]
    result = invoke("slots", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_another_distributions_slot_is_listed_with_its_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "their-slots", "their_slots", THIRD_PARTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = answer("slots", "their_accept", "--json")
    assert (found["provider"], found["chosen"]) == ("their-slots 2.5", False)
    text = invoke("slots").stdout
    assert "their-slots" in text
    assert "made up [1/2]" in text


def test_a_broken_distribution_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "their-slots", "their_broken_slots", "raise OSError('no disk')")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = answer("slots", "--json", code=2)["error"]
    assert "their-slots" in message
    assert "no disk" in message
