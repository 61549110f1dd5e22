"""A slot's launches without its Python: captured once, replayed on other contents of the same memory.

On CUDA that is a CUDA graph. On a CPU it is a tape: every operator of torch and every launch of Triton's
interpreter that a call made, with its arguments, run again into the memory that it wrote. What the call's Python chose
or kept is fixed on either. Used by the runner.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sgl_mega_plugin.conformance.arguments import Arguments, copy_of, load, poison
from sgl_mega_plugin.contract import Case

_WARM_UP = 2
_INTERPRETER = "triton.runtime.interpreter"
Replay = Callable[[], None]


def allocations(call: Callable[..., None], inputs: Arguments, device: str) -> list[str]:
    """Device allocations and host waits of a call after warm-up; a slot makes none.

    Allocations are counted by torch's own allocator alone; another one, such as cudaMallocAsync, keeps no count.
    """
    arguments = copy_of(inputs)
    call(**arguments)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)
    with _waits_are_errors():
        call(**arguments)
    made = torch.cuda.memory_stats(device).get("allocation.all.allocated", 0) - before
    return [f"a call after warm-up allocates device memory {made} times; must be 0"] if made else []


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class Step(NamedTuple):
    """Contents to replay on, and the outputs expected there."""

    inputs: Arguments
    expected: Arguments


class Run(NamedTuple):
    """One replay: what it was, the arguments after it, a copy from before it, and what is expected."""

    what: str
    found: Arguments
    before: Arguments
    expected: Arguments
    is_last: bool


def graph_replays(call: Callable[..., None], case: Case, steps: Sequence[Step]) -> Iterator[Run]:
    """Capture a call on the first step's contents in a CUDA graph, then replay it on each of the others."""
    memory = copy_of(steps[0].inputs)
    return _runs("a graph", _captured(call, memory), memory, case, steps[1:])


def tape_replays(tape: Tape, case: Case, memory: Arguments, steps: Sequence[Step]) -> Iterator[Run]:
    """Replay a call that a tape recorded on this memory on the contents of each step."""
    return _runs("the recorded launches", tape.replay, memory, case, steps)


def _runs(what: str, replay: Replay, memory: Arguments, case: Case, steps: Sequence[Step]) -> Iterator[Run]:
    for number, step in enumerate(steps, 1):
        load(memory, step.inputs)
        poison(memory, case.keep)
        before = copy_of(memory)
        replay()
        yield Run(f"replay {number} of {what}", memory, before, step.expected, number == len(steps))


def _captured(call: Callable[..., None], static: Arguments) -> Replay:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            call(**static)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**static)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


class Tape(TorchDispatchMode):
    """Every operator and interpreted launch of a call, in order."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._steps: list[Replay] = []
        self._in_launch = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not self._in_launch:
            self._steps.append(lambda: _run_again(func, args, kwargs, made))
        return made

    def recording(self, call: Callable[..., None]) -> Callable[..., None]:
        """The call, recorded while it runs."""

        def recorded(**arguments: Any) -> None:
            with self, self._launches():
                call(**arguments)

        return recorded

    @contextmanager
    def _launches(self) -> Iterator[None]:
        """Record the interpreter's launches as steps, and not the operators inside them."""
        interpreter = sys.modules.get(_INTERPRETER)
        if interpreter is None:
            yield
            return
        executor = interpreter.GridExecutor
        launch = executor.__call__

        def recorded(grid: Any, *args: Any, **kwargs: Any) -> None:
            self._steps.append(lambda: launch(grid, *args, **kwargs))
            self._in_launch = True
            try:
                launch(grid, *args, **kwargs)
            finally:
                self._in_launch = False

        executor.__call__ = recorded
        try:
            yield
        finally:
            executor.__call__ = launch

    def replay(self) -> None:
        for step in self._steps:
            step()


def _run_again(func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
    """Run an operator and put what it returns where its first results lie; views and in-place results are there."""
    again = func(*args, **kwargs)
    if any(value.alias_info is not None for value in func._schema.returns):
        return
    for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
