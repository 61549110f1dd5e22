"""The embedded engine's commit stage: what a slot's reference writes, and the draft's joined projection."""

from __future__ import annotations

import pytest
import torch
from embedded_tiny import tiny_models

from sgl_mega_plugin.conformance.arguments import copy_of, tensors
from sgl_mega_plugin.conformance.generate import generated_cases
from sgl_mega_plugin.contract import Provided, Requirements
from sgl_mega_plugin.embedded import stages
from sgl_mega_plugin.registry import load_cases, load_reference
from sgl_mega_slots import SLOTS

_SLOTS = {slot.seam: Provided(slot=slot, distribution="d", version="0") for slot in SLOTS}
#: The engine's norm rounds another way, so a key may be the next number of its dtype; of a rotation's two terms, which
#: cancel, one of up to 4 may be.
_STEPS = {torch.float8_e5m2: 2.0**-2, torch.float8_e4m3fn: 2.0**-3, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.mark.parametrize("seam", ["context_kv", "kv_staging", "staged_kv", "history_commit"])
def test_a_stage_does_what_the_reference_does(seam: str) -> None:
    reference = load_reference(_SLOTS[seam])
    made = generated_cases(seam, count=40, seed=4, requires=Requirements(), reference=reference, on_cuda=False)
    own = [case for case in load_cases(_SLOTS[seam]) if not case.kernel_only]
    for case in (*own, *made):
        values = case.make("cpu")
        expected = copy_of(values)
        reference(**expected)
        getattr(stages, seam)(**values)
        for (label, found), (_, wanted) in zip(tensors(values), tensors(expected), strict=True):
            step = _STEPS.get(found.dtype, 2.0**-20) if label.startswith("out_keys") else 0.0
            torch.testing.assert_close(
                found.float(), wanted.float(), rtol=step, atol=4 * step, equal_nan=True,
                msg=lambda text, label=label, case=case: f"{case.id}: {label}: {text}",
            )  # fmt: skip


def test_the_drafts_projection_is_joined_once_and_follows_its_weights() -> None:
    draft = tiny_models().draft
    context = torch.randn(3, draft.config.hidden)
    first = draft._stacked_kv_weight()
    assert draft._stacked_kv_weight() is first
    before = draft.context_kv(context)
    weight = draft.layers[1].get_parameter("self_attn.v_proj.weight")
    with torch.no_grad():
        weight.mul_(2)
    after = draft.context_kv(context)
    assert torch.equal(after[:, 1, 1], before[:, 1, 1] * 2)
    assert torch.equal(after[:, 0], before[:, 0])
    draft.double()
    assert draft.context_kv(context.double()).dtype is torch.float64


def test_a_draft_in_training_gets_gradients() -> None:
    draft = tiny_models().draft.requires_grad_(True)
    draft.context_kv(torch.randn(3, draft.config.hidden)).sum().backward()
    for layer in draft.layers:
        assert layer.get_parameter("self_attn.k_proj.weight").grad is not None
    with torch.no_grad():
        assert draft._stacked_kv_weight() is draft._stacked_kv_weight()
