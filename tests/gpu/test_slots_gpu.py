"""Every case of every built-in slot on a GPU: eager calls, then replays of one captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_mega_plugin.conformance.runner import Target, run_case
from sgl_mega_plugin.contract import Backend, Case, Provided, SlotSetup
from sgl_mega_plugin.registry import load_cases
from sgl_mega_slots import SLOTS
from sgl_mega_slots.draft.markov.cases import arguments

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


def _uniform(batch: int, offset: int) -> dict[str, Any]:
    nothing = torch.zeros(64, 16, device="cuda")
    logits = torch.zeros(batch, 2, 64, device="cuda")
    return arguments(logits, nothing, nothing, [1.0] * batch, noise_offset=offset)


def test_a_captured_step_draws_anew_at_each_offset() -> None:
    """Three replays of one graph equal three eager steps at offsets 0, 1, 2, and differ."""
    from sgl_mega_slots.draft.markov.launch import Markov

    slot = Markov(SlotSetup(backend=Backend.KERNEL, device="cuda", max_batch=4, gamma=2, vocab_size=64))
    eager = []
    for offset in range(3):
        values = _uniform(4, offset)
        slot(**values)
        eager.append(values["out_draft_tokens"].tolist())

    static = _uniform(4, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slot(**static)
    replayed = []
    for offset in range(3):
        static["noise_offset"].fill_(offset)
        static["out_draft_tokens"].fill_(0x7FFFFFFF)
        graph.replay()
        torch.cuda.synchronize()
        replayed.append(static["out_draft_tokens"].tolist())
    assert replayed == eager
    assert len({str(tokens) for tokens in eager}) == 3
    assert len({str(row) for row in eager[0]}) == 4, "rows with equal logits drew alike"
