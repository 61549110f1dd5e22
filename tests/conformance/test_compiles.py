"""Every kernel compiles for every GPU that its slot names, on a machine without one.

Triton's compiler and ptxas need no GPU; the interpreter, on the other hand, accepts code that
they refuse (mixed types, shapes that are no power of two). One test holds all architectures of a kernel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_mega_plugin.contract import Backend
from sgl_mega_slots.commit.context_kv.kernel import write_context_kv
from sgl_mega_slots.commit.context_kv.launch import ContextKvLaunch
from sgl_mega_slots.common.isas import TRITON_ISAS
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.draft.markov.kernel import markov_finish, markov_step
from sgl_mega_slots.draft.markov.launch import MarkovLaunch
from sgl_mega_slots.glue.step_inputs.kernel import fill_step_inputs
from sgl_mega_slots.glue.step_inputs.launch import StepInputsLaunch
from sgl_mega_slots.verify_accept.accept_tail.kernel import accept_request, row_partials
from sgl_mega_slots.verify_accept.accept_tail.launch import AcceptTailLaunch
from sgl_mega_slots.verify_accept.blockwise_rejection.kernel import decide_and_draw, finish
from sgl_mega_slots.verify_accept.blockwise_rejection.kernel import row_partials as rejection_partials
from sgl_mega_slots.verify_accept.blockwise_rejection.launch import BlockwiseRejectionLaunch

_TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}


@dataclass(frozen=True)
class Compilation:
    """A kernel with argument types by name; every other argument is a constant or ``i32``."""

    kernel: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]

    def source(self) -> ASTSource:
        signature: dict[str, Any] = {}
        for name in self.kernel.arg_names:
            if name in self.constants:
                signature[name] = "constexpr"
            else:
                signature[name] = self.types.get(name, "*i64" if name.endswith("_ptr") else "i32")
        # Pointers and strides of 16 bytes and more, as in an engine: these decide whether loads are pipelined.
        aligned = [i for i, name in enumerate(self.kernel.arg_names) if name.endswith("_ptr") or "stride" in name]
        attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
        return ASTSource(fn=self.kernel, signature=signature, constexprs=self.constants, attrs=attributes)


def _accept(dtype: str) -> dict[str, Compilation]:
    launch = AcceptTailLaunch.plan(rows=8, vocab=151_936, block_v=4096)
    partials = {"logits_ptr": f"*{dtype}", "verify_lens_ptr": "*i32", "value_ptr": "*fp32", "id_ptr": "*i32"}
    lengths = {"correct_ptr": "*i32", "commit_ptr": "*i32", "seq_lens_ptr": "*i32", "new_seq_ptr": "*i32"}
    return {
        f"row_partials-{dtype}": Compilation(
            row_partials, partials, {"BLOCK_V": launch.block_v}, {"num_warps": launch.num_warps}
        ),
        f"accept_request-{dtype}": Compilation(
            accept_request,
            partials | lengths,
            {"BLOCK_T": launch.block_t, "BLOCK_S": launch.block_s},
            {"num_warps": 1},
        ),
    }


def _rejection(target: str, draft: str | None, batch: int, rows: int, vocab: int) -> dict[str, Compilation]:
    launch = BlockwiseRejectionLaunch.plan(backend=Backend.KERNEL, batch=batch, rows=rows, vocab=vocab)
    floats = (
        "target_temperatures",
        "draft_temperatures",
        "target_max",
        "target_sum",
        "draft_max",
        "draft_sum",
        "value",
    )
    words = ("verify_lens", "id", "stood", "value_id", "correct", "commit", "seq_lens", "new_seq")
    types = {f"{name}_ptr": "*fp32" for name in floats} | {f"{name}_ptr": "*i32" for name in words}
    types |= {"target_ptr": f"*{target}", "draft_ptr": f"*{draft or target}"}
    has_draft = {"HAS_DRAFT": draft is not None}
    decide = has_draft | {"BLOCK_T": launch.block_t, "BLOCK_S": launch.block_s, "BLOCK_N": launch.block_n}
    warps = {"num_warps": launch.num_warps}
    name = f"{target}-{draft}-b{batch}-t{rows}"
    return {
        f"rejection_partials-{name}": Compilation(
            rejection_partials, types, has_draft | {"BLOCK_V": launch.block_v}, warps
        ),
        f"decide_and_draw-{name}": Compilation(decide_and_draw, types, decide, warps),
        f"rejection_finish-{name}": Compilation(
            finish, types, {"BLOCK_T": launch.block_t, "BLOCK_P": launch.block_p}, {"num_warps": 1}
        ),
    }


def _markov(base: str, weights: str, batch: int, rank: int) -> dict[str, Compilation]:
    weight_bytes = 4 if weights == "fp32" else 2
    launch = MarkovLaunch.plan(backend=Backend.KERNEL, batch=batch, vocab=151_936, rank=rank, weight_bytes=weight_bytes)
    step = base if base == weights else "fp32"
    winners = {"value_ptr": "*fp32", "id_ptr": "*i32"}
    pointers = {
        "base_ptr": f"*{base}",
        "w1_ptr": f"*{weights}",
        "w2_ptr": f"*{weights}",
        "temperatures_ptr": "*fp32",
        "logits_ptr": f"*{step}",
    }
    tiles = {"BLOCK_B": launch.block_b, "BLOCK_P": launch.block_p, "PROGRAMS": launch.programs}
    constants = tiles | {
        "R": rank,
        "TILES": launch.tiles,
        "STEP_DTYPE": _TYPES[step],
        "WRITE_LOGITS": True,
        "DOT_IN_FP32": False,
        "BLOCK_V": launch.block_v,
        "BLOCK_R": launch.block_r,
    }
    name = f"{base}-{weights}-b{batch}-r{rank}"
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return {
        f"markov_step-{name}": Compilation(markov_step, winners | pointers, constants, options),
        f"markov_finish-{name}": Compilation(markov_finish, winners, tiles, {"num_warps": 4}),
    }


def _step_inputs() -> dict[str, Compilation]:
    launch = StepInputsLaunch.plan(batch=64, rows=8)
    types = {"table_ptr": "*i32", "verify_lens_ptr": "*i32", "seq_lens_ptr": "*i32"}
    constants = {"PADDING": 0, "BLOCK_B": launch.block_b, "BLOCK_T": launch.block_t}
    return {"fill_step_inputs": Compilation(fill_step_inputs, types, constants, {"num_warps": launch.num_warps})}


def _context_kv(dtype: str, heads: int, size: int, layers: int) -> dict[str, Compilation]:
    launch = ContextKvLaunch.plan(heads=heads, head_size=size)
    types = {
        "projected_ptr": f"*{dtype}",
        "norm_ptr": f"*{dtype}",
        "cos_sin_ptr": "*fp32",
        "commit_lens_ptr": "*i32",
        "eps": "fp32",
        "key_ptrs": (f"*{dtype}",) * layers,
        "value_ptrs": (f"*{dtype}",) * layers,
    }
    constants = {"H": heads, "D": size, "PADDING": 0, "BLOCK_H": launch.block_h, "BLOCK_D": launch.block_d}
    options = {"num_warps": launch.num_warps}
    return {f"write_context_kv-{dtype}-h{heads}-d{size}": Compilation(write_context_kv, types, constants, options)}


COMPILATIONS = {
    **_accept("bf16"),
    **_accept("fp32"),
    **_rejection("bf16", "fp32", 1, 8, 151_936),
    **_rejection("fp32", None, 64, 16, 49_152),
    **_markov("bf16", "bf16", 1, 256),
    **_markov("fp32", "bf16", 64, 256),
    **_markov("bf16", "fp32", 64, 256),
    **_step_inputs(),
    **_context_kv("bf16", 8, 128, 5),
    **_context_kv("fp16", 3, 64, 3),
    **_context_kv("fp32", 1, 64, 1),
}


#: Shared memory that a program may have, in bytes (CUDA C++ programming guide, compute capabilities).
SHARED_BYTES = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_103": 227 * 1024, "sm_120": 99 * 1024}


def test_every_architecture_is_compiled_for() -> None:
    assert set(SHARED_BYTES) | {"cpu"} == TRITON_ISAS


@pytest.mark.parametrize("name", sorted(COMPILATIONS))
def test_kernel_compiles(name: str) -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "run this module without TRITON_INTERPRET: it compiles kernels"
    compilation = COMPILATIONS[name]
    for isa, allowed in SHARED_BYTES.items():
        target = GPUTarget("cuda", int(isa.removeprefix("sm_")), 32)
        options = compilation.options | {"enable_fp_fusion": ENABLE_FP_FUSION}
        compiled = triton.compile(compilation.source(), target=target, options=options)
        assert compiled.asm["cubin"], f"{name}: no binary for {isa}"
        shared = compiled.metadata.shared
        assert shared <= allowed, f"{name}: {shared} bytes of shared memory on {isa}, which has {allowed}"
        if name.startswith("write_context_kv"):
            assert "fma.rn.f32" not in compiled.asm["ptx"], f"{name}: {isa} fuses a multiply-add"
