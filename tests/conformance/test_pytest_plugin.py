"""The pytest plugin and ``python -m``: in processes of their own, with the slots made visible to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_TEST = """
def test_installed(conform_slot):
    conform_slot("step_inputs")


def test_missing(conform_slot):
    conform_slot("step_input")
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which a distribution provides one built-in slot, whatever else is installed."""
    info = tmp_path / "site" / "sgl_mega_plugin-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-mega-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sgl_mega_plugin.slots]\nbuiltin = sgl_mega_slots:SLOTS\n")
    paths = [str(tmp_path / "site"), *(path for path in sys.path if path)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
    }


def _run(command: list[str], environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environ, cwd=folder, capture_output=True, text=True, check=False
    )


def test_fixture(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(_TEST)
    plugin = "sgl_mega_plugin.conformance.pytest_plugin"
    done = _run(["-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "test_mine.py"], environ, tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "UnknownSlotError" in done.stdout
    assert "step_inputs" in done.stdout


def test_plugin_imports_nothing_heavy(environ: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys, sgl_mega_plugin.conformance.pytest_plugin; "
        "print([name for name in ('torch', 'triton', 'pydantic', 'sgl_mega_slots') if name in sys.modules])"
    )
    assert _run(["-c", code], environ, tmp_path).stdout.strip() == "[]"


def test_specs_import_no_torch(environ: dict[str, str], tmp_path: Path) -> None:
    code = "import sys, sgl_mega_slots; print([name for name in ('torch', 'triton') if name in sys.modules])"
    assert _run(["-c", code], environ, tmp_path).stdout.strip() == "[]"


def test_module_prints_a_report(environ: dict[str, str], tmp_path: Path) -> None:
    done = _run(["-m", "sgl_mega_plugin.conformance", "step_inputs", "accept_tail", "--json"], environ, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["backend"], report["device"]) == (True, "interpreter", "cpu")
    assert [(slot["slot"], slot["run"] == slot["passed"] > 0) for slot in report["slots"]] == [
        ("step_inputs", True),
        ("accept_tail", True),
    ]
