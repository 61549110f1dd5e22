"""One plot a stage from a report: time against B for slots and peers, with the floor. Needs matplotlib, no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_mega_plugin.bench.records import Mode, Report, Result, Role
from sgl_mega_plugin.contract import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOW_TO_INSTALL = "pip install 'sgl-mega-plugin[bench]'"
#: Told apart in print and by most colour-blind readers; slots take from the front, peers from the back.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#666666")
_PANEL_INCHES = (5.2, 3.9)
_MOST_COLUMNS = 3

Curve = list[tuple[int, float]]  # (B, microseconds)
Label = tuple[str, Role, Mode]


def missing() -> str | None:
    """Why no plot can be drawn here, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"plots need matplotlib, which cannot be imported ({error}): {HOW_TO_INSTALL}"
    return None


def draw(report: Report, folder: Path) -> list[Path]:
    """Write one PNG for each stage that was timed; an earlier one of the same stage is replaced."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    for stage in Stage:
        panels = list(_panels(result for result in report.results if result.size.stage is stage))
        if not panels:
            continue
        columns = min(_MOST_COLUMNS, len(panels))
        rows = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis, (title, results) in zip(axes, panels, strict=False):
            _panel(axis, title, results)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        figure.suptitle(f"{stage.value} on {report.machine.gpu}, cold L2")
        written.append(folder / f"{stage.value}.png")
        figure.savefig(written[-1], dpi=110)
    return written


def curves(results: Iterable[Result]) -> tuple[dict[Label, Curve], Curve]:
    """Each slot's and peer's points, and the floor's, in order of B."""
    lines: dict[Label, Curve] = {}
    floor: Curve = []
    for result in sorted(results, key=lambda result: result.size.batch):
        if result.floor_us:
            floor.append((result.size.batch, result.floor_us))
        for entry in result.entries:
            if entry.timing is not None and entry.timing.median_us > 0:
                label = (entry.name, entry.role, entry.timing.mode)
                lines.setdefault(label, []).append((result.size.batch, entry.timing.median_us))
    return lines, floor


def _panels(results: Iterable[Result]) -> Iterable[tuple[str, list[Result]]]:
    """Results that make one panel, which differ in B only, with its title. None without a timed point."""
    panels: dict[str, list[Result]] = {}
    for result in results:
        size = result.size
        vocab = "" if size.vocab is None else f"V {size.vocab:,}"
        title = ", ".join(word for word in (f"{size.seam} {size.variant}".strip(), vocab, size.dtype or "") if word)
        panels.setdefault(title, []).append(result)
    return ((title, found) for title, found in panels.items() if curves(found)[0])


def _panel(axis: Axes, title: str, results: list[Result]) -> None:
    lines, floor = curves(results)
    slots = [label for label in lines if label[1] is Role.SLOT]
    peers = [label for label in lines if label[1] is Role.PEER]
    names = list(dict.fromkeys(name for name, _, _ in (*slots, *peers)))
    for name, role, mode in (*slots, *peers):
        points = lines[name, role, mode]
        style: dict[str, Any] = {
            "color": _COLOURS[names.index(name) % len(_COLOURS)],
            "linewidth": 2.4 if role is Role.SLOT else 1.3,
            "linestyle": "-" if mode is Mode.GRAPH else ":",
            "marker": "o" if role is Role.SLOT else "s",
            "markersize": 5 if role is Role.SLOT else 4,
        }
        label = name if mode is Mode.GRAPH else f"{name} (called)"
        axis.plot([b for b, _ in points], [us for _, us in points], label=label, **style)
    if floor:
        axis.plot(
            [b for b, _ in floor],
            [us for _, us in floor],
            "--",
            color="black",
            linewidth=1.2,
            label="floor of its bytes",
        )
    batches = sorted({result.size.batch for result in results})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_xlabel("B (requests)")
    axis.set_ylabel("microseconds a call")
    axis.set_title(title, fontsize=10)
    axis.grid(visible=True, which="both", alpha=0.25)
    axis.legend(fontsize=8)
