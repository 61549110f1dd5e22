"""What is checked and compiled in other processes before a benchmark times anything."""

from __future__ import annotations

from typing import Any

import pytest
from bench_made import MACHINE, SMALL, MadeClock, provided
from made_slots import registry_of

from sgl_mega_plugin.bench import ahead, runner
from sgl_mega_plugin.bench.ahead import Task, check_ahead, run_task, tasks_of
from sgl_mega_plugin.bench.records import Gate, Settings, Size
from sgl_mega_plugin.bench.runner import Run, picked_cases
from sgl_mega_plugin.conformance.runner import Target
from sgl_mega_plugin.registry import Registry

ACCEPT = provided("made_accept")
SIZE = Size(seam="greedy_accept", batch=1, vocab=64, dtype="float32")
ON_CPU = Settings(device="cpu", batches=(1,), peers=())


def test_sizes_come_first_and_cases_a_few_at_a_time() -> None:
    tasks = tasks_of({"made_accept": range(6)}, [(SIZE, [ACCEPT])])
    assert tasks == [
        Task(("made_accept",), size=SIZE),
        Task(("made_accept",), cases=(0, 1, 2, 3)),
        Task(("made_accept",), cases=(4, 5)),
    ]


@pytest.mark.parametrize("passes", [True, False], ids=["right", "wrong"])
def test_a_task_says_whether_its_cases_pass(monkeypatch: pytest.MonkeyPatch, passes: bool) -> None:
    class Ran:
        ok = passes

    monkeypatch.setattr(ahead, "run_case", lambda target, case: Ran)
    monkeypatch.setattr(Target, "load", lambda found, **_: found)
    monkeypatch.setattr(ahead, "load_cases", lambda found: ["a", "b"])
    assert run_task(Task((ACCEPT.slot.name,), cases=(0, 1)), ON_CPU, registry_of(ACCEPT.slot)) is passes


def test_cases_that_pass_in_processes_are_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    relay, params = (Registry.discover().get(name) for name in ("relay", "params_once"))
    gates = check_ahead([relay, params], {"relay": [0, 1], "params_once": [10_000]}, [], ON_CPU, workers=1)
    assert [(gate.slot, gate.run, gate.ok) for gate in gates] == [("relay", 2, True)], "params_once has no such case"
    assert gates[0].total == len(picked_cases(relay, None))


@pytest.mark.parametrize("passed", [True, False], ids=["passed", "failed there"])
def test_what_did_not_pass_there_is_checked_again_here(monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    asked: list[Any] = []

    def made(chosen: Any, picked: Any, plan: Any, settings: Any, workers: int) -> list[Gate]:
        asked.append((picked, workers))
        return [Gate(slot="made_accept", distribution="d", version="1", run=77, total=77)] if passed else []

    monkeypatch.setattr(runner, "check_ahead", made)
    report = Run(SMALL, MadeClock(), MACHINE, "sgl-mega bench", workers=3).everything([ACCEPT])
    assert asked == [({"made_accept": picked_cases(ACCEPT, SMALL.most_cases)}, 3)]
    assert (report.gates[0].run == 77) is passed
    assert report.gates[0].ok
