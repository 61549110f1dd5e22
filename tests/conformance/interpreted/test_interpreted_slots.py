"""Every case of every built-in slot, its Triton kernel in the interpreter against its reference."""

from __future__ import annotations

import pytest

from sgl_mega_plugin.conformance.runner import Target, run_case
from sgl_mega_plugin.contract import Backend, Case, Provided
from sgl_mega_plugin.registry import load_cases
from sgl_mega_slots import SLOTS

_PROVIDED = {slot.name: Provided(slot=slot, distribution="sgl-mega-plugin", version="0") for slot in SLOTS}
_CASES = [
    pytest.param(name, case, id=f"{name}-{case.id}")
    for name, provided in _PROVIDED.items()
    for case in load_cases(provided)
    if not case.kernel_only
]


@pytest.mark.parametrize(("name", "case"), _CASES)
def test_case(name: str, case: Case) -> None:
    result = run_case(Target.load(_PROVIDED[name], device="cpu", backend=Backend.INTERPRETER), case)
    assert result.ok, result.text
