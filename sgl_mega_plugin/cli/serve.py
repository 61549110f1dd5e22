"""``sgl-mega serve``: SGLang's server with the megakernel flag, a slot list and the master switch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sgl_mega_plugin.cli.output import WRONG_USE, WrongUseError, answers, print_json, stdout
from sgl_mega_plugin.contract import Backend, Host
from sgl_mega_plugin.contract.selection import SLOTS_VARIABLE
from sgl_mega_plugin.engine import version
from sgl_mega_plugin.plan import make_plan
from sgl_mega_plugin.registry import Registry
from sgl_mega_plugin.switch import MASTER_SWITCH

FLAG = "--enable-nvidia-megakernel"


def command(
    context: typer.Context,
    slots: Annotated[
        str | None,
        typer.Option(
            help="Slot list, such as 'default,-markov'; sets "
            + SLOTS_VARIABLE
            + ", which is kept if this is not given."
        ),
    ] = None,
    master_switch: Annotated[
        bool | None,
        typer.Option(
            "--master-switch/--no-master-switch",
            help="The engine's sixteen switches on or off: sets " + MASTER_SWITCH + ".",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and its variables; start nothing.")] = (
        False
    ),
    as_json: Annotated[bool, typer.Option("--json", help="The dry run as one JSON object.")] = False,
) -> None:
    """Start SGLang's server with --enable-nvidia-megakernel. Every other argument goes to `sglang serve`.

    The slot list, the switch and the installed SGLang are checked first, and the model's configuration by the server,
    before it loads weights. What follows -- is passed on as it is, so `sgl-mega serve -- --help` lists the
    server's own arguments. An example:

    `sgl-mega serve MODEL --speculative-algorithm DSPARK --speculative-draft-model-path DRAFT`
    """
    with answers(as_json):
        changes = _variables(slots, master_switch)
        problems = _problems(os.environ | changes)
        arguments = [*context.args, *([] if FLAG in context.args else [FLAG])]
        command_line = [*_launcher(), *arguments]
        if not (dry_run or as_json):
            if problems:
                raise WrongUseError("; ".join(problems))
            os.execvpe(command_line[0], command_line, os.environ | changes)
    if as_json:
        print_json({"command": command_line, "environment": changes, "problems": problems})
    else:
        _print(command_line, changes, problems)
    if problems:
        raise typer.Exit(WRONG_USE)


def _variables(slots: str | None, master_switch: bool | None) -> dict[str, str]:
    """What the server's environment gets."""
    changes = {} if slots is None else {SLOTS_VARIABLE: slots}
    if master_switch is not None:
        changes[MASTER_SWITCH] = "1" if master_switch else "0"
    return changes


def _problems(environ: Mapping[str, str]) -> list[str]:
    """Why the server would not start with this installation. Raises :class:`SlotError` for the two variables."""
    host = Host(runtime="sglang", isa=None, backend=Backend.KERNEL, engine_version=version.engine_version())
    make_plan(registry=Registry.discover(), environ=environ, host=host)
    # The API version is the server's to check: to know it, SGLang has to be imported.
    return version.release_reasons(version.engine_version()) + version.provider_reasons(version.providers())


def _launcher() -> list[str]:
    """``sglang serve`` of this Python, or of the path."""
    beside = Path(sys.executable).with_name("sglang")
    found = str(beside) if beside.is_file() else shutil.which("sglang")
    if found is None and find_spec("sglang") is not None:
        return [sys.executable, "-m", "sglang.launch_server"]
    return [found or "sglang", "serve"]


def _print(command_line: list[str], changes: dict[str, str], problems: list[str]) -> None:
    words = [f"{name}={shlex.quote(value)}" for name, value in changes.items()]
    console = stdout()
    console.print(" ".join([*words, shlex.join(command_line)]), markup=False, soft_wrap=True)
    for problem in problems:
        console.print(f"would not start: {problem}", style="red", markup=False, soft_wrap=True)
