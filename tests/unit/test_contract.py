"""Records of the contract: what a slot may say about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from made_slots import kernel_slot
from pydantic import ValidationError

from sgl_mega_plugin.contract import SEAMS, Numerics, NumericsKind, Slot, Stage
from sgl_mega_plugin.contract.errors import did_you_mean, near_misses, quoted

WHOLE: dict[str, Any] = kernel_slot("accept_tail").model_dump()
SWITCH: dict[str, Any] = {
    "name": "made_fold",
    "stage": "glue",
    "summary": "made up",
    "engine_switch": "SGLANG_OPT_MADE_FOLD",
}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        pytest.param(WHOLE | {"name": "Accept"}, "pattern", id="name"),
        pytest.param(WHOLE | {"name": "all"}, "word of the slot list", id="name-is-a-word"),
        pytest.param(WHOLE | {"needs": ["accept_tail"]}, "needs or conflicts with itself", id="needs-itself"),
        pytest.param(WHOLE | {"conflicts": ["accept_tail"]}, "needs or conflicts with itself", id="excludes-itself"),
        pytest.param(WHOLE | {"summary": "two\nlines"}, "pattern", id="summary"),
        pytest.param(WHOLE | {"seam": "greedy"}, "seam 'greedy' is none of", id="seam"),
        pytest.param(WHOLE | {"stage": "glue"}, "belongs to stage 'verify_accept', not 'glue'", id="stage"),
        pytest.param(WHOLE | {"reference": None}, "lacks a reference or cases", id="no-reference"),
        pytest.param(WHOLE | {"cases": None}, "lacks a reference or cases", id="no-cases"),
        pytest.param(WHOLE | {"implementation": "kernel.py"}, "pattern", id="path"),
        pytest.param(WHOLE | {"speed": 3}, "speed", id="unknown-field"),
        pytest.param(SWITCH | {"engine_switch": None}, "neither an implementation nor an engine switch", id="nothing"),
        pytest.param(SWITCH | {"seam": "step_inputs"}, "names a seam, a reference or cases", id="switch-with-seam"),
    ],
)
def test_slots_that_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Slot.model_validate(fields)


def test_a_slot_is_frozen_and_knows_who_does_its_work() -> None:
    kernel, switch = Slot.model_validate(WHOLE), Slot.model_validate(SWITCH)
    assert (kernel.engine_backed, switch.engine_backed) == (False, True)
    with pytest.raises(ValidationError, match="frozen"):
        kernel.default = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        pytest.param({"kind": NumericsKind.TOLERANCE}, "a bound goes with", id="tolerance-without-bound"),
        pytest.param({"kind": NumericsKind.BITWISE, "bound": 1e-3}, "a bound goes with", id="bitwise-with-bound"),
        pytest.param({"kind": NumericsKind.TOLERANCE, "bound": 1e-3}, "derivation", id="bound-without-source"),
    ],
)
def test_a_tolerance_has_a_bound_and_a_source(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Numerics(**fields)


def test_every_stage_has_a_seam() -> None:
    assert {seam.stage for seam in SEAMS.values()} == set(Stage)
    assert all(stage.summary for stage in Stage)


def _with(*, positional: str = "", keywords: tuple[str, ...] = (), rest: str = "") -> Callable[..., Any]:
    """A function with a given signature, built from its text."""
    arguments = ", ".join(part for part in (positional, "*" if keywords else "", *keywords, rest) if part)
    scope: dict[str, Any] = {}
    exec(f"def call({arguments}): ...", scope)
    call: Callable[..., Any] = scope["call"]
    return call


@pytest.mark.parametrize("seam", SEAMS.values(), ids=lambda seam: seam.name)
def test_a_seam_lists_every_mismatch(seam: Any) -> None:
    wanted = seam.parameters
    assert wanted
    assert seam.mismatches(_with(keywords=wanted)) == []
    assert seam.mismatches(_with(positional="self", keywords=wanted)) == []
    assert seam.mismatches(_with(keywords=wanted[1:])) == [f"lacks {wanted[0]!r}"]
    assert seam.mismatches(_with(keywords=(*wanted, "extra"))) == ["has 'extra', which the seam does not pass"]
    assert seam.mismatches(_with(positional=wanted[0], keywords=wanted[1:])) == [
        f"lacks {wanted[0]!r}",
        f"{wanted[0]!r} is positional or keyword, not keyword-only",
    ]
    assert seam.mismatches(_with(keywords=wanted, rest="**more")) == ["'more' is variadic keyword, not keyword-only"]


def test_hints_keep_the_spelling_of_what_is_known() -> None:
    assert near_misses("POST_FALD", ["post_fold", "mid_fold", "markov"])[0] == "post_fold"
    assert did_you_mean("zzz", ["post_fold"]) == ""
    assert quoted([]) == "none"
    assert quoted(["a", "b"]) == "'a', 'b'"
