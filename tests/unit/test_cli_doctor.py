"""``sgl-mega doctor``: what it finds here, and its exit code for what is broken, wrong or merely absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_tools import answer, invoke, use_clean_environment
from made_slots import install

from sgl_mega_plugin.cli import doctor
from sgl_mega_plugin.cli.machine import Gpu
from sgl_mega_plugin.engine import version
from sgl_mega_plugin.engine.fold.hooks import HOOKS
from sgl_mega_plugin.engine.planning import UNCALLED
from sgl_mega_plugin.switch import ENGINE_SLOTS, MASTER_SWITCH, MASTER_VARIABLES, SLOTS_VARIABLE
from sgl_mega_slots import SLOTS

DEFAULTS = {slot.name for slot in SLOTS if slot.default}
SERVED = {slot.name for slot in SLOTS if slot.default and slot.seam not in UNCALLED}
MASTERED = {slot.name for slot in ENGINE_SLOTS if slot.engine_switch in MASTER_VARIABLES}
CONFLICTING = """
from sgl_mega_plugin.contract import Slot, Stage
SLOTS = [Slot(name="their_accept", stage=Stage.VERIFY_ACCEPT, seam="greedy_accept", summary="made up",
              conflicts={"accept_tail"}, implementation="t:A", reference="t:r", cases="t:c")]
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with neither SGLang nor a GPU, until a test says otherwise."""
    use_clean_environment(monkeypatch)
    here: dict[str, Any] = {"engine": None, "api": 1, "gpu": None, "providers": ("sgl-mega-plugin 0.1.0",)}
    monkeypatch.setattr(version, "engine_version", lambda: here["engine"])
    monkeypatch.setattr(version, "api_version", lambda: here["api"])
    monkeypatch.setattr(version, "providers", lambda: here["providers"])
    monkeypatch.setattr(doctor, "find_gpu", lambda: here["gpu"])
    return here


def checks(code: int = 0) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in answer("doctor", "--json", code=code)["checks"]}


def test_a_machine_with_neither_engine_nor_gpu_is_fine(machine: dict[str, Any]) -> None:
    found = answer("doctor", "--json")
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert states["SGLang"] == states["GPU"] == "absent"
    assert {states[name] for name in ("Python", "torch", "slots", SLOTS_VARIABLE, MASTER_SWITCH)} == {"ok"}
    embedded, sglang = found["plans"]["embedded"], found["plans"]["sglang"]
    assert {entry["slot"] for entry in embedded["active"]} == DEFAULTS
    assert (embedded["host"]["backend"], embedded["available"]) == ("reference", True)
    assert (sglang["active"], sglang["available"]) == ([], False)
    reasons = {entry["slot"]: " ".join(entry["reasons"]) for entry in sglang["inactive"]}
    assert "no GPU is visible" in reasons["markov"]
    assert "turns it on" in reasons["post_fold"]


def test_a_machine_that_can_serve(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    machine.update(engine="0.5.23", gpu=Gpu(name="NVIDIA H200", isa="sm_90"))
    monkeypatch.setenv(MASTER_SWITCH, "1")
    found = answer("doctor", "--json")
    states = {check["name"]: check for check in found["checks"]}
    assert states["GPU"]["found"] == "NVIDIA H200 (sm_90)"
    assert states["megakernel API"]["found"] == "version 1"
    assert found["plans"]["embedded"]["host"]["backend"] == "kernel"
    sglang = found["plans"]["sglang"]
    assert sglang["available"]
    assert {entry["slot"] for entry in sglang["active"]} == SERVED | MASTERED
    assert {"markov", "accept_tail", "blockwise_rejection", "context_kv"} <= SERVED
    assert set(sglang["engine_variables"]) == set(MASTER_VARIABLES)


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        ({"engine": "0.5.22"}, "SGLang", "SGLang 0.5.22 is not supported"),
        ({"engine": "0.5.23", "api": 2}, "megakernel API", "version 2 is not served"),
        ({"providers": ()}, "entry point nvidia_megakernel", "sgl-mega-plugin is not installed"),
        ({"providers": ("other 1", "sgl-mega-plugin 0.1.0")}, "entry point nvidia_megakernel", "2 distributions"),
    ],
    ids=["old engine", "new API", "not installed", "two plugins"],
)
def test_what_is_broken(machine: dict[str, Any], change: dict[str, Any], name: str, says: str) -> None:
    machine.update(change)
    found = checks(code=1)[name]
    assert found["state"] == "failed"
    assert says in found["found"]


def test_an_engine_that_does_not_import(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise OSError("libcuda.so.1: cannot open")

    machine.update(engine="0.5.23")
    monkeypatch.setattr(version, "api_version", broken)
    assert "OSError: libcuda.so.1" in checks(code=1)["megakernel API"]["found"]


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["text", "json"])
def test_a_misspelt_slot(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, "accept_tial")
    result = invoke("doctor", *arguments)
    assert result.exit_code == 2
    assert "accept_tail" in result.stdout
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (SLOTS_VARIABLE, "@nowhere", "no stage is named 'nowhere'"),
        (SLOTS_VARIABLE, "hop_a", "NVIDIA's DeepSeek-V4.1 kernel set"),
        (MASTER_SWITCH, "perhaps", "'perhaps' is no switch value"),
    ],
)
def test_a_value_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str) -> None:
    monkeypatch.setenv(name, value)
    found = checks(code=2)[name]
    assert found["state"] == "wrong"
    assert says in found["found"]


def test_slots_that_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "their-slots", "their_conflicting_slots", CONFLICTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(SLOTS_VARIABLE, "accept_tail,their_accept")
    assert "exclude each other" in checks(code=2)["plan"]["found"]


def test_a_named_slot_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, "default,post_fold")
    assert "slot 'post_fold'" in checks(code=1)["plan for embedded"]["found"]


def test_variables_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_NVIDIA_MEGAKERNEL_SLOT", "markov")
    found = checks(code=1)["SGLANG_NVIDIA_MEGAKERNEL_SLOT"]
    assert (found["state"], SLOTS_VARIABLE in found["advice"]) == ("failed", True)


def test_a_broken_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "their-slots", "their_doctored_slots", "raise OSError('no disk')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "their-slots" in checks(code=1)["slots"]["found"]


def test_the_text_has_each_check_and_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OPT_DSV41_DSPARK_MID_FOLD", "1")
    text = invoke("doctor").stdout
    names = [*checks(), *(slot.name for slot in SLOTS), *(slot.name for slot in ENGINE_SLOTS)]
    assert not [name for name in names if name not in text]
    assert "SGLANG_OPT_DSV41_DSPARK_MID_FOLD  1" in text
    assert "would not start here" in text


def test_the_hooks_are_told_and_documented() -> None:
    told = answer("doctor", "--json")["hooks"]
    assert [hook["target"] for hook in told] == [hook.target for hook in HOOKS]
    page = (Path(__file__).parents[2] / "docs" / "engine-hooks.md").read_text()
    for hook in HOOKS:
        named = hook.target.split(" ")[0].rstrip(",").rpartition(".")[2]
        assert f"{named}`" in page, hook.target
    assert "Hooks into SGLang" in invoke("doctor").output
