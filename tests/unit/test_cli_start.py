"""The command line starts without torch, and wrong use is one line with exit code 2."""

from __future__ import annotations

import json

import pytest
from cli_tools import invoke, program, use_clean_environment

from sgl_mega_plugin import __version__

HEAVY = ("torch", "triton", "sglang", "gguf", "tokenizers", "numpy")
COMMANDS = ("run", "slots", "doctor", "serve", "conform")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clean_environment(monkeypatch)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["slots"], ["slots", "markov"]],
    ids=" ".join,
)
def test_starts_without_torch(arguments: list[str]) -> None:
    done = program(*arguments, without=HEAVY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_slots_as_json_without_torch() -> None:
    done = program("slots", "--json", without=HEAVY)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"markov", "post_fold"} <= {slot["name"] for slot in json.loads(done.stdout)["slots"]}


@pytest.mark.parametrize("command", ["run", "conform"])
def test_what_needs_torch_says_so(command: str) -> None:
    done = program(command, without=("torch",))
    assert done.returncode == 2
    assert "torch cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_without_torch() -> None:
    done = program("doctor", "--json", without=HEAVY)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["torch"]["state"] == "failed"
    assert "pip install torch" in checks["torch"]["advice"]


def test_version() -> None:
    assert invoke("--version").stdout == f"sgl-mega-plugin {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_sub_command_has_help_and_json(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["run", "--nonsense"],
        ["run", "--max-tokens", "0"],
        ["run", "--max-tokens", "many"],
        ["run", "--gamma", "8"],
        ["run", "--temperature", "-1"],
        ["run", "--dtype", "int8"],
        ["slots", "markov", "post_fold"],
        ["conform", "--backend", "gpu"],
        ["doctor", "now"],
    ],
    ids=" ".join,
)
def test_arguments_that_do_not_parse(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Usage: sgl-mega" in result.stderr
    assert result.stdout == ""
