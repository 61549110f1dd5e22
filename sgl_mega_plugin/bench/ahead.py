"""Checks cases and compiles every size in processes side by side, before anything is timed. Called by ``runner``.

What they compile is in Triton's cache on disk, where the process that times finds it. They end before it starts. What
went wrong in one of them is found again there, and is reported from there.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from sgl_mega_plugin.bench.peers import peers_of
from sgl_mega_plugin.bench.records import Gate, Settings, Size
from sgl_mega_plugin.bench.slots import build_slot, gate_of
from sgl_mega_plugin.bench.workloads import WORKLOADS
from sgl_mega_plugin.conformance.runner import Target, run_case
from sgl_mega_plugin.contract import Backend, Provided
from sgl_mega_plugin.registry import Registry, load_cases

_CASES_AT_ONCE = 4  # of a slot, so that the processes end together
_MOST_SECONDS = 120.0  # then whatever is missing is left to the process that times


@dataclass(frozen=True)
class Task:
    """What a process does at a time: some cases of a slot by their numbers, or a size with all that is timed there."""

    slots: tuple[str, ...]
    cases: tuple[int, ...] = ()
    size: Size | None = None


def tasks_of(picked: Mapping[str, Sequence[int]], plan: Sequence[tuple[Size, Sequence[Provided]]]) -> list[Task]:
    """Every size of a plan and the picked cases of each slot; sizes first, for those compile longest."""
    tasks = [Task(tuple(entry.slot.name for entry in slots), size=size) for size, slots in plan]
    for name, numbers in picked.items():
        chunks = (numbers[start : start + _CASES_AT_ONCE] for start in range(0, len(numbers), _CASES_AT_ONCE))
        tasks += [Task((name,), cases=tuple(chunk)) for chunk in chunks]
    return tasks


def run_task(task: Task, settings: Settings, registry: Registry) -> bool:
    """Do one task; whether its cases pass. Of a size nothing is kept and nothing raised but an error of its inputs."""
    if task.size is not None:
        _call_once(task.size, [registry.get(name) for name in task.slots], settings)
        return True
    provided = registry.get(task.slots[0])
    target = Target.load(provided, device=settings.device, backend=_backend(settings))
    cases = load_cases(provided)
    return all(run_case(target, cases[number]).ok for number in task.cases)


def check_ahead(
    chosen: Sequence[Provided],
    picked: Mapping[str, Sequence[int]],
    plan: Sequence[tuple[Size, Sequence[Provided]]],
    settings: Settings,
    workers: int,
) -> list[Gate]:
    """Run all tasks in ``workers`` processes; the gates of the slots whose picked cases all ran and passed."""
    failed: set[str] = set()
    end = time.monotonic() + _MOST_SECONDS
    with multiprocessing.get_context("spawn").Pool(workers, _start) as pool:
        pending = [(task, pool.apply_async(_work, (task, settings))) for task in tasks_of(picked, plan)]
        for task, result in pending:
            passes = False
            with suppress(Exception):  # the process that times meets it again, and says what it is
                passes = result.get(max(0.0, end - time.monotonic()))
            if task.cases and not passes:
                failed.update(task.slots)
    return [
        gate_of(entry, run=len(picked[entry.slot.name]), total=len(load_cases(entry)))
        for entry in chosen
        if entry.slot.name not in failed and picked.get(entry.slot.name)
    ]


def _start() -> None:
    torch.set_num_threads(1)


def _work(task: Task, settings: Settings) -> bool:
    return run_task(task, settings, Registry.discover())


def _backend(settings: Settings) -> Backend:
    return Backend.KERNEL if settings.device.startswith("cuda") else Backend.INTERPRETER


def _call_once(size: Size, slots: Sequence[Provided], settings: Settings) -> None:
    """Call each slot and each peer at a size, so that what they need is compiled."""
    workload = WORKLOADS[size.seam]
    (arguments,) = workload.sets(size, settings.device, 1)

    def built(provided: Provided) -> Callable[[], object]:
        call = build_slot(provided, size, device=settings.device, backend=_backend(settings))
        return lambda: call(**arguments)

    with torch.no_grad():
        for provided in slots:
            with suppress(Exception):
                workload.ready(arguments, built(provided))()
        for peer in peers_of(size.seam):
            with suppress(Exception):
                if settings.wants(peer.name) and not peer.missing():
                    workload.ready(arguments, peer.prepare(arguments))()
    if settings.device.startswith("cuda"):
        torch.cuda.synchronize(settings.device)
