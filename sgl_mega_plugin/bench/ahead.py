"""Checks cases and compiles every size in processes side by side, before anything is timed. Called by ``runner``.

What they compile is on disk, where the process that times finds it. They end before it starts, after half of a run's
time limit at the latest. What went wrong in one of them is found again there, and is reported from there; a peer that
was not ready by then, for building a library's module can take minutes, gets a second chance behind the rest.
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
_MOST_SHARE = 0.5  # of a run's time limit


@dataclass(frozen=True)
class Task:
    """What a process does at a time: some cases of a slot by their numbers, or slots or a peer at a size."""

    slots: tuple[str, ...] = ()
    cases: tuple[int, ...] = ()
    size: Size | None = None
    peer: str = ""


@dataclass(frozen=True)
class Ahead:
    """Gates of the slots whose picked cases all ran and passed, and peers that were not ready in time."""

    gates: tuple[Gate, ...] = ()
    late_peers: frozenset[str] = frozenset()


def tasks_of(
    picked: Mapping[str, Sequence[int]], plan: Sequence[tuple[Size, Sequence[Provided]]], settings: Settings
) -> list[Task]:
    """Slots at every size of a plan, the picked cases of each slot, then peers: what the run needs most comes first."""
    tasks = [Task(tuple(entry.slot.name for entry in slots), size=size) for size, slots in plan if slots]
    for name, numbers in picked.items():
        chunks = (numbers[start : start + _CASES_AT_ONCE] for start in range(0, len(numbers), _CASES_AT_ONCE))
        tasks += [Task((name,), cases=tuple(chunk)) for chunk in chunks]
    peers = ((size, peer.name) for size, _ in plan for peer in peers_of(size.seam))
    return tasks + [Task(size=size, peer=name) for size, name in peers if settings.wants(name)]


def run_task(task: Task, settings: Settings, registry: Registry) -> bool:
    """Do one task; whether its cases pass. Of a size nothing is kept and nothing raised but an error of its inputs."""
    if task.size is not None:
        _call_once(task.size, [registry.get(name) for name in task.slots], task.peer, settings)
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
) -> Ahead:
    """Run all tasks in ``workers`` processes, for as long as the settings leave."""
    failed, ready = set[str](), set[str]()
    limit = _MOST_SECONDS if settings.time_limit is None else min(_MOST_SECONDS, _MOST_SHARE * settings.time_limit)
    end, tasks = time.monotonic() + limit, tasks_of(picked, plan, settings)
    with multiprocessing.get_context("spawn").Pool(workers, _start) as pool:
        for task, result in [(task, pool.apply_async(_work, (task, settings))) for task in tasks]:
            passes, in_time = False, True
            try:
                passes = result.get(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                in_time = False
            except Exception:  # the process that times meets it again, and says what it is
                pass
            if task.cases and not passes:
                failed.update(task.slots)
            if in_time:
                ready.add(task.peer)
    gates = (
        gate_of(entry, run=len(picked[entry.slot.name]), total=len(load_cases(entry)))
        for entry in chosen
        if entry.slot.name not in failed and picked.get(entry.slot.name)
    )
    return Ahead(tuple(gates), frozenset(task.peer for task in tasks if task.peer) - ready)


def _start() -> None:
    torch.set_num_threads(1)


def _work(task: Task, settings: Settings) -> bool:
    return run_task(task, settings, Registry.discover())


def _backend(settings: Settings) -> Backend:
    return Backend.KERNEL if settings.device.startswith("cuda") else Backend.INTERPRETER


def _call_once(size: Size, slots: Sequence[Provided], peer_name: str, settings: Settings) -> None:
    """Call slots or a peer at a size, so that what they need is compiled."""
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
                if peer.name == peer_name and not peer.missing():
                    workload.ready(arguments, peer.prepare(arguments))()
    if settings.device.startswith("cuda"):
        torch.cuda.synchronize(settings.device)
