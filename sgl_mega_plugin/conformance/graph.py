"""A slot inside a CUDA graph: captured once, replayed on other contents of the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sgl_mega_plugin.conformance.arguments import Arguments, copy_of, load, poison
from sgl_mega_plugin.contract import Case

_WARM_UP = 2


def allocations(call: Callable[..., None], inputs: Arguments, device: str) -> list[str]:
    """Device allocations of a call after warm-up; a slot makes none."""
    arguments = copy_of(inputs)
    call(**arguments)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    call(**arguments)
    made = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
    return [f"a call after warm-up allocates device memory {made} times; must be 0"] if made else []


def replays(
    call: Callable[..., None],
    case: Case,
    captured_on: Arguments,
    steps: Sequence[tuple[Arguments, Arguments]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any], Arguments]]:
    """Capture a call, then for each (inputs, expected) replay it on those inputs.

    Yields the arguments after the replay, a copy from before it, and what is expected.
    """
    static = copy_of(captured_on)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            call(**static)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**static)
    for inputs, expected in steps:
        load(static, inputs)
        poison(static, case.keep)
        before = copy_of(static)
        graph.replay()
        torch.cuda.synchronize()
        yield static, before, expected
