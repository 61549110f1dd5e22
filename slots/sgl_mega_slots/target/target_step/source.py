"""The kernel's source for a plan: the files of ``csrc`` with the plan's constants and the parameters' layout.

Both sides of the launch come from here, so that the layout is written once: :class:`Params` is what the host fills,
and :func:`plan_header` prints the same structure for the kernel.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import Any

from sgl_mega_slots.target.target_step.plan import BLOCK_GROUPS, LAYER, Op, StepPlan
from sgl_mega_slots.target.target_step.shape import WeightKind

#: Files of the kernel in the order in which one text of them compiles, the plan's constants after the first.
FILES = (
    "device.cuh",
    "pipeline.cuh",
    "words.cuh",
    "gemm.cuh",
    "operations.cuh",
    "attention.cuh",
    "producers.cuh",
    "step.cu",
)

_NAMES = {
    Op.QKV: "kQkv",
    Op.O: "kO",
    Op.GATE_UP: "kGateUp",
    Op.DOWN: "kDown",
    Op.HEAD: "kHead",
    Op.ATTENTION: "kAttention",
    Op.EMBED: "kEmbed",
    Op.FINAL: "kFinal",
}
_KINDS = {WeightKind.BF16: "kBf16", WeightKind.FP8_CHANNEL: "kFp8Channel", WeightKind.FP8_BLOCK: "kFp8Block"}
#: Weight maps of a layer: its four matrices, placed by operation.
LAYER_MAPS = sum(op is not Op.ATTENTION for op in LAYER)

_LAYER_FIELDS = (
    ("const uint16_t*", "input_norm"),  # [hidden]
    ("const uint16_t*", "middle_norm"),
    ("const uint16_t*", "qkv_bias"),  # [qkv] or null
    ("const uint16_t*", "q_norm"),  # [head dim] or null
    ("const uint16_t*", "k_norm"),
    ("uint16_t*", "keys"),  # [places, KV heads, head dim]
    ("uint16_t*", "values"),
)
_FIELDS = (
    ("const TensorMap*", "weight_maps"),  # [layers * 4 + 1]
    ("const uint16_t*", "final_norm"),  # [hidden]
    ("const uint16_t*", "embedding"),  # [vocab, hidden]
    ("const int64_t*", "input_ids"),  # [rows]
    ("const int64_t*", "positions"),  # [rows]
    ("const int64_t*", "cache_locs"),  # [rows]
    ("const int64_t*", "seq_lens"),  # [requests], this step's tokens left out
    ("const int64_t*", "req_pool_indices"),  # [requests], rows of the token table
    ("const int32_t*", "req_to_token"),  # [rows, stride]: places in the cache by position
    ("const float*", "rotary"),  # [positions, head dim]: cosines, then sines
    ("uint32_t*", "input"),  # [2 copies, layers + 1, padded rows * hidden / 2] pairs of bf16 values
    ("uint32_t*", "middle"),  # [2, layers, padded rows * hidden / 2]
    ("uint32_t*", "attended"),  # [2, layers, padded rows * q size / 2]
    ("uint32_t*", "activated"),  # [2, layers, padded rows * intermediate / 2]
    ("uint64_t*", "qkv"),  # [padded rows, qkv / 2] tagged pairs of floats, by words.cuh
    ("uint64_t*", "parts"),  # [unit groups, splits, unit rows, head dim / 2 + 2]
    ("uint64_t*", "squares_in"),  # [sms, padded rows / 2]
    ("uint64_t*", "squares_mid"),
    ("uint16_t*", "logits"),  # [rows, vocab]
    ("uint16_t*", "last_hidden"),  # [rows, hidden]
    ("uint16_t*", "tapped"),  # [rows, taps * hidden]
    ("uint32_t*", "steps"),
    ("uint32_t*", "finished"),
    ("uint32_t*", "failure"),  # [4]: failed, where, SM, value seen
    ("uint64_t*", "marks"),  # [sms, 1 + 5 * layers + 1, 4] clocks, where the plan is traced
    ("uint64_t", "deadline_ns"),
    ("int64_t", "req_to_token_stride"),
    ("float", "eps"),
    ("float", "softmax_scale"),
)


_SCALARS: dict[str, Any] = {"uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def _ctype(kind: str) -> Any:
    return ctypes.c_uint64 if kind.endswith("*") else _SCALARS[kind]


class Layer(ctypes.Structure):
    """Pointers of one layer, as the kernel reads them."""

    _fields_ = [(name, _ctype(kind)) for kind, name in _LAYER_FIELDS]


class Params(ctypes.Structure):
    """What a step reads and writes, as the kernel reads it; a plan's own has ``layers``, ``taps`` and ``scales`` behind
    it.
    """

    _fields_ = [(name, _ctype(kind)) for kind, name in _FIELDS]


@cache
def params_of(layers: int, taps: int, scales: int = 0) -> type[Params]:
    """The parameters of plans with so many layers, taps and matrices with scales. A launch copies them whole to where
    reads are fast.
    """

    class PlanParams(Params):
        _fields_ = [
            ("layers", Layer * layers),
            ("taps", ctypes.c_int32 * max(taps, 1)),
            ("scales", ctypes.c_uint64 * max(scales, 1)),
        ]

    return PlanParams


def scaled_matrices(plan: StepPlan) -> int:
    """Matrices with scales: each layer's four, placed by operation, or none."""
    return 0 if plan.shape.weights is WeightKind.BF16 else plan.shape.layers * LAYER_MAPS


def plan_header(plan: StepPlan) -> str:
    """``plan.cuh`` for a plan: constants, the operations' sizes and the parameters' layout."""
    shape = plan.shape
    constants = {
        "kRows": plan.padded_rows,
        "kRealRows": plan.rows,
        "kTokens": plan.tokens,
        "kSms": plan.sms,
        "kLayers": shape.layers,
        "kHidden": shape.hidden,
        "kIntermediate": shape.intermediate,
        "kQHeads": shape.q_heads,
        "kKvHeads": shape.kv_heads,
        "kHeadDim": shape.head_dim,
        "kVocab": shape.vocab,
        "kQkNorm": int(shape.qk_norm),
        "kQkvBias": int(shape.qkv_bias),
        "kWithHead": int(plan.head),
        "kCausal": int(plan.causal),
        "kKvFp8": int(plan.shape.kv_fp8),
        "kTaps": len(plan.taps),
        "kTrace": int(plan.trace),
        "kUnitHeads": plan.unit_heads,
        "kUnitGroups": plan.unit_groups,
        "kSplits": plan.splits,
        "kTeams": plan.teams,
        "kTeamBlocks": plan.team_blocks,
        "kStages": plan.stages,
        "kStageBytes": plan.stage_bytes,
        "kSlotBytes": plan.slot_bytes,
        "kSumPlaces": plan.sum_places,
        "kReductionBytes": plan.reduction_bytes,
        "kBarrierBytes": plan.barrier_bytes,
        "kResidualGroups": plan.residual_groups,
        "kBlockGroups": BLOCK_GROUPS,
        "kUnderWay": plan.under_way,
        "kGroupsTogether": int(plan.groups_together),
        "kLayerMaps": LAYER_MAPS,
    }
    lines = ["#pragma once", "namespace mega {"]
    lines += [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines.append("enum Op { " + ", ".join(f"{_NAMES[op]} = {int(op)}" for op in sorted(Op)) + " };")
    lines.append("enum Weights { " + ", ".join(_KINDS[kind] for kind in WeightKind) + " };")
    lines.append(f"constexpr Weights kWeights = {_KINDS[shape.weights]};")
    lines.append("template <int op> struct Gemm;")
    for op, gemm in plan.gemms.items():
        sizes = {
            "rows": gemm.rows,
            "slabs": gemm.slabs,
            "stage_slabs": gemm.stage_slabs,
            "segment_slabs": gemm.segment_slabs,
            "segments": gemm.segments,
            "pair": int(gemm.pair),
            "scaled": int(gemm.scaled),
        }
        members = " ".join(f"static constexpr int {name} = {value};" for name, value in sizes.items())
        members += f" static constexpr Weights weights = {_KINDS[gemm.weights]};"
        lines.append(f"template <> struct Gemm<{_NAMES[op]}> {{ {members} }};")
    for name, fields in (("Layer", _LAYER_FIELDS), ("Params", _FIELDS)):
        members = " ".join(f"{kind} {field};" for kind, field in fields)
        arrays = f" Layer layers[{shape.layers}]; int32_t taps[{max(len(plan.taps), 1)}];" if name == "Params" else ""
        arrays += f" const float* scales[{max(scaled_matrices(plan), 1)}];" if name == "Params" else ""
        lines.append(f"struct {name} {{ {members}{arrays} }};")
    lines.append("}  // namespace mega")
    return "\n".join(lines) + "\n"


def translation_unit(plan: StepPlan) -> str:
    """The whole kernel for a plan as one text for NVRTC, which then needs no folder of headers."""
    first, *rest = FILES
    texts = [_read(first), plan_header(plan), *map(_read, rest)]
    lines = (line for text in texts for line in text.splitlines())
    return "\n".join(line for line in lines if not line.startswith(('#include "', "#pragma once"))) + "\n"


def _read(name: str) -> str:
    return (files("sgl_mega_slots.target.target_step") / "csrc" / name).read_text()
