"""Every case of every built-in slot on a GPU: eager calls, then replays of one captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_mega_plugin.conformance.runner import Target, run_case
from sgl_mega_plugin.contract import Backend, Case, Provided, SlotSetup
from sgl_mega_plugin.registry import load_cases, load_implementation
from sgl_mega_slots import SLOTS
from sgl_mega_slots.draft.markov import cases as markov_cases
from sgl_mega_slots.verify_accept.blockwise_rejection import cases as rejection_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible"),
]

_PROVIDED = {slot.name: Provided(slot=slot, distribution="sgl-mega-plugin", version="0") for slot in SLOTS}
_CASES = [
    pytest.param(name, case, id=f"{name}-{case.id}")
    for name, provided in _PROVIDED.items()
    for case in load_cases(provided)
]


@pytest.mark.parametrize(("name", "case"), _CASES)
def test_case(name: str, case: Case) -> None:
    result = run_case(Target.load(_PROVIDED[name], device="cuda", backend=Backend.KERNEL), case)
    assert result.ok, result.text


def _uniform_draft(offset: int) -> dict[str, Any]:
    nothing = torch.zeros(64, 16, device="cuda")
    return markov_cases.arguments(
        torch.zeros(4, 2, 64, device="cuda"), nothing, nothing, [1.0] * 4, noise_offset=offset
    )


def _uniform_accept(offset: int) -> dict[str, Any]:
    """Drafts that fall, so that each row draws its token from equal logits."""
    drafts = torch.tensor([[0, 64, 64]] * 4)
    return rejection_cases.arguments(torch.zeros(12, 64, device="cuda"), None, drafts, [1.0] * 4, noise_offset=offset)


@pytest.mark.parametrize(
    ("name", "make"),
    [("markov", _uniform_draft), ("blockwise_rejection", _uniform_accept)],
    ids=["markov", "blockwise_rejection"],
)
def test_a_captured_step_draws_anew_at_each_offset(name: str, make: Callable[[int], dict[str, Any]]) -> None:
    """Three replays of one graph equal three eager steps at offsets 0, 1, 2, and differ."""
    setup = SlotSetup(backend=Backend.KERNEL, device="cuda", max_batch=4, gamma=2, vocab_size=64)
    slot = load_implementation(_PROVIDED[name])(setup)
    drawn = "out_draft_tokens" if name == "markov" else "out_tokens"
    eager = []
    for offset in range(3):
        values = make(offset)
        slot(**values)
        eager.append(values[drawn].tolist())

    static = make(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slot(**static)
    replayed = []
    for offset in range(3):
        static["noise_offset"].fill_(offset)
        static[drawn].fill_(0x7FFFFFFF)
        graph.replay()
        torch.cuda.synchronize()
        replayed.append(static[drawn].tolist())
    assert replayed == eager
    assert len({str(tokens) for tokens in eager}) == 3
    assert len({str(row) for row in eager[0]}) == 4, "rows with equal logits drew alike"
