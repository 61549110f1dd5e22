"""How every sub-command prints and ends. Wrong use is one line, never a traceback."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sgl_mega_plugin.contract import SlotError

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130  # by Ctrl-C, as shells have it
_PIPE_WIDTH = 100  # columns where no terminal says its own

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


class WrongUseError(Exception):
    """What the user has to change; the message says how."""


@contextmanager
def answers(as_json: bool) -> Iterator[None]:
    """Turn errors of use into exit code 2: text on stderr, or ``{"error": ...}`` on stdout with ``--json``."""
    try:
        yield
    except (SlotError, WrongUseError) as error:
        if as_json:
            print_json({"error": str(error)})
        else:
            stderr().print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(WRONG_USE) from None


def stdout() -> Console:
    """Where results go."""
    return Console(highlight=False, width=_width(sys.stdout.isatty()))


def stderr() -> Console:
    """Where progress and errors go."""
    return Console(stderr=True, highlight=False, width=_width(sys.stderr.isatty()))


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def table(*columns: str, title: str | None = None, right: tuple[str, ...] = (), fold: tuple[str, ...] = ()) -> Table:
    """An empty table: numbers in the ``right`` columns, prose in the ``fold`` columns, the others stay whole."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=name not in fold)
    return made


def _width(is_terminal: bool) -> int | None:
    return None if is_terminal or "COLUMNS" in os.environ else _PIPE_WIDTH
