"""Records of a benchmark: statistics, floors, ratios, and what they refuse."""

from __future__ import annotations

import pytest
from bench_made import peer_entry, report, result, slot_entry, timing
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sgl_mega_plugin.bench.records import FORMAT, QUICK, Cost, Entry, Gate, Mode, Report, Role, Settings, Size, Timing


def test_quartiles_are_those_of_the_first_series() -> None:
    found = Timing.of(Mode.GRAPH, [5.0, 1.0, 3.0, 2.0, 4.0], [9.0, 8.0, 7.0, 8.0, 8.0])
    assert (found.lower_us, found.median_us, found.upper_us, found.again_us) == (2.0, 3.0, 4.0, 8.0)
    assert (found.samples, found.spread_us) == (5, 5.0)


@given(st.lists(st.floats(0.01, 1e6), min_size=2, max_size=40))
def test_quartiles_lie_inside_the_samples(samples: list[float]) -> None:
    found = Timing.of(Mode.CALLED, samples, samples)
    assert min(samples) <= found.lower_us <= found.median_us <= found.upper_us <= max(samples)
    assert found.spread_us == pytest.approx(0, abs=1e-9 * max(samples))


@pytest.mark.parametrize(("first", "again"), [([1.0], [1.0]), ([], []), ([1.0, 2.0], [1.0])])
def test_series_too_short_or_unequal_are_refused(first: list[float], again: list[float]) -> None:
    with pytest.raises(ValueError, match="of the same length >= 2"):
        Timing.of(Mode.GRAPH, first, again)


def test_quartiles_out_of_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="out of order"):
        Timing(mode=Mode.GRAPH, median_us=2, lower_us=3, upper_us=4, again_us=2, samples=5)


@pytest.mark.parametrize(
    ("read", "written", "rate", "expected"),
    [(4_000_000, 0, 4.0, 1.0), (3_000_000, 1_000_000, 4.0, 1.0), (0, 0, 4.0, 0.0), (9_120_000_000, 0, 4.56, 2000.0)],
)
def test_the_floor_is_bytes_over_rate(read: int, written: int, rate: float, expected: float) -> None:
    assert Cost(bytes_read=read, bytes_written=written).floor_us(rate) == pytest.approx(expected, rel=1e-12)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Cost(bytes_read=1, bytes_written=0).floor_us(0.0)


def test_ratios_compare_like_with_like() -> None:
    """A peer that was called from Python is compared with the slot called from Python."""
    called = slot_entry(40.0, mode=Mode.CALLED)
    peers = (peer_entry("engine", 30.0), peer_entry("eager", 400.0, mode=Mode.CALLED), peer_entry("gone", None, "why"))
    found = result(4, slot_entry(10.0), called, *peers)
    assert [found.times_slot(entry) for entry in found.entries] == [1.0, 1.0, 3.0, 10.0, None]
    assert found.times_floor(peers[0]) == pytest.approx(
        30.0 / (found.cost or Cost(bytes_read=0, bytes_written=0)).floor_us(4.0)
    )
    assert result(4, peer_entry("engine", 30.0)).times_slot(peers[0]) is None


@pytest.mark.parametrize("fields", [{}, {"timing": timing(1.0), "reason": "both"}], ids=["neither", "both"])
def test_an_entry_is_timed_or_says_why_not(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="either a timing or a reason"):
        Entry.model_validate({"name": "x", "role": Role.PEER, "summary": "y"} | fields)


_FAILED = Gate(slot="accept_tail", distribution="d", version="1", run=2, total=2, failures=("b1: wrong",))
_NONE_RUN = Gate(slot="accept_tail", distribution="d", version="1", run=0, total=0)
_NO_TIME = Entry(name="accept_tail", role=Role.SLOT, summary="ours", reason="OutOfMemoryError: no")


@pytest.mark.parametrize(
    ("made", "ok"),
    [
        (report(result(1, slot_entry(1.0))), True),
        (report(result(1, slot_entry(1.0), peer_entry("engine", None, "not installed"))), True),
        (report(result(1, slot_entry(1.0)), result(2, _NO_TIME)), False),
        (report(result(1, slot_entry(1.0)), gates=(_FAILED,)), False),
        (report(result(1, slot_entry(1.0)), gates=(_NONE_RUN,)), False),
        (report(), False),
    ],
    ids=["timed", "absent-peer", "slot-without-time", "failed-case", "no-case", "nothing"],
)
def test_a_report_is_ok_when_every_slot_was_timed(made: Report, ok: bool) -> None:
    assert made.ok is ok


def test_a_report_survives_its_json() -> None:
    made = report(result(1, slot_entry(1.0), peer_entry("engine", None, "not installed")))
    assert Report.model_validate_json(made.model_dump_json()) == made


def test_another_format_is_refused() -> None:
    with pytest.raises(ValidationError, match=f"this version reads format {FORMAT}"):
        Report.model_validate(report().model_dump() | {"format": FORMAT + 1})


def test_a_size_reads_as_a_line() -> None:
    assert Size(seam="draft_block", variant="sampled", batch=4, vocab=9, dtype="float32").text == (
        "draft_block sampled B 4 V 9 float32"
    )
    assert Size(seam="step_inputs", batch=4).text == "step_inputs B 4"


def test_quick_is_a_part_of_the_full_run() -> None:
    full = Settings()
    assert set(QUICK.batches) < set(full.batches)
    assert set(QUICK.vocabs) < set(full.vocabs)
    assert set(QUICK.dtypes) < set(full.dtypes)
    assert QUICK.repetitions < full.repetitions
    assert full.most_cases is None
    assert full.peers is None


def test_an_odd_number_of_calls_is_refused() -> None:
    """The flush buffers take turns, and a graph has to end where it began."""
    with pytest.raises(ValidationError, match="multiple of 2"):
        Settings(calls=3)
