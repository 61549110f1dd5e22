"""What the tests of the command line share: an environment of known content, and programs without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sgl_mega_plugin.cli import app
from sgl_mega_plugin.switch import KNOWN_VARIABLES, PREFIX

ROOT = Path(__file__).parents[2]
#: Left by a terminal or a CI: they would colour or wrap what tests read.
_TERMINAL = ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "COLUMNS", "TTY_COMPATIBLE", "TERMINAL_WIDTH")


def clean_environment() -> dict[str, str]:
    """This process's environment without our variables and a terminal's, with this source tree first."""
    ours = {*KNOWN_VARIABLES, *(name for name in os.environ if name.startswith(PREFIX)), *_TERMINAL}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "slots"), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PYTHONPATH": paths, "NO_COLOR": "1"}


def use_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for this process; anything a test sets through ``monkeypatch`` afterwards stays."""
    clean = clean_environment()
    for name in set(os.environ) - clean.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")


def invoke(*arguments: str) -> Result:
    """Run ``sgl-mega`` in this process. An exception that is not an exit is raised."""
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def answer(*arguments: str, code: int = 0) -> Any:
    """The JSON object that a sub-command prints, after a check of its exit code."""
    result = invoke(*arguments)
    assert result.exit_code == code, f"exit code {result.exit_code}, expected {code}:\n{result.output}"
    return json.loads(result.stdout)


def program(
    *arguments: str, without: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``sgl-mega`` in a process of its own, where the modules ``without`` do not import."""
    source = (
        f"import sys\nsys.modules.update(dict.fromkeys({without!r}))\nfrom sgl_mega_plugin.cli import main\n"
        f"sys.argv = {['sgl-mega', *arguments]!r}\nmain()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", source],
        env=clean_environment() | (environ or {}),
        capture_output=True,
        text=True,
    )
