"""Runs a benchmark: cases first, then every slot and peer of a seam on the same inputs, size by size.

Called by ``sgl-mega bench``. Whatever goes wrong with one slot or peer at one size becomes that row's reason; the
rest is still measured. Only ``timer`` needs a GPU, so tests put another one in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_mega_plugin.bench.ahead import Ahead, check_ahead
from sgl_mega_plugin.bench.peers import peers_of
from sgl_mega_plugin.bench.records import (
    NOT_STARTED,
    Entry,
    Gate,
    Machine,
    Mode,
    Rates,
    Report,
    Result,
    Role,
    Settings,
    Size,
    Timing,
)
from sgl_mega_plugin.bench.slots import build_slot, gate_of
from sgl_mega_plugin.bench.workloads import WORKLOADS, Workload
from sgl_mega_plugin.conformance.runner import Target, run_case
from sgl_mega_plugin.contract import Backend, Case, Provided
from sgl_mega_plugin.contract.errors import ImplementationError, SelectionError
from sgl_mega_plugin.engine.peers import Call, Outputs, Peer, PeerUnavailableError
from sgl_mega_plugin.registry import Registry, load_cases

Arguments = Mapping[str, Any]
_LONGEST_REASON = 400
_LATE_PEER = "not ready when timing had to end: it may be compiling still; run again, or with a longer time limit"
_IMPOSSIBLE = -7  # no id, length, position or location


class Series(Protocol):
    """What a timer returns: samples in microseconds, and the nodes of the graph where there was one."""

    @property
    def first(self) -> Sequence[float]: ...
    @property
    def again(self) -> Sequence[float]: ...
    @property
    def launches(self) -> int | None: ...
    @property
    def copies(self) -> int | None: ...


class Clock(Protocol):
    """What times calls: ``timer.Timer`` on a GPU."""

    def capturable(self, call: Callable[[], object]) -> bool: ...
    def in_graph(self, calls: Sequence[Callable[[], object]]) -> Series: ...
    def called(self, calls: Sequence[Callable[[], object]]) -> Series: ...
    def rates(self) -> Rates: ...
    def check(self) -> None: ...


@dataclass(frozen=True)
class Listener:
    """Who is told while a run goes on: ``gate`` and ``result`` of each as it ends, ``report`` of all so far."""

    gate: Callable[[Gate], None] = lambda gate: None
    result: Callable[[Result], None] = lambda result: None
    report: Callable[[Report], None] = lambda report: None


def choose(registry: Registry, names: Sequence[str]) -> list[Provided]:
    """The named slots, or every slot with a kernel.

    Raises:
        UnknownSlotError: a name that no distribution provides.
        SelectionError: a name of an engine-backed slot, whose code the bench times as a peer.
    """
    chosen = [registry.get(name) for name in names] or [p for p in registry.provided if not p.slot.engine_backed]
    backed = [entry.slot.name for entry in chosen if entry.slot.engine_backed]
    if backed:
        raise SelectionError(
            f"{', '.join(backed)}: the engine's own code does this slot's work; it is timed as a peer of our slots"
        )
    return chosen


def schedule(chosen: Sequence[Provided], settings: Settings) -> list[tuple[Size, list[Provided]]]:
    """Every size that a chosen slot serves, in the order of a step's seams, with its slots."""
    seams = [seam for seam in WORKLOADS if any(entry.slot.seam == seam for entry in chosen)]
    plan = [
        (size, [entry for entry in chosen if entry.slot.seam == seam and _serves(entry, size.batch)])
        for seam in seams
        for size in WORKLOADS[seam].sizes(settings)
    ]
    return [(size, slots) for size, slots in plan if slots]


def left_out(chosen: Sequence[Provided], settings: Settings) -> list[str]:
    """A line for each slot that does not serve some of the batch sizes, so that it is not timed there."""
    lines = []
    for entry in chosen:
        batches = [batch for batch in settings.batches if not _serves(entry, batch)]
        if batches:
            most, named = entry.slot.requires.max_batch, ", ".join(map(str, batches))
            lines.append(f"{entry.slot.name}: serves at most {most} requests a step; not timed at B {named}")
    return lines


def _serves(provided: Provided, batch: int) -> bool:
    most = provided.slot.requires.max_batch
    return most is None or batch <= most


def check_gate(provided: Provided, *, device: str, most_cases: int | None, backend: Backend = Backend.KERNEL) -> Gate:
    """A slot's cases on the device, all of them or ``most_cases`` spread evenly over the list."""
    failures: list[str] = []
    run = total = 0
    try:
        target, cases = Target.load(provided, device=device, backend=backend), load_cases(provided)
        total = len(cases)
        for case in spread(cases, most_cases):
            result = run_case(target, case)
            run += 1
            if not result.ok:
                failures.append(result.text[:_LONGEST_REASON])
    except ImplementationError as error:
        failures.append(str(error))
    return gate_of(provided, run=run, total=total, failures=failures)


def spread(cases: Sequence[Case], most: int | None) -> list[Case]:
    """At most that many cases, evenly spread, the first and the last among them."""
    return [cases[number] for number in _spread_numbers(len(cases), most)]


def picked_cases(provided: Provided, most: int | None) -> list[int]:
    """Numbers of the cases of a slot that ``spread`` picks; none where they cannot be loaded."""
    try:
        return _spread_numbers(len(load_cases(provided)), most)
    except ImplementationError:
        return []


def _spread_numbers(count: int, most: int | None) -> list[int]:
    if most is None or count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


@dataclass
class Run:
    """One benchmark run: what it was asked for, and what it has found so far."""

    settings: Settings
    clock: Clock
    machine: Machine
    command: str
    listener: Listener = field(default_factory=Listener)
    workers: int = 0  # processes that check cases and compile before anything is timed; 0 is this one alone
    rates: Rates | None = None
    gates: list[Gate] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    late_peers: frozenset[str] = frozenset()  # those that were not ready when timing began
    started: float = field(default_factory=time.perf_counter)

    def report(self, *, complete: bool) -> Report:
        return Report(
            complete=complete,
            command=self.command,
            seconds=time.perf_counter() - self.started,
            settings=self.settings,
            machine=self.machine,
            rates=self.rates,
            gates=tuple(self.gates),
            results=tuple(self.results),
        )

    def everything(self, chosen: Sequence[Provided]) -> Report:
        """Measure the rates, check every slot's cases, then time what passed at every size."""
        plan = schedule(chosen, self.settings)
        ahead = self._ahead(chosen, plan)
        self.late_peers = ahead.late_peers
        passed = {gate.slot: gate for gate in ahead.gates}
        self.rates = self.clock.rates()
        for provided in chosen:
            gate = passed.get(provided.slot.name) or check_gate(
                provided, device=self.settings.device, most_cases=self.settings.most_cases
            )
            self.gates.append(gate)
            self.listener.gate(gate)
        self.listener.report(self.report(complete=False))
        for size, slots in plan:
            result = self.at_size(size, slots)
            self.results.append(result)
            self.listener.result(result)
            self.listener.report(self.report(complete=False))
        self._late_peers_again(plan)
        return self.report(complete=True)

    def _late_peers_again(self, plan: Sequence[tuple[Size, Sequence[Provided]]]) -> None:
        """Time the peers that were not ready when timing began, if they are in half of the time that is left."""
        late, limit = self.late_peers, self.settings.time_limit
        if not late or self._late():
            return
        left = None if limit is None else limit - (time.perf_counter() - self.started)
        asked = self.settings.model_copy(update={"peers": tuple(sorted(late)), "time_limit": left})
        self.late_peers = check_ahead([], {}, [(size, ()) for size, _ in plan], asked, self.workers).late_peers
        for index, (_, slots) in enumerate(plan):
            if self._late():
                return
            result = self._with_peers(self.results[index], slots, late - self.late_peers)
            if result is not self.results[index]:
                self.results[index] = result
                self.listener.result(result)
                self.listener.report(self.report(complete=False))

    def _with_peers(self, result: Result, slots: Sequence[Provided], names: frozenset[str]) -> Result:
        """A result with these peers timed too, on new inputs; as it was where no slot was timed, or none has a peer."""
        size, workload = result.size, WORKLOADS[result.size.seam]
        timed = {entry.name for entry in result.entries if entry.role is Role.SLOT and entry.timing}
        slots = [slot for slot in slots if slot.slot.name in timed]
        if not slots or not any(entry.name in names for entry in result.entries):
            return result
        try:
            with self._measuring():
                sets = workload.sets(size, self.settings.device, self.settings.input_sets)
                callers = [(slot, self._calls(slot, size, sets)) for slot in slots]
                expected = _first_outputs(callers[0][1][0], sets[0])
                peers = [peer for peer in peers_of(size.seam) if peer.name in names]
                found = {peer.name: self._peer(peer, workload, sets, expected) for peer in peers}
                entries = [found.get(entry.name, entry) for entry in result.entries]
                if not _any_called(result.entries):
                    entries = self._called(callers, entries)
        except Exception as error:  # the next size is still of interest
            reason = {"reason": _text(error)}
            entries = [entry.model_copy(update=reason) if entry.name in names else entry for entry in result.entries]
        return result.model_copy(update={"entries": tuple(entries)})

    def _called(self, callers: Sequence[tuple[Provided, list[Call]]], entries: Sequence[Entry]) -> list[Entry]:
        """Entries with a row more for each slot, called as peers are that no graph can hold, where there is one."""
        if not _any_called(entries):
            return list(entries)
        slots = [entry for entry in entries if entry.role is Role.SLOT]
        more = [self._measure(p.slot.name, Role.SLOT, p.slot.summary, calls, Mode.CALLED) for p, calls in callers]
        return [*slots, *more, *(entry for entry in entries if entry.role is Role.PEER)]

    def _ahead(self, chosen: Sequence[Provided], plan: Sequence[tuple[Size, Sequence[Provided]]]) -> Ahead:
        """Cases and compilations in other processes."""
        if not self.workers:
            return Ahead()
        picked = {entry.slot.name: picked_cases(entry, self.settings.most_cases) for entry in chosen}
        return check_ahead(chosen, picked, plan, self.settings, self.workers)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """One size's calls: on a GPU that nobody else uses, without gradients; the next size gets the memory back."""
        self.clock.check()
        try:
            with torch.no_grad():
                yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def at_size(self, size: Size, slots: Sequence[Provided]) -> Result:
        """Every slot and peer at one size."""
        passed = {gate.slot for gate in self.gates if gate.ok}
        failed = [_failed(slot, "fails its conformance cases here") for slot in slots if slot.slot.name not in passed]
        ready = [slot for slot in slots if slot.slot.name in passed]
        late = self._late()
        if late or not ready:
            entries = [*failed, *(_failed(slot, late) for slot in ready)]
            return Result(size=size, cost=None, floor_us=None, entries=tuple(entries))
        try:
            with self._measuring():
                return self._timed(WORKLOADS[size.seam], size, ready, failed)
        except Exception as error:  # the next size is still of interest
            entries = [*failed, *(_failed(slot, _text(error)) for slot in ready)]
            return Result(size=size, cost=None, floor_us=None, entries=tuple(entries))

    def _late(self) -> str:
        limit = self.settings.time_limit
        over = limit is not None and time.perf_counter() - self.started > limit
        return f"{NOT_STARTED}: the run's time limit of {limit:g} s was over" if over else ""

    def _timed(self, workload: Workload, size: Size, slots: Sequence[Provided], failed: Sequence[Entry]) -> Result:
        sets = workload.sets(size, self.settings.device, self.settings.input_sets)
        cost = workload.cost(sets[0])
        peers = [peer for peer in peers_of(size.seam) if self.settings.wants(peer.name)]
        callers: list[tuple[Provided, list[Call]]] = []
        entries: list[Entry] = []
        expected: Outputs = {}
        for provided in slots:
            calls, entry, outputs = self._slot(provided, size, sets, expected)
            entries.append(entry)
            expected = expected or outputs
            if entry.timing is not None:
                callers.append((provided, calls))
        entries += [*failed, *(self._peer(peer, workload, sets, expected) for peer in peers)]
        floor = None if self.rates is None else cost.floor_us(self.rates.read_tb_s)
        return Result(size=size, cost=cost, floor_us=floor, entries=tuple(self._called(callers, entries)))

    def _slot(
        self, provided: Provided, size: Size, sets: Sequence[dict[str, Any]], expected: Outputs
    ) -> tuple[list[Call], Entry, Outputs]:
        """Time one slot; also its calls, for another mode, and its integer outputs on the first set."""
        slot = provided.slot
        try:
            calls = self._calls(provided, size, sets)
            outputs = _first_outputs(calls[0], sets[0])
            entry = self._measure(slot.name, Role.SLOT, slot.summary, calls, Mode.GRAPH, share_equal(outputs, expected))
        except Exception as error:
            return [], _failed(provided, _text(error)), {}
        return calls, entry, outputs

    def _calls(self, provided: Provided, size: Size, sets: Sequence[dict[str, Any]]) -> list[Call]:
        """Calls of a slot that is built anew, one a set of inputs."""
        built, workload = build_slot(provided, size, device=self.settings.device), WORKLOADS[size.seam]
        return [workload.ready(arguments, _bound(built, arguments)) for arguments in sets]

    def _peer(self, peer: Peer, workload: Workload, sets: Sequence[dict[str, Any]], expected: Outputs) -> Entry:
        """Time one peer, after its first call's integers are compared with the slot's."""
        try:
            missing = peer.missing() or (_LATE_PEER if peer.name in self.late_peers else None)
            if missing:
                raise PeerUnavailableError(missing)
            calls = [workload.ready(arguments, peer.prepare(arguments)) for arguments in sets]
            agreement = share_equal(_first_outputs(calls[0], sets[0]), expected)
            mode = Mode.GRAPH if self.clock.capturable(calls[0]) else Mode.CALLED
            return self._measure(peer.name, Role.PEER, peer.summary, calls, mode, agreement)
        except Exception as error:
            return Entry(name=peer.name, role=Role.PEER, summary=peer.summary, reason=_text(error))

    def _measure(
        self,
        name: str,
        role: Role,
        summary: str,
        calls: Sequence[Call],
        mode: Mode,
        agreement: float | None = None,
    ) -> Entry:
        series = self.clock.in_graph(calls) if mode is Mode.GRAPH else self.clock.called(calls)
        return Entry(
            name=name,
            role=role,
            summary=summary,
            timing=Timing.of(mode, series.first, series.again),
            launches=series.launches,
            copies=series.copies,
            agreement=agreement,
        )


def _any_called(entries: Sequence[Entry]) -> bool:
    return any(entry.timing is not None and entry.timing.mode is Mode.CALLED for entry in entries)


def _bound(call: Callable[..., None], arguments: Arguments) -> Call:
    return lambda: call(**arguments)


def integer_outputs(arguments: Arguments) -> dict[str, Tensor]:
    """Ids and lengths among a seam's outputs: what two correct implementations agree on exactly."""
    return {
        name: value
        for name, value in arguments.items()
        if name.startswith("out_") and isinstance(value, Tensor) and not value.is_floating_point()
    }


def _first_outputs(call: Call, arguments: Arguments) -> dict[str, Tensor]:
    """What a call computes on these arguments, kept; poisoned before, so that nothing older is taken for it."""
    for output in integer_outputs(arguments).values():
        output.fill_(_IMPOSSIBLE)
    found = call()
    return {name: value.clone() for name, value in (integer_outputs(arguments) if found is None else found).items()}


def share_equal(found: Outputs, expected: Outputs) -> float | None:
    """The share of elements that two implementations have alike, over the outputs that both name; None without any.

    Of ``out_tokens`` nothing is compared: what lies behind the bonus is each implementation's own.
    """
    names = (found.keys() & expected.keys()) - {"out_tokens"}
    if not names:
        return None
    equal = sum(int((found[name].long() == expected[name].long()).sum()) for name in names)
    return equal / sum(expected[name].numel() for name in names)


def _failed(provided: Provided, reason: str) -> Entry:
    return Entry(name=provided.slot.name, role=Role.SLOT, summary=provided.slot.summary, reason=reason)


def _text(error: Exception) -> str:
    """The error in one line, its kind in front unless it is a peer's plain reason."""
    line = " ".join(str(error).split())
    text = line if isinstance(error, PeerUnavailableError) else f"{type(error).__name__}: {line}"
    return text[:_LONGEST_REASON]


def bench(
    registry: Registry,
    settings: Settings,
    *,
    names: Sequence[str] = (),
    command: str = "",
    listener: Listener | None = None,
    workers: int = 0,
) -> Report:
    """Run a benchmark on the GPU that the settings name, after ``workers`` processes have checked and compiled.

    Raises:
        SlotError: names that cannot be timed.
    """
    from sgl_mega_plugin.bench.machine import find_machine, read_clocks
    from sgl_mega_plugin.bench.timer import Timer

    chosen = choose(registry, names)
    with torch.cuda.device(settings.device):
        machine = find_machine(settings.device)
        clock = Timer(settings.device, repetitions=settings.repetitions, calls=settings.calls)
        run = Run(settings, clock, machine, command, listener or Listener(), workers)
        report = run.everything(chosen)
        after = read_clocks(settings.device, "after")
    return report.model_copy(update={"machine": machine.model_copy(update={"clocks": (*machine.clocks, after)})})
