"""SGLang's commit as the benchmark calls it, on the CPU: each peer does what the seam's reference does.

The stores are Triton kernels of SGLang's, which a CPU does not run; stand-ins write what they write.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from sglang.kernels.ops.embeddings import engram_hash
from sglang.kernels.ops.quantization.fp8_kernel import saturate_to_fp8_range
from sglang.kernels.ops.speculative.dspark import fused_kv_write
from sglang.kernels.ops.speculative.dspark import stage_commit as staging
from sglang.srt.mem_cache import memory_pool
from torch import Tensor

from sgl_mega_plugin.bench.records import Size
from sgl_mega_plugin.bench.workloads import WORKLOADS, sizes
from sgl_mega_plugin.contract import Provided
from sgl_mega_plugin.engine.peers import PeerUnavailableError, engine_peers
from sgl_mega_plugin.registry import load_reference
from sgl_mega_slots import SLOTS

_REFERENCES = {slot.seam: Provided(slot=slot, distribution="d", version="0") for slot in SLOTS}


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV pool of 0.7 GB takes seconds to fill on a CPU."""
    monkeypatch.setattr(sizes, "KV_SLOTS", 300)
    monkeypatch.setattr(sizes, "ROPE_POSITIONS", 700)


def _arguments(seam: str, variant: str = "") -> dict[str, Any]:
    return WORKLOADS[seam].sets(Size(seam=seam, variant=variant, batch=5), "cpu", 1)[0]


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def _call(seam: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a peer on the arguments, and the reference on a copy, which is returned."""
    expected = {key: _copy(value) for key, value in arguments.items()}
    load_reference(_REFERENCES[seam])(**expected)
    (peer,) = (peer for peer in engine_peers(seam) if peer.name == name)
    with torch.no_grad():
        found = peer.prepare(arguments)() or {}
    for key, value in found.items():
        assert torch.equal(value, expected[key]), f"{key}: {value.tolist()}, expected {expected[key].tolist()}"
    return expected


def _stored(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, loc_2d: Tensor, commit_lens: Tensor, row_dim: int,
    store_dtype: torch.dtype,
) -> None:  # fmt: skip
    assert (row_dim, store_dtype) == (k[0].numel(), k.dtype)
    kept = (torch.arange(loc_2d.shape[1]) < commit_lens[:, None]).flatten()
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache[loc_2d.flatten()[kept]] = rows[kept]


def _stored_fp8(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: float, v_scale: float, loc_2d: Tensor,
    commit_lens: Tensor, row_dim: int, k_scale_is_tensor: bool = False, v_scale_is_tensor: bool = False,
) -> None:  # fmt: skip
    assert (row_dim, k_scale_is_tensor, v_scale_is_tensor) == (k[0].numel(), True, True)
    keys, values = (
        saturate_to_fp8_range((rows.float() / scale).to(rows.dtype), k_cache.dtype).to(k_cache.dtype)
        for rows, scale in ((k, k_scale), (v, v_scale))
    )
    bits, dtype = [tensor.view(torch.uint8) for tensor in (keys, values, k_cache, v_cache)], torch.uint8
    _stored(*bits, loc_2d, commit_lens, row_dim, dtype)


@pytest.mark.parametrize(
    ("name", "stand_in"),
    [("_set_kv_buffer_prefix_valid_impl", _stored), ("_set_kv_buffer_prefix_valid_impl_fp8", _stored_fp8)],
)
def test_a_stand_in_takes_what_sglangs_function_takes(name: str, stand_in: Any) -> None:
    ours, theirs = (inspect.signature(call).parameters for call in (stand_in, getattr(memory_pool, name)))
    assert list(ours) == list(theirs)


@pytest.mark.parametrize(("variant", "neox"), [("", True), ("", False), ("fp8", True)])
def test_the_eager_write(monkeypatch: pytest.MonkeyPatch, variant: str, neox: bool) -> None:
    monkeypatch.setattr(memory_pool, "_set_kv_buffer_prefix_valid_impl", _stored)
    monkeypatch.setattr(memory_pool, "_set_kv_buffer_prefix_valid_impl_fp8", _stored_fp8)
    arguments = _arguments("context_kv", variant) | {"neox": neox}
    arguments["out_keys"], arguments["out_values"] = _copy(arguments["out_keys"]), _copy(arguments["out_values"])
    expected = _call("context_kv", "engine-eager", arguments)
    # A key's norm is rounded in fp32 another way, which may move it to the next number of bf16 or e4m3.
    step = 2.0**-3 if variant else 2.0**-7
    for name, bound in (("out_keys", step), ("out_values", 0.0)):
        for found, wanted in zip(arguments[name], expected[name], strict=True):
            torch.testing.assert_close(found.float(), wanted.float(), rtol=bound, atol=bound / 64)


def _fused(monkeypatch: pytest.MonkeyPatch, seam: str) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(fused_kv_write, "fused_kv_norm_rope_write", lambda *args, **kwargs: seen.append((args, kwargs)))
    arguments = _arguments(seam)
    (peer,) = (peer for peer in engine_peers(seam) if peer.name == "engine")
    peer.prepare(arguments)()
    return arguments, *seen[0]


@pytest.mark.parametrize(("seam", "lens"), [("context_kv", "commit_lens"), ("staged_kv", "out_commit_lens")])
def test_the_fused_write_gets_the_seams_arguments(monkeypatch: pytest.MonkeyPatch, seam: str, lens: str) -> None:
    arguments, positional, named = _fused(monkeypatch, seam)
    flat, meta, norms, cos_sin, positions, locations, layers, kv_size, size, eps = positional
    projected = arguments["projected_kv"]
    assert flat.shape == (projected.shape[0], projected[0].numel())
    assert flat.data_ptr() == projected.data_ptr()
    keys, values = arguments["out_keys"][2], arguments["out_values"][2]
    assert meta[2].tolist() == [keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0)]
    assert (norms is arguments["k_norm_weights"], cos_sin is arguments["cos_sin"]) == (True, True)
    assert (layers, kv_size, size, eps) == (5, 8 * 128, 128, 1e-6)
    assert positions.tolist() == arguments["positions"].flatten().tolist()
    assert locations.tolist() == arguments["cache_locs"].flatten().tolist()
    assert named["commit_lens"] is arguments[lens]
    assert (named["locs_row_width"], named["is_neox_style"], named["rotary_dim"]) == (8, True, 128)
    assert (int(arguments[lens].abs().sum()) == 0) == (seam == "staged_kv"), "a staging is disarmed behind the write"


def test_the_fused_write_takes_bf16_and_plain_slots_only() -> None:
    arguments = _arguments("context_kv")
    (peer,) = (peer for peer in engine_peers("context_kv") if peer.name == "engine")
    with pytest.raises(PeerUnavailableError, match="bfloat16 only"):
        peer.prepare(arguments | {"projected_kv": arguments["projected_kv"].float()})
    with pytest.raises(PeerUnavailableError, match=r"bfloat16 only, not torch.bfloat16 into torch.float8_e4m3fn"):
        peer.prepare(_arguments("context_kv", "fp8"))
    with pytest.raises(PeerUnavailableError, match="not by a map or a ring"):
        peer.prepare(arguments | {"ring_rows": torch.ones(5).long()})


def test_the_eager_staging() -> None:
    _call("kv_staging", "engine-eager", _arguments("kv_staging"))


def test_the_staging_kernel_gets_the_seams_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(**given: Any) -> None:
        assert given.keys() == inspect.signature(real).parameters.keys()
        assert (given["rows"], given["state_slot"], given["state_slot_dst"]) == (5 * 8, None, None)
        for name, lens in (("cache_loc", 5), ("positions", 5), ("commit_lens", 5)):
            given[f"{name}_dst"].zero_()
            given[f"{name}_dst"][:lens] = given[name]

    real = staging.stage_commit
    monkeypatch.setattr(staging, "stage_commit", stage)
    _call("kv_staging", "engine-switches", _arguments("kv_staging"))


def test_the_eager_history() -> None:
    arguments = _arguments("history_commit")
    expected = _call("history_commit", "engine-eager", arguments)
    assert torch.equal(arguments["out_histories"], expected["out_histories"])


def test_the_history_kernel_gets_the_seams_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(history: Tensor, verify_ids: Tensor, req_slots: Tensor, commit_lens: Tensor) -> None:
        load_reference(_REFERENCES["history_commit"])(
            tokens=verify_ids, req_pool_indices=req_slots, commit_lens=commit_lens, out_histories=history
        )

    first = list(inspect.signature(engram_hash.engram_commit_history).parameters)[:4]
    assert first == ["history", "verify_ids", "req_slots", "commit_lens"]
    monkeypatch.setattr(engram_hash, "engram_commit_history", append)
    _call("history_commit", "engine", _arguments("history_commit"))
