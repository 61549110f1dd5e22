"""`markov`'s launch as planned for a GPU with much shared memory: fits, and keeps its tiles in registers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_mega_plugin.contract import Backend
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.common.processors import Processors
from sgl_mega_slots.draft.markov.kernel import WAIT, markov_steps
from sgl_mega_slots.draft.markov.launch import MarkovLaunch

_SHARED_BYTES = 227 * 1024  # a program's on sm_90 (CUDA C++ programming guide, compute capabilities)


def _compiled(batch: int, rank: int, sm: int, vocab: int = 151_936) -> Any:
    launch = MarkovLaunch.plan(
        backend=Backend.KERNEL,
        batch=batch,
        vocab=vocab,
        rank=rank,
        weight_bytes=2,
        processors=Processors(count=132, shared_bytes=_SHARED_BYTES),
    )
    constants = {
        "R": rank,
        "G": 7,
        "STEPS": 7,
        "PROGRAMS": launch.programs,
        "TILES": launch.tiles,
        "STEP_DTYPE": tl.bfloat16,
        "LATENT": False,
        "WRITE_LOGITS": True,
        "WRITE_FEATURES": False,
        "INTERPRETED": False,
        "BLOCK_B": launch.block_b,
        "BLOCK_V": launch.block_v,
        "BLOCK_R": launch.block_r,
        "BLOCK_P": launch.block_p,
        "LOOKS": 1 << 22,
        "STAGES": launch.num_stages,
    }
    bf16 = ("base", "w1", "w2", "latent", "logits", "features")
    types = {f"{name}_ptr": "*bf16" for name in bf16} | {"temperatures_ptr": "*fp32"}
    names = markov_steps.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i64" if name.endswith("_ptr") else "i32")
        for name in names
    }
    aligned = [i for i, name in enumerate(names) if name.endswith("_ptr") or "stride" in name]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(fn=markov_steps, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "launch_cooperative_grid": True}
    options |= {"debug": True, "sanitize_overflow": False, "enable_fp_fusion": ENABLE_FP_FUSION}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


@pytest.mark.parametrize(("batch", "rank"), [(1, 256), (8, 256), (16, 256), (17, 256), (64, 256), (32, 512)])
def test_a_tile_stays_in_registers_and_its_loads_run_ahead(batch: int, rank: int, tmp_path: Path) -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "run this module without TRITON_INTERPRET: it compiles kernels"
    compiled = _compiled(batch, rank, 90)
    assert compiled.metadata.shared <= _SHARED_BYTES
    cubin = tmp_path / "markov.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True)
    stack = re.search(r"markov_steps.*?STACK:(\d+)", usage.stdout + usage.stderr, re.DOTALL)
    assert stack is not None, usage.stdout
    assert int(stack[1]) == 0, f"B {batch}, R {rank}: {stack[1]} bytes a thread spilled"
    assert "cp.async" in compiled.asm["ptx"], "tiles of markov_w2 are not loaded ahead"
    # Factors [R, B] with the rank contiguous in shared memory: stored 16 bytes at once, not 2 to one bank.
    for layout in re.findall(r"warp_group_dot .*\* !ttg\.memdesc<\w+, (#\w+), #smem", compiled.asm["ttgir"]):
        definition = re.search(rf"^{layout} = .*$", compiled.asm["ttgir"], re.MULTILINE)
        assert definition is not None
        assert "transposed = true" in definition[0]


@pytest.mark.parametrize(("batch", "vocab"), [(1, 1000), (9, 70), (18, 136), (32, 151_936), (960, 151_936)])
def test_no_two_warps_look_at_the_same_words(batch: int, vocab: int) -> None:
    """Looks at one word at different times differ: a warp that looked too early went on without the last winner."""
    ir = _compiled(batch, 72, 90, vocab).asm["ttgir"]
    looks = re.findall(r"isVolatile = true\} : tensor<(\d+)x(\d+)x!tt\.ptr<i64>, (#\w+)>", ir)
    assert looks
    for *shape, layout in looks:
        definition = re.search(rf"^{layout} = .*$", ir, re.MULTILINE)
        assert definition is not None
        sizes = [[int(size) for size in sizes.split(",")] for sizes in re.findall(r"\[([\d, ]+)\]", definition[0])[:3]]
        for size, of_thread, threads, warps in zip(map(int, shape), *sizes, strict=True):
            assert of_thread * threads * warps <= size, f"[{' x '.join(shape)}] words in {definition[0]}"


@pytest.mark.parametrize("sm", [90, 100, 103])
def test_a_wait_in_vain_ends_with_a_message_that_names_it(sm: int) -> None:
    assert WAIT.value in _compiled(32, 256, sm).asm["llir"]
