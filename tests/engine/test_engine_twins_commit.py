"""The commit stage's references against SGLang's own code of the same steps, on the CPU.

SGLang's Triton kernels run in Triton's interpreter, in a process of their own: it fixes the mode at import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.quantization.fp8_kernel import saturate_to_fp8_range
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import build_ring_commit_inject_layout
from sglang.srt.layers.engram import EngramHasher
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models.dspark import DSparkDraftMixin
from sglang.srt.speculative.dspark_components.dspark_deferred_commit import DeferredContextCommit
from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector
from torch import Tensor

from sgl_mega_plugin.contract import Provided
from sgl_mega_plugin.deferral import Deferral, Todo
from sgl_mega_plugin.registry import load_reference
from sgl_mega_slots import SLOTS
from sgl_mega_slots.commit.context_kv import cases
from sgl_mega_slots.commit.context_kv.reference import store

_REFERENCES = {
    slot.name: load_reference(Provided(slot=slot, distribution="d", version="0"))
    for slot in SLOTS
    if slot.name in ("context_kv", "histories")
}


class _Rope:
    """SGLang's rotary embedding as its own torch code computes it; the class itself wants a GPU to be built."""

    def __init__(self, head_dim: int, positions: int, rotary_dim: int, *, neox: bool) -> None:
        angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.head_size, self.rotary_dim = head_dim, rotary_dim
        self.is_neox_style = neox
        self._apply_rotary_emb_wrapped = apply_rotary_emb

    def __call__(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = RotaryEmbedding.forward_native(self, positions, query, key)
        return rotated


@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "neighbours"])
def test_context_kv_is_sglangs_projection_norm_and_rope(rotary_dim: int, neox: bool) -> None:
    batch, rows, layers, heads, head_dim, hidden, slots = 2, 4, 3, 2, 16, 24, 40
    draw = torch.Generator().manual_seed(11)
    rope = _Rope(head_dim, 64, rotary_dim, neox=neox)
    attention = SimpleNamespace(kv_size=heads * head_dim, head_dim=head_dim, num_kv_heads=heads, rotary_emb=rope)
    weight = torch.randn(layers * 2 * heads * head_dim, hidden, generator=draw)
    norms = torch.rand(layers, head_dim, generator=draw) + 0.5
    ctx = torch.randn(batch * rows, hidden, generator=draw)
    positions = torch.tensor([[3, 4, 5, 6], [60, 61, 62, 63]])
    locations = torch.tensor([[9, 8, 7, 6], [20, 21, 22, 23]])
    commit = torch.tensor([3, 1], dtype=torch.int32)

    keys, values = DSparkDraftMixin._project_ctx_kv_stacked(
        SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)] * layers),
        ctx_hidden=ctx,
        positions=positions.flatten(),
        stacked={"weight": weight, "bias": None, "k_norm_weight": norms, "eps": 1e-6},
    )
    out_keys = [torch.full((slots, heads, head_dim), torch.nan) for _ in range(layers)]
    out_values = [torch.full((slots, heads, head_dim), torch.nan) for _ in range(layers)]
    _REFERENCES["context_kv"](
        projected_kv=torch.nn.functional.linear(ctx, weight).view(batch * rows, layers, 2, heads, head_dim),
        k_norm_weights=norms, cos_sin=rope.cos_sin_cache, neox=neox, positions=positions, cache_locs=locations,
        location_map=None, ring_rows=None, ring_size=0, commit_lens=commit, eps=1e-6, kv_scales=None,
        out_keys=out_keys, out_values=out_values,
    )  # fmt: skip
    kept = (torch.arange(rows) < commit[:, None]).flatten()
    written = locations.flatten()[kept]
    for layer in range(layers):
        # fp32: the norm's mean and root and the rotation round about six times, 2**-24 each of values below 8.
        torch.testing.assert_close(out_keys[layer][written], keys[layer][kept], rtol=0, atol=8 * 6 * 2.0**-24)
        torch.testing.assert_close(out_values[layer][written], values[layer][kept], rtol=0, atol=0)
        untouched = torch.ones(slots, dtype=torch.bool).index_fill(0, written, False)
        assert out_keys[layer][untouched].isnan().all()
        assert out_values[layer][untouched].isnan().all()


def _slots_of(locations: Tensor, positions: Tensor, commit: Tensor, slots: int, **places: Any) -> Tensor:
    """[B, T]: the slot that the reference writes a row to, -1 where it writes none."""
    batch, rows = positions.shape
    values = cases.arguments("cpu", locations=[[1] * rows] * batch, commit_lens=[0] * batch, layers=1, heads=1,
                             size=2, slots=slots, dtype=torch.float32)  # fmt: skip
    values["projected_kv"][:, 0, 1] = torch.arange(batch * rows)[:, None, None]
    values["out_values"][0].fill_(-1.0)
    values |= {"positions": positions, "cache_locs": locations, "commit_lens": commit} | places
    _REFERENCES["context_kv"](**values)
    found = torch.full((batch * rows,), -1)
    for slot, tag in enumerate(values["out_values"][0][:, 0, 0].tolist()):
        if tag >= 0:
            found[int(tag)] = slot
    return found.view(batch, rows)


def test_mapped_slots_are_those_of_sglangs_sliding_window_pool() -> None:
    """Committed rows whose location is one; an unmapped one is the padding slot there and not written here."""
    batch, rows, full, slots = 5, 4, 90, 30
    draw = torch.Generator().manual_seed(2)
    mapping = torch.cat([torch.zeros(1).long(), torch.randperm(full - 1, generator=draw) % 60 - 30, torch.tensor([-1])])
    mapping = torch.where(mapping < 0, 0, mapping)
    mapping[-1] = -1  # SGLang's sentinel behind the map, which location -1 finds
    locations = torch.randperm(full - 1, generator=draw)[: batch * rows].view(batch, rows) + 1
    commit = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    pool = SimpleNamespace(swa_req_ring_size=None, translate_loc_from_full_to_swa=lambda where: mapping[where])
    expected = TargetHiddenKvInjector.committed_swa_loc(
        SimpleNamespace(), pool=pool, cache_loc=locations.flatten(), positions=torch.zeros(batch * rows).long(),
        cache_loc_2d=locations, commit_lens=commit,
    ).view(batch, rows)  # fmt: skip
    # Two rows of one slot would race in SGLang as well; they are not what is compared.
    shown = expected.flatten().tolist()
    once = torch.tensor([slot > 0 and shown.count(slot) == 1 for slot in shown]).view(batch, rows)
    found = _slots_of(locations, torch.zeros(batch, rows).long(), commit, slots, location_map=mapping)
    assert once.sum() >= 3
    assert torch.equal(found[once], expected[once].long())
    assert (found[expected <= 0] == -1).all()


@pytest.mark.parametrize("ragged", [False, True], ids=["static", "ragged"])
def test_ring_slots_are_those_of_sglangs_rings(ragged: bool) -> None:
    batch, rows, ring = 4, 5, 8
    owners, prefix = torch.tensor([3, 1, 5, 2]), torch.tensor([0, 6, 13, 40])
    commit = torch.tensor([5, 3, 0, 4], dtype=torch.int32)
    positions = prefix[:, None] + torch.arange(rows)
    if ragged:
        expected = build_ring_commit_inject_layout(
            req_pool_indices=owners, prefix_lens=prefix, block_pos_offsets=torch.arange(rows), commit_lens=commit,
            stride=rows, ring_stride=ring,
        ).swa_loc  # fmt: skip
    else:
        expected = TargetHiddenKvInjector._ring_inject_loc(
            SimpleNamespace(), pool=SimpleNamespace(swa_req_ring_size=ring, sliding_window=3),
            positions=positions.flatten(), cache_loc_2d=positions, commit_lens=commit,
            state_slot=owners.repeat_interleave(rows), final_pos=None,
        )  # fmt: skip
    found = _slots_of(
        torch.ones(batch, rows).long(), positions, commit, 48, ring_rows=owners, ring_size=ring, location_map=None
    )
    assert found.flatten().tolist() == expected.tolist()


def test_a_long_commit_into_a_ring_keeps_what_sglangs_window_keeps() -> None:
    """A prefill's rule, pos > last - window, with the ring for the window: the rows that share no slot."""
    rows, ring = 9, 4
    positions, commit = torch.arange(20, 20 + rows)[None], torch.tensor([7], dtype=torch.int32)
    expected = TargetHiddenKvInjector._ring_inject_loc(
        SimpleNamespace(), pool=SimpleNamespace(swa_req_ring_size=ring, sliding_window=ring),
        positions=positions.flatten(), cache_loc_2d=positions, commit_lens=commit,
        state_slot=torch.full((rows,), 2), final_pos=torch.full((rows,), 26),
    )  # fmt: skip
    found = _slots_of(
        torch.ones(1, rows).long(),
        positions,
        commit,
        48,
        ring_rows=torch.tensor([2]),
        ring_size=ring,
        location_map=None,
    )
    assert found.flatten().tolist() == expected.tolist()


def _pool(dtype: torch.dtype, slots: int, heads: int, size: int) -> MHATokenToKVPool:
    """SGLang's pool with what its stores read; the class itself wants a GPU to be built."""
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.__dict__ |= {
        "dtype": dtype, "store_dtype": torch.uint8, "size": slots - 1, "page_size": 1, "start_layer": 0,
        "use_hnd": False, "kv_cache_layout": "layer_first", "requires_physical_write_loc": False, "alt_stream": None,
        "row_dim": heads * size, "v_row_dim": heads * size, "device_module": None,
        "k_buffer": [torch.zeros(slots, heads, size, dtype=torch.uint8)],
        "v_buffer": [torch.zeros(slots, heads, size, dtype=torch.uint8)],
    }  # fmt: skip
    return pool


@pytest.mark.parametrize("scales", [None, (0.75, 3.0)], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_bytes_are_those_of_sglangs_pool(
    monkeypatch: pytest.MonkeyPatch, name: str, scales: tuple[float, float] | None
) -> None:
    """Its eager store, within the range of the type: beyond it CUDA's commit saturates e4m3 and a prefill does not."""
    dtype, rows, heads, size = getattr(torch, name), 64, 2, 32
    monkeypatch.setattr(MHATokenToKVPool, "is_quantized_kv_cache", property(lambda self: False))
    draw = torch.Generator().manual_seed(8)
    keys, values = (
        (torch.randn(rows, heads, size, generator=draw) * 2.0 ** torch.randint(-9, 7, (rows, 1, 1), generator=draw))
        .clamp(-300, 300)
        .bfloat16()
        for _ in range(2)
    )
    pool, where = _pool(dtype, 80, heads, size), torch.randperm(79, generator=draw)[:rows] + 1
    layer = SimpleNamespace(layer_id=0, k_scale=None, k_scale_float=None, v_scale=None, v_scale_float=None)
    pool.set_kv_buffer_prefix_valid(
        layer, where.view(8, 8), torch.full((8,), 8, dtype=torch.int32), keys.clone(), values.clone(), *(scales or ())
    )
    for index, (buffer, row) in enumerate(((pool.k_buffer[0], keys), (pool.v_buffer[0], values))):
        ours = torch.zeros(80, heads, size).to(dtype)
        store(ours, where, row, None if scales is None else torch.tensor(scales[index]))
        assert torch.equal(ours.view(torch.uint8), buffer)


def test_e4m3_saturates_as_sglangs_commit_does() -> None:
    row = torch.tensor([[[440.0, 450.0, 1e6, -torch.inf, torch.nan, 464.0]]]).bfloat16()
    ours = torch.zeros(2, 1, 6).to(torch.float8_e4m3fn)
    store(ours, torch.tensor([1]), row, None)
    expected = saturate_to_fp8_range(row, torch.float8_e4m3fn).to(torch.float8_e4m3fn)
    assert torch.equal(ours[1:].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("ids", [1, 3, 7])
def test_histories_are_sglangs(ids: int) -> None:
    draw = torch.Generator().manual_seed(ids)
    batch, rows = 6, 5
    history = torch.randint(0, 99, (9, ids), generator=draw, dtype=torch.int32)
    tokens = torch.randint(0, 99, (batch, rows), generator=draw)
    owners = torch.randperm(9, generator=draw)[:batch]
    commit = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
    theirs, ours = SimpleNamespace(history=history.clone(), max_ngram_size=ids + 1), history.clone()
    EngramHasher.commit_after_verify(theirs, tokens, owners, commit)
    _REFERENCES["histories"](tokens=tokens, req_pool_indices=owners, commit_lens=commit, out_histories=ours)
    assert torch.equal(ours, theirs.history)


class _Recorded(DeferredContextCommit):
    """SGLang's deferral, whose write is noted and not done."""

    def __init__(self) -> None:
        super().__init__(max_bs=4, stride=2, device="cpu", kv_injector=None)
        self.writes = 0

    def write(self, bs: int | None = None) -> None:
        self.writes += 1


@settings(deadline=None)
@given(st.data())
def test_the_host_writes_when_sglangs_does(data: st.DataObject) -> None:
    """Any order of drafts, prefills and stagings that SGLang has; dropping is ours alone."""
    theirs, ours = _Recorded(), Deferral(4)
    for rows in data.draw(st.sets(st.sampled_from([1, 2, 4]))):
        theirs._forked_bs.add(rows)
        ours.captured(rows)
    for _ in range(data.draw(st.integers(1, 12))):
        before, event = theirs.writes, data.draw(st.sampled_from(["step", "eager step", "prefill", "disarm"]))
        replays = False
        if event == "disarm":
            theirs.disarm()
            ours.disarmed()
            continue
        if event == "prefill":
            theirs.flush()
            todo = ours.before_prefill()
        else:
            graph = data.draw(st.sampled_from([1, 2, 4])) if event == "step" else None
            theirs.before_draft_forward(graph)
            replays = theirs.pending
            theirs.after_draft_forward(graph is not None)
            todo = ours.before_draft(graph)
        assert todo is (Todo.WRITE if theirs.writes > before else Todo.REPLAY if replays else Todo.NOTHING)
        if event != "prefill":
            live = data.draw(st.integers(1, 4))
            assert ours.before_verify() is Todo.NOTHING
            theirs.note_static_verify(live)
            ours.staged(live)


_KERNELS = """
import json, torch
from sgl_mega_slots.commit.context_kv import cases
from sgl_mega_slots.commit.context_kv.reference import context_kv

def fused(neox, rotated):
    from sglang.kernels.ops.memory.ptr_table import make_ptr_table
    from sglang.kernels.ops.speculative.dspark.fused_kv_write import fused_kv_norm_rope_write
    window = {"locations": [[9, 8, 7], [20, -1, 22], [5, 6, 1]], "commit_lens": [3, 2, 0]}
    theirs, ours = (cases.arguments("cpu", **window, neox=neox, rotated=rotated, size=64) for _ in range(2))
    buffers = list(zip(theirs["out_keys"], theirs["out_values"]))
    meta = make_ptr_table([[k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)] for k, v in buffers], "cpu")
    fused_kv_norm_rope_write(
        theirs["projected_kv"].flatten(1), meta, theirs["k_norm_weights"], theirs["cos_sin"],
        theirs["positions"].flatten(), theirs["cache_locs"].flatten(), 2, 128, 64, 1e-6,
        commit_lens=theirs["commit_lens"], locs_row_width=3, is_neox_style=neox, rotary_dim=rotated,
    )
    context_kv(**ours)
    off = [(k.double() - o.double()).abs().max().item() for k, o in zip(theirs["out_keys"], ours["out_keys"])]
    same = [torch.equal(v, o) for v, o in zip(theirs["out_values"], ours["out_values"])]
    return max(off), all(same)

def staging():
    from sglang.kernels.ops.speculative.dspark.stage_commit import stage_commit
    from sgl_mega_slots.commit.kv_staging.cases import arguments
    from sgl_mega_slots.commit.kv_staging.reference import kv_staging
    values = arguments("cpu", locations=[[10, 11, 12], [20, 21, 22]], commit_lens=[2, 1], staged=4)
    theirs = {name: torch.full_like(value, 7) for name, value in values.items() if name.startswith("out_")}
    stage_commit(
        cache_loc_dst=theirs["out_cache_locs"], positions_dst=theirs["out_positions"],
        commit_lens_dst=theirs["out_commit_lens"], state_slot_dst=None, cache_loc=values["cache_locs"],
        positions=values["positions"], commit_lens=values["commit_lens"], state_slot=None, rows=6,
    )
    kv_staging(**values)
    rows = {"out_cache_locs": 2, "out_positions": 2, "out_commit_lens": 4}
    return [torch.equal(theirs[name][:count], values[name][:count]) for name, count in rows.items()]

def history():
    from sglang.kernels.ops.embeddings.engram_hash import engram_commit_history
    from sgl_mega_slots.commit.histories.cases import arguments
    from sgl_mega_slots.commit.histories.reference import history_commit
    theirs, ours = (arguments("cpu", commit_lens=[0, 1, 3, 4], rows=4, ids=3) for _ in range(2))
    verified = torch.tensor([0, 4, 4, 4], dtype=torch.int32)
    engram_commit_history(
        theirs["out_histories"], theirs["tokens"], theirs["req_pool_indices"], theirs["commit_lens"],
        live_rows=verified, gate=torch.ones(1, dtype=torch.int32),
    )
    history_commit(**ours)
    return torch.equal(theirs["out_histories"], ours["out_histories"])

def swa():
    from sglang.kernels.ops.speculative.dspark.commit_swa import committed_swa_locations
    mapping = torch.tensor([0, 9, 8, 0, 7, -1])
    found = committed_swa_locations(torch.tensor([1, 2, 3, 4, 1, 2]), mapping, torch.tensor([2, 3]).int(), 3)
    return found.tolist()

shapes = {f"{neox} {rotated}": fused(neox, rotated) for neox in (True, False) for rotated in (64, 32)}
print(json.dumps({"fused": shapes, "staging": staging(), "history": history(), "swa": swa()}))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What SGLang's kernels gave, compared in their process where that takes both."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", "-c", _KERNELS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("neox", "rotated"), [(True, 64), (True, 32), (False, 64), (False, 32)])
def test_context_kv_is_sglangs_fused_kernel(interpreted: dict[str, Any], neox: bool, rotated: int) -> None:
    """The same rows are written. The interpreter truncates to bf16 twice where a GPU and the reference round."""
    off, same = interpreted["fused"][f"{neox} {rotated}"]
    assert same, "values, or rows that were not to be written"
    # Normed keys are below 16 with these weights: two truncations of 2**-7 of that, times the sum of cos and sin.
    assert off <= 2 * 16 * 2.0**-7 * 2**0.5, off


def test_kv_staging_is_sglangs_kernel(interpreted: dict[str, Any]) -> None:
    assert interpreted["staging"] == [True, True, True]


def test_histories_are_sglangs_kernel(interpreted: dict[str, Any]) -> None:
    assert interpreted["history"] is True


def test_mapped_slots_are_sglangs_kernel(interpreted: dict[str, Any]) -> None:
    """Locations [1, 2, 3 | 4, 1, 2] by this map; both requests write slots 9 and 8, the later row last."""
    found = _slots_of(
        torch.tensor([[1, 2, 3], [4, 1, 2]]), torch.zeros(2, 3).long(), torch.tensor([2, 3]).int(), 20,
        location_map=torch.tensor([0, 9, 8, 0, 7, -1]),
    )  # fmt: skip
    assert interpreted["swa"] == [9, 8, -1, 7, 9, 8]
    assert found.flatten().tolist() == [-1, -1, -1, 7, 9, 8]
