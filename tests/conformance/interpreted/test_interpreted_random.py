"""Random steps: `accept_tail` and `step_inputs` in the interpreter against their references."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_mega_plugin.conformance.runner import Target, run_case
from sgl_mega_plugin.contract import Backend, Case, Provided, Slot
from sgl_mega_slots.glue.step_inputs import cases as step_cases
from sgl_mega_slots.glue.step_inputs.spec import STEP_INPUTS
from sgl_mega_slots.verify_accept.accept_tail import cases as accept_cases
from sgl_mega_slots.verify_accept.accept_tail.spec import ACCEPT_TAIL

_INF, _NAN = float("inf"), float("nan")
_SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def _check(slot: Slot, arguments: dict[str, Any]) -> None:
    provided = Provided(slot=slot, distribution="sgl-mega-plugin", version="0")
    target = Target.load(provided, device="cpu", backend=Backend.INTERPRETER)
    result = run_case(target, Case("random", lambda device: arguments))
    assert result.ok, result.text


@st.composite
def _accept_steps(draw: st.DrawFn) -> dict[str, Any]:
    """Few distinct logits, so that ties are common; drafts in and out of [0, V)."""
    batch, rows, vocab = draw(st.integers(1, 4)), draw(st.integers(2, 5)), draw(st.integers(1, 70))
    levels = st.sampled_from([-_INF, -1.0, 0.0, -0.0, 2.0, _INF, _NAN])
    numbers = draw(st.lists(levels, min_size=batch * rows, max_size=batch * rows))
    seed = draw(st.integers(0, 2**31))
    source = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (batch * rows, vocab), generator=source).to(
        draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )
    for row, level in enumerate(numbers):
        logits[row, torch.randint(0, vocab, (max(1, vocab // 3),), generator=source)] = level
    ids = st.one_of(st.integers(-2, vocab + 1), st.just(0x7FFFFFFF))
    candidates = torch.tensor(
        draw(st.lists(st.lists(ids, min_size=rows, max_size=rows), min_size=batch, max_size=batch))
    )
    return accept_cases.arguments(
        logits,
        candidates,
        verify_lens=draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch)),
        seq_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        stride=draw(st.booleans()),
    )


@st.composite
def _input_steps(draw: st.DrawFn) -> dict[str, Any]:
    """Lengths about the end of the context, table rows in and out of range, any mixture of padding."""
    batch, gamma = draw(st.integers(1, 20)), draw(st.integers(1, 8))

    def of(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=batch, max_size=batch))

    return step_cases.arguments(
        "cpu",
        seq_lens=of(st.integers(-3, 40)),
        gamma=gamma,
        verify_lens=of(st.integers(0, gamma + 1)),
        pool=of(st.integers(-2, batch + 3)),
        columns=draw(st.integers(1, 40)),
        max_positions=draw(st.integers(1, 40)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        relay=draw(st.booleans()),
        used=draw(st.booleans()),
        stride=draw(st.booleans()),
    )


@_SETTINGS
@given(_accept_steps())
def test_accept_tail(arguments: dict[str, Any]) -> None:
    _check(ACCEPT_TAIL, arguments)


@_SETTINGS
@given(_input_steps())
def test_step_inputs(arguments: dict[str, Any]) -> None:
    _check(STEP_INPUTS, arguments)
