"""What holds in another process: SGLang's workers are spawned, and a broken install shows only in a fresh one."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest
from engine_server import outcome_in_child
from sglang.srt.plugins import load_plugins

from sgl_mega_plugin.engine import families
from sgl_mega_plugin.switch import MASTER_SWITCH, MASTER_VARIABLES, SLOTS_VARIABLE

SECONDS = 180  # a spawned process imports SGLang, which takes about ten


def _in_child(target: str, draft: str, isa: str = "sm_90") -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        outcome: dict[str, Any] = pool.apply_async(outcome_in_child, (target, draft, isa)).get(SECONDS)
    return outcome


@pytest.mark.slow
def test_a_spawned_process_registers_and_inherits_the_switches(target: str, draft: str) -> None:
    os.environ[MASTER_SWITCH] = "yes"
    os.environ[MASTER_VARIABLES[0]] = "0"
    load_plugins()
    child = _in_child(target, draft)
    assert child["refusal"] is None
    assert child["architectures"] == sorted([*families.ALL_TARGETS, *families.ALL_DRAFTS])
    values = {name: child["environ"].get(name) for name in MASTER_VARIABLES}
    assert values == {**dict.fromkeys(MASTER_VARIABLES, "1"), MASTER_VARIABLES[0]: "0"}


@pytest.mark.slow
def test_a_spawned_process_refuses_a_wrong_slot_list(target: str, draft: str) -> None:
    os.environ[SLOTS_VARIABLE] = "accept_tial"
    child = _in_child(target, draft)
    assert child["refusal"] is not None
    assert "'accept_tail'" in child["refusal"]


_PRINT_REFUSAL = """
from engine_server import outcome_in_child
print(outcome_in_child(sys.argv[1], sys.argv[2], "sm_90")["refusal"])
"""
_SPOILED = [
    pytest.param(
        'import sys\nsys.modules["importlib_metadata"] = None  # an import of it raises ModuleNotFoundError',
        ("specs:TARGET does not import: ModuleNotFoundError", "importlib_metadata"),
        id="missing-dependency",
    ),
    pytest.param(
        "import sys\nfrom sglang.kernels.plugin_kernels.nvidia import spec\nspec.MEGAKERNEL_API_VERSION = 2",
        ("megakernel API version 2 is not served: sgl-mega-plugin implements version 1",),
        id="api-version-2",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "words"), _SPOILED)
def test_a_fresh_process_names_what_is_wrong(spoil: str, words: tuple[str, ...], target: str, draft: str) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, "-c", spoil + _PRINT_REFUSAL, target, draft],
        capture_output=True, text=True, timeout=SECONDS, env=environ, check=True,
    )  # fmt: skip
    assert [word for word in words if word not in result.stdout] == [], result.stdout + result.stderr
