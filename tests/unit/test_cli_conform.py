"""``sgl-mega conform``: its table, its JSON, its exit codes."""

from __future__ import annotations

import json

import pytest
import torch
from cli_tools import answer, invoke, program, use_clean_environment

from sgl_mega_plugin.conformance import runner
from sgl_mega_plugin.conformance.report import CaseResult, Report, SlotResult
from sgl_mega_plugin.conformance.runner import InterruptedRun
from sgl_mega_plugin.contract import Backend


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clean_environment(monkeypatch)


def report(*, ok: bool) -> Report:
    cases = (
        CaseResult(slot="markov", case="b1", ok=True),
        CaseResult(slot="markov", case="ties[x]", ok=ok, detail=() if ok else ("out_draft_tokens[0, 1]: found 3",)),
    )
    slot = SlotResult(slot="markov", distribution="sgl-mega-plugin", cases=cases, skipped=("large",))
    return Report(device="cpu", device_name="cpu", backend=Backend.REFERENCE, torch="2", triton=None, slots=(slot,))


def test_a_slot_on_its_reference() -> None:
    found = answer("conform", "step_inputs", "--backend", "reference", "--json")
    (slot,) = found["slots"]
    assert (found["ok"], found["backend"], slot["slot"]) == (True, "reference", "step_inputs")
    assert slot["passed"] == slot["run"] > 0


def test_a_kernel_in_the_interpreter() -> None:
    done = program("conform", "step_inputs")
    assert done.returncode == 0, done.stderr
    assert "backend interpreter" in done.stdout
    assert done.stdout.endswith("conforms: true\n")


@pytest.mark.parametrize("ok", [True, False], ids=["passed", "failed"])
def test_the_answer(monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    monkeypatch.setattr(runner, "conform", lambda *args, **kwargs: report(ok=ok))
    result = invoke("conform", "--backend", "reference")
    assert result.exit_code == (0 if ok else 1)
    assert ("failed: markov/ties[x]: out_draft_tokens[0, 1]: found 3" in result.stdout) is not ok
    assert result.stdout.endswith(f"conforms: {str(ok).lower()}\n")
    found = answer("conform", "--backend", "reference", "--json", code=0 if ok else 1)
    assert found["ok"] is ok
    assert found["slots"][0]["skipped"] == ["large"]


def test_processes_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    def conform(*args: object, **kwargs: object) -> Report:
        given.update(kwargs)
        found = report(ok=True)
        return found.model_copy(update={"slots": (found.slots[0].model_copy(update={"not_run": ("b9", "b10")}),)})

    monkeypatch.setattr(runner, "conform", conform)
    result = invoke("conform", "--backend", "reference", "--workers", "3", "--time-limit", "20")
    assert (given["workers"], given["time_limit"]) == (3, 20.0)
    assert result.exit_code == 1
    assert "not run: 2 cases of markov, b9 the first of them" in result.stdout


def test_processes_give_the_report_of_one() -> None:
    slots = ("relay", "params_once", "--generated", "2", "--json")
    alone, side_by_side = (json.loads(program("conform", *slots, *more).stdout) for more in ((), ("--workers", "2")))
    assert alone["ok"] is True
    assert side_by_side == alone


def test_an_interrupt_gives_the_report_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def conform(*args: object, **kwargs: object) -> Report:
        found = report(ok=True).slots[0].model_copy(update={"not_run": ("b9",)})
        interrupt = InterruptedRun([found])
        interrupt.report = report(ok=True).model_copy(update={"slots": (found,)})
        raise interrupt

    monkeypatch.setattr(runner, "conform", conform)
    result = invoke("conform", "--backend", "reference")
    assert result.exit_code == 130
    assert "not run: 1 cases of markov, b9 the first of them\nconforms: false\n" in result.stdout
    found = answer("conform", "--backend", "reference", "--json", code=130)
    assert (found["ok"], found["slots"][0]["not_run"]) == (False, ["b9"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["acept_tail"], "Did you mean 'accept_tail'"),
        (["post_fold"], "no cases here"),
        (["--device", "gpu"], "write 'cpu', 'cuda' or 'cuda:0'"),
        (["--device", "cuda:x"], "'cuda:x' is no device"),
        (["--device", "cuda"], "sees 0 CUDA devices"),
        (["--backend", "kernel"], "backend 'kernel' runs on 'cuda', not on 'cpu'"),
    ],
    ids=" ".join,
)
def test_wrong_use(monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("conform", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert says in answer("conform", *arguments, "--json", code=2)["error"]


def test_the_interpreter_has_to_come_before_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "triton", torch)
    assert "start Python with TRITON_INTERPRET=1" in answer("conform", "step_inputs", "--json", code=2)["error"]
