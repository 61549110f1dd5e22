"""``sgl-mega serve``: the command it runs, the variables it sets, and what it refuses before that."""

from __future__ import annotations

import os
from typing import Any

import pytest
from cli_tools import answer, invoke, use_clean_environment

from sgl_mega_plugin.cli import serve
from sgl_mega_plugin.engine import version
from sgl_mega_plugin.switch import MASTER_SWITCH, SLOTS_VARIABLE

FLAG = "--enable-nvidia-megakernel"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with the SGLang that is served."""
    use_clean_environment(monkeypatch)
    here: dict[str, Any] = {"engine": "0.5.23", "providers": ("sgl-mega-plugin 0.1.0",)}
    monkeypatch.setattr(version, "engine_version", lambda: here["engine"])
    monkeypatch.setattr(version, "providers", lambda: here["providers"])
    monkeypatch.setattr(serve, "_launcher", lambda: ["sglang", "serve"])
    return here


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """What would have replaced this process."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    return calls


@pytest.mark.parametrize(
    ("arguments", "command", "environment"),
    [
        (["MODEL"], ["MODEL", FLAG], {}),
        (["MODEL", "--tp-size", "2", "-x"], ["MODEL", "--tp-size", "2", "-x", FLAG], {}),
        (["MODEL", FLAG, "--port=1"], ["MODEL", FLAG, "--port=1"], {}),
        (["--model-path", "M", "--slots", "-markov"], ["--model-path", "M", FLAG], {SLOTS_VARIABLE: "-markov"}),
        (["M", "--slots", "", "--no-master-switch"], ["M", FLAG], {SLOTS_VARIABLE: "", MASTER_SWITCH: "0"}),
        (["M", "--master-switch"], ["M", FLAG], {MASTER_SWITCH: "1"}),
        (["M", "--", "--help", "--slots", "x"], ["M", "--help", "--slots", "x", FLAG], {}),
    ],
    ids=" ".join,
)
def test_the_command(arguments: list[str], command: list[str], environment: dict[str, str]) -> None:
    found = answer("serve", "--json", *arguments)
    assert found == {"command": ["sglang", "serve", *command], "environment": environment, "problems": []}


def test_it_replaces_this_process(executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "yes")
    invoke("serve", "MODEL", "--slots", "markov")
    [(path, command, environ)] = executed
    assert [path, *command] == ["sglang", "sglang", "serve", "MODEL", FLAG]
    assert (environ["KEPT"], environ[SLOTS_VARIABLE]) == ("yes", "markov")
    assert SLOTS_VARIABLE not in os.environ


def test_a_dry_run_starts_nothing(executed: list[Any]) -> None:
    result = invoke("serve", "MODEL", "--slots", "default, -markov", "--dry-run")
    assert result.stdout == f"{SLOTS_VARIABLE}='default, -markov' sglang serve MODEL {FLAG}\n"
    assert (result.exit_code, executed) == (0, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engine": None}, "no installed SGLang"),
        ({"engine": "0.5.24"}, "SGLang 0.5.24 is not supported"),
        ({"providers": ("other 1", "sgl-mega-plugin 0.1.0")}, "uninstall all but one"),
    ],
    ids=["no engine", "another engine", "two plugins"],
)
def test_an_installation_that_cannot_serve(
    machine: dict[str, Any], executed: list[Any], change: dict[str, Any], says: str
) -> None:
    machine.update(change)
    result = invoke("serve", "MODEL")
    assert (result.exit_code, executed) == (2, [])
    assert says in result.stderr
    assert says in answer("serve", "MODEL", "--json", code=2)["problems"][0]
    assert f"sglang serve MODEL {FLAG}" in invoke("serve", "MODEL", "--dry-run").stdout


@pytest.mark.parametrize(
    ("environ", "arguments", "says"),
    [
        ({}, ["--slots", "accept_tial"], "Did you mean 'accept_tail'"),
        ({SLOTS_VARIABLE: "accept_tial"}, [], "Did you mean 'accept_tail'"),
        ({MASTER_SWITCH: "maybe"}, [], "'maybe' is no switch value"),
    ],
    ids=["option", "variable", "switch"],
)
def test_values_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, executed: list[Any], environ: dict[str, str], arguments: list[str], says: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = invoke("serve", "MODEL", *arguments)
    assert (result.exit_code, executed) == (2, [])
    assert says in result.stderr


def test_an_option_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, "accept_tial")
    assert answer("serve", "MODEL", "--slots", "none", "--json")["environment"] == {SLOTS_VARIABLE: "none"}
