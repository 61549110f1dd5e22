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
from sgl_mega_slots.commit.histories.kernel import append_committed
from sgl_mega_slots.commit.histories.launch import HistoriesLaunch
from sgl_mega_slots.commit.kv_staging.kernel import stage_commit
from sgl_mega_slots.commit.kv_staging.launch import KvStagingLaunch
from sgl_mega_slots.common.isas import TRITON_ISAS
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.common.processors import Processors
from sgl_mega_slots.draft.markov.kernel import markov_steps
from sgl_mega_slots.draft.markov.launch import MarkovLaunch
from sgl_mega_slots.draft.markov.mixer.kernel import mixer_hidden, mixer_step
from sgl_mega_slots.glue.attn_metadata.kernel import fill_attention_metadata
from sgl_mega_slots.glue.attn_metadata.launch import AttentionMetadataLaunch
from sgl_mega_slots.glue.params_once.kernel import stage_params
from sgl_mega_slots.glue.relay.kernel import hand_over
from sgl_mega_slots.glue.step_inputs.kernel import fill_step_inputs
from sgl_mega_slots.glue.step_inputs.launch import StepInputsLaunch
from sgl_mega_slots.verify_accept.accept_tail.kernel import accept_from_logits, accept_from_tokens
from sgl_mega_slots.verify_accept.accept_tail.launch import AcceptTailLaunch
from sgl_mega_slots.verify_accept.blockwise_rejection.kernel import draw_last_token, masses_and_decision, simulate
from sgl_mega_slots.verify_accept.blockwise_rejection.launch import BlockwiseRejectionLaunch
from sgl_mega_slots.verify_accept.sampling_cutoffs.kernel import find_cutoff, group_maxima
from sgl_mega_slots.verify_accept.sampling_cutoffs.launch import SamplingCutoffsLaunch

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


def _accept(dtype: str, batch: int, *, simulated: bool) -> dict[str, Compilation]:
    launch = AcceptTailLaunch.plan(backend=Backend.KERNEL, batch=batch, rows=8, vocab=151_936)
    words = ("verify_lens", "simulated", "id", "arrived", "correct", "commit", "seq_lens", "new_seq")
    types = {f"{name}_ptr": "*i32" for name in words} | {"value_ptr": "*fp32", "logits_ptr": f"*{dtype}"}
    tile = {"SIMULATED": simulated, "BLOCK_T": launch.block_t}
    blocks = tile | {"BLOCK_V": launch.block_v, "BLOCK_S": launch.block_s}
    name, warps = f"{dtype}-b{batch}", {"num_warps": launch.num_warps}
    parts = {
        f"accept_from_logits{'-winners' * winners}{'-decides' * decides}-{name}": Compilation(
            accept_from_logits, types, blocks | {"WINNERS": winners, "DECIDES": decides}, warps
        )
        for winners, decides in launch.parts
    }
    return parts | {f"accept_from_tokens-{name}": Compilation(accept_from_tokens, types, tile, {"num_warps": 1})}


def _rejection(target: str, draft: str | None, batch: int, rows: int, *, cutoffs: bool) -> dict[str, Compilation]:
    launch = BlockwiseRejectionLaunch.plan(backend=Backend.KERNEL, batch=batch, rows=rows, vocab=151_936)
    floats = ("target_temperatures", "draft_temperatures", "cutoffs", "target_max", "target_sum", "draft_max")
    words = (
        "verify_lens",
        "id",
        "arrived",
        "drawn",
        "value_id",
        "simulated",
        "correct",
        "commit",
        "seq_lens",
        "new_seq",
    )
    types = {f"{name}_ptr": "*fp32" for name in (*floats, "draft_sum", "forms", "value")}
    types |= {f"{name}_ptr": "*i32" for name in (*words, "seed")}
    types |= {"target_ptr": f"*{target}", "draft_ptr": f"*{draft or target}"}
    has_cutoffs = {"HAS_CUTOFFS": cutoffs}
    has = has_cutoffs | {"HAS_DRAFT": draft is not None}
    tiles = {"BLOCK_T": launch.block_t, "BLOCK_S": launch.block_s, "BLOCK_V": launch.block_v}
    parts = {
        f"masses_and_decision{'-masses' * masses}{'-decides' * decides}-{target}-{draft}-b{batch}-t{rows}": Compilation(
            masses_and_decision,
            types,
            has | tiles | {"MASSES": masses, "DECIDES": decides},
            {"num_warps": launch.warps_v},
        )
        for masses, decides in launch.parts
    }
    draw = {"BLOCK_N": launch.block_n, "BLOCK_P": launch.block_p}
    name, warps = f"{target}-{draft}-b{batch}-t{rows}", {"num_warps": launch.warps_n}
    return parts | {
        f"draw_last_token-{name}": Compilation(draw_last_token, types, has | draw | {"INTERPRETED": False}, warps),
        f"simulate-{name}": Compilation(simulate, types, has_cutoffs | draw | {"BLOCK_T": launch.block_t}, warps),
    }


def _cutoffs(dtype: str, vocab: int) -> dict[str, Compilation]:
    launch = SamplingCutoffsLaunch.plan(backend=Backend.KERNEL, vocab=vocab)
    types = {f"{name}_ptr": "*fp32" for name in ("temperatures", "top_ps", "min_ps", "max", "sum", "list", "cutoffs")}
    types |= {f"{name}_ptr": "*i32" for name in ("top_ks", "verify_lens", "hits")} | {"logits_ptr": f"*{dtype}"}
    find = {
        "SIZE": launch.size,
        "BLOCK_A": triton.next_power_of_2(launch.groups),
        "BLOCK_H": launch.block_h,
        "LIST": launch.listed,
        "PAIRS": launch.pairs,
        "BLOCK_J": launch.block_j,
        "BLOCK_X": launch.block_x,
        "STEPS": launch.steps,
    }
    group = {"SIZE": launch.size, "BLOCK_G": launch.block_g}
    return {
        f"group_maxima-{dtype}-v{vocab}": Compilation(group_maxima, types, group, {"num_warps": launch.warps_g}),
        f"find_cutoff-{dtype}-v{vocab}": Compilation(find_cutoff, types, find, {"num_warps": launch.warps_f}),
    }


def _markov(
    base: str, weights: str, batch: int, rank: int, shared: int = 227, *, mixer: bool = False
) -> dict[str, Compilation]:
    """The vocabulary's launch as planned for so many KiB of shared memory; with a mixer, it takes the factors."""
    launch = MarkovLaunch.plan(
        backend=Backend.KERNEL,
        batch=batch,
        vocab=151_936,
        rank=rank,
        weight_bytes=4 if weights == "fp32" else 2,
        processors=Processors(count=132, shared_bytes=shared * 1024),
    )
    step = base if base == weights else "fp32"
    of_weights = ("w1", "w2", "latent", "features")
    types = {"base_ptr": f"*{base}", "temperatures_ptr": "*fp32", "logits_ptr": f"*{step}"}
    types |= {f"{name}_ptr": f"*{weights}" for name in of_weights}
    constants = {
        "R": rank,
        "G": 7,
        "STEPS": 1 if mixer else 7,
        "PROGRAMS": launch.programs,
        "TILES": launch.tiles,
        "STEP_DTYPE": _TYPES[step],
        "LATENT": mixer,
        "WRITE_LOGITS": True,
        "WRITE_FEATURES": not mixer,
        "INTERPRETED": False,
        "BLOCK_B": launch.block_b,
        "BLOCK_V": launch.block_v,
        "BLOCK_R": launch.block_r,
        "BLOCK_P": launch.block_p,
        "LOOKS": 1 << 22,
        "STAGES": launch.num_stages,
    }
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "launch_cooperative_grid": launch.one_launch and not mixer,
        "debug": True,
        "sanitize_overflow": False,
    }
    needs = "" if shared == 227 else f"-{shared}kib"
    name = f"markov_steps-{base}-{weights}-b{batch}-r{rank}{'-mixer' if mixer else ''}{needs}"
    return {name: Compilation(markov_steps, types, constants, options)}


def _mixer(weights: str, batch: int, rank: int, hidden: int, *, recurrent: bool) -> dict[str, Compilation]:
    outputs = 3 * rank if recurrent else rank
    block = 256 // (4 if weights == "fp32" else 2)
    names = ("hidden", "weight", "bias", "w1", "state", "latent", "features")
    types = {f"{name}_ptr": f"*{weights}" for name in names} | {"mixed_ptr": "*fp32"}
    shared = {"G": 7, "OUT": outputs, "INTERPRETED": False, "BLOCK_O": 16}
    of_hidden = {"H": hidden, "COLUMN": 0, "HAS_BIAS": True, "BLOCK_N": 8, "BLOCK_H": block, "STAGES": 4}
    of_step = {"R": rank, "RNN": recurrent, "COLUMN": rank, "PROGRAMS": 132, "WRITE_FEATURES": True}
    of_step |= {"BLOCK_B": batch, "BLOCK_R": min(triton.next_power_of_2(rank), block), "BLOCK_P": 2048 // batch}
    name = f"{weights}-b{batch}-r{rank}-{'rnn' if recurrent else 'gated'}"
    return {
        f"mixer_hidden-{name}": Compilation(mixer_hidden, types, shared | of_hidden, {"num_warps": 4, "num_stages": 4}),
        f"mixer_step-{name}": Compilation(mixer_step, types, shared | of_step, {"num_warps": 4}),
    }


def _step_inputs() -> dict[str, Compilation]:
    launch = StepInputsLaunch.plan(batch=64, rows=8)
    types = {"table_ptr": "*i32", "verify_lens_ptr": "*i32", "seq_lens_ptr": "*i32"}
    constants = {"PADDING": 0, "BLOCK_B": launch.block_b, "BLOCK_T": launch.block_t}
    relay = ("relay_lens_ptr", "relay_tokens_ptr", "used_lens_ptr", "used_anchors_ptr")
    options = {"num_warps": launch.num_warps}
    return {
        "fill_step_inputs": Compilation(fill_step_inputs, types, constants | dict.fromkeys(relay), options),
        "fill_step_inputs-relay": Compilation(fill_step_inputs, types, constants, options),
    }


def _attention_metadata(name: str, page_size: int, batch: int, none: tuple[str, ...]) -> dict[str, Compilation]:
    launch = AttentionMetadataLaunch.plan(batch=batch)
    words = (
        "table", "verify_lens", "kv_lens", "kv_indptr", "qo_indptr", "page_table", "window_table",
        "window_indptr", "window_offsets",
    )  # fmt: skip
    types = {f"{word}_ptr": "*i32" for word in words}
    constants = {"PADDING": 0, "PAGE_SIZE": page_size, "BLOCK_B": launch.block_b, "BLOCK_C": launch.block_c}
    constants |= {f"{word}_ptr": None for word in none}
    options = {"num_warps": launch.num_warps}
    return {f"fill_attention_metadata-{name}": Compilation(fill_attention_metadata, types, constants, options)}


def _relay() -> dict[str, Compilation]:
    types = {"verify_lens_ptr": "*i32"}
    return {"hand_over": Compilation(hand_over, types, {"BLOCK_B": 64}, {"num_warps": 2})}


def _step_params(dtype: str) -> dict[str, Compilation]:
    floats = {"temperatures_ptr": f"*{dtype}", "out_temperatures_ptr": "*fp32", "out_step_ptr": "*fp32"}
    types = floats | {"top_ks_ptr": "*i32", "verify_lens_ptr": "*i32", "out_greedy_ptr": "*i1"}
    constants = {"SMALLEST": 1e-5, "BLOCK_B": 64}
    return {f"stage_params-{dtype}": Compilation(stage_params, types, constants, {"num_warps": 2})}


def _context_kv(
    dtype: str, heads: int, size: int, layers: int, *, cache: str = "", rotated: int = 0, **flags: bool
) -> dict[str, Compilation]:
    launch = ContextKvLaunch.plan(heads=heads, head_size=size)
    types = {
        "projected_ptr": f"*{dtype}",
        "norm_ptr": f"*{dtype}",
        "cos_sin_ptr": "*fp32",
        "scales_ptr": "*fp32",
        "commit_lens_ptr": "*i32",
        "arrivals_ptr": "*i32",
        "eps": "fp32",
        "key_ptrs": (f"*{cache or dtype}",) * layers,
        "value_ptrs": (f"*{cache or dtype}",) * layers,
    }
    constants = {"H": heads, "D": size, "ROTATED": rotated or size, "PADDING": 0}
    constants |= {"NEOX": True, "HAS_MAP": False, "HAS_RING": False, "SCALED": False, "DISARM": False} | flags
    constants |= {"BLOCK_H": launch.block_h, "BLOCK_D": launch.block_d}
    options = {"num_warps": launch.num_warps}
    words = (dtype, cache, f"h{heads}", f"d{size}", f"r{rotated}" if rotated else "", *map(str.lower, flags))
    name = "-".join(word for word in ("write_context_kv", *words) if word)
    return {name: Compilation(write_context_kv, types, constants, options)}


def _staging() -> dict[str, Compilation]:
    launch = KvStagingLaunch.plan(staged=64, rows=8)
    types = {"commit_lens_ptr": "*i32", "out_commit_lens_ptr": "*i32"}
    constants = {"PADDING": 0, "BLOCK_M": launch.block_m, "BLOCK_T": launch.block_t}
    return {"stage_commit": Compilation(stage_commit, types, constants, {"num_warps": launch.num_warps})}


def _histories(dtype: str) -> dict[str, Compilation]:
    launch = HistoriesLaunch.plan(batch=64, ids=3)
    types = {"commit_lens_ptr": "*i32", "histories_ptr": f"*{dtype}"}
    constants = {"BLOCK_B": launch.block_b, "BLOCK_N": launch.block_n}
    compilation = Compilation(append_committed, types, constants, {"num_warps": launch.num_warps})
    return {f"append_committed-{dtype}": compilation}


COMPILATIONS = {
    **_accept("bf16", 1, simulated=False),
    **_accept("fp32", 64, simulated=True),
    **_rejection("bf16", "fp32", 1, 8, cutoffs=True),
    **_rejection("fp32", None, 64, 16, cutoffs=False),
    **_cutoffs("bf16", 151_936),
    **_cutoffs("fp32", 49_152),
    **_markov("bf16", "bf16", 1, 256, 99),
    **_markov("bf16", "bf16", 64, 512, 99),
    **_markov("fp32", "fp16", 1, 24, 99),
    **_markov("bf16", "fp32", 64, 256, 99),
    **_markov("bf16", "bf16", 4, 256, 99, mixer=True),
    **_mixer("bf16", 8, 256, 4096, recurrent=False),
    **_mixer("fp32", 64, 24, 512, recurrent=True),
    **_mixer("bf16", 64, 256, 4096, recurrent=True),
    **_step_inputs(),
    **_attention_metadata("everything", 16, 256, ()),
    **_attention_metadata(
        "page-table",
        1,
        32,
        (
            "map",
            "qo_indptr",
            "mask_indptr",
            "window_table",
            "kv_indices",
            "window_indptr",
            "window_indices",
            "window_offsets",
        ),
    ),
    **_attention_metadata("slots", 1, 4, ("map", "page_table", "window_table")),
    **_relay(),
    **_step_params("fp32"),
    **_step_params("bf16"),
    **_step_params("fp64"),
    **_context_kv("bf16", 8, 128, 5),
    **_context_kv("fp16", 3, 64, 3),
    **_context_kv("fp32", 1, 64, 1),
    **_context_kv("bf16", 8, 128, 5, DISARM=True),
    **_context_kv("bf16", 8, 128, 5, cache="fp8e4nv", SCALED=True),
    **_context_kv("fp16", 8, 128, 2, cache="fp8e5", HAS_MAP=True),
    **_context_kv("bf16", 8, 128, 2, rotated=64, HAS_RING=True),
    **_context_kv("bf16", 8, 128, 2, rotated=64, NEOX=False),
    **_staging(),
    **_histories("i32"),
    **_histories("i64"),
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
