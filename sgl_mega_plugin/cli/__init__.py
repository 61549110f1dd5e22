"""The command ``sgl-mega``: one module a sub-command, and what they share.

``output`` is how a sub-command prints and ends, ``machine`` what it asks of this machine. torch,
Triton and an engine are imported by the sub-commands that need them, when they run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sgl_mega_plugin import __version__
from sgl_mega_plugin.cli import bench, conform, doctor, run, serve, slots

__all__ = ["app", "main"]

app = typer.Typer(
    name="sgl-mega",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a check failed, 2 wrong use.",
)
app.command("run")(run.command)
app.command("slots")(slots.command)
app.command("doctor")(doctor.command)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.command)
app.command("conform")(conform.command)
app.command("bench")(bench.command)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Slots that shorten the decode steps of DSpark speculative decoding."""
    if version:
        typer.echo(f"sgl-mega-plugin {__version__}")
        raise typer.Exit


def main() -> None:
    """The console script."""
    app()
