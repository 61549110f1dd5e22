"""Runs ``interpreted/`` in processes that have TRITON_INTERPRET set, one a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent / "interpreted"
_FILES = sorted(path.name for path in _FOLDER.glob("test_*.py"))


def test_there_are_interpreted_tests() -> None:
    assert "test_interpreted_slots.py" in _FILES


@pytest.mark.parametrize("name", _FILES)
def test_in_the_interpreter(name: str) -> None:
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    for variable in ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environ.pop(variable, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_FOLDER / name)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
