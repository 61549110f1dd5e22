"""``sgl-mega slots``: every slot that is installed here, and what the environment chooses of them."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from sgl_mega_plugin.cli.output import JsonOption, answers, print_json, stdout, table
from sgl_mega_plugin.contract import Backend, Host, Provided, Requirements, Slot, Stage
from sgl_mega_plugin.contract.selection import SLOTS_VARIABLE, parse, render
from sgl_mega_plugin.plan import make_plan
from sgl_mega_plugin.registry import Registry
from sgl_mega_plugin.switch import MASTER_SWITCH, master_switch

Choices = dict[str, tuple[bool, str]]  # by slot: whether it is chosen, and why


def command(
    name: Annotated[str | None, typer.Argument(help="Show only this slot, in full.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List every installed slot by stage: default, provider, needs, and what it does.

    "on" is what SGLANG_NVIDIA_MEGAKERNEL_SLOTS, the master switch and the engine's own variables choose.
    Whether a slot can run on this machine is what `sgl-mega doctor` says.
    """
    with answers(as_json):
        registry = Registry.discover()
        choices = _choices(registry)
        if name is not None:
            record = _record(registry.get(name), choices)
            if as_json:
                print_json(record)
            else:
                stdout().print(_details(record))
        elif as_json:
            print_json(_listing(registry, choices))
        else:
            _print_stages(registry, choices)


def _choices(registry: Registry) -> Choices:
    """The plan of a host on which nothing stands against a slot: what was chosen, and why."""
    free = Registry.of(
        entry.model_copy(update={"slot": entry.slot.model_copy(update={"requires": Requirements()})})
        for entry in registry.provided
    )
    host = Host(runtime="sglang", isa=None, backend=Backend.KERNEL)
    plan = make_plan(registry=free, environ=os.environ, host=host)
    chosen = {entry.name: (True, entry.because) for entry in plan.active}
    return chosen | {entry.name: (False, "; ".join(entry.reasons)) for entry in plan.inactive}


def _record(entry: Provided, choices: Choices) -> dict[str, Any]:
    """A slot as JSON: what it states about itself, who provides it, and whether it is chosen."""
    chosen, because = choices[entry.slot.name]
    return {
        **entry.slot.model_dump(mode="json"),
        "engine_backed": entry.slot.engine_backed,
        "provider": f"{entry.distribution} {entry.version}",
        "chosen": chosen,
        "because": because,
    }


def _listing(registry: Registry, choices: Choices) -> dict[str, Any]:
    return {
        "slot_list": render(parse(os.environ.get(SLOTS_VARIABLE))),
        "master_switch": master_switch(os.environ),
        "stages": {stage.value: stage.summary for stage in Stage},
        "slots": [_record(entry, choices) for entry in registry.provided],
    }


def _print_stages(registry: Registry, choices: Choices) -> None:
    console = stdout()
    for stage in Stage:
        entries = [entry for entry in registry.provided if entry.slot.stage is stage]
        console.print(f"[bold cyan]{stage.value}[/bold cyan]  {stage.summary}")
        console.print(_stage_table(entries, choices) if entries else "no slot is installed", "")
    selection = render(parse(os.environ.get(SLOTS_VARIABLE)))
    switch = "on" if master_switch(os.environ) else "off"
    console.print(f"{SLOTS_VARIABLE}: {selection}\n{MASTER_SWITCH}: {switch}", markup=False, soft_wrap=True)


def _stage_table(entries: list[Provided], choices: Choices) -> Table:
    rows = table("slot", "on", "default", "provider", "what it does, and needs", fold=("what it does, and needs",))
    for entry in entries:
        slot = entry.slot
        needs = _needs(slot)
        rows.add_row(
            slot.name,
            "yes" if choices[slot.name][0] else "",
            "yes" if slot.default else "",
            escape(_provider(entry)),
            escape(slot.summary.removeprefix("engine: ")) + (f"\n[dim]needs {escape(needs)}[/dim]" if needs else ""),
        )
    return rows


def _provider(entry: Provided) -> str:
    """Who does the work: a distribution, or the engine at the releases that have the switch."""
    if not entry.slot.engine_backed:
        return entry.distribution
    return " ".join(["SGLang", *sorted(entry.slot.requires.engine_versions)])


def _needs(slot: Slot) -> str:
    isas = sorted(slot.requires.isas, key=lambda isa: (len(isa), isa))  # sm_90 before sm_100
    return ", ".join([*(f"slot {name}" for name in sorted(slot.needs)), *([" or ".join(isas)] if isas else [])])


def _details(record: dict[str, Any]) -> Table:
    rows = table("", " ", fold=(" ",))
    rows.show_header = False
    flat = {key: value for key, value in record.items() if not isinstance(value, dict)}
    for group in ("requires", "numerics"):
        flat |= {f"{group}.{key}": value for key, value in record[group].items()}
    for key, value in flat.items():
        rows.add_row(f"[bold]{key}[/bold]", escape(_text(value)))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    return "" if value is None else str(value)
