"""Slots in the embedded engine: which are called, that output stays, that both sides mean the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_tiny import PROVIDED, slots_plan, tiny_models
from torch import Tensor

from sgl_mega_plugin.contract import SEAMS, Backend, Case, Plan, Provided, SlotSetup
from sgl_mega_plugin.embedded import Engine, Request, stages
from sgl_mega_plugin.embedded.runtime import engine_stages, plan_stages
from sgl_mega_plugin.registry import load_cases, load_reference

SETUP = SlotSetup(backend=Backend.REFERENCE, device="cpu", max_batch=8, gamma=7, vocab_size=24)
# A sum of squares in another order moves an fp32 norm by some 2**-23, and with it a value to the next of
# its dtype; RoPE adds two such values. In parts of a row's largest value:
TOLERANCES = {torch.float32: 2.0**-21, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def test_each_seam_has_the_plans_slot_or_the_engines_stage() -> None:
    found = plan_stages(slots_plan("accept_tail,context_kv"), SETUP)
    assert found.slots == (("greedy_accept", "accept_tail"), ("context_kv", "context_kv"))
    served = {entry.slot.seam: load_reference(entry) for entry in PROVIDED}
    assert found.greedy_accept is served["greedy_accept"]
    assert found.context_kv is served["context_kv"]
    assert (found.draft_block, found.step_inputs) == (stages.draft_block, stages.step_inputs)


def test_the_default_plan_serves_every_seam() -> None:
    assert [seam for seam, _ in plan_stages(slots_plan(), SETUP).slots] == list(SEAMS)


@pytest.mark.parametrize("none", [None, slots_plan("none")], ids=["no-plan", "empty-plan"])
def test_slots_off(none: Plan | None) -> None:
    assert plan_stages(none, SETUP) == engine_stages()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param(slots_plan(runtime="sglang"), "a plan for runtime 'sglang'", id="runtime"),
        pytest.param(slots_plan(backend=Backend.KERNEL), "backend 'kernel' cannot serve", id="backend"),
    ],
)
def test_a_plan_for_elsewhere_is_refused(bad: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_stages(bad, SETUP)


def test_a_named_slot_that_cannot_run_is_refused() -> None:
    refused = slots_plan("markov", isa="sm_70")
    with pytest.raises(ValueError, match="the plan does not stand: slot 'markov': needs ISA"):
        plan_stages(refused, SETUP)


def test_a_plan_needs_speculation() -> None:
    with pytest.raises(ValueError, match="pass speculative=True or no plan"):
        Engine(tiny_models(), plan=slots_plan(), speculative=False)


@pytest.mark.parametrize("seam", SEAMS)
def test_the_engines_stages_have_their_seams_signature(seam: str) -> None:
    assert SEAMS[seam].mismatches(getattr(stages, seam)) == []


CASES = [
    pytest.param(entry, case, id=f"{entry.slot.name}-{case.id}")
    for entry in PROVIDED
    for case in load_cases(entry)
    if not case.kernel_only
]


@pytest.mark.parametrize(("entry", "case"), CASES)
def test_stage_and_reference_agree_on_the_slots_cases(entry: Provided, case: Case) -> None:
    """Two definitions of a seam, written apart: integers equal, floats within a rounding."""
    ours, theirs = poisoned(case), poisoned(case)
    getattr(stages, str(entry.slot.seam))(**ours)
    load_reference(entry)(**theirs)
    for name, value in theirs.items():
        if not name.startswith("out_") or value is None:
            continue
        pairs = [(ours[name], value)] if isinstance(value, Tensor) else zip(ours[name], value, strict=True)
        for index, (found, wanted) in enumerate(pairs):
            assert_near(f"{name}[{index}]", found, wanted)


def poisoned(case: Case) -> dict[str, Any]:
    arguments = case.make("cpu")
    for name, value in arguments.items():
        if name.startswith("out_") and name not in case.keep:
            for tensor in [value] if isinstance(value, Tensor) else value or []:
                tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
    return arguments


def assert_near(name: str, found: Tensor, wanted: Tensor) -> None:
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), f"{name}: {found.tolist()} != {wanted.tolist()}"
        return
    both = ~(found.isnan() & wanted.isnan()) & (found != wanted)
    finite = torch.where(wanted.isfinite(), wanted, 0).double()
    bound = TOLERANCES[wanted.dtype] * finite.abs().amax(-1, keepdim=True).expand_as(finite)
    wrong = both & ~((found.double() - wanted.double()).abs() <= bound)
    for where in wrong.nonzero()[:1].tolist():
        at = tuple(where)
        pytest.fail(f"{name}{where}: {found[at].item()} instead of {wanted[at].item()}, bound {bound[at].item()}")


def requests(temperature: float = 0.0) -> list[Request]:
    return [
        Request(
            prompt_ids=tuple((5 * place + 3 * length) % 24 for place in range(length)),
            max_new_tokens=12 + length,
            temperature=temperature * (length % 2),
            seed=length,
            ignore_eos=True,
        )
        for length in (3, 9, 4, 17, 6)
    ]


@pytest.mark.parametrize("names", ["default", *(entry.slot.name for entry in PROVIDED)])
@pytest.mark.parametrize("pad_to", [None, 5], ids=["unpadded", "padded"])
def test_greedy_output_does_not_depend_on_slots(names: str, pad_to: int | None) -> None:
    models = tiny_models()
    plain = Engine(models, speculative=False).generate(requests())
    slots = Engine(models, plan=slots_plan(names), max_batch=3, pad_to=pad_to).generate(requests())
    assert [c.tokens for c in slots] == [c.tokens for c in plain]


@pytest.mark.parametrize("pad_to", [None, 5], ids=["unpadded", "padded"])
def test_mixed_batches_draw_the_same_with_slots(pad_to: int | None) -> None:
    models = tiny_models()
    off = Engine(models, max_batch=3).generate(requests(0.9))
    on = Engine(models, plan=slots_plan(), max_batch=3, pad_to=pad_to).generate(requests(0.9))
    assert on == off


def test_a_padded_step_equals_a_step_of_one_row() -> None:
    """Captured for 4 with temperatures .3 .6 .9 1.2, replayed with one row at .7: the other rows are stale."""
    gamma, vocab_size, rank = 3, 24, 4
    torch.manual_seed(0)
    base = torch.randn(4, gamma, vocab_size)
    w1, w2 = torch.randn(2, vocab_size, rank)
    for calls in (engine_stages(), plan_stages(slots_plan(), SETUP)):
        drafts = {}
        for rows, temperatures in ((1, [0.7]), (4, [0.7, 0.6, 0.9, 1.2])):
            drafts[rows] = torch.full((rows, gamma), 2**31 - 1)
            calls.draft_block(
                base_logits=base[:rows],
                anchor_tokens=torch.tensor([1, 2, 3, 4])[:rows],
                markov_w1=w1,
                markov_w2=w2,
                temperatures=torch.tensor(temperatures),
                noise_key=99,
                noise_offset=torch.tensor([5]),
                out_draft_tokens=drafts[rows],
                out_step_logits=torch.full((rows, gamma, vocab_size), torch.nan),
            )
        assert drafts[1][0].tolist() == drafts[4][0].tolist()


def test_the_interpreter_runs_the_kernels() -> None:
    """Triton's mode is fixed when it is imported, so this is a process of its own."""
    script = """
import json, sys
from test_embedded_runtime import Backend, Engine, requests, slots_plan, tiny_models
few = [r.model_copy(update={"max_new_tokens": 4}) for r in requests(0.9)[:3]]
models = tiny_models(gamma=2)
made = Engine(models, plan=slots_plan(backend=Backend.INTERPRETER), max_batch=3, pad_to=4)
print(json.dumps({
    "slots": len(made.stages.slots),
    "on": [c.tokens for c in made.generate(few)],
    "off": [c.tokens for c in Engine(models, max_batch=3).generate(few)],
}))
"""
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), str(here.parents[1] / "slots")]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["slots"] == len(SEAMS)
    assert found["on"] == found["off"]
