"""What a benchmark run says, as data: frozen records that are written as JSON and read back. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from sgl_mega_plugin.contract import SEAMS, Record, Stage

#: Raised with every change of the records' fields, so that an old file is not misread.
FORMAT = 1


class Mode(StrEnum):
    """How a call was timed."""

    GRAPH = "graph"  # inside a replayed CUDA graph: time on the GPU alone
    CALLED = "called"  # called from Python on an idle GPU: the host's launches included


class Role(StrEnum):
    """Whether a row is what is measured or what it is compared with."""

    SLOT = "slot"
    PEER = "peer"


class Size(Record):
    """One point of a seam's workload; ``vocab`` and ``dtype`` are None where the seam shows neither."""

    seam: str
    variant: str = ""
    batch: int = Field(ge=1)
    vocab: int | None = None
    dtype: str | None = None

    @property
    def stage(self) -> Stage:
        return SEAMS[self.seam].stage

    @property
    def text(self) -> str:
        """One line for people: "draft_block sampled B 4 V 151936 bfloat16"."""
        vocab = "" if self.vocab is None else f"V {self.vocab}"
        return " ".join(word for word in (self.seam, self.variant, f"B {self.batch}", vocab, self.dtype or "") if word)


class Cost(Record):
    """The bytes that a call cannot avoid: each input element that it needs and each output element, once."""

    bytes_read: int = Field(ge=0)
    bytes_written: int = Field(ge=0)
    note: str = ""  # where the count is not the sum of the tensors

    @property
    def total(self) -> int:
        return self.bytes_read + self.bytes_written

    def floor_us(self, terabytes_a_second: float) -> float:
        """The time in microseconds that the bytes take at a rate in TB/s."""
        if terabytes_a_second <= 0:
            raise ValueError(f"rate {terabytes_a_second} TB/s; must be above 0")
        return self.total / terabytes_a_second * 1e-6


class Timing(Record):
    """Microseconds a call: median and quartiles of one series, and the median of a second one of the same thing."""

    mode: Mode
    median_us: float
    lower_us: float  # first quartile
    upper_us: float  # third quartile
    again_us: float
    samples: int = Field(ge=2)  # in each series

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if not self.lower_us <= self.median_us <= self.upper_us:
            raise ValueError(f"quartiles {self.lower_us}, {self.median_us}, {self.upper_us} are out of order")
        return self

    @classmethod
    def of(cls, mode: Mode, first: Sequence[float], again: Sequence[float]) -> Self:
        """Summarise two series of the same length, each of two samples or more."""
        if len(first) != len(again) or len(first) < 2:
            raise ValueError(f"series of {len(first)} and {len(again)} samples; must be two of the same length >= 2")
        lower, median, upper = statistics.quantiles(first, n=4, method="inclusive")
        return cls(
            mode=mode,
            median_us=median,
            lower_us=lower,
            upper_us=upper,
            again_us=statistics.median(again),
            samples=len(first),
        )

    @property
    def spread_us(self) -> float:
        """How far two timings of the same thing lie apart; a smaller difference between versions is noise."""
        return abs(self.median_us - self.again_us)


#: How the reason of an entry begins whose turn did not come.
NOT_STARTED = "not started"


class Entry(Record):
    """One slot or peer at one size: its time, or why it has none."""

    name: str
    role: Role
    summary: str
    timing: Timing | None = None
    launches: int | None = None  # kernel nodes of the captured graph; None where none was captured or read
    copies: int | None = None  # its copy and fill nodes
    agreement: float | None = None  # share of integer outputs equal to the first slot's; None where not comparable
    reason: str = ""  # why it was not timed

    @model_validator(mode="after")
    def _is_timed_or_says_why(self) -> Self:
        if (self.timing is None) != bool(self.reason):
            raise ValueError(f"entry {self.name!r} has to have either a timing or a reason why not")
        return self


class Result(Record):
    """Every slot and peer at one size. No cost where nothing was run."""

    size: Size
    cost: Cost | None
    floor_us: float | None
    entries: tuple[Entry, ...]

    def first_slot(self, mode: Mode) -> Timing | None:
        """The timing that the others are compared with: the first slot's in the same mode."""
        found = (e.timing for e in self.entries if e.role is Role.SLOT and e.timing and e.timing.mode is mode)
        return next(found, None)

    def times_slot(self, entry: Entry) -> float | None:
        """An entry's time over the first slot's; above 1 is slower than the slot."""
        ours = None if entry.timing is None else self.first_slot(entry.timing.mode)
        return (
            None
            if ours is None or entry.timing is None or ours.median_us <= 0
            else entry.timing.median_us / ours.median_us
        )

    def times_floor(self, entry: Entry) -> float | None:
        """An entry's time over the floor of its bytes."""
        return entry.timing.median_us / self.floor_us if entry.timing and self.floor_us else None


class Gate(Record):
    """A slot's conformance cases on the device, before it is timed."""

    slot: str
    distribution: str
    version: str
    run: int
    total: int  # cases that the slot has
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.run > 0 and not self.failures


class Rates(Record):
    """What the memory and a launch cost on this GPU, measured in the same run."""

    read_tb_s: float = Field(gt=0)  # streaming read
    copy_tb_s: float = Field(gt=0)  # device-to-device copy, bytes read plus bytes written
    bytes_streamed: int
    empty_launch_us: float  # an empty kernel in the same graph that times the slots
    flush_us: float  # the read that empties L2 between two calls; subtracted
    flush_bytes: int
    l2_bytes: int


class Clocks(Record):
    """What nvidia-smi says of the GPU; it is read, never set. Empty without nvidia-smi."""

    when: str
    values: dict[str, str] = Field(default_factory=dict)


class Machine(Record):
    """Where a run took place."""

    device: str
    gpu: str
    driver: str
    cuda: str
    python: str
    torch: str
    triton: str
    sglang: str
    platform: str
    commit: str  # "unknown" without git
    dirty: bool | None  # None where the commit is unknown
    clocks: tuple[Clocks, ...] = ()


class Settings(Record):
    """What a run was asked for."""

    device: str = "cuda"
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    vocabs: tuple[int, ...] = (151_936, 49_152)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    repetitions: int = Field(default=100, ge=2)  # samples of a series
    calls: int = Field(default=16, ge=2, multiple_of=2)  # in one graph
    input_sets: int = Field(default=4, ge=1)  # that the calls go through in turn
    most_cases: int | None = Field(default=None, ge=1)  # of a slot before it is timed; None is all
    peers: tuple[str, ...] | None = None  # names; None is every peer
    time_limit: float | None = Field(default=None, gt=0)  # seconds after which no further size is started

    def wants(self, peer: str) -> bool:
        """Whether the peer of that name is to be timed."""
        return self.peers is None or peer in self.peers


#: ``--quick``: a minute instead of the full table.
QUICK = Settings(
    batches=(1, 4, 32),
    vocabs=(151_936,),
    dtypes=("bfloat16",),
    repetitions=30,
    calls=8,
    most_cases=6,
    peers=("eager", "engine", "engine-eager", "engine-switches"),
)


class Report(Record):
    """A whole run, or one so far: ``complete`` is false while it goes on."""

    format: int = FORMAT
    complete: bool
    command: str
    seconds: float
    settings: Settings
    machine: Machine
    rates: Rates | None
    gates: tuple[Gate, ...]
    results: tuple[Result, ...]

    @model_validator(mode="after")
    def _is_of_this_format(self) -> Self:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}; this version reads format {FORMAT}: run the benchmark again")
        return self

    @property
    def ok(self) -> bool:
        """Whether every slot passed its cases and was timed at every size."""
        slots = [entry for result in self.results for entry in result.entries if entry.role is Role.SLOT]
        return bool(slots) and all(gate.ok for gate in self.gates) and all(entry.timing for entry in slots)
