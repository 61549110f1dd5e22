"""Times calls on a GPU: cold L2, graph replay, events. Needs CUDA; used by ``runner``, which passes the samples on.

A graph holds N times (call, flush): each flush reads a buffer four times as large as L2, so every call finds a
cold cache whose lines are clean, and what a call leaves to be written back is written in its own graph. A second
graph holds the N flushes alone. Both are replayed in turn, and a sample is the difference of the two times over
N. So the launch of the graph cancels, and a call pays for its own kernel boundaries as it does inside a
step's graph. Flushes go through two buffers in turn: with one, part of it would survive in L2 and what a call evicts
of it would be charged to the call.
"""

from __future__ import annotations

import ctypes
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_mega_plugin.bench.kernel import READ_BLOCK, nothing, stream_read
from sgl_mega_plugin.bench.records import Rates

Call = Callable[[], object]

_WARM_UP = 2  # calls of each, then replays: compilation and lazy loading stay out
_FLUSH_OVER_L2 = 4  # times L2: of a random replacement, exp(-4) of the old lines would survive
_SMALLEST_L2 = 32 << 20
_STREAM_BYTES = 4 << 30
_STREAM_SAMPLES = 20
_MOST_CALLED = 30  # samples of calls from Python, each of which may take milliseconds
_KERNEL, _COPY_AND_FILL = 0, (1, 2)  # CUgraphNodeType


@dataclass(frozen=True)
class Series:
    """Microseconds a call, sample by sample, of two series; and what the graph of a call consists of."""

    first: list[float]
    again: list[float]
    launches: int | None = None
    copies: int | None = None


class Timer:
    """Times calls on one device. Holds the flush buffers, so it is built once a run."""

    def __init__(self, device: str, *, repetitions: int, calls: int) -> None:
        self._device = torch.device(device)
        self._repetitions = repetitions
        self._calls = calls
        self.l2_bytes = max(int(torch.cuda.get_device_properties(self._device).L2_cache_size), _SMALLEST_L2)
        self._buffers = [_buffer(self.l2_bytes * _FLUSH_OVER_L2, self._device) for _ in range(2)]
        self.flush_bytes = _nbytes(self._buffers[0])
        self._sums = torch.empty(_programs(self._buffers[0]), dtype=torch.int32, device=self._device)
        self._read(self._buffers[0])  # compiled before any capture
        self._reference, _ = self._capture([None] * calls)

    def capturable(self, call: Call) -> bool:
        """Whether a graph can hold a call: not if it waits for the GPU. A capture that fails may spoil later ones."""
        call()  # what happens once only may wait
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            if "synchroniz" in str(error):
                return False
            raise
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return True

    def in_graph(self, calls: Sequence[Call]) -> Series:
        """Time calls, in turn, inside a graph. Raises what the calls raise, during capture too."""
        turns = [calls[index % len(calls)] for index in range(self._calls)]
        _warm_up(calls)
        graph, nodes = self._capture(turns)
        try:
            for _ in range(_WARM_UP):
                self._reference.replay()
                graph.replay()
            first, again = (self._replays(graph) for _ in range(2))
        finally:
            torch.cuda.synchronize(self._device)
            graph.reset()
        kernels, others = (_a_call(count, self._calls) for count in nodes) if nodes else (None, None)
        # One of a call's kernel nodes is the flush.
        return Series(first, again, launches=None if kernels is None else kernels - 1, copies=others)

    def called(self, calls: Sequence[Call]) -> Series:
        """Time calls from Python, one by one on an idle GPU with a cold L2: host launches and waits included."""
        _warm_up(calls)
        first, again = (self._one_by_one(calls) for _ in range(2))
        return Series(first, again)

    def rates(self) -> Rates:
        """Measure what reading, copying and an empty launch cost. Memory for it is returned before the end."""
        read, copy, streamed = self._stream()
        empty = self.in_graph([lambda: nothing[(1,)](self._sums)])
        flush = [self._replay(self._reference) / self._calls for _ in range(self._repetitions)]
        return Rates(
            read_tb_s=read,
            copy_tb_s=copy,
            bytes_streamed=streamed,
            empty_launch_us=statistics.median(empty.first),
            flush_us=statistics.median(flush),
            flush_bytes=self.flush_bytes,
            l2_bytes=self.l2_bytes,
        )

    def _stream(self) -> tuple[float, float, int]:
        """Rates of a read and of a copy in TB/s, and the bytes that they went through."""
        free, _ = torch.cuda.mem_get_info(self._device)
        source = _buffer(min(_STREAM_BYTES, free // 4), self._device)
        sums = torch.empty(_programs(source), dtype=torch.int32, device=self._device)
        half = source.numel() // 2
        read = _median_seconds(lambda: _launch_read(source, sums), self._device)
        copy = _median_seconds(lambda: _launch_copy(source[:half], source[half : 2 * half]), self._device)
        return _nbytes(source) / read * 1e-12, 2 * _nbytes(source[:half]) / copy * 1e-12, _nbytes(source)

    def check(self) -> None:
        """Raise if an earlier failure left the device unusable."""
        torch.cuda.synchronize(self._device)
        if int(torch.ones(2, device=self._device).sum()) != 2:
            raise RuntimeError(f"{self._device} computes wrong sums")

    def _read(self, buffer: Tensor) -> None:
        _launch_read(buffer, self._sums)

    def _capture(self, turns: Sequence[Call | None]) -> tuple[torch.cuda.CUDAGraph, tuple[int, int] | None]:
        """A graph of each call and a flush behind it; and how many kernels, and copies and fills, it has."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            for index, call in enumerate(turns):
                if call is not None:
                    call()
                self._read(self._buffers[index % 2])
        nodes = graph_nodes(graph.raw_cuda_graph())
        graph.instantiate()
        return graph, nodes

    def _replays(self, graph: torch.cuda.CUDAGraph) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(self._repetitions)]
        for start, middle, end in events:
            start.record()
            self._reference.replay()
            middle.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self._device)
        return [
            (middle.elapsed_time(end) - start.elapsed_time(middle)) * 1e3 / self._calls for start, middle, end in events
        ]

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of one replay."""
        with _elapsed(self._device) as microseconds:
            graph.replay()
        return microseconds[0]

    def _one_by_one(self, calls: Sequence[Call]) -> list[float]:
        samples = []
        for index in range(min(self._repetitions, _MOST_CALLED)):
            self._read(self._buffers[index % 2])
            torch.cuda.synchronize(self._device)
            with _elapsed(self._device) as microseconds:
                calls[index % len(calls)]()
            samples.append(microseconds[0])
        return samples


def graph_nodes(graph: int) -> tuple[int, int] | None:
    """Kernel nodes, and copy and fill nodes, of a CUgraph by its handle; None where the driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, handle = ctypes.c_size_t(), ctypes.c_void_p(graph)
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        return None
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        return None
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            return None
        kinds.append(kind.value)
    return kinds.count(_KERNEL), sum(kinds.count(kind) for kind in _COPY_AND_FILL)


def _a_call(nodes: int, calls: int) -> int | None:
    """Nodes of one call; None where the calls differ."""
    return nodes // calls if nodes % calls == 0 else None


def _warm_up(calls: Sequence[Call]) -> None:
    """Call each on a side stream, as a capture does: compilation and one-time buffers come before it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def _median_seconds(call: Call, device: torch.device) -> float:
    for _ in range(_WARM_UP):
        call()
    samples = []
    for _ in range(_STREAM_SAMPLES):
        with _elapsed(device) as microseconds:
            call()
        samples.append(microseconds[0])
    return statistics.median(samples) * 1e-6


@contextmanager
def _elapsed(device: torch.device) -> Iterator[list[float]]:
    """Microseconds between two events around a block, in the list that it yields."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: list[float] = []
    start.record()
    yield found
    end.record()
    torch.cuda.synchronize(device)
    found.append(start.elapsed_time(end) * 1e3)


def _launch_read(buffer: Tensor, sums: Tensor) -> None:
    stream_read[(_programs(buffer),)](buffer, sums, BLOCK=READ_BLOCK, num_warps=8)


def _launch_copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _buffer(nbytes: int, device: torch.device) -> Tensor:
    """About that many bytes of random int32, a whole number of a read's blocks."""
    elements = nbytes // 4 // READ_BLOCK * READ_BLOCK
    return torch.randint(-(1 << 31), (1 << 31) - 1, (elements,), dtype=torch.int32, device=device)


def _programs(buffer: Tensor) -> int:
    return buffer.numel() // READ_BLOCK


def _nbytes(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()
