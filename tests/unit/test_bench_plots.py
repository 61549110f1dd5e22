"""Plots from made-up reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_made import peer_entry, report, result, slot_entry

from sgl_mega_plugin.bench import plots
from sgl_mega_plugin.bench.records import Mode, Report, Role

_PNG = b"\x89PNG\r\n\x1a\n"


def made() -> Report:
    results = [
        result(
            batch,
            slot_entry(4.0 + batch),
            peer_entry("engine", 20.0 + batch),
            peer_entry("eager", 300.0, mode=Mode.CALLED),
            peer_entry("flashinfer", None, "not installed"),
            dtype=dtype,
        )
        for dtype in ("bfloat16", "float32")
        for batch in (8, 1, 32)
    ]
    return report(*results, result(1, slot_entry(9.0), seam="draft_block"))


def test_one_plot_a_stage(tmp_path: Path) -> None:
    written = plots.draw(made(), tmp_path)
    assert [path.name for path in written] == ["draft.png", "verify_accept.png"]
    for path in written:
        assert path.read_bytes().startswith(_PNG)
    assert written[1].stat().st_size > written[0].stat().st_size, "two panels are not more than one"


def test_curves_are_in_order_and_leave_out_what_has_no_time() -> None:
    results = [
        entry for entry in made().results if entry.size.dtype == "bfloat16" and entry.size.seam == "greedy_accept"
    ]
    lines, floor = plots.curves(results)
    assert set(lines) == {
        ("accept_tail", Role.SLOT, Mode.GRAPH),
        ("engine", Role.PEER, Mode.GRAPH),
        ("eager", Role.PEER, Mode.CALLED),
    }
    assert lines["accept_tail", Role.SLOT, Mode.GRAPH] == [(1, 5.0), (8, 12.0), (32, 36.0)]
    assert [batch for batch, _ in floor] == [1, 8, 32]


def test_a_time_of_nothing_is_not_drawn_on_a_log_axis() -> None:
    lines, _ = plots.curves([result(1, slot_entry(-0.01))])
    assert lines == {}


def test_a_stage_without_a_time_has_no_plot(tmp_path: Path) -> None:
    assert plots.draw(report(result(1, peer_entry("engine", None, "gone"))), tmp_path) == []


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plots.missing() is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'sgl-mega-plugin[bench]'" in (plots.missing() or "")
