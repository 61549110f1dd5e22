"""A report as Markdown: what was measured where, every slot's cases, and one table a stage. Used by the CLI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl_mega_plugin.bench.records import NOT_STARTED, Entry, Mode, Report, Result, Role
from sgl_mega_plugin.contract import Stage

_COLUMNS = (
    "seam",
    "B",
    "V",
    "dtype",
    "what",
    "launches",
    "median us",
    "quartiles",
    "again",
    "floor us",
    "x floor",
    "x slot",
)
_RIGHT = frozenset({"B", "V", "launches", "median us", "quartiles", "again", "floor us", "x floor", "x slot"})


def markdown(report: Report) -> str:
    """The whole report as Markdown, its tables last."""
    parts = [_head(report), _gates(report)]
    for stage in Stage:
        results = [result for result in report.results if result.size.stage is stage]
        if results:
            parts.append(f"## {stage.value}\n{grid(_COLUMNS, stage_rows(results), right=_RIGHT)}{_footnotes(results)}")
    return "\n".join(parts)


def stage_rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """One row for each timed entry and each slot without a time; a peer without a time is in the footnotes."""
    rows = []
    for result in results:
        size = result.size
        where = (
            f"{size.seam} {size.variant}".strip(),
            str(size.batch),
            "" if size.vocab is None else str(size.vocab),
            size.dtype or "",
        )
        for entry in result.entries:
            if entry.timing is not None:
                rows.append((*where, _name(entry), *_figures(result, entry)))
            elif entry.role is Role.SLOT:
                what = NOT_STARTED if entry.reason.startswith(NOT_STARTED) else "FAILED"
                rows.append((*where, f"{entry.name}: {what}", *[""] * (len(_COLUMNS) - len(where) - 1)))
    return rows


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()) -> str:
    """A Markdown table whose columns also line up as plain text."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) if cells else len(name) for i, name in enumerate(columns)]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * (width - 1) + (":" if name in right else "-") for name, width in zip(columns, widths, strict=True))
    return "\n".join([line(columns), f"| {' | '.join(rule)} |", *map(line, cells)]) + "\n"


def _name(entry: Entry) -> str:
    called = entry.timing is not None and entry.timing.mode is Mode.CALLED
    mark = "**" if entry.role is Role.SLOT else ""
    return f"{mark}{entry.name}{mark}{' (called)' if called else ''}"


def _figures(result: Result, entry: Entry) -> tuple[str, ...]:
    timing = entry.timing
    if timing is None:
        raise ValueError(f"{entry.name} has no timing")
    return (
        "" if entry.launches is None else str(entry.launches) + (f" + {entry.copies}c" if entry.copies else ""),
        number(timing.median_us),
        f"{number(timing.lower_us)} - {number(timing.upper_us)}",
        number(timing.again_us),
        number(result.floor_us),
        number(result.times_floor(entry)),
        number(result.times_slot(entry)),
    )


def number(value: float | None) -> str:
    """A figure with as many digits as mean something; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _head(report: Report) -> str:
    machine, rates, settings = report.machine, report.rates, report.settings
    state = {True: ", with uncommitted changes", False: "", None: ""}[machine.dirty]
    lines = [
        "# Benchmark" if report.complete else "# Benchmark, unfinished",
        f"`{report.command}`, {report.seconds:.0f} s\n",
        f"- {machine.gpu}, driver {machine.driver}, CUDA {machine.cuda}, PyTorch {machine.torch}, "
        f"Triton {machine.triton}, SGLang {machine.sglang}, Python {machine.python}",
        f"- commit {machine.commit}{state}",
    ]
    for clocks in machine.clocks:
        values = ", ".join(f"{name} {value}" for name, value in clocks.values.items() if name != "driver_version")
        lines.append(f"- nvidia-smi {clocks.when}: {values or 'no answer'}")
    if rates is not None:
        lines.append(
            f"- read {rates.read_tb_s:.2f} TB/s and copy {rates.copy_tb_s:.2f} TB/s over "
            f"{rates.bytes_streamed / 1e9:.1f} GB; an empty launch {rates.empty_launch_us:.2f} us"
        )
        lines.append(
            f"- L2 {rates.l2_bytes / 2**20:.0f} MiB, cold: {rates.flush_bytes / 2**20:.0f} MiB read after each call, "
            f"{rates.flush_us:.1f} us, subtracted"
        )
    lines.append(
        f"- {settings.repetitions} samples, each of {settings.calls} calls "
        f"on {settings.input_sets} sets of inputs, twice"
    )
    return "\n".join(lines) + "\n"


def _gates(report: Report) -> str:
    rows = [(g.slot, g.distribution, f"{g.run} of {g.total}", "pass" if g.ok else "FAIL") for g in report.gates]
    failures = "".join(f"\n- {failure}" for gate in report.gates for failure in gate.failures)
    return f"## Cases\n{grid(('slot', 'provider', 'cases run', 'result'), rows)}{failures}\n"


def _footnotes(results: Sequence[Result]) -> str:
    """Why a row is missing or failed, who the peers are, and where outputs differ; each said once."""
    lines: dict[str, None] = {}
    for result in results:
        for entry in result.entries:
            if entry.timing is None:
                at = f" at {result.size.text}" if entry.role is Role.SLOT else ""
                lines[f"- {entry.name} ({result.size.seam}{at}) not timed: {entry.reason}"] = None
            elif entry.role is Role.PEER:
                lines[f"- {entry.name} ({result.size.seam}): {entry.summary}"] = None
            if entry.agreement is not None and entry.agreement < 1:
                lines[
                    f"- {entry.name} at {result.size.text}: {entry.agreement:.1%} of integer outputs as the slot's"
                ] = None
        if result.cost is not None and result.cost.note:
            lines[f"- floor of {result.size.seam}: {result.cost.note}"] = None
    return "".join(f"\n{line}" for line in lines) + ("\n" if lines else "")
