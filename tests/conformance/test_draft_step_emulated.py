"""The kernel of `draft_step` on a CPU: `target_step`'s for blocks whose rows see each other."""

from __future__ import annotations

import pytest
import torch

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.draft.draft_step import cases
from sgl_mega_slots.draft.draft_step.launch import DraftStep
from sgl_mega_slots.target.target_step.cases import StepCase, arguments
from sgl_mega_slots.target.target_step.emulator import kernel as emulator
from sgl_mega_slots.target.target_step.interpret import interpret
from sgl_mega_slots.target.target_step.plan import StepPlan
from sgl_mega_slots.target.target_step.reference import decoder_step
from sgl_mega_slots.target.target_step.weights import Cache, Call, call_of

BY_NAME = {case.name: case for case in cases.CASES}


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.norm(found.float() - wanted) / torch.linalg.norm(wanted))


def _emulated(plan: StepPlan, call: Call, seed: int) -> torch.Tensor:
    kernel, buffers = emulator.EmulatedKernel(plan), emulator.buffers(plan)
    buffers.bind_model(call.weights, call.cache, emulator.encode)
    buffers.bind(call.inputs, call.outputs)
    hidden = call.outputs.hidden
    assert hidden is not None
    hidden.fill_(float("nan"))
    assert kernel.run(buffers, seed=seed) == ""
    return hidden.clone()


def _made(case: StepCase) -> Call:
    return call_of(cases.arguments_of(case, "cpu"))


@pytest.mark.parametrize("name", list(BY_NAME))
def test_the_kernel_is_the_reference(name: str) -> None:
    case, call = BY_NAME[name], _made(BY_NAME[name])
    wanted = decoder_step(case.shape, call.weights, call.cache, call.inputs, causal=False).last_hidden
    copy = Cache(*(tuple(layer.clone() for layer in layers) for layers in (call.cache.keys, call.cache.values)))
    ideal = interpret(case.plan(), call.weights, copy, call.inputs, seed=0).last_hidden
    first, second = (_emulated(case.plan(), call, seed) for seed in (1, 2))
    assert _error(first, wanted) <= 1.3 * _error(ideal, wanted)
    assert torch.equal(first, second)


def test_a_causal_plan_gives_something_else() -> None:
    case, call = BY_NAME["no context"], _made(BY_NAME["no context"])
    wanted = decoder_step(case.shape, call.weights, call.cache, call.inputs, causal=False).last_hidden
    plan = case.plan()
    causal = StepPlan(plan.shape, plan.requests, plan.tokens, plan.sms, head=False)
    assert _error(_emulated(causal, call, 1), wanted) > 2.0**-5


def test_a_block_has_as_many_rows_as_tokens_are_drafted_or_one_more() -> None:
    slot = DraftStep(SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=1, gamma=7, vocab_size=256))
    for rows in (6, 9):
        case = StepCase("another", BY_NAME["one request"].shape, rows, (9,), 4, taps=(), head=False, causal=False)
        with pytest.raises(
            ValueError, match=f"draft_step: 1 requests of {rows} rows; it was built for at most 1 of 7 or 8"
        ):
            slot(**cases.arguments_of(case, "cpu"))


def test_messages_name_the_slot() -> None:
    case = BY_NAME["one request"]
    assert (case.plan().name, StepPlan(case.shape, 1, 8, 4).name) == ("draft_step", "target_step")
    with pytest.raises(ValueError, match="draft_step does not cover this step: 35 rows"):
        StepPlan(case.shape, 5, 7, 4, head=False, causal=False)


def test_arguments_are_the_seams() -> None:
    every = arguments(BY_NAME["one request"], "cpu")
    assert set(every) - set(cases.arguments_of(BY_NAME["one request"], "cpu")) == {
        "lm_head_weight", "taps", "out_tapped", "out_logits",
    }  # fmt: skip
