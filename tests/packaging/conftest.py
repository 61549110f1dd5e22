"""The distribution as built files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging_tools import ROOT, execute


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    execute(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found
