"""Runs slots' cases: implementation against reference on equal copies, eagerly and in a CUDA graph.

Called by ``sgl-mega conform``, by the pytest plugin and by ``python -m sgl_mega_plugin.conformance``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch

from sgl_mega_plugin.conformance.arguments import Arguments, blank, copy_of, poison, trespasses
from sgl_mega_plugin.conformance.compare import differences
from sgl_mega_plugin.conformance.graph import allocations, replays
from sgl_mega_plugin.conformance.report import CaseResult, Report, SlotResult
from sgl_mega_plugin.contract import SEAMS, Backend, Case, NumericsKind, Provided, SlotSetup
from sgl_mega_plugin.contract.errors import ImplementationError, SelectionError
from sgl_mega_plugin.registry import Registry, load_cases, load_implementation, load_reference

#: Sizes B, G and V of a seam's arguments. V is 1 where the seam does not show it.
_SIZES: dict[str, Callable[[Arguments], tuple[int, int, int]]] = {
    "draft_block": lambda a: tuple(a["base_logits"].shape),
    "greedy_accept": lambda a: (a["candidates"].shape[0], a["candidates"].shape[1] - 1, a["target_logits"].shape[1]),
    "step_inputs": lambda a: (a["out_positions"].shape[0], a["out_positions"].shape[1] - 1, a["mask_token"] + 1),
    "context_kv": lambda a: (a["positions"].shape[0], a["positions"].shape[1] - 1, 1),
}


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
        batch, gamma, vocab = _SIZES[self.seam](arguments)
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
    on_result: Callable[[CaseResult], None] | None = None,
) -> Report:
    """Run the cases of the named slots, or of every slot with a kernel.

    ``backend`` ``reference`` runs the reference twice: it tests the cases, not a kernel.
    ``interpreter`` needs TRITON_INTERPRET=1 before Triton is imported. ``on_result`` is told of each
    case as it ends.

    Raises:
        UnknownSlotError: a name that no distribution provides.
        SelectionError: a name of an engine-backed slot, which has no cases.
    """
    chosen = [registry.get(name) for name in names] or [p for p in registry.provided if not p.slot.engine_backed]
    backed = [entry.slot.name for entry in chosen if entry.slot.engine_backed]
    if backed:
        raise SelectionError(
            f"{', '.join(backed)}: the engine's own code does this slot's work, so it has no cases here"
        )
    results = tuple(run_slot(entry, device=device, backend=backend, on_result=on_result) for entry in chosen)
    return Report(
        device=device,
        device_name=torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        backend=backend,
        torch=torch.__version__,
        triton=_version("triton"),
        slots=results,
    )


def run_slot(
    provided: Provided,
    *,
    device: str,
    backend: Backend,
    on_result: Callable[[CaseResult], None] | None = None,
) -> SlotResult:
    """Every case of one slot. A slot that can't be loaded has one failed case, ``(load)``."""
    name = provided.slot.name
    results: list[CaseResult] = []
    skipped: list[str] = []

    def note(result: CaseResult) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)

    try:
        target, cases = Target.load(provided, device=device, backend=backend), load_cases(provided)
    except ImplementationError as error:
        note(CaseResult(slot=name, case="(load)", ok=False, detail=(str(error),)))
    else:
        for case in cases:
            if case.kernel_only and backend is not Backend.KERNEL:
                skipped.append(case.id)
            else:
                note(run_case(target, case))
    return SlotResult(slot=name, distribution=provided.distribution, cases=tuple(results), skipped=tuple(skipped))


def run_case(target: Target, case: Case) -> CaseResult:
    """Run one case; an exception of the slot's is a failure of the case."""
    try:
        with torch.cuda.device(target.device) if target.on_cuda else nullcontext():
            problems = _problems(target, case)
    except Exception as error:  # the next case is still of interest
        problems = [f"{type(error).__name__}: {error}"]
    return CaseResult(slot=target.provided.slot.name, case=case.id, ok=not problems, detail=tuple(problems))


def _problems(target: Target, case: Case) -> list[str]:
    """Every difference that a case shows; empty if it passes."""
    inputs = case.make(target.device)
    wanted = SEAMS[target.seam].parameters
    if set(inputs) != set(wanted):
        return [f"the case makes {sorted(inputs)}; seam {target.seam!r} takes {sorted(wanted)}"]
    expected, problems = _expect(target, case, inputs)
    call = target.build(inputs)
    problems += _eager(call, case, inputs, expected, target.bound(case))
    if not problems and target.backend is Backend.KERNEL and target.on_cuda:
        problems += allocations(call, inputs, target.device)
        problems += _replayed(target, call, case, inputs, expected)
    return problems


def _expect(target: Target, case: Case, inputs: Arguments) -> tuple[dict[str, Any], list[str]]:
    """The reference's outputs on a copy of the inputs, and what it wrote that it may not."""
    expected = copy_of(inputs)
    poison(expected, case.keep)
    before = copy_of(expected)
    target.reference(**expected)
    return expected, [f"reference: {line}" for line in trespasses(expected, before)]


def _eager(call: Callable[..., None], case: Case, inputs: Arguments, expected: Arguments, bound: float) -> list[str]:
    """Two calls, so that what the first leaves in the slot's own memory is seen by the second."""
    problems = []
    for number in ("first", "second"):
        found = copy_of(inputs)
        poison(found, case.keep)
        before = copy_of(found)
        call(**found)
        problems = [
            f"{number} call: {line}" for line in differences(found, expected, bound) + trespasses(found, before)
        ]
        if problems:
            break
    return problems


def _replayed(
    target: Target, call: Callable[..., None], case: Case, inputs: Arguments, expected: Arguments
) -> list[str]:
    """A graph captured on zeros, then replayed on this case, on zeros and on this case again."""
    zeros = blank(inputs)
    nothing, problems = _expect(target, case, zeros)
    steps = ((inputs, expected), (zeros, nothing), (inputs, expected))
    for index, (found, before, wanted) in enumerate(replays(call, case, zeros, steps)):
        lines = differences(found, wanted, target.bound(case)) + trespasses(found, before)
        problems += [f"replay {index + 1} of a graph: {line}" for line in lines]
    return problems


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
