"""Draw what ``compare_servers.py --profile`` saw: a table of a step's calls and a timeline of host and GPU, per arm.

python tools/draw_step.py step.json          writes step.md and step.png beside it
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

LANES = ("gpu", "graph launches", "kernel launches", "copies and fills", "host waits", "other calls")
COLOURS = {
    "gpu": "#4c72b0",
    "graph launches": "#c44e52",
    "kernel launches": "#dd8452",
    "copies and fills": "#8172b3",
    "host waits": "#937860",
    "other calls": "#8c8c8c",
}


def _rows(head: list[str], rows: list[list[object]]) -> str:
    """A markdown table."""
    lines: list[list[object]] = [[*head], ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _speed(arm: dict[str, Any], key: str) -> str:
    speeds = arm["tokens_per_s"][key]
    return f"{arm['median'][key]:.0f} [{min(speeds):.0f} to {max(speeds):.0f}], {arm['speed_over_it'][key]:.2f}x"


def table(arms: list[dict[str, Any]]) -> str:
    """Tokens/s of each series beside the first arm's, then what a traced step consists of."""
    keys = list(arms[0]["median"])
    text = _rows(["tokens/s", *keys], [[arm["arm"], *(_speed(arm, key) for key in keys)] for arm in arms])
    profiles = {arm["arm"]: arm["profile"] for arm in arms if "timeline" in arm["profile"]}
    if not profiles:
        return text
    kinds = sorted({kind for profile in profiles.values() for kind in profile["calls_a_step"]})
    rows: list[list[object]] = [
        [kind, *(profile["calls_a_step"].get(kind, 0) for profile in profiles.values())] for kind in kinds
    ]
    for what, name in (
        ("kernels on the GPU", "gpu_kernels_a_step"),
        ("GPU busy, us", "gpu_busy_us_a_step"),
        ("GPU from first to last, us", "gpu_wall_us_a_step"),
    ):
        rows.append([what, *(profile[name] for profile in profiles.values())])
    hosts = [profile.get("host") for profile in profiles.values()]
    if all(hosts):
        shares = [f"{host['share_in_forward_batch_generation']:.1%}" for host in hosts if host]
        rows.append(["scheduler's loop inside forward_batch_generation", *shares])
    return text + "\n" + _rows(["a traced step", *profiles], rows)


def picture(arms: list[dict[str, Any]], path: Path) -> None:
    """One panel an arm, on one time axis."""
    figure = Figure(figsize=(11, 2.2 * len(arms)), layout="constrained")
    FigureCanvasAgg(figure)
    for index, arm in enumerate(arms):
        axes = figure.add_subplot(len(arms), 1, index + 1)
        for lane, kind in enumerate(LANES):
            spans = [(start, length) for what, start, length in arm["profile"]["timeline"] if what == kind]
            axes.broken_barh(spans, (-lane - 0.4, 0.8), facecolors=COLOURS[kind])
        axes.set_yticks([-lane for lane in range(len(LANES))], LANES, fontsize=8)
        axes.set_xlim(0, max(start for _, start, _ in arms[0]["profile"]["timeline"]))
        axes.set_title(f"{arm['arm']}: {arm['median'][next(iter(arm['median']))]:.0f} tokens/s", fontsize=9, loc="left")
    axes.set_xlabel("microseconds of a traced run")
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", type=Path)
    path = parser.parse_args(arguments).found
    arms = json.loads(path.read_text())["arms"]
    groups = {
        arm["compared_with"]: [other for other in arms if other["compared_with"] == arm["compared_with"]]
        for arm in arms
    }
    path.with_suffix(".md").write_text("\n".join(table(group) for group in groups.values()))
    profiled = [arm for arm in arms if "timeline" in arm["profile"]]
    if profiled:
        picture(profiled, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
