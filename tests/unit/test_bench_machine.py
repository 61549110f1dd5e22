"""What a result says of its machine: git with and without a tree, nvidia-smi's answer in any form."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_mega_plugin.bench import machine
from sgl_mega_plugin.bench.machine import SMI_FIELDS, find_commit, find_machine, parse_smi, read_clocks, version_of

_LINE = "580.95.05, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 34, 117.20 W, 700.00 W, 0x0000000000000000"


def _git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True)


def test_the_commit_and_its_changes(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("a = 1\n")
    assert find_commit(package) == ("unknown", None)
    _git(tmp_path, "init", "--quiet")
    assert find_commit(package) == ("unknown", None), "a tree without a commit"
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "a")
    commit, dirty = find_commit(package)
    assert (len(commit), dirty) == (40, False)
    (package / "a.py").write_text("a = 2\n")
    assert find_commit(package) == (commit, True)


def test_another_projects_tree_is_not_ours(tmp_path: Path) -> None:
    package = tmp_path / "venv" / "package"
    package.mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "a")
    assert find_commit(package) == ("unknown", None)


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_commit(tmp_path) == ("unknown", None)


@pytest.mark.parametrize("text", ["", "\n", "No devices were found\n", f"{_LINE}\n{_LINE}\n", "1, 2, 3\n"])
def test_an_answer_that_is_none_has_no_values(text: str) -> None:
    assert parse_smi(text) == {}


def test_nvidia_smis_line_is_read_by_field() -> None:
    found = parse_smi(_LINE + "\n")
    assert list(found) == list(SMI_FIELDS)
    assert (found["driver_version"], found["clocks.sm"], found["power.limit"]) == ("580.95.05", "1980 MHz", "700.00 W")


def test_the_gpu_is_asked_for_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def answer(*command: str) -> str:
        asked.append(command)
        return _LINE

    monkeypatch.setattr(machine, "_output", answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    assert read_clocks("cuda:1", "after").values["clocks.mem"] == "3201 MHz"
    ((program, *words),) = asked
    assert (program, words[:2]) == ("nvidia-smi", ["-i", "GPU-abc"])
    assert not any(word in ("-pl", "-lgc", "-ac", "-r", "-pm", "-mig") for word in words), "read only"


def test_a_gpu_without_a_name_of_its_own_has_no_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert read_clocks("cuda", "before").values == {}


def test_a_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = find_machine("cuda")
    assert (found.gpu, found.driver, found.commit, found.dirty) == ("NVIDIA H200", "unknown", "unknown", None)
    assert (found.torch, found.clocks[0].values) == (torch.__version__, {})


def test_a_distribution_that_is_not_there() -> None:
    assert version_of("no-such-distribution") == "not installed"
    assert version_of("pydantic")[0].isdecimal()
