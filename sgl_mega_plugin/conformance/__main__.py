"""``python -m sgl_mega_plugin.conformance``: the same run as ``sgl-mega conform``, without its tables."""

from __future__ import annotations

from typing import Annotated

import typer

from sgl_mega_plugin.conformance.backend import prepare
from sgl_mega_plugin.contract import Backend
from sgl_mega_plugin.contract.errors import SlotError


def main(
    slots: Annotated[
        list[str] | None, typer.Argument(help="Slots to run; every slot with a kernel by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="'cpu' or a CUDA device.")] = "cpu",
    backend: Annotated[Backend | None, typer.Option(help="What runs the slots; by device unless named.")] = None,
    generated: Annotated[int, typer.Option(help="Random cases a slot, besides its own.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the random cases.")] = 0,
    law: Annotated[
        bool | None, typer.Option(help="Frequencies of 20,000 draws; --law for interpreted kernels.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Compare slots with their references. Exit code 1 if a case fails."""
    chosen = prepare(device, backend)
    from sgl_mega_plugin.conformance.runner import conform
    from sgl_mega_plugin.registry import Registry

    try:
        report = conform(
            Registry.discover(),
            device=device,
            backend=chosen,
            names=slots or (),
            generated=generated,
            seed=seed,
            law=law,
        )
    except SlotError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        typer.echo(report.model_dump_json(indent=2))
    for slot in () if json else report.slots:
        typer.echo(f"{slot.slot}: {slot.passed} of {slot.run} cases passed, {len(slot.skipped)} skipped")
        for failure in slot.failures:
            typer.echo(f"  {failure.text}")
    raise typer.Exit(0 if report.ok else 1)


if __name__ == "__main__":
    typer.run(main)
