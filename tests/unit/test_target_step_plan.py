"""The plan of `target_step`: every unit has one SM, everything fits, and SMs do not wait for each other in a circle."""

from __future__ import annotations

import ctypes
import re
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_mega_slots.target.target_step import cases, driver, launch, reference, source
from sgl_mega_slots.target.target_step.buffers import StepBuffers, Tile
from sgl_mega_slots.target.target_step.cases import QWEN3_8B
from sgl_mega_slots.target.target_step.interpret import Interpreted, StuckError, interpret
from sgl_mega_slots.target.target_step.plan import (
    CONSUMER_WARPS,
    SHARED_BYTES,
    SMALL_SHARED_BYTES,
    VECTOR_BYTES,
    Op,
    Share,
    StepPlan,
)
from sgl_mega_slots.target.target_step.shape import DenseShape, WeightKind
from sgl_mega_slots.target.target_step.weights import Cache, call_of

BY_NAME = {case.name: case for case in cases.CASES}


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    kv_heads = draw(st.integers(1, 8))
    weights = draw(st.sampled_from(WeightKind))
    head_dim = draw(st.sampled_from((64, 128)))
    shape = DenseShape(
        layers=draw(st.integers(1, 3)),
        hidden=weights.slab * draw(st.integers(1, 80)),
        intermediate=weights.slab * draw(st.integers(1, 200)),
        q_heads=kv_heads * draw(st.integers(1, 8)) * (weights.slab // 64 if head_dim == 64 else 1),
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=8 * draw(st.integers(1, 20000)),
        eps=1e-6,
        weights=weights,
        kv_fp8=draw(st.booleans()),
    )
    tokens = draw(st.integers(1, 16))
    return StepPlan(shape, draw(st.integers(1, 32 // tokens)), tokens, draw(st.integers(64, 148)))


@given(plans())
@settings(max_examples=100, deadline=None)
def test_every_unit_is_dealt_to_one_sm(plan: StepPlan) -> None:
    for op in Op:
        shares = [plan.share(op, sm) for sm in range(plan.sms)]
        assert shares[0].first == 0
        assert all(before.first + before.count == after.first for before, after in pairwise(shares))
        assert shares[-1].first + shares[-1].count == plan.units_of(op)
        assert max(share.count for share in shares) - min(share.count for share in shares) <= 1


@given(plans())
@settings(max_examples=100, deadline=None)
def test_stages_and_segments_fit_what_they_are_kept_in(plan: StepPlan) -> None:
    assert plan.dynamic_shared_bytes <= SHARED_BYTES
    assert plan.stages >= 2
    for gemm in plan.gemms.values():
        assert gemm.stage_slabs * 1024 <= plan.stage_bytes
        halves = -(-2 * gemm.stage_slabs // CONSUMER_WARPS)  # of a warp, in a stage
        of_segment = -(-gemm.segment_slabs // gemm.stage_slabs) * halves
        vectors = of_segment * max(1, plan.padded_rows // 8) * gemm.weights.slab // 64
        assert gemm.weights is WeightKind.BF16 or of_segment <= 8  # scales of a group that a warp's lanes keep
        assert vectors * CONSUMER_WARPS * 32 * VECTOR_BYTES <= 2 * plan.slot_bytes
        assert gemm.segment_slabs % gemm.stage_slabs == 0 or gemm.segments == 1
        lengths = [
            min(gemm.segment_slabs, gemm.slabs - segment * gemm.segment_slabs) for segment in range(gemm.segments)
        ]
        assert min(lengths) > 0
        assert sum(lengths) == gemm.slabs
    assert plan.teams >= 4
    team_bytes = 2 * plan.slot_bytes // plan.teams
    assert plan.team_blocks * plan.block_bytes <= team_bytes
    assert plan.unit_rows * plan.shape.head_dim * 4 <= team_bytes  # a team's result takes the place of its blocks


def test_a_ring_holds_what_the_memory_needs_in_flight() -> None:
    """48 KB an SM in pieces of 16 KB or more read at the memory's rate on an H200."""
    plan = StepPlan(QWEN3_8B, 1, 8, 132)
    assert plan.stages * plan.stage_bytes >= 128 * 1024
    assert plan.under_way * plan.stage_bytes == 48 * 1024
    assert all(gemm.stage_slabs * 1024 >= 16 * 1024 for gemm in plan.gemms.values())


def test_bytes_of_a_step() -> None:
    """Of Qwen3-8B: 36 layers of 193 million parameters and an LM head of 622 million, two bytes each."""
    layer = 4096 * (6144 + 4096 + 3 * 12288)
    assert QWEN3_8B.weight_bytes(head=True) == 2 * (36 * layer + 151936 * 4096)
    assert QWEN3_8B.weight_bytes(head=False) == 2 * 36 * layer


def test_bytes_of_a_step_with_fp8_weights() -> None:
    """A byte a weight of the layers, their scales in fp32, and the LM head in bf16."""
    layer, rows = 4096 * (6144 + 4096 + 3 * 12288), 6144 + 4096 + 2 * 12288 + 4096
    by_row, by_block = (replace(QWEN3_8B, weights=kind) for kind in (WeightKind.FP8_CHANNEL, WeightKind.FP8_BLOCK))
    assert by_row.weight_bytes(head=True) == 36 * (layer + 4 * rows) + 2 * 151936 * 4096
    assert by_block.weight_bytes(head=False) == 36 * (layer + 4 * layer // 128**2)


def test_sizes_that_fp8_weights_do_not_have_are_refused() -> None:
    sizes = {"layers": 1, "q_heads": 3, "kv_heads": 1, "head_dim": 64, "vocab": 8, "eps": 1e-6}
    shape = DenseShape(hidden=192, intermediate=320, weights=WeightKind.FP8_BLOCK, **sizes)  # type: ignore[arg-type]
    assert shape.reasons() == [
        f"{name} size {size} is no multiple of 128, which fp8 weights need"
        for name, size in (("hidden", 192), ("query", 192), ("intermediate", 320))
    ]
    assert replace(shape, weights=WeightKind.BF16).reasons() == []


def test_what_is_not_covered_is_refused_with_every_reason() -> None:
    shape = DenseShape(layers=1, hidden=100, intermediate=96, q_heads=3, kv_heads=2, head_dim=80, vocab=1001, eps=1e-6)
    with pytest.raises(ValueError, match="hidden size 100") as caught:
        StepPlan(shape, 5, 8, 132)
    for word in ("intermediate size 96", "head size 80", "3 query heads", "vocabulary 1001", "40 rows"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="tap 37 is not 0 to 36"):
        StepPlan(QWEN3_8B, 1, 8, 132, taps=(37,))
    with pytest.raises(ValueError, match="17 tokens a request are more than 16"):
        StepPlan(QWEN3_8B, 1, 17, 132, shared_bytes=SMALL_SHARED_BYTES)


# --- the plan, interpreted


def _interpreted(name: str, seed: int = 0) -> tuple[Interpreted, reference.DecoderStep, Cache]:
    case = BY_NAME[name]
    weights = cases.weights(case.shape, seed=1)
    cache, inputs = cases.step(case, seed=2)
    wanted = reference.decoder_step(case.shape, weights, cache, inputs)
    return interpret(case.plan(), weights, cache, inputs, seed=seed), wanted, cache


@pytest.mark.parametrize(
    "name", [name for name in BY_NAME if "come again" not in name and name not in cases.COARSE_CASES]
)
def test_an_interpreted_plan_is_the_reference(name: str) -> None:
    """Rounding to bf16 is what differs: 2**-8 relative for each of about six roundings that add up in squares."""
    found, wanted, _ = _interpreted(name)
    out, target = (found.logits, wanted.logits) if BY_NAME[name].head else (found.last_hidden, wanted.last_hidden)
    assert torch.linalg.norm(out.float() - target) <= 2**-8 * 6**0.5 * torch.linalg.norm(target)


def test_the_order_of_sms_changes_nothing() -> None:
    first, _, _ = _interpreted("two requests", seed=1)
    second, _, _ = _interpreted("two requests", seed=2)
    assert first.order != second.order
    assert torch.equal(first.logits, second.logits)


def test_a_plan_that_deals_a_unit_to_nobody_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["one request"]
    plan = case.plan()
    share = StepPlan.share

    def without_the_first(self: StepPlan, op: Op, sm: int) -> Share:
        found = share(self, op, sm)
        return Share(found.first + 1, found.count - 1) if op is Op.O and found.first == 0 and found.count else found

    monkeypatch.setattr(StepPlan, "share", without_the_first)
    cache, inputs = cases.step(case, seed=2)
    with pytest.raises(StuckError, match="GATE_UP of layer 0"):
        interpret(plan, cases.weights(case.shape, seed=1), cache, inputs, seed=0)


# --- what both sides of the launch hold


def test_the_header_lists_the_parameters_as_the_host_lays_them_out() -> None:
    header = source.plan_header(StepPlan(QWEN3_8B, 1, 8, 132))
    params = source.params_of(QWEN3_8B.layers, 0)
    for name, fields in (("Params", [*source.Params._fields_, *params._fields_]), ("Layer", source.Layer._fields_)):
        [body] = re.findall(rf"struct {name} {{ (.*?) }};", header)
        assert [field.split()[-1].split("[")[0] for field in body.rstrip(";").split(";")] == [
            each for each, *_ in fields
        ]
    assert ctypes.sizeof(source.Layer) == 8 * len(source.Layer._fields_)
    assert params.layers.size == QWEN3_8B.layers * ctypes.sizeof(source.Layer)


def test_waits_have_the_kernels_numbers() -> None:
    text = source.translation_unit(StepPlan(QWEN3_8B, 1, 8, 132))
    [body] = re.findall(r"enum Wait \{ (.*?) \};", text)
    numbers = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", body)}
    assert numbers == {wait.name.title().replace("_", ""): int(wait) for wait in driver.Wait}


def test_one_text_has_every_file_and_no_include_of_ours() -> None:
    text = source.translation_unit(StepPlan(QWEN3_8B, 1, 8, 132))
    assert '#include "' not in text
    for word in ("target_step(MEGA_GRID_CONSTANT", "attend_unit", "copy_weights", "constexpr int kHidden = 4096;"):
        assert word in text


@pytest.mark.parametrize("wait", list(driver.Wait))
def test_a_failure_names_the_wait(wait: driver.Wait) -> None:
    told = driver.describe_failure([1, int(wait) << 24 | 3 << 8 | 2, 17, 5], "target_step")
    assert told is not None
    assert all(word in told for word in ("SM 17", "layer 3", "operation 2", "last seen 5"))


class _Failing:
    """A slot whose kernel stopped itself, the second time that somebody looks."""

    looks = 0

    def failures(self) -> list[str]:
        self.looks += 1
        return ["SM 17 waited too long"] if self.looks == 2 else []


def test_a_kernel_that_stopped_itself_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    slot = _Failing()
    launch.tell_failures(weakref.ref(slot), 0.0)  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == ["sgl-mega-plugin: SM 17 waited too long"]


def test_nobody_looks_after_a_slot_that_is_gone() -> None:
    gone = weakref.ref(_Failing())
    launch.tell_failures(gone, 0.0)  # type: ignore[arg-type]


def test_no_failure_is_none() -> None:
    assert driver.describe_failure([0] * 4, "target_step") is None


def test_matrices_that_cannot_be_copied_in_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 64"):
        Tile(torch.zeros(8, 96, dtype=torch.bfloat16), 8, 1)
    with pytest.raises(ValueError, match="must be bf16"):
        Tile(torch.zeros(8, 64), 8, 1)


def test_a_matrix_at_an_odd_address_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        Tile(torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64), 8, 1)


def test_inputs_of_another_step_are_refused() -> None:
    buffers = StepBuffers(BY_NAME["one request"].plan(), device=torch.device("cpu"), deadline_s=1.0)
    one, other = (call_of(cases.arguments(BY_NAME[name], "cpu")) for name in ("one request", "two requests"))
    buffers.bind(one.inputs, one.outputs)
    with pytest.raises(ValueError, match="input_ids"):
        buffers.bind(other.inputs, other.outputs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lm_head_weight": torch.zeros(8, 8)}, "lm_head_weight: torch.float32"),
        ({"out_tapped": None}, "out_tapped goes with taps"),
        ({"out_logits": None}, "one of out_hidden and out_logits"),
        ({"mlp_norms": []}, "shorter|argument"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call_of(cases.arguments(BY_NAME["one request"], "cpu") | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"down_scales": None}, "with all four matrices of a layer or with none; down_scales are not given"),
        ({"qkv_scales": None, "output_scales": None, "gate_up_scales": None, "down_scales": None}, "qkv of layer 0"),
        ({"output_scales": [torch.ones(256)] * 2}, "o_scales of layer 0: torch.float32 (256,); must be .* (2, 2)"),
        ({"output_scales": [torch.ones(2, 2).bfloat16()] * 2}, "o_scales of layer 0: torch.bfloat16"),
        ({"output_weights": [torch.zeros(256, 256, dtype=torch.bfloat16)] * 2}, "o of layer 0: torch.bfloat16"),
        ({"lm_head_weight": torch.zeros(256, 256).to(torch.float8_e4m3fn)}, "lm_head_weight: torch.float8_e4m3fn"),
    ],
)
def test_fp8_arguments_that_do_not_go_together_are_refused(change: dict[str, object], says: str) -> None:
    arguments = cases.arguments(BY_NAME["fp8, a scale a block"], "cpu")
    call_of(arguments)
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        call_of(arguments | change)


def test_bf16_weights_with_scales_are_refused() -> None:
    arguments = cases.arguments(BY_NAME["one request"], "cpu")
    scales = {f"{name}_scales": [torch.ones(8)] * 2 for name in ("qkv", "output", "gate_up", "down")}
    with pytest.raises(ValueError, match=r"qkv of layer 0: torch\.bfloat16"):
        call_of(arguments | scales)


def test_the_dequantised_weights_are_values_times_scales() -> None:
    """Against a loop over values."""
    for kind in ("row", "block"):
        layer = cases.weights(BY_NAME[f"fp8, a scale a {kind}"].shape, seed=3).layers[0]
        found, (rows, columns) = layer.dequantised().gate_up, layer.gate_up.shape
        assert layer.gate_up_scales is not None
        for row, column in ((0, 0), (127, 128), (128, 127), (383, 255), (384, 0), (rows - 1, columns - 1)):
            at = (row,) if kind == "row" else (row // 128, column // 128)
            assert found[row, column] == layer.gate_up[row, column].float() * layer.gate_up_scales[at]
