"""Reports, slots and a clock made up for the tests of the benchmark. ``SlotOf`` is the slots' implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_mega_plugin.bench.records import (
    Cost,
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
from sgl_mega_plugin.contract import Case, Numerics, NumericsKind, Provided, Slot, SlotSetup, Stage
from sgl_mega_plugin.embedded import stages

RATES = Rates(
    read_tb_s=4.0,
    copy_tb_s=3.5,
    bytes_streamed=4 << 30,
    empty_launch_us=0.8,
    flush_us=60.0,
    flush_bytes=240 << 20,
    l2_bytes=60 << 20,
)
MACHINE = Machine(
    device="cuda",
    gpu="NVIDIA H200",
    driver="580.1",
    cuda="13.0",
    python="3.12.1",
    torch="2.11.0",
    triton="3.6.0",
    sglang="not installed",
    platform="Linux",
    commit="0123abc",
    dirty=True,
)
SMALL = Settings(device="cpu", batches=(1, 3), vocabs=(64,), dtypes=("float32",), repetitions=3, calls=2, input_sets=2)


def timing(median: float, *, mode: Mode = Mode.GRAPH, again: float | None = None) -> Timing:
    again = median if again is None else again
    return Timing.of(mode, [median - 0.1, median, median + 0.1], [again, again, again])


def slot_entry(median: float, *, mode: Mode = Mode.GRAPH) -> Entry:
    return Entry(name="accept_tail", role=Role.SLOT, summary="ours", timing=timing(median, mode=mode), launches=2)


def peer_entry(name: str, median: float | None, reason: str = "", *, mode: Mode = Mode.GRAPH) -> Entry:
    timed = None if median is None else timing(median, mode=mode)
    return Entry(name=name, role=Role.PEER, summary=f"what {name} is", timing=timed, reason=reason)


def result(batch: int, *entries: Entry, seam: str = "greedy_accept", dtype: str = "bfloat16") -> Result:
    size = Size(seam=seam, batch=batch, vocab=151_936, dtype=dtype)
    cost = Cost(bytes_read=8 * batch * 151_936 * 2, bytes_written=100 * batch)
    return Result(size=size, cost=cost, floor_us=cost.floor_us(4.0), entries=entries)


def report(*results: Result, gates: tuple[Gate, ...] = (), complete: bool = True) -> Report:
    passed = Gate(slot="accept_tail", distribution="sgl-mega-plugin", version="0.1.0", run=6, total=23)
    return Report(
        complete=complete,
        command="sgl-mega bench --quick",
        seconds=61.4,
        settings=Settings(),
        machine=MACHINE,
        rates=RATES,
        gates=gates or (passed,),
        results=results,
    )


@dataclass
class MadeClock:
    """Calls everything once and gives each the next time; what it timed is in ``timed``."""

    times: Iterator[float] = field(default_factory=lambda: iter(range(10, 10_000)))
    timed: list[tuple[str, int]] = field(default_factory=list)
    holds: bool = True  # whether a graph can hold a peer's call

    def capturable(self, call: Callable[[], object]) -> bool:
        return self.holds

    def in_graph(self, calls: Sequence[Callable[[], object]]) -> Any:
        return self._series("graph", calls, launches=2)

    def called(self, calls: Sequence[Callable[[], object]]) -> Any:
        return self._series("called", calls, launches=None)

    def rates(self) -> Rates:
        return RATES

    def check(self) -> None:
        """Nothing to check."""

    def _series(self, mode: str, calls: Sequence[Callable[[], object]], *, launches: int | None) -> Any:
        for call in calls:
            call()
        self.timed.append((mode, len(calls)))
        time = float(next(self.times))
        return MadeSeries([time, time + 1, time + 2], [time + 1] * 3, launches, None if launches is None else 0)


@dataclass
class MadeSeries:
    first: list[float]
    again: list[float]
    launches: int | None
    copies: int | None


def provided(name: str, seam: str = "greedy_accept", stage: Stage = Stage.VERIFY_ACCEPT, **fields: Any) -> Provided:
    """A slot of this module: right, unless ``implementation`` names another class of it."""
    paths = {
        "implementation": f"bench_made:{seam}_slot",
        "reference": f"bench_made:{seam}",
        "cases": f"bench_made:{seam}_cases",
    }
    slot = Slot(
        name=name,
        stage=stage,
        summary="made up",
        seam=seam,
        numerics=Numerics(kind=NumericsKind.BITWISE),
        **(paths | fields),
    )
    return Provided(slot=slot, distribution="made", version="2.5")


def greedy_accept(
    *,
    candidates: torch.Tensor,
    target_logits: torch.Tensor | None,
    target_tokens: torch.Tensor | None,
    seq_lens: torch.Tensor,
    verify_lens: torch.Tensor,
    simulated_correct: torch.Tensor | None,
    out_correct_lens: torch.Tensor,
    out_bonus_tokens: torch.Tensor,
    out_commit_lens: torch.Tensor,
    out_new_seq_lens: torch.Tensor,
    out_tokens: torch.Tensor,
) -> None:
    stages.greedy_accept(**locals())


class greedy_accept_slot:  # noqa: N801  named after its seam, as ``provided`` looks for it
    wrong = False
    fails_above: int | None = None

    def __init__(self, setup: SlotSetup) -> None:
        if self.fails_above is not None and setup.max_batch > self.fails_above:
            raise ValueError(f"B {setup.max_batch}\nis too large")

    def __call__(
        self,
        *,
        candidates: torch.Tensor,
        target_logits: torch.Tensor | None,
        target_tokens: torch.Tensor | None,
        seq_lens: torch.Tensor,
        verify_lens: torch.Tensor,
        simulated_correct: torch.Tensor | None,
        out_correct_lens: torch.Tensor,
        out_bonus_tokens: torch.Tensor,
        out_commit_lens: torch.Tensor,
        out_new_seq_lens: torch.Tensor,
        out_tokens: torch.Tensor,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        stages.greedy_accept(**arguments)
        if self.wrong:
            out_bonus_tokens.add_(1)


class wrong_slot(greedy_accept_slot):  # noqa: N801
    wrong = True


class small_slot(greedy_accept_slot):  # noqa: N801
    fails_above = 2


def greedy_accept_cases() -> Iterator[Case]:
    for count in range(1, 6):
        yield Case(f"b{count}", lambda device, count=count: _case(device, count))  # type: ignore[misc]


def _case(device: str, batch: int) -> dict[str, Any]:
    from sgl_mega_plugin.bench.workloads import WORKLOADS

    size = Size(seam="greedy_accept", batch=batch, vocab=17, dtype="float32")
    return WORKLOADS["greedy_accept"].sets(size, device, 1)[0]


def context_kv(
    *,
    projected_kv: torch.Tensor,
    k_norm_weights: torch.Tensor,
    cos_sin: torch.Tensor,
    neox: bool,
    positions: torch.Tensor,
    cache_locs: torch.Tensor,
    location_map: torch.Tensor | None,
    ring_rows: torch.Tensor | None,
    ring_size: int,
    commit_lens: torch.Tensor,
    eps: float,
    kv_scales: torch.Tensor | None,
    out_keys: Sequence[torch.Tensor],
    out_values: Sequence[torch.Tensor],
) -> None:
    stages.context_kv(**locals())
