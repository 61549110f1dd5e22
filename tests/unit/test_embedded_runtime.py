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

from sgl_mega_plugin.contract import SEAMS, Backend, Case, Host, Plan, Provided, SlotSetup
from sgl_mega_plugin.embedded import UNCALLED, Engine, Request, stages
from sgl_mega_plugin.embedded.runtime import engine_stages, plan_stages
from sgl_mega_plugin.plan import make_plan
from sgl_mega_plugin.registry import Registry, load_cases, load_reference

SETUP = SlotSetup(backend=Backend.REFERENCE, device="cpu", max_batch=8, gamma=7, vocab_size=24)
# A sum of squares in another order moves an fp32 norm by some 2**-23, and with it a value to the next of
# its dtype; RoPE adds two such values. In parts of a row's largest value:
TOLERANCES = {torch.float32: 2.0**-21, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
# A value of 8 bits is rounded from one of 16 that may be the next: one step of three or two bits of mantissa.
TOLERANCES |= {torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}
CALLED = [entry for entry in PROVIDED if entry.slot.seam not in UNCALLED]


def test_each_seam_has_the_plans_slot_or_the_engines_stage() -> None:
    found = plan_stages(slots_plan("accept_tail,context_kv"), SETUP)
    assert found.slots == (("greedy_accept", "accept_tail"), ("context_kv", "context_kv"))
    served = {entry.slot.seam: load_reference(entry) for entry in PROVIDED}
    assert found.greedy_accept is served["greedy_accept"]
    assert found.context_kv is served["context_kv"]
    assert (found.draft_block, found.step_inputs) == (stages.draft_block, stages.step_inputs)


def test_the_default_plan_serves_every_seam_that_has_a_default_slot() -> None:
    served = {entry.slot.seam for entry in PROVIDED if entry.slot.default}
    found = plan_stages(slots_plan(), SETUP)
    assert [seam for seam, _ in found.slots] == [seam for seam in SEAMS if seam in served]
    assert (found.idle, found.deferred) == ((), False)


def test_a_deferred_commit_takes_the_place_of_the_commit_at_once() -> None:
    found = plan_stages(slots_plan("all"), SETUP)
    assert [seam for seam, _ in found.slots] == [seam for seam in SEAMS if seam not in (*UNCALLED, "context_kv")]
    assert found.idle == (("context_kv", "the commit is deferred, so nothing is written at once"),)
    assert found.deferred
    assert found.context_kv is stages.context_kv


def test_a_second_slot_of_a_seam_is_idle() -> None:
    name = PROVIDED[0].slot.name
    twin = PROVIDED[0].model_copy(update={"slot": PROVIDED[0].slot.model_copy(update={"name": "twin"})})
    plan = slots_plan(name)
    doubled = plan.model_copy(update={"active": (*plan.active, plan.active[0].model_copy(update={"provided": twin}))})
    found = plan_stages(doubled, SETUP)
    assert found.slots == ((str(PROVIDED[0].slot.seam), name),)
    assert found.idle == (("twin", f"slot {name!r} serves the same seam and comes before it"),)


@pytest.mark.parametrize("seam", UNCALLED)
def test_a_slot_of_a_seam_that_is_not_called_is_refused(seam: str) -> None:
    name = next(entry.slot.name for entry in PROVIDED if entry.slot.seam == seam)
    with pytest.raises(ValueError, match=f"slot '{name}': {UNCALLED[seam]}"):
        plan_stages(slots_plan(name), SETUP)
    host = Host(runtime="embedded", isa="cpu", backend=Backend.REFERENCE)
    environ = {"SGLANG_NVIDIA_MEGAKERNEL_SLOTS": name}
    opened = make_plan(registry=Registry.of(PROVIDED), environ=environ, host=host)
    with pytest.raises(ValueError, match=f"calls more seams: slot '{name}'"):
        plan_stages(opened, SETUP)


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
                if tensor.dtype is torch.bool:
                    tensor.logical_not_()
                    continue
                tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
    return arguments


def assert_near(name: str, found: Tensor, wanted: Tensor) -> None:
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), f"{name}: {found.tolist()} != {wanted.tolist()}"
        return
    part = TOLERANCES[wanted.dtype]
    found, wanted = found.float(), wanted.float()  # exact, and 8-bit floats have few operators
    both = ~(found.isnan() & wanted.isnan()) & (found != wanted)
    finite = torch.where(wanted.isfinite(), wanted, 0).double()
    bound = part * finite.abs().amax(-1, keepdim=True).expand_as(finite)
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


def alone(entry: Provided) -> str:
    return ",".join(["none", entry.slot.name, *sorted(entry.slot.needs)])


LISTS = ["default", "all", "all,-target_argmax_head,-draft_lm_head", "all,-kv_staging", *map(alone, CALLED)]


@pytest.mark.parametrize("names", LISTS)
@pytest.mark.parametrize("pad_to", [None, 5], ids=["unpadded", "padded"])
def test_greedy_output_does_not_depend_on_slots(names: str, pad_to: int | None) -> None:
    models = tiny_models()
    plain = Engine(models, speculative=False).generate(requests())
    slots = Engine(models, plan=slots_plan(names), max_batch=3, pad_to=pad_to).generate(requests())
    assert [c.tokens for c in slots] == [c.tokens for c in plain]


@pytest.mark.parametrize("name", ["kv_staging", "deferred_kv"])
def test_half_of_a_deferred_commit_goes_with_the_engines_own_other_half(name: str) -> None:
    """As with a third party's slot that needs no other."""
    (entry,) = [entry for entry in PROVIDED if entry.slot.name == name]
    alone = entry.model_copy(update={"slot": entry.slot.model_copy(update={"needs": frozenset()})})
    host = Host(runtime="embedded", isa="cpu", backend=Backend.REFERENCE)
    environ = {"SGLANG_NVIDIA_MEGAKERNEL_SLOTS": name}
    plan = make_plan(registry=Registry.of([alone]), environ=environ, host=host)
    made = Engine(tiny_models(), plan=plan, max_batch=3, pad_to=5)
    assert made.stages.deferred
    assert made.stages.slots == ((entry.slot.seam, name),)
    assert made.generate(requests(0.9)) == Engine(tiny_models(), max_batch=3).generate(requests(0.9))


@pytest.mark.parametrize("names", ["default", "all"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("committed", [57, 60, 61, 63, 64])
def test_context_end_with_slots(names: str, page_size: int, committed: int) -> None:
    """Beside a request that goes on, and one that starts when the first has ended."""
    models = tiny_models(max_positions=64)
    prompts = [tuple((5 * place + length) % 24 for place in range(length)) for length in (committed, 20, 50)]
    these = [Request(prompt_ids=prompt, max_new_tokens=None, ignore_eos=True) for prompt in prompts]
    plain = Engine(models, speculative=False).generate(these)
    made = Engine(models, plan=slots_plan(names), max_batch=2, page_size=page_size, pad_to=3)
    for cache in (made.kv.target, made.kv.draft):
        assert cache is not None
        cache.fill(torch.nan)
    assert [(c.tokens, c.finish_reason) for c in made.generate(these)] == [(c.tokens, "context") for c in plain]


FILTERS: dict[str, dict[str, Any]] = {"unfiltered": {}, "filtered": {"top_k": 7, "top_p": 0.8, "min_p": 0.02}}


@pytest.mark.parametrize("fields", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("names", LISTS)
@pytest.mark.parametrize("pad_to", [None, 5], ids=["unpadded", "padded"])
def test_mixed_batches_draw_the_same_with_slots(pad_to: int | None, names: str, fields: dict[str, Any]) -> None:
    """Accepted lengths too: the drafts read the same context, whenever it was written."""
    models = tiny_models()
    these = [request.model_copy(update=fields) for request in requests(0.9)]
    off = Engine(models, max_batch=3).generate(these)
    on = Engine(models, plan=slots_plan(names), max_batch=3, pad_to=pad_to).generate(these)
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
                draft_hidden=None,
                mixer_weight=None,
                mixer_bias=None,
                temperatures=torch.tensor(temperatures),
                noise_key=99,
                noise_offset=torch.tensor([5]),
                out_draft_tokens=drafts[rows],
                out_step_logits=torch.full((rows, gamma, vocab_size), torch.nan),
                out_features=None,
            )
        assert drafts[1][0].tolist() == drafts[4][0].tolist()


def test_the_interpreter_runs_the_kernels() -> None:
    """Triton's mode is fixed when it is imported, so this is a process of its own."""
    script = """
import json, sys
from test_embedded_runtime import Backend, Engine, requests, slots_plan, tiny_models
few = [r.model_copy(update={"max_new_tokens": 4, "top_p": 0.9}) for r in requests(0.9)[:3]]
models = tiny_models(gamma=2)
made = Engine(models, plan=slots_plan("all", backend=Backend.INTERPRETER), max_batch=3, pad_to=4)
greedy = [r.model_copy(update={"temperature": 0.0}) for r in few]
print(json.dumps({
    "slots": len(made.stages.slots),
    "on": [c.tokens for these in (few, greedy) for c in made.generate(these)],
    "off": [c.tokens for these in (few, greedy) for c in Engine(models, max_batch=3).generate(these)],
}))
"""
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), str(here.parents[1] / "slots")]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["slots"] == len(SEAMS) - len(UNCALLED) - 1  # and without the commit at once
    assert found["on"] == found["off"]
