"""The files of a run: ``bench.json``, ``table.md`` and the plots, in one folder. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from sgl_mega_plugin.bench.records import Report
from sgl_mega_plugin.bench.table import markdown

REPORT, TABLE = "bench.json", "table.md"


def write(report: Report, folder: Path) -> None:
    """Write the report and its table; safe to call again as a run goes on, and to be killed in."""
    _replace(folder / REPORT, report.model_dump_json(indent=1) + "\n")
    _replace(folder / TABLE, markdown(report))


def read(folder: Path) -> Report:
    """The report of a folder. Raises OSError where there is none and ValueError where it is no report."""
    return Report.model_validate_json((folder / REPORT).read_text(encoding="utf-8"))


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of it."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
