"""A benchmark run with a made-up clock: what is timed, what is left out, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_made import MACHINE, SMALL, MadeClock, provided
from made_slots import registry_of

from sgl_mega_plugin.bench import runner
from sgl_mega_plugin.bench.records import Gate, Mode, Report, Result, Role, Settings, Size
from sgl_mega_plugin.bench.runner import Listener, Run, check_gate, choose, left_out, schedule, share_equal, spread
from sgl_mega_plugin.bench.workloads import Source
from sgl_mega_plugin.contract import Case, Provided, Requirements, Stage
from sgl_mega_plugin.contract.errors import SelectionError, UnknownSlotError
from sgl_mega_plugin.engine.peers import Arguments, Call, Peer, PeerUnavailableError

ACCEPT = provided("made_accept")


def _unavailable(arguments: Arguments) -> Call:
    raise PeerUnavailableError("takes fp8 only")


def _broken(arguments: Arguments) -> Call:
    raise RuntimeError("CUDA error:\n  out of luck")


def _right(arguments: Arguments) -> Call:
    return lambda: {"out_correct_lens": arguments["out_correct_lens"].clone().fill_(0)}


PEERS = (
    Peer("zeros", "a peer that says 0", _right),
    Peer("absent", "not here", _right, missing=lambda: "not installed"),
    Peer("picky", "takes other inputs", _unavailable),
    Peer("broken", "fails", _broken),
)


@pytest.fixture(autouse=True)
def _made_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "peers_of", lambda seam: PEERS)


@pytest.fixture(autouse=True)
def _one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size a batch, vocabulary and dtype: of the accept only the variant with logits."""
    accept = replace(runner.WORKLOADS["greedy_accept"], variants=("",))
    monkeypatch.setitem(runner.WORKLOADS, "greedy_accept", accept)


def run(*chosen: Provided, settings: Settings = SMALL, clock: MadeClock | None = None, **fields: Any) -> Report:
    return Run(settings, clock or MadeClock(), MACHINE, "sgl-mega bench", **fields).everything(chosen)


def times(result: Result) -> dict[str, float | None]:
    return {entry.name: entry.timing and entry.timing.median_us for entry in result.entries}


def test_a_slot_and_its_peers_are_timed_on_the_same_inputs() -> None:
    clock = MadeClock()
    report = run(ACCEPT, clock=clock)
    assert [result.size.text for result in report.results] == [
        "greedy_accept B 1 V 64 float32",
        "greedy_accept B 3 V 64 float32",
    ]
    assert times(report.results[0]) == {
        "made_accept": 11.0,
        "zeros": 12.0,
        "absent": None,
        "picky": None,
        "broken": None,
    }
    assert clock.timed == [("graph", 2)] * 4, "each in a graph, over both input sets"
    assert (report.ok, report.complete) == (True, True)
    assert report.results[0].floor_us == pytest.approx(report.results[0].cost.total / 4.0 * 1e-6)  # type: ignore[union-attr]
    assert [entry.launches for entry in report.results[0].entries] == [2, 2, None, None, None]


def test_a_peer_without_a_time_says_why() -> None:
    reasons = {entry.name: entry.reason for entry in run(ACCEPT).results[0].entries if entry.reason}
    assert reasons == {
        "absent": "not installed",
        "picky": "takes fp8 only",
        "broken": "RuntimeError: CUDA error: out of luck",
    }


def test_outputs_are_compared_with_the_slots() -> None:
    entries = {entry.name: entry for entry in run(ACCEPT).results[1].entries}
    share = entries["zeros"].agreement
    assert share is not None
    assert 0 <= share < 1, "not every block of the workload is rejected at once"
    assert entries["made_accept"].agreement is None


def test_a_slot_that_fails_its_cases_is_not_timed() -> None:
    wrong = provided("made_wrong", implementation="bench_made:wrong_slot")
    clock = MadeClock()
    report = run(wrong, clock=clock)
    assert clock.timed == []
    assert not report.ok
    (entry,) = report.results[0].entries
    assert (entry.timing, entry.reason) == (None, "fails its conformance cases here")
    assert any("out_bonus_tokens" in line for line in report.gates[0].failures)


def test_a_failed_slot_stands_beside_one_that_passes() -> None:
    report = run(provided("made_wrong", implementation="bench_made:wrong_slot"), ACCEPT)
    slots = [entry for entry in report.results[0].entries if entry.role is Role.SLOT]
    assert [(entry.name, bool(entry.timing)) for entry in slots] == [("made_accept", True), ("made_wrong", False)]


def test_a_slot_that_fails_at_one_size_is_timed_at_the_others() -> None:
    small = provided("made_small", implementation="bench_made:small_slot", cases="test_bench_runner:one_small_case")
    report = run(small)
    assert [bool(result.entries[0].timing) for result in report.results] == [True, False]
    assert report.results[1].entries[0].reason == "ValueError: B 3 is too large"
    assert times(report.results[1])["zeros"] is not None, "its peers are timed all the same"
    assert not report.ok


def one_small_case() -> Sequence[Case]:
    from bench_made import greedy_accept_cases

    return [next(greedy_accept_cases())]


def test_inputs_that_cannot_be_made_fail_their_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.WORKLOADS["greedy_accept"]

    def scarce(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
        if size.batch == 3 and size.vocab == 64:  # not the cases, which come from the same workload
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real.make(size, source, shared)

    monkeypatch.setitem(runner.WORKLOADS, "greedy_accept", replace(real, make=scarce))
    report = run(ACCEPT)
    assert [result.entries[0].reason for result in report.results] == ["", "OutOfMemoryError: CUDA out of memory"]


def test_a_device_that_is_lost_fails_what_follows() -> None:
    class Lost(MadeClock):
        def check(self) -> None:
            if self.timed:
                raise RuntimeError("illegal memory access")

    report = run(ACCEPT, clock=Lost())
    assert [result.entries[0].reason for result in report.results] == ["", "RuntimeError: illegal memory access"]


def test_a_peer_that_no_graph_can_hold_is_called_and_so_is_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "peers_of", lambda seam: (Peer("reads", "reads back", _right),))
    clock = MadeClock(holds=False)
    (first, _) = run(ACCEPT, clock=clock).results
    assert clock.timed[:3] == [("graph", 2), ("called", 2), ("called", 2)]
    modes = [(entry.name, entry.timing and entry.timing.mode) for entry in first.entries]
    assert modes == [("made_accept", Mode.GRAPH), ("made_accept", Mode.CALLED), ("reads", Mode.CALLED)]


@pytest.mark.parametrize(("names", "left"), [(("zeros",), ["zeros"]), ((), [])], ids=["one", "none"])
def test_only_the_named_peers(names: tuple[str, ...], left: list[str]) -> None:
    report = run(ACCEPT, settings=SMALL.model_copy(update={"peers": names}))
    assert [entry.name for entry in report.results[0].entries] == ["made_accept", *left]


def test_after_the_time_limit_no_size_is_started() -> None:
    report = run(ACCEPT, settings=SMALL.model_copy(update={"time_limit": 1e-9}))
    assert [result.entries[0].reason for result in report.results] == [
        "not started: the run's time limit of 1e-09 s was over"
    ] * 2


def test_the_listener_hears_of_each_step() -> None:
    gates: list[Gate] = []
    results: list[Result] = []
    reports: list[Report] = []
    final = run(ACCEPT, listener=Listener(gates.append, results.append, reports.append))
    assert ([gate.slot for gate in gates], len(results)) == (["made_accept"], 2)
    assert [len(report.results) for report in reports] == [0, 1, 2]
    assert not any(report.complete for report in reports)
    assert final.results == reports[-1].results


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [(5, None, [0, 1, 2, 3, 4]), (5, 9, [0, 1, 2, 3, 4]), (5, 3, [0, 2, 4]), (33, 2, [0, 32]), (5, 1, [4]), (0, 3, [])],
)
def test_cases_are_spread_evenly(count: int, most: int | None, expected: list[int]) -> None:
    cases = [Case(str(index), lambda device: {}) for index in range(count)]
    assert [int(case.id) for case in spread(cases, most)] == expected


def test_a_gate_counts_what_it_ran() -> None:
    gate = check_gate(ACCEPT, device="cpu", most_cases=2)
    assert (gate.run, gate.total, gate.ok, gate.distribution) == (2, 5, True, "made")


def test_a_slot_that_cannot_be_loaded_does_not_pass() -> None:
    gate = check_gate(provided("made_gone", implementation="bench_made:Nothing"), device="cpu", most_cases=None)
    assert (gate.run, gate.ok) == (0, False)
    assert "has no 'Nothing'" in gate.failures[0]


def test_slots_are_chosen_by_name_and_listed_by_seam() -> None:
    registry = registry_of(ACCEPT.slot, provided("made_kv", "context_kv", Stage.COMMIT).slot)
    assert [entry.slot.name for entry in choose(registry, [])] == ["made_accept", "made_kv"]
    plan = schedule(choose(registry, ["made_kv"]), SMALL)
    assert [(size.text, [slot.slot.name for slot in slots]) for size, slots in plan] == [
        ("context_kv B 1", ["made_kv"]),
        ("context_kv B 3", ["made_kv"]),
        ("context_kv fp8 B 1", ["made_kv"]),
        ("context_kv fp8 B 3", ["made_kv"]),
    ]
    with pytest.raises(UnknownSlotError, match="made_accept"):
        choose(registry, ["made_acept"])
    with pytest.raises(SelectionError, match="timed as a peer"):
        choose(registry, ["post_fold"])


def test_a_slot_is_timed_at_the_batches_that_it_serves() -> None:
    small = provided("made_small", requires=Requirements(max_batch=2))
    plan = schedule([small, ACCEPT], SMALL)
    assert [(size.batch, [slot.slot.name for slot in slots]) for size, slots in plan] == [
        (1, ["made_small", "made_accept"]),
        (3, ["made_accept"]),
    ]
    assert left_out([small, ACCEPT], SMALL) == [
        "made_small: serves at most 2 requests a step; not timed at B 3",
    ]
    report = run(small)
    assert ([result.size.batch for result in report.results], report.ok) == ([1], True)


@pytest.mark.parametrize(
    ("found", "expected", "share"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, 0.5),
        ({"a": [1], "b": [1]}, {"a": [1]}, 1.0),
        ({"b": [1]}, {"a": [1]}, None),
        ({}, {}, None),
        ({"out_tokens": [1]}, {"out_tokens": [2]}, None),
    ],
)
def test_the_share_of_equal_outputs(found: Any, expected: Any, share: float | None) -> None:
    made: Callable[[dict[str, list[int]]], dict[str, torch.Tensor]] = lambda named: {  # noqa: E731
        name: torch.tensor(values) for name, values in named.items()
    }
    assert share_equal(made(found), made(expected)) == share
