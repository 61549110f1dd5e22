"""Draw what `measure_target_step.py` measured: achieved bandwidth over model size, and what each SM does in a layer.

    python tools/draw_target_step.py DIR

Reads ``DIR/steps.jsonl`` and ``DIR/layer-MODEL.json``, which ``--cut DIR/trace-MODEL.json`` makes of a trace. Writes
``DIR/bandwidth.png`` and ``DIR/layer-MODEL.png``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

COLORS = {"QKV": "tab:blue", "ATTENTION": "tab:orange", "O": "tab:green", "GATE_UP": "tab:red", "DOWN": "tab:purple"}


def bandwidth(folder: Path) -> None:
    """Bytes that a step of one request has to read, over its time and over the time of a reduction in the same run."""
    records = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    records = sorted(filter(_is_plain, records), key=lambda r: r["bytes_read"])
    sizes = [record["bytes_read"] / 1e9 for record in records]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(sizes, [r["bytes_read"] / r["ms"] / 1e9 for r in records], "o-", label="target_step")
    axes.plot(sizes, [r["read_rate"] / 1e12 for r in records], "--", color="gray", label="a reduction over 8 GB")
    for size, record in zip(sizes, records, strict=True):
        axes.annotate(
            record["model"], (size, record["bytes_read"] / record["ms"] / 1e9), (4, -12), textcoords="offset points"
        )
    axes.set(
        xlabel="GB that a step reads", ylabel="TB/s", ylim=(0, None), title="One request of eight rows, context 1,024"
    )
    axes.legend()
    figure.savefig(folder / "bandwidth.png", dpi=130, bbox_inches="tight")


def _is_plain(record: dict[str, Any]) -> bool:
    """A target's step in bf16 of one request over a context of 1,024."""
    bf16 = all(record.get(name, "bf16") == "bf16" for name in ("weights", "kv"))
    return bf16 and not record.get("draft") and record["batch"] == 1 and record["context"] == 1024


def cut(trace: Path) -> Path:
    """Keep a middle layer of a trace and how it meets the next one."""
    lines = json.loads(trace.read_text())
    middle = max(line[1] for line in lines) // 2
    kept = [line for line in lines if line[1] == middle or (line[1] == middle + 1 and line[2] == "QKV")]
    path = trace.with_name(trace.name.replace("trace-", "layer-"))
    path.write_text(json.dumps(kept))
    return path


def _bars(lines: list[list[Any]]) -> Iterator[tuple[str, int, float, float, float]]:
    first = min(line[3] for line in lines if line[2] == "QKV")
    for sm, _, op, began, there, _, ended in lines:
        if op in COLORS:
            yield op, sm, (began - first) / 1e3, (there - first) / 1e3, (ended - first) / 1e3


def layer(path: Path) -> None:
    """An SM a line: what it works at, pale while it waits for the input."""
    figure, axes = plt.subplots(figsize=(10, 6))
    for op, sm, began, there, ended in _bars(json.loads(path.read_text())):
        axes.barh(sm, there - began, left=began, height=1.0, color=COLORS[op], alpha=0.25)
        axes.barh(sm, ended - there, left=there, height=1.0, color=COLORS[op])
    axes.legend(handles=[Patch(color=color, label=op) for op, color in COLORS.items()], loc="upper right")
    axes.set(xlabel="µs", ylabel="SM", title=f"{path.stem.removeprefix('layer-')}: one layer of a step; pale: waits")
    figure.savefig(path.with_suffix(".png"), dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cut", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    for trace in options.cut:
        cut(trace)
    bandwidth(options.folder)
    for path in sorted(options.folder.glob("layer-*.json")):
        layer(path)


if __name__ == "__main__":
    main()
