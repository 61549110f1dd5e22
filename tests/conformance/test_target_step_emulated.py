"""The kernel of `target_step` itself, run on a CPU: against the reference and the interpreted plan, and broken.

The emulator takes the kernel's source as it is (emulator/platform.cuh). Breaking a line of it shows that a wrong
schedule does not pass here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from sgl_mega_slots.target.target_step import cases, reference
from sgl_mega_slots.target.target_step.cases import SLOW_CASES, StepCase
from sgl_mega_slots.target.target_step.emulator import kernel as emulator
from sgl_mega_slots.target.target_step.interpret import interpret
from sgl_mega_slots.target.target_step.plan import StepPlan
from sgl_mega_slots.target.target_step.weights import Cache, call_of, dequantised

BY_NAME = {case.name: case for case in cases.CASES}


class Step:
    """A case with its memory and its kernel, and what it should give."""

    def __init__(self, case: StepCase, *, changed: Mapping[str, str] | None = None) -> None:
        self.case = case
        call = call_of(cases.arguments(case, "cpu"))
        self.weights, self.cache, self.inputs, self.outputs = call.weights, call.cache, call.inputs, call.outputs
        self.before = _copy(self.cache)
        self.wanted = reference.decoder_step(case.shape, self.weights, self.cache, self.inputs)
        self.plan = case.plan()
        self.kernel = emulator.EmulatedKernel(self.plan, changed=changed)
        self.buffers = emulator.buffers(self.plan)
        self.buffers.bind_model(self.weights, self.cache, emulator.encode)
        self.buffers.bind(self.inputs, self.outputs)

    def run(self, seed: int) -> str:
        """One step into poisoned outputs: what went wrong, else an empty text."""
        for out in (self.outputs.tapped, self.outputs.hidden, self.outputs.logits):
            if out is not None:
                out.fill_(float("nan"))
        return self.kernel.run(self.buffers, seed=seed)

    @property
    def out(self) -> torch.Tensor:
        out = self.outputs.logits if self.case.head else self.outputs.hidden
        assert out is not None
        return out


def _copy(cache: Cache) -> Cache:
    return Cache(tuple(keys.clone() for keys in cache.keys), tuple(values.clone() for values in cache.values))


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.norm(found.float() - wanted) / torch.linalg.norm(wanted)) if wanted.numel() else 0.0


@pytest.mark.parametrize("name", list(BY_NAME))
def test_the_kernel_is_the_reference(name: str) -> None:
    step = Step(BY_NAME[name])
    case = step.case
    interpreted = interpret(step.plan, step.weights, _copy(step.cache), step.inputs, seed=0)
    first = None
    for seed in (1,) if name in SLOW_CASES else (1, 2):
        assert step.run(seed) == ""
        target = step.wanted.logits if case.head else step.wanted.last_hidden
        ideal = interpreted.logits if case.head else interpreted.last_hidden
        # Rounding apart, as the interpreted plan rounds; attention rounds its probabilities too.
        assert _error(step.out, target) <= 1.3 * _error(ideal, target)
        if step.outputs.tapped is not None:
            taps = step.wanted.residuals[list(case.taps)].transpose(0, 1).flatten(1)
            assert _error(step.outputs.tapped, taps) <= 1.3 * _error(interpreted.tapped, taps) + 1e-4
        # Whatever the order in which threads, SMs and copies take turns.
        first = step.out.clone() if first is None else first
        assert torch.equal(step.out, first)
    assert step.buffers.failure.tolist() == [0] * 4


@pytest.mark.parametrize(
    "name",
    [
        "one request",
        "two requests",
        "five rows and a bias",
        "seven heads share a KV head",
        "fp8 KV",
        "fp8 KV, two requests",
    ],
)
def test_keys_and_values_go_where_the_engine_said_and_nowhere_else(name: str) -> None:
    step = Step(BY_NAME[name])
    assert step.run(3) == ""
    slots = step.inputs.cache_locs
    others = torch.ones(step.cache.keys[0].shape[0], dtype=torch.bool)
    others[slots] = False
    for layer in range(step.case.shape.layers):
        pairs = (
            (step.cache.keys[layer], step.before.keys[layer], step.wanted.keys[layer]),
            (step.cache.values[layer], step.before.values[layer], step.wanted.values[layer]),
        )
        for found, before, wanted in pairs:
            assert torch.equal(found.view(torch.uint8)[others], before.view(torch.uint8)[others])
            # Two roundings to bf16 a layer before it, and its own. Of fp8 values some are one step away.
            fp8 = 2**-6 if step.case.shape.kv_fp8 else 0.0
            assert _error(reference.read(found, slots), wanted) <= 2**-8 * (1 + 2 * layer) ** 0.5 + 1e-4 + fp8


def test_the_padding_slot_is_never_written() -> None:
    step = Step(BY_NAME["two requests"])
    step.inputs.cache_locs[3:9] = 0
    assert step.run(1) == ""
    for found, before in zip(
        (*step.cache.keys, *step.cache.values), (*step.before.keys, *step.before.values), strict=True
    ):
        assert torch.equal(found[0].view(torch.int16), before[0].view(torch.int16))
    assert _error(step.out, step.wanted.logits) <= 2**-7


def test_steps_are_numbered_anew_after_the_last_number() -> None:
    """Tags and copies go on as if they were not: 510 is a multiple of the tags' number and of the copies'."""
    step = Step(BY_NAME["one request"])
    step.buffers.steps[0] = 508
    outs = []
    for seed in range(4):
        assert step.run(seed) == ""
        outs.append(step.out.clone())
    assert step.buffers.steps.tolist() == [2]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_the_next_step_reads_new_inputs() -> None:
    """What a graph's replay does: the same addresses, other requests."""
    step = Step(BY_NAME["one request"])
    assert step.run(1) == ""
    step.inputs.input_ids.copy_((step.inputs.input_ids + 17) % step.case.shape.vocab)
    wanted = reference.decoder_step(step.case.shape, step.weights, step.before, step.inputs)
    assert step.run(2) == ""
    assert _error(step.out, wanted.logits) <= 2**-7


def test_one_row_a_request() -> None:
    """A step without a draft, which the seam has no size for."""
    step = Step(replace(BY_NAME["two requests"], tokens=1))
    assert step.run(1) == ""
    assert _error(step.out, step.wanted.logits) <= 2**-7


def test_every_fp8_value_is_widened_exactly() -> None:
    """All but the two NaNs, which no checkpoint holds."""
    kernel = emulator.EmulatedKernel(BY_NAME["fp8, a scale a row"].plan())
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn)
    found, wanted = kernel.widen(values), values.bfloat16()
    numbers = (codes & 0x7F) != 0x7F
    assert int(numbers.sum()) == 254
    assert torch.equal(wanted[numbers].float(), values.float()[numbers])
    assert torch.equal(found[numbers].view(torch.int16), wanted[numbers].view(torch.int16))


def test_numbers_are_narrowed_as_torch_does_within_the_range_of_fp8() -> None:
    """All bf16 values: what is past the range becomes its end, where torch makes no number of it."""
    kernel = emulator.EmulatedKernel(BY_NAME["fp8 KV"].plan())
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[~values.isnan()]
    found = kernel.narrow(values)
    assert torch.equal(found.view(torch.uint8), values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert not found.float().isnan().any()


def test_fp8_weights_are_as_good_as_the_same_weights_in_bf16() -> None:
    """Scales that are powers of two lose nothing in bf16: then both kernels have the same weights."""
    case = BY_NAME["fp8, a scale a block, two requests"]
    fp8 = Step(case)
    made = cases.arguments(case, "cpu")
    for name in ("qkv", "output", "gate_up", "down"):
        for layer, (weight, scales) in enumerate(zip(made[f"{name}_weights"], made[f"{name}_scales"], strict=True)):
            scales.copy_(torch.exp2(scales.log2().round()))
            mine = getattr(fp8.weights.layers[layer], {"output": "o"}.get(name, name) + "_scales")
            mine.copy_(scales)
            made[f"{name}_weights"][layer] = dequantised(weight, scales).bfloat16()
        made[f"{name}_scales"] = None
    call = call_of(made)
    wanted = reference.decoder_step(call.shape, call.weights, call.cache, call.inputs)
    plan = StepPlan(call.shape, call.inputs.requests, call.inputs.tokens, case.sms, taps=case.taps)
    kernel, buffers = emulator.EmulatedKernel(plan), emulator.buffers(plan)
    buffers.bind_model(call.weights, call.cache, emulator.encode)
    buffers.bind(call.inputs, call.outputs)
    assert (kernel.run(buffers, seed=1), fp8.run(1)) == ("", "")
    assert call.outputs.logits is not None
    assert _error(fp8.out, wanted.logits) <= 1.1 * _error(call.outputs.logits, wanted.logits)


# --- broken

BROKEN = {
    "weights read before they are there": (
        "gemm.cuh",
        "    await(b, b.s.full(place.slot), place.parity, kWeightsFull, layer, op);\n",
        "",
    ),
    "a stage overwritten while it is read": (
        "producers.cuh",
        "  await(b, b.s.empty(at.next.slot), at.next.parity ^ 1, kWeightsEmpty, layer, of.op);\n",
        "",
    ),
    "an input taken before all of it is there": (
        "words.cuh",
        "  return w[0] != kNothing && w[1] != kNothing && w[2] != kNothing && w[3] != kNothing;",
        "  return w[0] != kNothing;",
    ),
    "an input of the step before last": ("words.cuh", "    store_word(next + at, kNothing);\n", ""),
    "an input nobody writes": ("words.cuh", "store_word(now + at,", "static_cast<void>("),
    "parts taken away before all have read them": ("attention.cuh", "    await_layer(b, u, layer);\n", ""),
    "an fp8 matrix's input that is too small": (
        "words.cuh",
        "pack_bf16(first * kOfFp8Input, second * kOfFp8Input)",
        "pack_bf16(first, second)",
    ),
    "projections of the layer before": ("words.cuh", "(static_cast<uint32_t>(word) & 255) == tag", "true"),
    "positions after the row's own are seen": (
        "attention.cuh",
        "own - (u.first_fresh",
        "own + 1 - (u.first_fresh",
    ),
    "a block read before its copies": ("attention.cuh", "    copies_wait<kTeamBlocks - 1>();\n", ""),
    "a block overwritten while it is read": (
        "attention.cuh",
        "    sync_team(b);\n    if (later < u.blocks) copy_block",
        "    if (later < u.blocks) copy_block",
    ),
    "keys from another block's places": ("attention.cuh", "(team * kTeamBlocks + turn) * kBlock", "turn * kBlock"),
    "sums that are still being read": ("pipeline.cuh", "(block & (kSumPlaces - 1))", "0"),
    "scales of the block's first group": ("gemm.cuh", "group * kScalesOfGroup + number", "number"),
    "scales of the segment's first half": (
        "gemm.cuh",
        "(scales, group * kScalesOfGroup + number)",
        "(scales, group * kScalesOfGroup)",
    ),
    "scales of the first group's rows": (
        "gemm.cuh",
        "const int from = group * kScalesOfGroup + column;",
        "const int from = column;",
    ),
    "scales of the block before": ("gemm.cuh", "next > 0 ? block : block + kBlockGroups", "block"),
    "scales of gates for ups": ("gemm.cuh", "first + Gemm<op>::rows / 2 : first", "first : first"),
    "an fp8 matrix's input in the order of a bf16 one's": ("words.cuh", "= fp8 ? word_of", "= false ? word_of"),
    "a bf16 matrix's input in the order of an fp8 one's": ("words.cuh", "= fp8 ? word_of", "= kFp8 ? word_of"),
    "scales of the norm before": (
        "gemm.cuh",
        "  await(b, b.s.scales_full(), work.normed & 1, kScales, layer, 0);\n",
        "",
    ),
}


#: The case that meets a fault, where it is not the plain one.
BROKEN_IN = {
    "parts taken away before all have read them": "SMs with attention alone",
    "an fp8 matrix's input that is too small": "fp8, a scale a row",
    "a block read before its copies": "heads of 128, split contexts",
    "a block overwritten while it is read": "four requests",
    "positions after the row's own are seen": "no context",
    "scales of the block's first group": "fp8, a scale a block",
    "scales of the segment's first half": "fp8, a scale a block, two stages",
    "scales of the first group's rows": "fp8, a scale a row",
    "scales of the block before": "fp8, a scale a row, two requests",
    "scales of gates for ups": "fp8, a scale a block",
    "an fp8 matrix's input in the order of a bf16 one's": "fp8, a scale a row",
    "a bf16 matrix's input in the order of an fp8 one's": "fp8, a scale a row, three requests",
}
#: Interleavings tried: a fault that needs one warp to be late shows seldom.
TRIES = 12


@pytest.mark.parametrize("fault", list(BROKEN))
def test_a_broken_kernel_does_not_pass(fault: str) -> None:
    """Within some interleavings: a wrong result, or a block that can't go on."""
    name, line, instead = BROKEN[fault]
    text = (emulator.CSRC / name).read_text()
    assert text.count(line) == 1, f"{name} no longer has the line that this test breaks"
    step = Step(BY_NAME[BROKEN_IN.get(fault, "two requests")], changed={name: text.replace(line, instead)})
    for seed in range(TRIES):
        step.inputs.input_ids.copy_((step.inputs.input_ids + 17) % step.case.shape.vocab)  # the last step's are wrong
        wanted = reference.decoder_step(step.case.shape, step.weights, step.before, step.inputs)
        if step.run(seed) or not _error(step.out, wanted.logits) <= 2**-7:
            return
    pytest.fail(f"{TRIES} interleavings gave the right result")
