"""The kernel of `target_step` itself, run on a CPU: against the reference and the interpreted plan, and broken.

The emulator takes the kernel's source as it is (tests/emulator/platform.cuh). Breaking a line of it shows that a wrong
schedule does not pass here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated import CSRC, EmulatedStep, buffers

from sgl_mega_slots.target.target_step import cases, reference
from sgl_mega_slots.target.target_step.buffers import StepBuffers
from sgl_mega_slots.target.target_step.cases import StepCase
from sgl_mega_slots.target.target_step.interpret import interpret
from sgl_mega_slots.target.target_step.plan import COUNTER_WORDS
from sgl_mega_slots.target.target_step.weights import Cache, StepInputs, Weights

BY_NAME = {case.name: case for case in cases.CASES}
#: Cases whose step takes seconds here.
LARGE = {"three segments, wide MLP", "segments that stay", "segments that come again", "more SMs than work"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target_step")


class Step:
    """A case with its memory, and what it should give."""

    def __init__(self, case: StepCase, seed: int = 1) -> None:
        self.case = case
        self.weights: Weights = cases.weights(case.shape, seed=seed)
        cache, inputs = cases.step(case, seed=seed + 1)
        self.cache: Cache = cache
        self.inputs: StepInputs = inputs
        self.wanted = reference.target_step(case.shape, self.weights, cache, inputs)
        self.before = _copy(cache)
        self.plan = case.plan()
        self.buffers: StepBuffers = buffers(self.plan, self.weights, cache)
        self.buffers.bind(inputs)

    @property
    def out(self) -> torch.Tensor:
        return self.buffers.logits if self.case.head else self.buffers.last_hidden

    def poison(self) -> None:
        for out in (self.buffers.logits, self.buffers.last_hidden, self.buffers.tapped):
            out.fill_(float("nan"))


def _copy(cache: Cache) -> Cache:
    return Cache(tuple(keys.clone() for keys in cache.keys), tuple(values.clone() for values in cache.values))


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.norm(found.float() - wanted) / torch.linalg.norm(wanted)) if wanted.numel() else 0.0


@pytest.mark.parametrize("name", list(BY_NAME))
def test_the_kernel_is_the_reference(name: str, folder: Path) -> None:
    step = Step(BY_NAME[name])
    case, plan = step.case, step.plan
    kernel = EmulatedStep(plan, folder)
    interpreted = interpret(plan, step.weights, _copy(step.cache), step.inputs, seed=0)
    first = None
    for seed in (1,) if name in LARGE else (1, 2):
        step.poison()
        assert kernel.run(step.buffers, seed=seed) == ""
        target = step.wanted.logits if case.head else step.wanted.last_hidden
        ideal = interpreted.logits if case.head else interpreted.last_hidden
        # Rounding apart, as the interpreted plan rounds; attention rounds its probabilities too.
        assert _error(step.out, target) <= 1.3 * _error(ideal, target)
        taps = step.wanted.residuals[list(case.taps)].transpose(0, 1).flatten(1)
        assert _error(step.buffers.tapped, taps) <= 1.3 * _error(interpreted.tapped, taps) + 1e-4
        # Whatever the order in which threads, SMs and copies take turns.
        first = step.out.clone() if first is None else first
        assert torch.equal(step.out, first)
    assert step.buffers.failure.tolist() == [0] * 6


@pytest.mark.parametrize("name", ["one request", "two requests", "five rows and a bias", "seven heads share a KV head"])
def test_keys_and_values_go_where_the_engine_said_and_nowhere_else(name: str, folder: Path) -> None:
    step = Step(BY_NAME[name])
    assert EmulatedStep(step.plan, folder).run(step.buffers, seed=3) == ""
    places = step.inputs.out_cache_loc
    others = torch.ones(step.cache.keys[0].shape[0], dtype=torch.bool)
    others[places] = False
    for layer in range(step.case.shape.layers):
        pairs = (
            (step.cache.keys[layer], step.before.keys[layer], step.wanted.keys[layer]),
            (step.cache.values[layer], step.before.values[layer], step.wanted.values[layer]),
        )
        for found, before, wanted in pairs:
            assert torch.equal(found[others].view(torch.int16), before[others].view(torch.int16))
            # Two roundings to bf16 a layer before it, and its own.
            assert _error(found[places], wanted) <= 2**-8 * (1 + 2 * layer) ** 0.5 + 1e-4


def test_counters_count_as_the_plan_says(folder: Path) -> None:
    step = Step(BY_NAME["two requests"])
    kernel = EmulatedStep(step.plan, folder)
    wanted = interpret(step.plan, step.weights, _copy(step.cache), step.inputs, seed=0).counters
    for steps in (1, 2, 3):
        assert kernel.run(step.buffers, seed=steps) == ""
        assert step.buffers.counters[::COUNTER_WORDS].tolist() == [steps * count for count in wanted]


def test_counters_may_wrap(folder: Path) -> None:
    """After 2**32 / arrivals steps: a counter compares by distance, not by size."""
    step = Step(BY_NAME["one request"])
    kernel = EmulatedStep(step.plan, folder)
    assert kernel.run(step.buffers, seed=1) == ""
    out = step.out.clone()
    one = step.buffers.counters.clone()
    done = 2**32 - 1  # the next step is number 0
    step.buffers.counters.copy_((one.long() * done).to(torch.int32))
    step.buffers.steps[0] = -1
    step.poison()
    assert kernel.run(step.buffers, seed=2) == ""
    assert torch.equal(step.out, out)


def test_the_next_step_reads_new_inputs(folder: Path) -> None:
    """What a graph's replay does: the same addresses, other requests."""
    step = Step(BY_NAME["one request"])
    kernel = EmulatedStep(step.plan, folder)
    assert kernel.run(step.buffers, seed=1) == ""
    step.inputs.input_ids.copy_((step.inputs.input_ids + 17) % step.case.shape.vocab)
    wanted = reference.target_step(step.case.shape, step.weights, step.before, step.inputs)
    step.poison()
    assert kernel.run(step.buffers, seed=2) == ""
    assert _error(step.out, wanted.logits) <= 2**-7


# --- broken

BROKEN = {
    "weights read before they are there": (
        "gemm.cuh",
        "      await(b, b.s.full(place.slot), place.parity, kWeightsFull, layer, op);\n",
        "",
    ),
    "a stage overwritten while it is read": (
        "producers.cuh",
        "          await(b, b.s.empty(place.slot), place.parity ^ 1, kWeightsEmpty, layer, op);\n",
        "",
    ),
    "an input brought before it is written": (
        "producers.cuh",
        "      await_arrivals(b, counter + segment, arrivals(segment), layer);\n",
        "",
    ),
    "one arrival too few asked for": (
        "pipeline.cuh",
        "  return static_cast<uint32_t>(slabs_in<reader>(segment) * (kSlab / kGroup));",
        "  return static_cast<uint32_t>(slabs_in<reader>(segment) * (kSlab / kGroup)) - 1;",
    ),
    "one arrival too many asked for": (
        "pipeline.cuh",
        "constexpr uint32_t kQkvArrivals = static_cast<uint32_t>(",
        "constexpr uint32_t kQkvArrivals = 1 + static_cast<uint32_t>(",
    ),
    "attention before its queries": (
        "attention.cuh",
        "  if (b.warp == 0 && b.lane == 0) await_arrivals(",
        "  if (false) await_arrivals(",
    ),
    "positions after the row's own are seen": ("attention.cuh", "at <= u.prefix + token", "at <= u.prefix + token + 1"),
    "a chunk read before its copies": ("attention.cuh", "    copies_wait<1>();\n", ""),
    "an input overwritten while it is read": (
        "producers.cuh",
        "      await(b, b.s.input_empty(place.slot), place.parity ^ 1, kInputEmpty, layer, op);\n",
        "",
    ),
    "arrivals before every thread has stored": (
        "gemm.cuh",
        "  fence_copies();\n  sync_threads(kConsumerBarrier, kConsumers);\n",
        "  fence_copies();\n",
    ),
    "scales of the norm before": (
        "operations.cuh",
        "  await(b, b.s.scales_full(), work.normed & 1, kScales, layer, 0);\n",
        "",
    ),
}


#: The case that meets a fault, where it is not the plain one.
BROKEN_IN = {
    "attention before its queries": "heads of 128, split contexts",
    "a chunk read before its copies": "heads of 128, split contexts",
    "positions after the row's own are seen": "no context",
    "an input overwritten while it is read": "three segments, wide MLP",
}


@pytest.mark.parametrize("fault", list(BROKEN))
def test_a_broken_kernel_does_not_pass(fault: str, folder: Path) -> None:
    """Within five interleavings: a wrong result, or a block that can't go on."""
    name, line, instead = BROKEN[fault]
    text = (CSRC / name).read_text()
    assert text.count(line) == 1, f"{name} no longer has the line that this test breaks"
    step = Step(BY_NAME[BROKEN_IN.get(fault, "two requests")])
    kernel = EmulatedStep(step.plan, folder, changed={name: text.replace(line, instead)})
    for seed in range(5):
        step.poison()
        if kernel.run(step.buffers, seed=seed) or not _error(step.out, step.wanted.logits) <= 2**-7:
            return
    pytest.fail("five interleavings gave the right result")
