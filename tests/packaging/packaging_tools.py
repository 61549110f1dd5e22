"""Commands run as a user runs them, and environments to run them in."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def execute(*command: str | Path, cwd: Path, code: int = 0, **environ: str) -> str:
    """The stdout of a command that ends with ``code``; a failure shows all that it wrote."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SGL", "TRITON"))}
    done = subprocess.run(command, cwd=cwd, env=clean | environ, capture_output=True, text=True)
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment_on_ours(folder: Path, *wheels: Path) -> Path:
    """A new environment with these wheels, which sees what this one has installed; returns its folder of commands."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    execute(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *wheels, cwd=folder)
    [site] = folder.glob("lib/python3*/site-packages")
    ours = [path for path in sys.path if "site-packages" in path and Path(path).is_dir()]
    (site / "ours.pth").write_text("\n".join(ours) + "\n")
    return python.parent
