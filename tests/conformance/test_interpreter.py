"""Runs ``interpreted/`` in processes that have TRITON_INTERPRET set: one a file, for the slots' cases one a slot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_mega_slots import SLOTS

_FOLDER = Path(__file__).parent / "interpreted"
_FILES = sorted(path.name for path in _FOLDER.glob("test_*.py"))
_SLOTS_FILE = "test_interpreted_slots.py"
#: Files with what to select of them; nothing selects all.
_RUNS = [(_SLOTS_FILE, slot.name) for slot in SLOTS] + [(name, "") for name in _FILES if name != _SLOTS_FILE]


def test_there_are_interpreted_tests() -> None:
    assert _SLOTS_FILE in _FILES


@pytest.mark.parametrize(("name", "only"), _RUNS, ids=["-".join(run) for run in _RUNS])
def test_in_the_interpreter(name: str, only: str) -> None:
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    for variable in ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environ.pop(variable, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", only, str(_FOLDER / name)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
