"""Cases of slots in processes side by side: most of a case is compilation and host time, and a GPU has room for many.

Each process makes a slot's list of checks anew and is told numbers of it, a few at a time. One that ends with a case
under way, as a CUDA error may make it, costs that case and nothing else: another takes its place. Called by ``runner``.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch

from sgl_mega_plugin.conformance.report import CaseResult, SlotResult
from sgl_mega_plugin.conformance.runner import Check, InterruptedRun, Wanted, checks_of, slot_result
from sgl_mega_plugin.contract import Provided
from sgl_mega_plugin.registry import Registry

#: Checks that a process is given at once: few, so that all end together, and of one slot, which it has to load.
AT_ONCE = 4
_LOOK_S = 0.5  # between two looks at the clock
_END_S = 5.0  # for a process whose pipe is closed

Lookup = Callable[[], Registry]


class Part(NamedTuple):
    """Some checks of a slot, by their numbers."""

    slot: str
    numbers: tuple[int, ...]


def parts_of(checks: dict[str, list[Check]]) -> list[Part]:
    """All checks that can run; those from the ends of the lists first, for frequency tests take longest."""
    parts = []
    for slot, found in checks.items():
        numbers = [number for number, check in enumerate(found) if check.run is not None]
        parts += [Part(slot, tuple(numbers[start : start + AT_ONCE])) for start in range(0, len(numbers), AT_ONCE)]
    return sorted(parts, key=lambda part: part.numbers[-1] - len(checks[part.slot]))[::-1]


def run_side_by_side(
    chosen: Sequence[Provided],
    wanted: Wanted,
    workers: int,
    end: float | None,
    on_result: Callable[[CaseResult], None] | None,
    lookup: Lookup = Registry.discover,
) -> list[SlotResult]:
    """The results of every slot, as one process would give them.

    Args:
        end: a time of ``time.monotonic``: processes are stopped then, and what they have not ended is not run.
        lookup: gives the registry in each process; a function of a module.

    Raises:
        InterruptedRun: an interrupt (Ctrl-C) came; it has the results so far.
    """
    checks = {entry.slot.name: checks_of(entry, wanted) for entry in chosen}
    results: dict[str, dict[int, CaseResult]] = {name: {} for name in checks}
    waiting = deque(parts_of(checks))
    team: list[_Worker] = []
    leaving: list[_Worker] = []  # a process with a GPU takes a while to end, and others have results meanwhile

    def found() -> list[SlotResult]:
        return [slot_result(entry, checks[entry.slot.name], results[entry.slot.name]) for entry in chosen]

    try:
        for _ in range(min(workers, len(waiting))):
            team.append(_Worker(wanted, lookup))
        while team and (end is None or time.monotonic() < end):
            for worker in [worker for worker in team if worker.part is None]:
                if waiting:
                    worker.give(waiting.popleft())
                else:
                    worker.stop()
                    team.remove(worker)
                    leaving.append(worker)
            told = wait([worker.pipe for worker in team], _LOOK_S)
            for worker in [worker for worker in team if worker.pipe in told]:
                ended = worker.take()
                if worker.left is not None:  # nothing more comes of it
                    waiting.extendleft([worker.left] if worker.left.numbers else [])
                    leaving.append(worker)
                    team[team.index(worker)] = _Worker(wanted, lookup)
                if ended is None:
                    continue
                number, result = ended
                name = worker.slot
                results[name][number] = result or _died(name, checks[name][number].id, worker.exit_code())
                if on_result is not None:
                    on_result(results[name][number])
    except KeyboardInterrupt:
        raise InterruptedRun(found()) from None
    finally:
        for worker in (*team, *leaving):
            worker.kill()
    return found()


def _died(slot: str, case: str, code: int | None) -> CaseResult:
    how = f"exit code {code}"
    with suppress(ValueError):  # a signal that Python has a name for
        how = signal.Signals(-(code or 0)).name
    return CaseResult(slot=slot, case=case, ok=False, detail=(f"its process ended with {how}",))


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """An interrupt that comes meanwhile is raised afterwards; a process that is started meanwhile never has one."""
    resource_tracker.ensure_running()  # of multiprocessing: its start lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A process, and the checks that it has been given and has not ended.

    Attributes:
        part: None once it has ended all.
        left: None while it runs; what of its part has not been begun once it has ended.
    """

    def __init__(self, wanted: Wanted, lookup: Lookup) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.part: Part | None = None
        self.left: Part | None = None
        self.slot = ""
        self._process = context.Process(target=_work, args=(other, wanted, lookup), daemon=True)
        with _no_interrupt():  # of a terminal, which sends it to all: the first process ends the others
            self._process.start()
        other.close()

    def give(self, part: Part) -> None:
        self.part, self.slot = part, part.slot
        with suppress(BrokenPipeError):  # take() finds out
            self.pipe.send(part)

    def take(self) -> tuple[int, CaseResult | None] | None:
        """What the process says: a check's number and its result, which is None if the process ended in it; or
        nothing, if it ended between two of them.
        """
        assert self.part is not None
        try:
            said: tuple[int, CaseResult] | None = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.left = Part(self.slot, self.part.numbers[1:])
            return self.part.numbers[0], None
        if said is None:
            self.left = self.part
            return None
        left = tuple(other for other in self.part.numbers if other != said[0])
        self.part = Part(self.slot, left) if left else None
        return said

    def exit_code(self) -> int | None:
        self._process.join(_END_S)
        return self._process.exitcode

    def stop(self) -> None:
        with suppress(BrokenPipeError):
            self.pipe.send(None)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _work(pipe: Connection, wanted: Wanted, lookup: Lookup) -> None:
    """A process: runs the checks of each part that it is told, until it is told None. Leaves with None if a check broke
    its GPU, so that no other can run in it.
    """
    torch.set_num_threads(1)
    registry, checks = lookup(), dict[str, list[Check]]()
    with suppress(EOFError, ConnectionError):  # the first process is no more
        while (part := pipe.recv()) is not None:
            if part.slot not in checks:  # parts of a slot come one now, one later
                checks[part.slot] = checks_of(registry.get(part.slot), wanted)
            for number in part.numbers:
                run = checks[part.slot][number].run
                assert run is not None
                result = run()
                pipe.send((number, result))
                if not result.ok and is_broken(wanted.device):
                    pipe.send(None)
                    return
            if wanted.device.startswith("cuda"):
                with suppress(RuntimeError):  # the next case shows it
                    torch.cuda.empty_cache()  # the other processes need the memory


def is_broken(device: str) -> bool:
    """Whether nothing can run any more on a device in this process."""
    try:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
