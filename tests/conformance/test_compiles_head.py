"""The LM head's kernels compile for every GPU, each with the plan for that GPU's shared memory. See `test_compiles`."""

from __future__ import annotations

import pytest
import triton
from test_compiles import SHARED_BYTES, Compilation
from triton.backends.compiler import GPUTarget
from triton.language import bfloat16, float16, float32

from sgl_mega_plugin.contract import Backend
from sgl_mega_slots.common.lm_head.kernel import head_rows, head_tokens
from sgl_mega_slots.common.lm_head.launch import HeadLaunch
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.common.processors import Processors

_TYPES = {"fp32": float32, "bf16": bfloat16, "fp16": float16}
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Hidden, weight, rows, H, by a descriptor, target's argmax rather than the draft's logits and tokens, scaled.
_POINTS = [
    ("bf16", "bf16", 7, 1024, True, False, False),
    ("bf16", "bf16", 8, 4096, False, True, False),
    ("bf16", "bf16", 32, 576, True, True, False),
    ("bf16", "bf16", 56, 2048, True, False, True),
    ("fp16", "fp16", 64, 2048, False, False, False),
    ("bf16", "bf16", 256, 4096, True, True, False),
    ("fp32", "bf16", 224, 1024, True, False, True),
    ("fp32", "fp32", 8, 576, True, False, False),
    ("bf16", "fp32", 256, 24, False, True, False),
]


def _launch(rows: int, depth: int, hidden: str, weight: str, shared: int) -> HeadLaunch:
    return HeadLaunch.plan(
        backend=Backend.KERNEL,
        rows=rows,
        vocab=151_936,
        depth=depth,
        hidden_bytes=_BYTES[hidden],
        weight_bytes=_BYTES[weight],
        processors=Processors(count=132, shared_bytes=shared),
    )


@pytest.mark.parametrize(
    ("hidden", "weight", "rows", "depth", "described", "target", "scaled"),
    _POINTS,
    ids=[
        f"{p[0]}-{p[1]}-m{p[2]}-h{p[3]}-{'tma' if p[4] else 'pointers'}-{'target' if p[5] else 'draft'}"
        for p in _POINTS
    ],
)
def test_head_rows_compiles(
    hidden: str, weight: str, rows: int, depth: int, described: bool, target: bool, scaled: bool
) -> None:
    for isa, allowed in SHARED_BYTES.items():
        launch = _launch(rows, depth, hidden, weight, allowed)
        pointer = f"tensordesc<{weight}[{launch.block_v},{launch.block_h}]>" if described else f"*{weight}"
        types = {"hidden_ptr": f"*{hidden}", "weight": pointer, "logits_ptr": f"*{weight}"}
        types |= {"value_ptr": "*fp32", "id_ptr": "*i32", "verify_lens_ptr": "*i32", "scale": "fp32"}
        constants = {
            "H": depth,
            "WEIGHT_DTYPE": _TYPES[weight],
            "HAS_LENS": target,
            "SCALED": scaled,
            "WRITE_LOGITS": not target,
            "WRITE_WINNERS": True,
            "DOT_IN_FP32": False,
            "BY_DESCRIPTOR": described,
            "PROGRAMS": launch.programs,
            "TILES": launch.tiles,
            "BLOCK_M": launch.block_m,
            "BLOCK_V": launch.block_v,
            "BLOCK_H": launch.block_h,
        }
        compilation = Compilation(head_rows, types, constants, {})
        options = {
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": ENABLE_FP_FUSION,
        }
        architecture = GPUTarget("cuda", int(isa.removeprefix("sm_")), 32)
        compiled = triton.compile(compilation.source(), target=architecture, options=options)
        shared = compiled.metadata.shared
        assert shared <= allowed, f"{isa}: {shared} bytes of shared memory; {allowed} for a program"
        fetched = "cp.async.bulk" if described else "cp.async"
        assert fetched in compiled.asm["ptx"], f"{isa}: weights are not fetched by {fetched}, ahead of their use"
        if isa == "sm_90" and weight != "fp32":
            assert "wgmma" in compiled.asm["ptx"], "the tensor cores are not used"


@pytest.mark.parametrize("has_lens", [False, True], ids=["draft", "target"])
def test_head_tokens_compiles(has_lens: bool) -> None:
    launch = _launch(8, 1024, "bf16", "bf16", SHARED_BYTES["sm_90"])
    types = {"value_ptr": "*fp32", "id_ptr": "*i32", "verify_lens_ptr": "*i32"}
    constants = {"HAS_LENS": has_lens, "PROGRAMS": launch.programs, "BLOCK_P": launch.block_p}
    for isa in SHARED_BYTES:
        architecture = GPUTarget("cuda", int(isa.removeprefix("sm_")), 32)
        source = Compilation(head_tokens, types, constants, {}).source()
        options = {"num_warps": 1, "enable_fp_fusion": ENABLE_FP_FUSION}
        assert triton.compile(source, target=architecture, options=options).asm["cubin"], isa
