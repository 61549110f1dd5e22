"""The distribution: sdist and wheel build, hold what they should, and install into a clean environment.

The wheel is built from the sdist, so the sdist is complete. The environment gets every dependency but torch and
Triton, some gigabytes: that also shows that the command starts without them.
"""

from __future__ import annotations

import json
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging_tools import ROOT, execute

DRAFT = "sgl_mega_plugin/embedded/smollm2_dspark"
HEAVY = {"torch", "triton"}
LIMIT = 35 * 2**20  # bytes: the draft may have 30 MiB


@pytest.fixture(scope="session")
def requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


@pytest.fixture(scope="session")
def installed(wheel: Path, requirements: list[Requirement], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a clean environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    execute(*pip, "--no-deps", wheel, cwd=folder)
    light = [str(needed) for needed in requirements if needed.name not in HEAVY and needed.marker is None]
    execute(*pip, *light, cwd=folder)
    return folder / "bin"


def test_what_the_sdist_holds(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"Makefile", ".ci/run", "LICENSE", "README.md", "CHANGELOG.md", "docs/slots.md", "pyproject.toml"}
    assert wanted | {"tests/packaging/test_wheel.py", f"{DRAFT}/config.json"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/"))]


def test_what_the_wheel_holds(wheel: Path) -> None:
    assert wheel.stat().st_size < LIMIT
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {
        str(path.relative_to(base))
        for base, package in ((ROOT, "sgl_mega_plugin"), (ROOT / "slots", "sgl_mega_slots"))
        for path in (base / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert {"sgl_mega_plugin/py.typed", "sgl_mega_slots/py.typed", f"{DRAFT}/model.safetensors"} <= names


def test_run_time_dependencies_are_few(requirements: list[Requirement]) -> None:
    always = {needed.name for needed in requirements if needed.marker is None or "extra" not in str(needed.marker)}
    assert always == {"torch", "triton", "pydantic", "importlib-metadata", "typer", "rich"}


def test_the_command_in_a_clean_environment(installed: Path, tmp_path: Path) -> None:
    listing = json.loads(execute(installed / "sgl-mega", "slots", "--json", cwd=tmp_path))
    names = {slot["name"] for slot in listing["slots"]}
    assert {"markov", "accept_tail", "step_inputs", "context_kv", "post_fold"} <= names
    assert {slot["stage"] for slot in listing["slots"]} == set(listing["stages"])


def test_the_entry_points_in_a_clean_environment(installed: Path, tmp_path: Path) -> None:
    program = (
        "from importlib.metadata import entry_points as find\n"
        "[entry] = find(group='sglang.srt.plugins', name='nvidia_megakernel')\n"
        "print(entry.load().__module__, *sorted(e.name for e in find(group='sgl_mega_plugin.slots')))"
    )
    found = execute(installed / "python", "-c", program, cwd=tmp_path)
    assert found == "sgl_mega_plugin.engine.entry builtin engine\n"
