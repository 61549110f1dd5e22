"""The report as Markdown and as files."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_made import peer_entry, report, result, slot_entry

from sgl_mega_plugin.bench import files
from sgl_mega_plugin.bench.records import Clocks, Entry, Gate, Mode, Role
from sgl_mega_plugin.bench.table import grid, markdown, number

_FAILED = Entry(name="accept_tail", role=Role.SLOT, summary="ours", reason="fails its conformance cases here")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.8123, "0.81"),
        (9.994, "9.99"),
        (12.34, "12.3"),
        (-0.05, "-0.05"),
        (123.4, "123"),
        (4567.8, "4568"),
    ],
)
def test_numbers_have_the_digits_that_mean_something(value: float | None, text: str) -> None:
    assert number(value) == text


def test_columns_line_up() -> None:
    assert grid(("name", "B"), [("a|b", "1"), ("longer", "128")], right=frozenset({"B"})) == (
        "| name   |   B |\n"
        "| ------ | --: |\n"
        "| a\\|b   |   1 |\n"
        "| longer | 128 |\n"
    )  # fmt: skip


def test_an_empty_table_has_its_head() -> None:
    assert grid(("a",), []) == "| a |\n| - |\n"


def test_a_row_says_times_floor_and_ratio() -> None:
    text = markdown(report(result(4, slot_entry(8.0), peer_entry("engine", 24.0))))
    ours, theirs = (line.split("|") for line in text.splitlines() if line.startswith("| greedy_accept"))
    cells = [cell.strip() for cell in ours[1:-1]]
    # 8 rows of 4 requests, V 151,936 in bf16, at 4 TB/s: 2.43 us.
    assert cells == [
        "greedy_accept", "4", "151936", "bfloat16", "**accept_tail**", "2",
        "8.00", "7.95 - 8.05", "8.00", "2.43", "3.29", "1.00",
    ]  # fmt: skip
    assert [cell.strip() for cell in theirs[5:-1]] == [
        "engine",
        "",
        "24.0",
        "23.9 - 24.1",
        "24.0",
        "2.43",
        "9.87",
        "3.00",
    ]


def test_a_failed_slot_stays_and_an_absent_peer_is_a_footnote() -> None:
    gate = Gate(slot="accept_tail", distribution="d", version="1", run=3, total=9, failures=("accept_tail/b1: bad",))
    text = markdown(report(result(4, _FAILED, peer_entry("engine", None, "SGLang is not installed")), gates=(gate,)))
    assert "accept_tail: FAILED" in text
    assert "- accept_tail/b1: bad" in text
    assert "3 of 9" in text
    assert "- engine (greedy_accept) not timed: SGLang is not installed" in text
    assert "- accept_tail (greedy_accept at greedy_accept B 4 V 151936 bfloat16) not timed: fails its" in text


def test_a_slot_whose_turn_did_not_come_has_not_failed() -> None:
    late = _FAILED.model_copy(update={"reason": "not started: the run's time limit of 75 s was over"})
    text = markdown(report(result(4, late)))
    assert "accept_tail: not started" in text
    assert "FAILED" not in text


def test_a_note_is_said_once_for_all_sizes() -> None:
    results = [result(batch, slot_entry(1.0), peer_entry("engine", None, "gone")) for batch in (1, 2, 4)]
    assert markdown(report(*results)).count("- engine (greedy_accept) not timed: gone") == 1


def test_a_peer_that_disagrees_is_named() -> None:
    odd = peer_entry("engine", 3.0).model_copy(update={"agreement": 0.75})
    text = markdown(report(result(4, slot_entry(8.0), odd)))
    assert "- engine at greedy_accept B 4 V 151936 bfloat16: 75.0% of integer outputs as the slot's" in text


def test_calls_from_python_are_marked() -> None:
    text = markdown(report(result(4, slot_entry(8.0), peer_entry("eager", 90.0, mode=Mode.CALLED))))
    assert "| eager (called) " in text


def test_stages_come_in_the_order_of_a_step() -> None:
    text = markdown(report(result(1, slot_entry(1.0)), result(1, slot_entry(1.0), seam="draft_block")))
    assert text.index("## draft\n") < text.index("## verify_accept\n")


def test_the_head_says_where_and_how() -> None:
    made = report(result(1, slot_entry(1.0)), complete=False)
    clocks = Clocks(when="before", values={"driver_version": "580.1", "clocks.sm": "1980 MHz"})
    text = markdown(made.model_copy(update={"machine": made.machine.model_copy(update={"clocks": (clocks,)})}))
    for piece in (
        "# Benchmark, unfinished", "`sgl-mega bench --quick`, 61 s", "NVIDIA H200", "driver 580.1", "Triton 3.6.0",
        "commit 0123abc, with uncommitted changes", "nvidia-smi before: clocks.sm 1980 MHz", "read 4.00 TB/s",
        "copy 3.50 TB/s", "an empty launch 0.80 us", "240 MiB read after each call, 60.0 us, subtracted",
        "100 samples, each of 16 calls on 4 sets of inputs, twice",
    ):  # fmt: skip
        assert piece in text, piece


def test_files_are_written_and_read(tmp_path: Path) -> None:
    made = report(result(1, slot_entry(1.0)))
    files.write(made, tmp_path)
    files.write(made, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "table.md"]
    assert files.read(tmp_path) == made
    assert (tmp_path / "table.md").read_text() == markdown(made)
