"""What is checked and compiled in other processes before a benchmark times anything."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from bench_made import MACHINE, SMALL, MadeClock, provided
from made_slots import registry_of

from sgl_mega_plugin.bench import ahead, runner
from sgl_mega_plugin.bench.ahead import Ahead, Task, check_ahead, run_task, tasks_of
from sgl_mega_plugin.bench.peers import peers_of
from sgl_mega_plugin.bench.records import Gate, Settings, Size
from sgl_mega_plugin.bench.runner import Run, picked_cases
from sgl_mega_plugin.conformance.runner import Target
from sgl_mega_plugin.registry import Registry

ACCEPT = provided("made_accept")
SIZE = Size(seam="greedy_accept", batch=1, vocab=64, dtype="float32")
PEERS = {peer.name for peer in peers_of(SIZE.seam)}
ON_CPU = Settings(device="cpu", batches=(1,), peers=())


def test_slots_come_first_then_cases_a_few_at_a_time_then_peers() -> None:
    tasks = tasks_of({"made_accept": range(6)}, [(SIZE, [ACCEPT])], Settings(peers=("eager", "flashinfer")))
    assert tasks[:3] == [
        Task(("made_accept",), size=SIZE),
        Task(("made_accept",), cases=(0, 1, 2, 3)),
        Task(("made_accept",), cases=(4, 5)),
    ]
    assert tasks[3:] == [Task(size=SIZE, peer=name) for name in ("eager", "flashinfer") if name in PEERS]
    assert tasks[3:]


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
    gates = check_ahead([relay, params], {"relay": [0, 1], "params_once": [10_000]}, [], ON_CPU, workers=1).gates
    assert [(gate.slot, gate.run, gate.ok) for gate in gates] == [("relay", 2, True)], "params_once has no such case"
    assert gates[0].total == len(picked_cases(relay, None))


@pytest.mark.parametrize("passed", [True, False], ids=["passed", "failed there"])
def test_what_did_not_pass_there_is_checked_again_here(monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    asked: list[Any] = []

    def made(chosen: Any, picked: Any, plan: Any, settings: Any, workers: int) -> Ahead:
        asked.append((picked, workers))
        gate = Gate(slot="made_accept", distribution="d", version="1", run=77, total=77)
        return Ahead((gate,) if passed else ())

    monkeypatch.setattr(runner, "check_ahead", made)
    report = Run(SMALL, MadeClock(), MACHINE, "sgl-mega bench", workers=3).everything([ACCEPT])
    assert asked == [({"made_accept": picked_cases(ACCEPT, SMALL.most_cases)}, 3)]
    assert (report.gates[0].run == 77) is passed
    assert report.gates[0].ok


class _Result:
    """A task's result that comes, fails or does not come."""

    def __init__(self, ends: object) -> None:
        self.ends = ends

    def get(self, timeout: float) -> object:
        if self.ends is None:
            raise multiprocessing.TimeoutError
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends


class _Pool:
    """Processes in which everything ends but what `never` names."""

    def __init__(self, ends: Callable[[Task], object]) -> None:
        self.ends = ends

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def apply_async(self, _: object, arguments: tuple[Task, Settings]) -> _Result:
        return _Result(self.ends(arguments[0]))


def _context(ends: Callable[[Task], object]) -> Any:
    return lambda _: SimpleNamespace(Pool=lambda workers, start: _Pool(ends))


def test_a_peer_that_never_ended_is_late_and_one_that_failed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    second = SIZE.model_copy(update={"batch": 2})

    def ends(task: Task) -> object:
        if task.peer == "eager":
            return None
        return ValueError("wrong inputs") if task.peer and task.size == SIZE else None if task.peer else True

    monkeypatch.setattr(multiprocessing, "get_context", _context(ends))
    found = check_ahead([], {}, [(SIZE, []), (second, [])], Settings(device="cpu"), workers=1)
    assert found.late_peers == {"eager"}
    assert {"eager"} < PEERS


def test_half_of_a_time_limit_is_the_most_that_is_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(multiprocessing, "get_context", _context(lambda task: True))
    monkeypatch.setattr(_Result, "get", lambda self, timeout: waited.append(timeout))
    for limit in (None, 60.0):
        check_ahead([], {}, [(SIZE, [ACCEPT])], Settings(device="cpu", peers=(), time_limit=limit), workers=1)
    assert 119 < waited[0] <= 120
    assert 29 < waited[1] <= 30


def test_a_late_peer_is_in_the_table_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check_ahead", lambda *_: Ahead(late_peers=frozenset({"eager"})))
    report = Run(
        SMALL.model_copy(update={"peers": None}), MadeClock(), MACHINE, "sgl-mega bench", workers=3
    ).everything([ACCEPT])
    reasons = [entry.reason for result in report.results for entry in result.entries if entry.name == "eager"]
    assert reasons
    assert all(reason is not None and "not ready when timing had to end" in reason for reason in reasons)


def _second_chance(monkeypatch: pytest.MonkeyPatch, settings: Settings, *, ready: bool) -> tuple[list[Any], Any]:
    """What was asked ahead of each timing, and the report of a run whose peer "eager" was late for the first."""
    asked: list[Any] = []

    def made(chosen: Any, picked: Any, plan: Any, settings: Settings, workers: int) -> Ahead:
        asked.append((len(chosen), picked, [slots for _, slots in plan], settings.peers, settings.time_limit))
        return Ahead(late_peers=frozenset({"eager"} if len(asked) == 1 or not ready else ()))

    monkeypatch.setattr(runner, "check_ahead", made)
    return asked, Run(settings, MadeClock(), MACHINE, "sgl-mega bench", workers=3).everything([ACCEPT])


def test_a_late_peer_that_is_ready_later_is_timed_behind_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SMALL.model_copy(update={"peers": None, "time_limit": 60.0})
    asked, report = _second_chance(monkeypatch, settings, ready=True)
    (_, (chosen, picked, slots, peers, left)) = asked
    assert (chosen, picked, set(slots), peers) == (0, {}, {()}, ("eager",))
    assert 0 < left < 60
    monkeypatch.setattr(runner, "check_ahead", lambda *_: Ahead())
    at_once = Run(settings, MadeClock(), MACHINE, "sgl-mega bench", workers=3).everything([ACCEPT])
    for late, wanted in zip(report.results, at_once.results, strict=True):
        assert [(e.name, e.role, bool(e.timing), e.agreement, e.reason) for e in late.entries] == [
            (e.name, e.role, bool(e.timing), e.agreement, e.reason) for e in wanted.entries
        ]
        modes = [[entry.timing and entry.timing.mode for entry in found.entries] for found in (late, wanted)]
        assert modes[0] == modes[1]
    assert any(entry.name == "eager" and entry.timing for result in report.results for entry in result.entries)


@pytest.mark.parametrize("limit", [None, 60.0, 1e-9], ids=["no limit", "a limit", "over"])
def test_a_peer_that_is_late_again_keeps_its_reason(monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
    settings = SMALL.model_copy(update={"peers": None, "time_limit": limit})
    asked, report = _second_chance(monkeypatch, settings, ready=False)
    assert len(asked) == (1 if limit == 1e-9 else 2)
    assert not any(entry.name == "eager" and entry.timing for result in report.results for entry in result.entries)


def test_what_goes_wrong_with_a_late_peer_is_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[None] = []

    class Clock(MadeClock):
        def check(self) -> None:
            checks.append(None)
            if len(checks) > len(sizes):
                raise RuntimeError("another program uses the GPU")

    settings = SMALL.model_copy(update={"peers": None})
    sizes = runner.schedule([ACCEPT], settings)
    late = iter([frozenset({"eager"}), frozenset[str]()])
    monkeypatch.setattr(runner, "check_ahead", lambda *_: Ahead(late_peers=next(late)))
    report = Run(settings, Clock(), MACHINE, "sgl-mega bench", workers=3).everything([ACCEPT])
    reasons = {entry.reason for result in report.results for entry in result.entries if entry.name == "eager"}
    assert reasons == {"RuntimeError: another program uses the GPU"}
    assert all(entry.timing for result in report.results for entry in result.entries if entry.name == "made_accept")
