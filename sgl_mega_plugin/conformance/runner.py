"""Runs slots' cases, their own and generated ones: implementation against reference, eagerly and replayed.

Called by ``sgl-mega conform``, by the pytest plugin and by ``python -m sgl_mega_plugin.conformance``.
"""

from __future__ import annotations

import importlib.metadata
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from sgl_mega_plugin.conformance.arguments import (
    Arguments,
    blank,
    copy_of,
    load,
    near_tie,
    poison,
    relocated,
    trespasses,
)
from sgl_mega_plugin.conformance.compare import differences
from sgl_mega_plugin.conformance.generate import generated_cases
from sgl_mega_plugin.conformance.graph import Run, Step, Tape, allocations, graph_replays, tape_replays
from sgl_mega_plugin.conformance.hostread import host_reads
from sgl_mega_plugin.conformance.laws import LAWS, Law
from sgl_mega_plugin.conformance.report import CaseResult, Report, SlotResult
from sgl_mega_plugin.conformance.seam_kits import SEAM_KITS
from sgl_mega_plugin.conformance.seam_kits.ranges import range_problems
from sgl_mega_plugin.contract import SEAMS, Backend, Case, NumericsKind, Provided, SlotSetup
from sgl_mega_plugin.contract.errors import ImplementationError, SelectionError
from sgl_mega_plugin.registry import Registry, load_cases, load_implementation, load_reference

_NEAR_TIE_LOGITS = 4096  # the interpreter takes seconds for more; every generated case has fewer


class Wanted(NamedTuple):
    """Where slots run, and what a run adds to the cases that they bring."""

    device: str
    backend: Backend
    generated: int = 0
    seed: int = 0
    law: bool | None = False
    only: str = ""


class InterruptedRun(KeyboardInterrupt):
    """An interrupt (Ctrl-C) with what was found before it.

    Attributes:
        results: every slot's; what had not ended is not run.
        report: the same as a report, once ``conform`` has made one.
    """

    def __init__(self, results: Sequence[SlotResult]) -> None:
        super().__init__()
        self.results = results
        self.report: Report | None = None


class Check(NamedTuple):
    """A case or a frequency test of a slot; ``run`` is None where it is too large for the backend."""

    id: str
    run: Callable[[], CaseResult] | None


@dataclass(frozen=True)
class Target:
    """A slot with what stands behind it, on one device and backend."""

    provided: Provided
    implementation: type[Any]
    reference: Callable[..., None]
    device: str
    backend: Backend

    @classmethod
    def load(cls, provided: Provided, *, device: str, backend: Backend) -> Self:
        """Import a slot's implementation and reference; raises ImplementationError where they don't fit."""
        return cls(provided, load_implementation(provided), load_reference(provided), device, backend)

    @property
    def seam(self) -> str:
        return self.provided.slot.seam or ""

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def setup(self, arguments: Arguments) -> SlotSetup:
        batch, gamma, vocab = SEAM_KITS[self.seam].sizes(arguments)
        return SlotSetup(backend=self.backend, device=self.device, max_batch=batch, gamma=gamma, vocab_size=vocab)

    def build(self, arguments: Arguments) -> Callable[..., None]:
        """What the backend runs: the implementation for these sizes, or the reference itself."""
        if self.backend is Backend.REFERENCE:
            return self.reference
        built: Callable[..., None] = self.implementation(self.setup(arguments))
        return built

    def bound(self, case: Case) -> float:
        """0 is bit for bit; a slot exact in law is too, for the noise is an argument."""
        numerics = self.provided.slot.numerics
        return 0.0 if case.exact or numerics.kind is not NumericsKind.TOLERANCE else numerics.bound


def conform(
    registry: Registry,
    *,
    device: str = "cpu",
    backend: Backend,
    names: Sequence[str] = (),
    generated: int = 0,
    seed: int = 0,
    law: bool | None = False,
    only: str = "",
    workers: int = 0,
    time_limit: float | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> Report:
    """Run the cases of the named slots, or of every slot with a kernel.

    ``backend`` ``reference`` runs the reference twice: it tests the cases, not a kernel.
    ``interpreter`` needs TRITON_INTERPRET=1 before Triton is imported. ``generated`` adds that many random cases a
    slot, the same for the same ``seed``. ``law`` counts draws at seams that draw tokens: None counts the
    reference's, and the kernel's on CUDA; True counts the interpreted kernel's too, which takes minutes; False none.
    ``only`` keeps the cases that have it in their names, and a slot that cannot be loaded fails whatever it says.
    ``workers`` processes run cases side by side, which discover the slots again; with 0 this one does, one after the
    other. After ``time_limit`` seconds no further case is started. ``on_result`` is told of each case as it ends.

    Raises:
        UnknownSlotError: a name that no distribution provides.
        SelectionError: a name of an engine-backed slot, which has no cases; or no case has ``only`` in its name.
        InterruptedRun: an interrupt (Ctrl-C) came; it has the report so far.
    """
    chosen = [registry.get(name) for name in names] or [p for p in registry.provided if not p.slot.engine_backed]
    backed = [entry.slot.name for entry in chosen if entry.slot.engine_backed]
    if backed:
        raise SelectionError(
            f"{', '.join(backed)}: the engine's own code does this slot's work, so it has no cases here"
        )
    wanted = Wanted(device, backend, generated, seed, law, only)
    end = None if time_limit is None else time.monotonic() + time_limit
    try:
        if workers:
            from sgl_mega_plugin.conformance.workers import run_side_by_side

            results = run_side_by_side(chosen, wanted, workers, end, on_result)
        else:
            results = _run_one_by_one(chosen, wanted, end, on_result)
    except InterruptedRun as interrupt:
        interrupt.report = _report(wanted, interrupt.results)
        raise
    if only:
        results = [slot for slot in results if slot.cases or slot.skipped or slot.not_run]
        if not results:
            raise SelectionError(f"no case has {only!r} in its name")
    return _report(wanted, results)


def _report(wanted: Wanted, results: Sequence[SlotResult]) -> Report:
    on_cuda = torch.device(wanted.device).type == "cuda"
    return Report(
        device=wanted.device,
        device_name=torch.cuda.get_device_name(wanted.device) if on_cuda else "cpu",
        backend=wanted.backend,
        torch=torch.__version__,
        triton=_version("triton"),
        generated=wanted.generated,
        seed=wanted.seed,
        slots=tuple(results),
    )


def _run_one_by_one(
    chosen: Sequence[Provided], wanted: Wanted, end: float | None, on_result: Callable[[CaseResult], None] | None
) -> list[SlotResult]:
    """The results of every slot, in this process."""
    results: list[SlotResult] = []
    try:
        for entry in chosen:
            results.append(run_slot(entry, wanted, end=end, on_result=on_result))
    except InterruptedRun as interrupt:
        ended = [*results, *interrupt.results]
        ended += [slot_result(entry, checks_of(entry, wanted), {}) for entry in chosen[len(ended) :]]
        raise InterruptedRun(ended) from None
    return results


def run_slot(
    provided: Provided,
    wanted: Wanted,
    *,
    end: float | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> SlotResult:
    """Every case of one slot, but none that would be started after ``end``, a time of ``time.monotonic``.

    A slot that can't be loaded has one failed case, ``(load)``.

    Raises:
        InterruptedRun: an interrupt (Ctrl-C) came; it has this slot's result so far.
    """
    checks, results = list[Check](), dict[int, CaseResult]()
    try:
        checks = checks_of(provided, wanted)
        for number, check in enumerate(checks):
            if check.run is None or (end is not None and time.monotonic() > end):
                continue
            results[number] = check.run()
            if on_result is not None:
                on_result(results[number])
    except KeyboardInterrupt:
        raise InterruptedRun([slot_result(provided, checks, results)]) from None
    return slot_result(provided, checks, results)


def slot_result(provided: Provided, checks: Sequence[Check], results: Mapping[int, CaseResult]) -> SlotResult:
    """What a run of a slot's checks gave, by their numbers."""
    return SlotResult(
        slot=provided.slot.name,
        distribution=provided.distribution,
        cases=tuple(results[number] for number in sorted(results)),
        skipped=tuple(check.id for check in checks if check.run is None),
        not_run=tuple(
            check.id for number, check in enumerate(checks) if check.run is not None and number not in results
        ),
    )


def checks_of(provided: Provided, wanted: Wanted) -> list[Check]:
    """All that there is to run of a slot, in the order of a report; the same in each process."""
    try:
        target = Target.load(provided, device=wanted.device, backend=wanted.backend)
        cases = list(load_cases(provided))
    except ImplementationError as error:
        return [_failing(provided, "(load)", error)]
    failing = []
    try:
        cases += _generated(target, wanted)
    except RuntimeError as error:
        failing = [_failing(provided, "(generated)", error)]
    large = wanted.backend is not Backend.KERNEL
    checks = [Check(case.id, None if case.kernel_only and large else partial(run_case, target, case)) for case in cases]
    return [*failing, *(check for check in (*checks, *_laws(target, wanted)) if wanted.only in check.id)]


def _failing(provided: Provided, case: str, error: Exception) -> Check:
    return Check(case, partial(_result, provided, case, [str(error)]))


def run_case(target: Target, case: Case) -> CaseResult:
    """Run one case; an exception of the slot's is a failure of the case."""
    return _result(target.provided, case.id, _guarded(target, lambda: _problems(target, case)))


def _guarded(target: Target, check: Callable[[], list[str]]) -> list[str]:
    """What a check finds on the target's device; an exception is a finding, for the next case is still of interest."""
    try:
        with torch.cuda.device(target.device) if target.on_cuda else _silent_infinities():
            return check()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


@contextmanager
def _silent_infinities() -> Iterator[None]:
    """A GPU makes infinities and NaN in silence; numpy, which the interpreter computes with, warns of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
        yield


def _result(provided: Provided, case: str, problems: Sequence[str]) -> CaseResult:
    return CaseResult(slot=provided.slot.name, case=case, ok=not problems, detail=tuple(problems))


def _generated(target: Target, wanted: Wanted) -> Iterator[Case]:
    return generated_cases(
        target.seam,
        count=wanted.generated,
        seed=wanted.seed,
        requires=target.provided.slot.requires,
        reference=target.reference,
        on_cuda=target.on_cuda,
    )


def _laws(target: Target, wanted: Wanted) -> Iterator[Check]:
    """The frequency tests: of the reference, and of what the backend runs where that is quick or asked for."""
    if wanted.law is False:
        return
    for law in LAWS.get(target.seam, ()):
        if not law.kernel_only:
            name = f"{law.id} (reference)"
            yield Check(name, partial(_frequencies, target, law, name, lambda _: target.reference))
        built = target.on_cuda or (wanted.law and not law.kernel_only)
        if target.backend is not Backend.REFERENCE and built:
            yield Check(law.id, partial(_frequencies, target, law, law.id, target.build))


def _frequencies(target: Target, law: Law, name: str, build: Callable[[Arguments], Callable[..., None]]) -> CaseResult:
    def check() -> list[str]:
        arguments = law.arguments(target.device)
        return law.run(build(arguments), arguments)

    return _result(target.provided, name, _guarded(target, check))


def _problems(target: Target, case: Case) -> list[str]:
    """Every difference that a case shows; empty if it passes. The first kind of run that fails is the last."""
    inputs = case.make(target.device)
    wanted = SEAMS[target.seam].parameters
    if set(inputs) != set(wanted):
        return [f"the case makes {sorted(inputs)}; seam {target.seam!r} takes {sorted(wanted)}"]
    expected, problems = _expect(target, case, inputs)
    call = target.build(inputs)
    first = copy_of(inputs)
    problems += _run(target, call, case, first, expected, "first call")
    if problems:
        return problems
    zeros = blank(inputs)
    nothing, problems = _expect(target, case, zeros)
    # Another rank, built on its own, has the same bits; here it also has another allocator's addresses.
    apart = partial(relocated, alignment=SEAM_KITS[target.seam].alignment)
    memory, rank, tape = apart(inputs), target.build(inputs), Tape()
    load(memory, apart(zeros))
    problems += _run(target, rank, case, memory, nothing, "another rank, on zeros")
    load(memory, apart(inputs))
    second = rank if target.on_cuda else tape.recording(rank)
    problems += _run(target, second, case, memory, first, "another rank, its memory filled anew", bound=0.0)
    if problems or target.backend is Backend.REFERENCE:
        return problems
    this, start = Step(inputs, expected), Step(zeros, nothing)
    if target.on_cuda:
        problems += allocations(call, inputs, target.device)
        tied, more = _near_tie(target, case, inputs)
        return problems + more + _replayed(target, case, graph_replays(call, case, [start, tied, start, this]), first)
    logits = inputs.get("target_logits")
    small = logits is not None and logits.numel() <= _NEAR_TIE_LOGITS
    tied, problems = _near_tie(target, case, inputs) if small else (start, [])
    steps = [Step(apart(step.inputs), step.expected) for step in (tied, this)]
    return problems + _replayed(target, case, tape_replays(tape, case, memory, steps), first)


def _expect(target: Target, case: Case, inputs: Arguments) -> tuple[dict[str, Any], list[str]]:
    """The reference's outputs on a copy of the inputs, and what it wrote that it may not."""
    expected = copy_of(inputs)
    poison(expected, case.keep)
    before = copy_of(expected)
    target.reference(**expected)
    problems = range_problems(target.seam, expected) + trespasses(expected, before)
    return expected, [f"reference: {line}" for line in problems]


def _run(
    target: Target,
    call: Callable[..., None],
    case: Case,
    memory: Arguments,
    expected: Arguments,
    what: str,
    *,
    bound: float | None = None,
) -> list[str]:
    """One eager call on this memory: all that is wrong with its outputs and with the call."""
    poison(memory, case.keep)
    before = copy_of(memory)
    with host_reads() as reads:
        call(**memory)
    if target.backend is Backend.REFERENCE:
        reads = []  # a reference may
    lines = _wrong(target, memory, before, expected, target.bound(case) if bound is None else bound)
    return [f"{what}: {line}" for line in [*reads, *lines]]


def _near_tie(target: Target, case: Case, inputs: Arguments) -> tuple[Step, list[str]]:
    tied = near_tie(inputs)
    expected, problems = _expect(target, case, tied)
    return Step(tied, expected), problems


def _replayed(target: Target, case: Case, runs: Iterator[Run], first: Arguments) -> list[str]:
    """What is wrong with replays, the last of which has to give what the first call gave."""
    problems = []
    for run in runs:
        lines = _wrong(target, run.found, run.before, run.expected, target.bound(case))
        if run.is_last and not lines:
            lines = [f"not what the first call gave: {line}" for line in differences(run.found, first, 0.0)]
        problems += [f"{run.what}: {line}" for line in lines]
    return problems


def _wrong(target: Target, found: Arguments, before: Arguments, expected: Arguments, bound: float) -> list[str]:
    ranges = range_problems(target.seam, found)
    return differences(found, expected, bound) + ranges + trespasses(found, before)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
