"""A distribution from outside: built, installed beside ours, listed, conformed and run; and six broken slots.

The environment is new and holds three wheels; torch, Triton and the demo model are those of this environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging_tools import ROOT, environment_on_ours, execute

FOLDER = ROOT / "tests" / "third_party"

#: What the kit has to say of each broken slot: the case, then parts of the text.
CAUGHT = {
    "wrong_law": ("law-v8 (reference)", ["temperature 0.6, id 0 after id 0: frequency ", "expected 0.36", "5 sigma"]),
    "stale_replay": (
        "all_stand",
        ["another rank, its memory filled anew: out_commit_lens[0]: found 0, expected 3, bit for bit"],
    ),
    "padded_write": ("a_padded_row", ["first call: out_commit_lens[1]: found 1, expected 0, bit for bit"]),
    "id_out_of_range": (
        "all_stand",
        ["out_bonus_tokens[0]: found 4096, expected 8, bit for bit", "found 4096, allowed 0 to 8"],
    ),
    "host_read": ("all_stand", ["host read: Tensor.__bool__ of bool [] at ", "broken_slots/accepts.py:"]),
    "wrong_signature": ("(load)", ["has 'drafts', which the seam does not pass (seam 'greedy_accept')"]),
}


@pytest.fixture(scope="session")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with our wheel, the sample and the broken slots."""
    folder = tmp_path_factory.mktemp("third_party")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder]
    for name in ("sample_slots", "broken_slots"):
        execute(*build, FOLDER / name, cwd=folder)
    return environment_on_ours(folder / "clean", wheel, *sorted(folder.glob("*.whl")))


@pytest.fixture(scope="session")
def broken(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report on the six broken slots, by name."""
    folder = tmp_path_factory.mktemp("broken")
    text = execute(commands / "sgl-mega", "conform", *CAUGHT, "--generated", "2", "--json", cwd=folder, code=1)
    return {slot["slot"]: slot for slot in json.loads(text)["slots"]}


def test_it_is_listed_with_its_distribution(commands: Path, tmp_path: Path) -> None:
    listing = json.loads(execute(commands / "sgl-mega", "slots", "--json", cwd=tmp_path))
    [found] = [slot for slot in listing["slots"] if slot["name"] == "scan_accept"]
    assert (found["stage"], found["provider"]) == ("verify_accept", "sample-slots 1.0")


def test_it_conforms(commands: Path, tmp_path: Path) -> None:
    report = json.loads(execute(commands / "sgl-mega", "conform", "scan_accept", "--json", cwd=tmp_path))
    [slot] = report["slots"]
    assert (report["ok"], report["backend"], slot["distribution"]) == (True, "interpreter", "sample-slots")
    assert (report["generated"], report["seed"]) == (20, 0)
    assert slot["run"] == slot["passed"] == 5 + 20


def test_the_embedded_engine_runs_it_where_it_is_chosen(commands: Path, tmp_path: Path) -> None:
    found = json.loads(
        execute(
            *(
                commands / "sgl-mega",
                "run",
                "--interpreter",
                "--prompt",
                "Name a river.",
                "--max-tokens",
                "6",
                "--json",
            ),
            cwd=tmp_path,
            SGLANG_NVIDIA_MEGAKERNEL_SLOTS="none,scan_accept",
        )
    )
    assert found["slots"] == [{"name": "scan_accept", "seam": "greedy_accept", "backend": "interpreter"}]
    assert found["identical"] is True


def test_the_pytest_plugin_runs_it(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_mine(conform_slot):\n    conform_slot('scan_accept')\n")
    plugin = "sgl_mega_plugin.conformance.pytest_plugin"
    run = [commands / "python", "-m", "pytest", "-q", "-p", plugin, "--sgl-mega-generated", "2", "test_mine.py"]
    assert "1 passed" in execute(*run, cwd=tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")


def test_the_page_leads_to_a_passing_slot(wheel: Path, tmp_path: Path) -> None:
    """Its first commands as they stand, in a new environment that has our wheel alone."""
    page = (ROOT / "docs" / "writing-a-slot.md").read_text()
    lines = re.findall(r"^```sh\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[0].splitlines()
    assert [line.split()[0] for line in lines] == ["cp", "pip", "sgl-mega", "sgl-mega", "sgl-mega"]
    commands = environment_on_ours(tmp_path / "clean", wheel)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 is what means none
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    said = [execute("bash", "-c", line, cwd=tmp_path, PATH=path, **offline) for line in lines]
    assert re.search(r"^scan_accept .*sample-slots", said[2], flags=re.MULTILINE), said[2]
    assert said[3].endswith("conforms: true\n"), said[3]
    assert "identical: true" in said[4], said[4]


@pytest.mark.parametrize("name", CAUGHT)
def test_a_broken_slot_is_caught(broken: dict[str, Any], name: str) -> None:
    case, parts = CAUGHT[name]
    failures = {failure["case"]: "; ".join(failure["detail"]) for failure in broken[name]["failures"]}
    assert case in failures
    assert not [part for part in parts if part not in failures[case]], failures[case]
