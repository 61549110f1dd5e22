"""The timer's arithmetic on a GPU made up of a clock: what a sample is, what is counted, which buffer is read when."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_mega_plugin.bench import timer as timer_module
from sgl_mega_plugin.bench.kernel import READ_BLOCK
from sgl_mega_plugin.bench.timer import Timer, graph_nodes

FLUSH_US, COPY_US, LAUNCH_US, REPLAY_US = 50.0, 40.0, 1.0, 9.0


@dataclass
class MadeGpu:
    """Work takes its time at once, or is kept for a replay while a graph is captured. Microseconds."""

    now: float = 0.0
    capturing: list[tuple[float, str]] | None = None
    done: list[str] = field(default_factory=list)

    def work(self, cost: float, name: str) -> None:
        if self.capturing is not None:
            self.capturing.append((cost, name))
        else:
            self.now += cost
            self.done.append(name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MadeGpu:
    made = MadeGpu()
    buffers: dict[int, str] = {}

    class Graph:
        def __init__(self, keep_graph: bool) -> None:
            assert keep_graph, "the nodes cannot be counted otherwise"
            self.nodes: list[tuple[float, str]] = []
            self.ready = False

        def raw_cuda_graph(self) -> list[tuple[float, str]]:
            return self.nodes

        def instantiate(self) -> None:
            self.ready = True

        def replay(self) -> None:
            assert self.ready
            made.now += REPLAY_US
            for cost, name in self.nodes:
                made.work(cost, name)

        def reset(self) -> None:
            self.ready = False

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        made.capturing = graph.nodes
        yield
        made.capturing = None

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = made.now

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) / 1e3  # milliseconds, as torch's

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        yield

    def read(buffer: torch.Tensor, sums: torch.Tensor) -> None:
        made.work(FLUSH_US, "flush " + buffers.setdefault(buffer.data_ptr(), "ABCDEF"[len(buffers)]))

    def nodes(graph: list[tuple[float, str]]) -> tuple[int, int]:
        copies = sum(name.startswith("copy") for _, name in graph)
        return len(graph) - copies, copies

    class Nothing:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args: made.work(LAUNCH_US, "nothing")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=READ_BLOCK * 4),
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": Event,
        "synchronize": lambda device=None: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": on,
        "mem_get_info": lambda device: (64 * READ_BLOCK, 0),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timer_module, "_SMALLEST_L2", 0)
    monkeypatch.setattr(timer_module, "_launch_read", read)
    monkeypatch.setattr(timer_module, "_launch_copy", lambda target, source: made.work(COPY_US, "copy"))
    monkeypatch.setattr(timer_module, "graph_nodes", nodes)
    monkeypatch.setattr(timer_module, "nothing", Nothing())
    return made


@pytest.fixture
def timer(gpu: MadeGpu) -> Timer:
    return Timer("cpu", repetitions=3, calls=4)


def test_a_sample_is_the_time_of_a_call_alone(gpu: MadeGpu, timer: Timer) -> None:
    """Neither the flush nor the graph's own launch is in it."""
    series = timer.in_graph([lambda: gpu.work(7.0, "slot")])
    assert series.first == pytest.approx([7.0] * 3)
    assert series.again == pytest.approx([7.0] * 3)


def test_calls_take_turns_and_are_averaged(gpu: MadeGpu, timer: Timer) -> None:
    series = timer.in_graph([lambda: gpu.work(6.0, "a"), lambda: gpu.work(8.0, "b")])
    assert series.first == pytest.approx([7.0] * 3)
    assert gpu.done[-8:] == ["a", "flush A", "b", "flush B", "a", "flush A", "b", "flush B"]


def test_a_flush_never_reads_the_buffer_of_the_one_before(gpu: MadeGpu, timer: Timer) -> None:
    timer.in_graph([lambda: gpu.work(7.0, "slot")])
    flushes = [name for name in gpu.done if name.startswith("flush")]
    replayed = flushes[1:]  # the first compiles the kernel
    assert len(replayed) == (2 * 2 + 2 * 3 * 2) * 4, "warm-up and two series, each of reference and graph"
    assert all(one != other for one, other in pairwise(replayed))


def test_nodes_of_a_call_are_those_without_the_flush(gpu: MadeGpu, timer: Timer) -> None:
    def call() -> None:
        for name in ("one", "two", "copy"):
            gpu.work(1.0, name)

    series = timer.in_graph([call])
    assert (series.launches, series.copies) == (2, 1)


def test_calls_that_differ_have_no_count(gpu: MadeGpu, timer: Timer) -> None:
    turns = iter([2, 2, 2, 2, 1, 2, 1, 3])  # warm-up of two calls, twice; then the four of the capture

    def call() -> None:
        for _ in range(next(turns)):
            gpu.work(1.0, "kernel")

    assert timer.in_graph([call, call]).launches is None


def test_calls_from_python_start_cold_and_alone(gpu: MadeGpu, timer: Timer) -> None:
    series = timer.called([lambda: gpu.work(7.0, "slot")])
    assert series.first == pytest.approx([7.0] * 3)
    assert gpu.done[-4:] == ["flush B", "slot", "flush A", "slot"]
    assert series.launches is None


def test_rates_are_bytes_over_time(gpu: MadeGpu, timer: Timer) -> None:
    rates = timer.rates()
    # A quarter of the free bytes, which are read in one flush's time.
    assert rates.bytes_streamed == 16 * READ_BLOCK
    assert rates.read_tb_s == pytest.approx(16 * READ_BLOCK / FLUSH_US * 1e-6)
    assert rates.copy_tb_s == pytest.approx(16 * READ_BLOCK / COPY_US * 1e-6), "half of it, read and written"
    assert rates.empty_launch_us == pytest.approx(LAUNCH_US)
    assert rates.flush_us == pytest.approx(FLUSH_US + REPLAY_US / 4)
    assert rates.flush_bytes == 4 * rates.l2_bytes


@pytest.mark.parametrize(
    ("message", "expected"), [("called a synchronizing CUDA operation", False), (None, True)], ids=["waits", "does-not"]
)
def test_a_call_that_waits_is_found_before_it_is_captured(timer: Timer, message: str | None, expected: bool) -> None:
    calls = iter([None, message])

    def call() -> None:
        found = next(calls)
        if found is not None:
            raise RuntimeError(found)

    assert timer.capturable(call) is expected


def test_another_failure_is_not_taken_for_a_wait(timer: Timer) -> None:
    calls = iter([False, True])

    def call() -> None:
        if next(calls):
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        timer.capturable(call)


class MadeDriver:
    """A graph of two kernels, a copy, a fill and an empty node, as the driver tells of it."""

    kinds = (0, 1, 2, 0, 5)

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def cuGraphGetNodes(self, graph: ctypes.c_void_p, nodes: Any, count: Any) -> int:  # noqa: N802
        assert graph.value == 77
        count._obj.value = len(self.kinds)
        for index in range(0 if nodes is None else len(self.kinds)):
            nodes[index] = index + 1
        return int(self.fails)

    def cuGraphNodeGetType(self, node: ctypes.c_void_p, kind: Any) -> int:  # noqa: N802
        kind._obj.value = self.kinds[(node.value or 0) - 1]
        return 0


def test_the_driver_counts_kernels_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: MadeDriver())
    assert graph_nodes(77) == (2, 2)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: MadeDriver(fails=True))
    assert graph_nodes(77) is None


def test_without_a_driver_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert graph_nodes(77) is None
