"""``sgl-mega bench``: slots timed on a GPU beside their peers; results as a table, JSON and plots."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from sgl_mega_plugin.cli.machine import check_device, need_torch
from sgl_mega_plugin.cli.output import FAILED, JsonOption, WrongUseError, answers, print_json, stderr, stdout, table
from sgl_mega_plugin.registry import Registry

if TYPE_CHECKING:
    from sgl_mega_plugin.bench.records import Gate, Report, Result, Settings
    from sgl_mega_plugin.contract import Provided

_DTYPES = ("bfloat16", "float32", "float16")
_LARGEST_BATCH = 1024


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SLOT]...", help="Slots to time; every slot with a kernel by default."),
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes B. [default: 1,2,4,8,16,32]")] = None,
    vocab: Annotated[str | None, typer.Option(help="Vocabulary sizes V. [default: 151936,49152]")] = None,
    dtype: Annotated[str | None, typer.Option(help="dtypes of the logits. [default: bfloat16,float32]")] = None,
    peers: Annotated[str | None, typer.Option(help="Peers to time, 'none' for none; every peer by default.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=2, help="Samples of each series. [default: 100]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About a minute: few sizes, samples and cases.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no further size is started.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that check cases and compile, side by side, before any timing.")
    ] = 0,
    device: Annotated[str, typer.Option(help="'cuda' or 'cuda:N'.")] = "cuda",
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write bench.json, table.md and a plot for each stage here.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", "--dry-run", help="Only show what would be timed; needs no GPU.")
    ] = False,
    redraw: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Only write table and plots of FOLDER/bench.json again.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time slots inside CUDA graphs with a cold L2, beside plain torch, SGLang's own functions and other libraries.

    A slot's cases run first, and one that fails them is not timed. Exit code 1 if a slot fails its cases or has
    no time at some size.
    """
    with answers(as_json):
        if redraw is not None:
            _redraw(redraw, as_json=as_json)
            return
        settings = _settings(batch, vocab, dtype, peers, repetitions, time_limit, device, quick=quick)
        registry = Registry.discover()
        need_torch()
        chosen = _choose(registry, names or [])
        _check_peers(settings)
        _check_batches(chosen, settings)
        if show:
            _show(chosen, settings, as_json=as_json)
            return
        _check_cuda(device)
        if out is not None:
            _prepare(out)
        if not as_json:
            for line in _left_out(chosen, settings):
                stderr().print(line, style="yellow", markup=False, soft_wrap=True)
        report = _run(registry, names or [], settings, out, workers, as_json=as_json)
    _finish(report, out, as_json=as_json)


def _settings(
    batch: str | None,
    vocab: str | None,
    dtype: str | None,
    peers: str | None,
    repetitions: int | None,
    time_limit: float | None,
    device: str,
    *,
    quick: bool,
) -> Settings:
    """``--quick`` or the full set, changed by what the user gave."""
    from sgl_mega_plugin.bench.records import QUICK, Settings

    given = {
        "batches": None if batch is None else _numbers("--batch", batch, _LARGEST_BATCH),
        "vocabs": None if vocab is None else _numbers("--vocab", vocab, 1 << 24),
        "dtypes": None if dtype is None else _words("--dtype", dtype, _DTYPES),
        "peers": None if peers is None else () if peers == "none" else _words("--peers", peers),
        "repetitions": repetitions,
        "time_limit": time_limit,
    }
    base = QUICK if quick else Settings()
    return base.model_copy(update={"device": device} | {key: v for key, v in given.items() if v is not None})


def _words(option: str, text: str, allowed: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Words with commas between them, each once."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    wrong = [word for word in words if allowed and word not in allowed]
    if wrong or not words:
        expected = f"one or more of {', '.join(allowed)}" if allowed else "one name or more"
        raise WrongUseError(f"{option} {text!r}: write {expected}, with commas between them")
    return words


def _numbers(option: str, text: str, largest: int) -> tuple[int, ...]:
    words = _words(option, text)
    if not all(word.isascii() and word.isdecimal() and 1 <= int(word) <= largest for word in words):
        raise WrongUseError(f"{option} {text!r}: write whole numbers from 1 to {largest}, with commas between them")
    return tuple(int(word) for word in words)


def _choose(registry: Registry, names: list[str]) -> list[Provided]:
    from sgl_mega_plugin.bench.runner import choose

    return choose(registry, names)


def _check_peers(settings: Settings) -> None:
    from sgl_mega_plugin.bench.peers import peers_of
    from sgl_mega_plugin.bench.workloads import WORKLOADS

    known = sorted({peer.name for seam in WORKLOADS for peer in peers_of(seam)})
    unknown = sorted(set(settings.peers or ()) - set(known))
    if unknown:
        raise WrongUseError(f"--peers: {', '.join(unknown)} is none of {', '.join(known)}")


def _check_batches(chosen: list[Provided], settings: Settings) -> None:
    """Some size that some slot serves: a run of none would say nothing."""
    from sgl_mega_plugin.bench.runner import schedule

    if not schedule(chosen, settings):
        raise WrongUseError(f"nothing to time: {'; '.join(_left_out(chosen, settings))}")


def _left_out(chosen: list[Provided], settings: Settings) -> list[str]:
    from sgl_mega_plugin.bench.runner import left_out

    return left_out(chosen, settings)


def _check_cuda(device: str) -> None:
    """A GPU of that name; anything else is an error of use, since nothing else is worth timing."""
    import torch

    how = "'sgl-mega bench --list' shows without one what would be timed"
    if device.partition(":")[0] != "cuda":
        raise WrongUseError(
            f"--device {device!r}: slots are timed on 'cuda' only, "
            f"for a time in Triton's interpreter means nothing; {how}"
        )
    if not torch.cuda.is_available():
        raise WrongUseError(f"--device {device!r}: torch {torch.__version__} sees no NVIDIA GPU here; {how}")
    check_device(device)


def _prepare(out: Path) -> None:
    """The folder, and a word now if plots cannot be drawn: the run is worth its time without them."""
    from sgl_mega_plugin.bench import plots

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongUseError(f"--out {str(out)!r} cannot be made a folder: {error}") from None
    reason = plots.missing()
    if reason is not None:
        stderr().print(f"{reason}; or draw them elsewhere with --redraw", style="yellow", markup=False, soft_wrap=True)


def _run(
    registry: Registry, names: list[str], settings: Settings, out: Path | None, workers: int, *, as_json: bool
) -> Report:
    from sgl_mega_plugin.bench import files
    from sgl_mega_plugin.bench.runner import Listener, bench

    start = time.perf_counter()

    def say(text: str) -> None:
        if not as_json:
            stderr().print(f"{time.perf_counter() - start:6.1f} s  {text}", markup=False, soft_wrap=True)

    def on_gate(gate: Gate) -> None:
        say(f"{gate.slot}: {gate.run} of {gate.total} cases, {'all pass' if gate.ok else 'FAILED'}")

    def on_report(report: Report) -> None:
        if out is not None:
            files.write(report, out)

    listener = Listener(gate=on_gate, result=lambda result: say(_line(result)), report=on_report)
    return bench(registry, settings, names=names, command=_command(), listener=listener, workers=workers)


def _command() -> str:
    """The command as it was typed, whatever folder the program lies in."""
    return shlex.join(["sgl-mega", *sys.argv[1:]])


def _line(result: Result) -> str:
    from sgl_mega_plugin.bench.table import number

    times = [
        f"{entry.name} {number(entry.timing.median_us) if entry.timing else 'not timed'}" for entry in result.entries
    ]
    return f"{result.size.text}: {', '.join(times)} (us)"


def _finish(report: Report, out: Path | None, *, as_json: bool) -> None:
    """Write and print the whole, the table last."""
    from sgl_mega_plugin.bench import files
    from sgl_mega_plugin.bench.table import markdown

    if out is not None:
        files.write(report, out)
        _draw(report, out)
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        typer.echo(markdown(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _draw(report: Report, folder: Path) -> list[Path]:
    """The plots where matplotlib is there. What was measured counts more, so its absence is no error here."""
    from sgl_mega_plugin.bench import plots

    return [] if plots.missing() else plots.draw(report, folder)


def _redraw(folder: Path, *, as_json: bool) -> None:
    from sgl_mega_plugin.bench import files, plots

    try:
        report = files.read(folder)
    except (OSError, ValueError) as error:
        raise WrongUseError(f"--redraw {str(folder)!r} has no report that can be read: {error}") from None
    reason = plots.missing()
    if reason is not None:
        raise WrongUseError(reason)
    files.write(report, folder)
    written = [folder / files.TABLE, *plots.draw(report, folder)]
    if as_json:
        print_json({"written": [str(path) for path in written]})
    else:
        for path in written:
            typer.echo(path)


def _show(chosen: list[Provided], settings: Settings, *, as_json: bool) -> None:
    """What would be timed, and which peers would run here."""
    from sgl_mega_plugin.bench.peers import peers_of
    from sgl_mega_plugin.bench.runner import schedule

    plan = schedule(chosen, settings)
    seams = dict.fromkeys(size.seam for size, _ in plan)
    peers = {
        seam: [
            {"name": peer.name, "summary": peer.summary, "missing": peer.missing()}
            for peer in peers_of(seam)
            if settings.wants(peer.name)
        ]
        for seam in seams
    }
    if as_json:
        sizes = [size.model_dump(mode="json") | {"slots": [entry.slot.name for entry in slots]} for size, slots in plan]
        left = _left_out(chosen, settings)
        print_json({"settings": settings.model_dump(mode="json"), "sizes": sizes, "left_out": left, "peers": peers})
        return
    console = stdout()
    rows = table("seam", "slots", "B", "V", "dtype", fold=("B",))
    curves: dict[tuple[str, str, str, str], list[str]] = {}
    for size, slots in plan:
        key = (
            f"{size.seam} {size.variant}".strip(),
            ", ".join(entry.slot.name for entry in slots),
            str(size.vocab or ""),
            size.dtype or "",
        )
        curves.setdefault(key, []).append(str(size.batch))
    for (seam, slots_text, vocab, dtype), batches in curves.items():
        rows.add_row(seam, slots_text, ", ".join(batches), vocab, dtype)
    console.print(rows, "")
    others = table("seam", "peer", "here", "what it is", fold=("here", "what it is"))
    for seam, found in peers.items():
        for peer in found:
            others.add_row(seam, peer["name"], escape(peer["missing"] or "yes"), escape(peer["summary"] or ""))
    console.print(others, "")
    for line in _left_out(chosen, settings):
        console.print(line, markup=False)
    console.print(f"{len(plan)} sizes, {settings.repetitions} samples twice, {settings.calls} calls a graph")
