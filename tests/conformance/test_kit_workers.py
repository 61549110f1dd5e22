"""Cases in processes side by side: the same report, and what ends a process costs one case."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest
from test_kit import Faultless, Raises, WriteInPaddedRow, two_cases

from sgl_mega_plugin.conformance import workers
from sgl_mega_plugin.conformance.report import CaseResult, SlotResult
from sgl_mega_plugin.conformance.runner import InterruptedRun, Wanted, checks_of, conform, run_slot
from sgl_mega_plugin.conformance.workers import AT_ONCE, parts_of, run_side_by_side
from sgl_mega_plugin.contract import Backend, Case, Provided, Slot, Stage
from sgl_mega_plugin.registry import Registry

WANTED = Wanted("cpu", Backend.INTERPRETER, generated=3, seed=4)


class Leaves(Faultless):
    """Ends its process where there are strided arguments."""

    def damage(self, values: dict[str, object], before: dict[str, object]) -> None:
        if not values["candidates"].is_contiguous():  # type: ignore[attr-defined]
            os._exit(3)


class Killed(Faultless):
    """A signal ends its process in the one case with strided arguments."""

    def damage(self, values: dict[str, object], before: dict[str, object]) -> None:
        if not values["candidates"].is_contiguous():  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(Faultless):
    def damage(self, values: dict[str, object], before: dict[str, object]) -> None:
        time.sleep(60)


def many_cases() -> Iterator[Case]:
    """More than a process is given at once."""
    for number in range(3):
        yield from (Case(f"{case.id}-{number}", case.make, kernel_only=case.kernel_only) for case in two_cases())


def three_cases() -> Iterator[Case]:
    yield from list(many_cases())[:4]


def two_of_them() -> Iterator[Case]:
    yield from list(many_cases())[:2]


def _slot(name: str, implementation: type, cases: str = "many_cases") -> Slot:
    return Slot(
        name=name,
        stage=Stage.VERIFY_ACCEPT,
        seam="greedy_accept",
        summary="a slot in another process",
        implementation=f"{__name__}:{implementation.__name__}",
        reference="sgl_mega_slots.verify_accept.accept_tail.reference:greedy_accept",
        cases=f"{__name__}:{cases}",
    )


def _registry(*slots: Slot) -> Registry:
    return Registry.of([Provided(slot=slot, distribution="made-up", version="1") for slot in slots])


def some_slots() -> Registry:
    return _registry(
        _slot("sound", Faultless), _slot("broken", WriteInPaddedRow), _slot("missing", Faultless, "no_cases")
    )


def one_that_leaves() -> Registry:
    return _registry(_slot("sound", Faultless), _slot("leaves", Leaves))


def one_that_is_killed() -> Registry:
    return _registry(_slot("killed", Killed, "two_of_them"))


def interrupted_ones() -> Registry:
    """As in a terminal in which Ctrl-C was pressed, which every process of the run is told of."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGINT)
    return _registry(_slot("sound", Faultless), _slot("broken", WriteInPaddedRow))


def on_a_broken_gpu() -> Registry:
    """As in a process in which nothing can run after a case that failed."""
    workers.is_broken = lambda device: True  # type: ignore[assignment]
    return _registry(_slot("raises", Raises, "three_cases"))


def slow_ones() -> Registry:
    return _registry(_slot("slow", Slow))


def _run(lookup: workers.Lookup, *, end: float | None = None, wanted: Wanted = WANTED) -> list[SlotResult]:
    return run_side_by_side(lookup().provided, wanted, 2, end, None, lookup)


def test_the_report_is_that_of_one_process() -> None:
    alone = [run_slot(entry, WANTED) for entry in some_slots().provided]
    assert _run(some_slots) == alone
    assert [slot.ok for slot in alone] == [True, False, False]
    assert alone[0].skipped == ("large-0", "large-1", "large-2")


def test_a_process_that_ends_costs_its_case_and_no_other() -> None:
    told = []
    wanted = WANTED._replace(generated=0)
    sound, leaves = run_side_by_side(one_that_leaves().provided, wanted, 2, None, told.append, one_that_leaves)
    assert sound.ok
    assert {case.case: case.ok for case in leaves.cases} == {
        f"{name}-{number}": name == "plain" for name in ("plain", "strided") for number in range(3)
    }
    assert {case.detail for case in leaves.failures} == {("its process ended with exit code 3",)}
    assert len(told) == len(sound.cases) + len(leaves.cases)


def test_a_signal_that_ends_a_process_is_named() -> None:
    (killed,) = _run(one_that_is_killed, wanted=WANTED._replace(generated=0))
    assert [(case.case, case.detail) for case in killed.failures] == [
        ("strided-0", ("its process ended with SIGKILL",))
    ]


def test_an_interrupt_ends_all_processes_and_keeps_the_results_so_far() -> None:
    told: list[CaseResult] = []

    def on_result(result: CaseResult) -> None:
        told.append(result)
        if len(told) == 3:
            raise KeyboardInterrupt

    chosen, before = interrupted_ones().provided, set(multiprocessing.active_children())
    with pytest.raises(InterruptedRun) as caught:
        run_side_by_side(chosen, WANTED, 2, None, on_result, interrupted_ones)
    assert set(multiprocessing.active_children()) <= before
    results = caught.value.results
    assert not [line for case in told for line in case.detail if "process ended" in line]
    assert [result.slot for result in results] == ["sound", "broken"]
    assert {(case.slot, case.case) for result in results for case in result.cases} == {
        (case.slot, case.case) for case in told
    }
    for result, provided in zip(results, chosen, strict=True):
        can_run = {check.id for check in checks_of(provided, WANTED) if check.run is not None}
        assert {case.case for case in result.cases} | set(result.not_run) == can_run
        assert not result.ok


def test_an_interrupt_of_one_process_keeps_the_results_so_far() -> None:
    alone = [run_slot(entry, WANTED) for entry in some_slots().provided]
    told: list[CaseResult] = []

    def on_result(result: CaseResult) -> None:
        told.append(result)
        if result.slot == "broken":
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRun) as caught:
        conform(some_slots(), backend=WANTED.backend, generated=3, seed=4, on_result=on_result)
    report = caught.value.report
    assert report is not None
    assert (report.ok, report.slots[0]) == (False, alone[0])
    assert report.slots[1].cases == alone[1].cases[:1]
    assert report.slots[1].not_run == tuple(case.case for case in alone[1].cases[1:])
    assert (report.slots[2].cases, report.slots[2].not_run) == ((), ("(load)",))


def test_after_a_case_that_broke_the_gpu_others_run_in_another_process() -> None:
    (raises,) = _run(on_a_broken_gpu, wanted=WANTED._replace(generated=0))
    assert len(raises.failures) == 3
    assert all("the cause" in line for case in raises.failures for line in case.detail[:1])


def test_what_has_not_had_its_turn_is_not_run_and_not_passed() -> None:
    started = time.monotonic()
    (slow,) = _run(slow_ones, end=started + 3.0)
    assert time.monotonic() - started < 30
    assert (slow.cases, slow.ok) == ((), False)
    assert slow.not_run[:2] == ("plain-0", "strided-0")
    (late,) = [run_slot(entry, WANTED, end=started) for entry in slow_ones().provided]
    assert late == slow


def test_frequency_tests_come_first_and_no_part_is_large() -> None:
    checks = {entry.slot.name: checks_of(entry, WANTED) for entry in some_slots().provided}
    parts = parts_of(checks)
    assert max(len(part.numbers) for part in parts) == AT_ONCE
    assert [part.numbers[-1] for part in parts if part.slot == "sound"] == sorted(
        (part.numbers[-1] for part in parts if part.slot == "sound"), reverse=True
    )
    numbers = sorted((part.slot, number) for part in parts for number in part.numbers)
    assert numbers == sorted((name, n) for name, found in checks.items() for n, check in enumerate(found) if check.run)
