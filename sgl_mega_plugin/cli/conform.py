"""``sgl-mega conform``: slots' cases on this machine, each compared with its reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sgl_mega_plugin.cli.machine import check_backend, check_device, interpret, need_torch
from sgl_mega_plugin.cli.output import (
    FAILED,
    INTERRUPTED,
    JsonOption,
    WrongUseError,
    answers,
    print_json,
    stderr,
    stdout,
    table,
)
from sgl_mega_plugin.contract import Backend
from sgl_mega_plugin.registry import Registry

if TYPE_CHECKING:
    from sgl_mega_plugin.conformance.report import CaseResult, Report


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SLOT]...", help="Slots to run; every slot with a kernel by default."),
    ] = None,
    device: Annotated[str, typer.Option(help="'cpu', 'cuda' or 'cuda:N'.")] = "cpu",
    backend: Annotated[
        Backend | None,
        typer.Option(help="kernel on CUDA and interpreter on a CPU unless given; reference tests the cases only."),
    ] = None,
    generated: Annotated[
        int, typer.Option(min=0, help="Random cases a slot, besides its own; the same for the same seed.")
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the random cases.")] = 0,
    law: Annotated[
        bool | None,
        typer.Option(
            help="Frequencies of 20,000 draws: of references everywhere and of kernels on CUDA unless given; "
            "--law adds interpreted kernels, for minutes.",
            show_default=False,
        ),
    ] = None,
    case: Annotated[
        str, typer.Option("--case", "-k", metavar="TEXT", help="Only cases that have TEXT in their names.")
    ] = "",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that run cases side by side; 0 is this one alone.")
    ] = 0,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no further case is run, and exit code 1.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run slots' cases and compare every output with the reference: exact, or within the bound that the slot states.

    Each case also runs as another rank, in other memory, and as a replay of its captured launches on other contents: a
    CUDA graph, or on a CPU a recording. Exit code 1 if a case fails or is not run; 130 after Ctrl-C, with the report
    so far.
    """
    with answers(as_json):
        isa = check_device(device)
        chosen = backend or (Backend.INTERPRETER if isa == "cpu" else Backend.KERNEL)
        check_backend(device, chosen)
        registry = Registry.discover()
        for name in names or ():
            if registry.get(name).slot.engine_backed:
                raise WrongUseError(f"slot {name!r} is the engine's own code, so it has no cases here")
        if chosen is Backend.INTERPRETER:
            interpret()
        need_torch()
        from sgl_mega_plugin.conformance.runner import InterruptedRun, conform

        start = time.perf_counter()
        interrupted = False
        try:
            with _progress(quiet=as_json) as on_result:
                report = conform(
                    registry,
                    device=device,
                    backend=chosen,
                    names=names or [],
                    generated=generated,
                    seed=seed,
                    law=law,
                    only=case,
                    workers=workers,
                    time_limit=time_limit,
                    on_result=on_result,
                )
        except InterruptedRun as interrupt:
            if interrupt.report is None:
                raise
            report, interrupted = interrupt.report, True
        seconds = time.perf_counter() - start
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        _print(report, seconds)
    if interrupted or not report.ok:
        raise typer.Exit(INTERRUPTED if interrupted else FAILED)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[CaseResult], None]]:
    """The case that ended last, on stderr where that is a terminal."""
    console = Console(stderr=True, quiet=True) if quiet else stderr()
    done = failed = 0
    with console.status("running cases") as status:

        def on_result(result: CaseResult) -> None:
            nonlocal done, failed
            done += 1
            failed += not result.ok
            status.update(f"{done} cases, {failed} failed: {escape(result.slot)}/{escape(result.case)}")

        yield on_result


def _print(report: Report, seconds: float) -> None:
    console = stdout()
    console.print(
        f"[bold]{report.device_name}[/bold], backend {report.backend.value}, torch {report.torch}, "
        f"triton {report.triton or 'not installed'}: {seconds:.0f} s\n"
        f"{report.generated} generated cases a slot, seed {report.seed}\n"
    )
    rows = table("slot", "provider", "passed", "failed", "skipped", right=("passed", "failed", "skipped"))
    for slot in report.slots:
        failed = len(slot.failures)
        red = f"[red]{failed}[/red]" if failed else "0"
        rows.add_row(slot.slot, slot.distribution, str(slot.passed), red, str(len(slot.skipped)))
    console.print(rows, "")
    for slot in report.slots:
        for failure in slot.failures:
            console.print(f"failed: {failure.text}", style="red", markup=False, soft_wrap=True)
    if any(slot.skipped for slot in report.slots):
        console.print("skipped: cases too large for anything but the kernel\n")
    for slot in report.slots:
        if slot.not_run:
            text = f"not run: {len(slot.not_run)} cases of {slot.slot}, {slot.not_run[0]} the first of them"
            console.print(text, markup=False, soft_wrap=True)
    console.print(f"conforms: {'true' if report.ok else 'false'}")
