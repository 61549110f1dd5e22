"""The draft's context KV as the fold commits it, beside what SGLang's draft writes layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_decoders import decoder, draft_of, one_rank, quantised_draft, served
from engine_forwards import row_error, serving
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config
from torch import Tensor

from sgl_mega_plugin.engine.fold.draft_kv import bundle_of, draft_kv
from sgl_mega_plugin.registry import Registry, load_reference

REQUESTS, ROWS = 2, 3
COMMITTED = (3, 1)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
QUANTISED = {
    "a scale a block": lambda: Fp8Config(True, "dynamic", weight_block_size=[128, 128]),
    "a scale a row": lambda: W8A8Fp8Config(True),
}


@pytest.fixture(autouse=True)
def worker(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker's process of a server with the fold's slots."""
    with serving("context_kv,accept_tail", target, draft, monkeypatch):
        yield


def _pair(weights: str) -> tuple[Any, Any]:
    """A draft, and one of the same weights in bf16."""
    if weights in QUANTISED:
        return quantised_draft(QUANTISED[weights]())
    model = draft_of(decoder("qwen3"))
    return model, model


def _step(width: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    places = 1 + torch.randperm(40, generator=draw)[: REQUESTS * ROWS]
    return {
        "hidden": torch.randn(REQUESTS * ROWS, width, generator=draw).bfloat16(),
        "positions": torch.tensor([[20, 21, 22], [7, 8, 9]]),
        "cache_locs": places.view(REQUESTS, ROWS),
        "commit_lens": torch.tensor(COMMITTED, dtype=torch.int32),
    }


def _ours(model: Any, pool: Any, step: dict[str, Tensor]) -> None:
    with one_rank():
        draft_kv(model, pool).commit(load_reference(Registry.discover().get("context_kv")), **step)


def _sglangs(model: Any, pool: Any, step: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer: its fused write is a kernel."""
    monkeypatch.setattr(model, "_fused_kv_write_bundle", lambda pool: None)
    live = torch.arange(ROWS) < step["commit_lens"][:, None]
    with one_rank():
        model.write_target_hidden_kv(
            target_hidden=step["hidden"][live.flatten()],
            pool=pool,
            positions=step["positions"][live],
            cache_loc=step["cache_locs"][live],
        )
    monkeypatch.undo()


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16 cache", "fp8 cache"])
@pytest.mark.parametrize("weights", ["bf16", *QUANTISED])
def test_the_fold_writes_what_sglangs_draft_writes_from_the_same_weights(
    weights: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = _pair(weights)
    theirs, ours = served(dtype=dtype), served(dtype=dtype)
    step = _step(2 * model.config.hidden_size)
    before = ours.written()
    _sglangs(twin, theirs.pool, step, monkeypatch)
    _ours(model, ours.pool, step)
    live = _live(step)
    places = step["cache_locs"].flatten()[live]
    others = torch.ones(before[0].shape[1], dtype=torch.bool)
    others[places] = False
    bound = 2**-8 if dtype == BF16 else 2**-5  # SGLang rounds a key after its norm too; the last rounding is as theirs
    for was, found, wanted in zip(before, ours.written(), theirs.written(), strict=True):
        assert torch.equal(_bytes(found)[:, others], _bytes(was)[:, others])
        here, there = _numbers(found[:, places], dtype), _numbers(wanted[:, places], dtype)
        assert not torch.equal(_bytes(found)[:, places], _bytes(was)[:, places])
        assert row_error(here.flatten(2), there.flatten(2)) <= bound


def _live(step: dict[str, Tensor]) -> Tensor:
    return (torch.arange(ROWS) < step["commit_lens"][:, None]).flatten()


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def _numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.view(dtype).float()


def test_an_fp8_draft_is_not_what_sglang_itself_fuses() -> None:
    """Else the fold would take SGLang's description, and these tests would not test ours."""
    model, twin = _pair("a scale a block")
    plain, fp8 = served().pool, served(dtype=FP8).pool
    assert model._fused_kv_write_bundle(plain) is None
    assert twin._fused_kv_write_bundle(plain) is not None
    assert twin._fused_kv_write_bundle(fp8) is None


def test_an_fp8_cache_has_the_layers_scales_and_a_bf16_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _pair("bf16")
    model.layers[1].self_attn.attn.k_scale = torch.tensor(0.5)
    model.layers[2].self_attn.attn.v_scale = torch.tensor(4.0)
    found = draft_kv(model, served(dtype=FP8).pool)
    assert found.scales is not None
    assert found.scales.tolist() == [[1.0, 1.0], [0.5, 1.0], [1.0, 4.0]]
    assert draft_kv(model, served().pool).scales is None
    theirs, ours, step = served(dtype=FP8), served(dtype=FP8), _step(2 * model.config.hidden_size)
    _sglangs(model, theirs.pool, step, monkeypatch)
    _ours(model, ours.pool, step)
    places = step["cache_locs"].flatten()[_live(step)]
    for mine, kept in zip(ours.written(), theirs.written(), strict=True):
        assert row_error(_numbers(mine[:, places], FP8).flatten(2), _numbers(kept[:, places], FP8).flatten(2)) <= 2**-5


def test_a_bias_is_left_to_sglang() -> None:
    model, _ = _pair("a scale a block")
    model.layers[0].self_attn.qkv_proj.bias = torch.nn.Parameter(torch.zeros(1))
    assert bundle_of(model, served().pool) is None
