"""Decoders and steps by name for `target_step`: small, and each with something at its edge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.target.target_step.plan import StepPlan
from sgl_mega_slots.target.target_step.shape import SCALE_BLOCK, DenseShape, WeightKind
from sgl_mega_slots.target.target_step.weights import MATRICES, Cache, LayerWeights, StepInputs, Weights


@dataclass(frozen=True)
class StepCase:
    """A step on random weights: ``prefixes`` are the requests' lengths before it."""

    name: str
    shape: DenseShape
    tokens: int
    prefixes: tuple[int, ...]
    sms: int
    taps: tuple[int, ...] = (1,)
    head: bool = True
    causal: bool = True

    def plan(self, sms: int | None = None) -> StepPlan:
        """The case's plan, on its own number of SMs or a GPU's."""
        requests, sms = len(self.prefixes), sms or self.sms
        return StepPlan(self.shape, requests, self.tokens, sms, taps=self.taps, head=self.head, causal=self.causal)


def _shape(hidden: int, intermediate: int, heads: tuple[int, int], head_dim: int = 64, **more: object) -> DenseShape:
    settings: dict[str, object] = {"layers": 2, "vocab": 256, "eps": 1e-6, "qk_norm": True} | more
    return DenseShape(
        hidden=hidden,
        intermediate=intermediate,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        **settings,  # type: ignore[arg-type]
    )


#: What most cases change one thing of, those of `draft_step` too.
PLAIN = _shape(128, 192, (4, 2))


def _fp8(shape: DenseShape, kind: str) -> DenseShape:
    return replace(shape, weights=WeightKind(kind))


#: Every size is a multiple of 128, so are the rows of each matrix.
_KV_ODD = _shape(448, 192, (7, 1), qkv_bias=True, qk_norm=False, kv_fp8=True)
_FP8_PLAIN = _shape(256, 384, (4, 2))
_FP8_ODD = _shape(384, 640, (2, 1), 64, qk_norm=False, qkv_bias=True)
_FP8_WIDE = _shape(128, 4736, (2, 1), layers=1)
_FP8_DEEP = _shape(2304, 256, (2, 1), layers=1)
_FP8_LOW = _shape(1152, 1152, (2, 1), layers=1)

CASES = (
    StepCase("one request", PLAIN, 8, (92,), 4),
    StepCase("no context", PLAIN, 8, (0,), 4),
    StepCase("two rows", _shape(64, 64, (1, 1), layers=1, vocab=64, qk_norm=False), 2, (0,), 1, taps=(0, 1)),
    StepCase("five rows and a bias", _shape(128, 192, (4, 2), qk_norm=False, qkv_bias=True), 5, (4,), 3, (0, 2), False),
    StepCase("two requests", PLAIN, 8, (92, 29), 4),
    StepCase("four requests", _shape(192, 128, (6, 2), qk_norm=False), 8, (92, 0, 292, 56), 4, taps=()),
    StepCase("heads of 128, split contexts", _shape(128, 192, (4, 1), 128, vocab=264), 8, (592,), 5),
    StepCase("seven heads share a KV head", _shape(448, 192, (7, 1), qkv_bias=True, qk_norm=False), 8, (325,), 6),
    StepCase("three segments, wide MLP", _shape(128, 4288, (2, 1)), 8, (12,), 4),
    StepCase("segments that stay", _shape(2560, 256, (2, 1), layers=1), 8, (12,), 6),
    StepCase("segments that come again", _shape(1536, 1600, (2, 1), layers=1), 8, (12, 62), 3),
    StepCase("more SMs than work", _shape(64, 64, (1, 1), vocab=64), 8, (40,), 12),
    StepCase("SMs with attention alone", _shape(64, 64, (1, 1), layers=3, vocab=64), 2, (40,), 26),
    StepCase("fp8 KV", replace(PLAIN, kv_fp8=True), 8, (92,), 4),
    StepCase("fp8 KV, no context", replace(PLAIN, kv_fp8=True), 8, (0,), 4),
    StepCase("fp8 KV, two requests", replace(PLAIN, kv_fp8=True), 8, (92, 29), 4),
    StepCase("fp8 KV, heads of 128, split contexts", _shape(128, 192, (4, 1), 128, kv_fp8=True), 8, (592,), 5),
    StepCase("fp8 KV, seven heads, a bias", _KV_ODD, 8, (325,), 6),
    StepCase("fp8, a scale a row", _fp8(_FP8_PLAIN, "fp8-channel"), 8, (92,), 4),
    StepCase("fp8, a scale a block", _fp8(_FP8_PLAIN, "fp8-block"), 8, (92,), 4),
    StepCase("fp8, a scale a row, two requests", _fp8(_FP8_PLAIN, "fp8-channel"), 8, (92, 29), 3),
    StepCase("fp8, a scale a block, two requests", _fp8(_FP8_PLAIN, "fp8-block"), 8, (92, 29), 3),
    StepCase("fp8, a scale a row, three requests", _fp8(_FP8_ODD, "fp8-channel"), 8, (9, 0, 40), 4, taps=()),
    StepCase("fp8, a scale a row, ten rows", _fp8(_FP8_ODD, "fp8-channel"), 5, (9, 40), 4, taps=()),
    StepCase("fp8, a scale a block, four requests", _fp8(_FP8_ODD, "fp8-block"), 8, (9, 0, 40, 56), 4, taps=()),
    StepCase("fp8, a scale a row, no LM head", _fp8(_FP8_ODD, "fp8-channel"), 5, (12,), 5, (0, 2), False),
    StepCase("fp8, a scale a block, no LM head", _fp8(_FP8_ODD, "fp8-block"), 5, (12,), 5, (0, 2), False),
    StepCase("fp8, a scale a row, segments", _fp8(_FP8_WIDE, "fp8-channel"), 8, (12,), 6),
    StepCase("fp8, a scale a block, segments", _fp8(_FP8_WIDE, "fp8-block"), 8, (12,), 6),
    StepCase("fp8, a scale a block, two stages", _fp8(_shape(128, 4096, (2, 1), layers=1), "fp8-block"), 8, (12,), 6),
    StepCase("fp8, a scale a block, segments again", _fp8(_FP8_DEEP, "fp8-block"), 8, (12, 5), 3),
    StepCase("fp8, a scale a block, segments of 32 rows", _fp8(_FP8_LOW, "fp8-block"), 8, (12, 5, 0, 3), 3),
)


def weights(shape: DenseShape, *, seed: int, device: str = "cpu", positions: int = 2048) -> Weights:
    """Random weights whose activations stay near one, on a device."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float | None = None) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return (values * (columns**-0.5 if scale is None else scale)).bfloat16()

    def weight(name: str) -> dict[str, Tensor]:
        """A matrix, and its scales where it is fp8: they differ by up to three times, so that no wrong one passes.
        Every other scale's values are small, most of them subnormal.
        """
        size = shape.matrices[MATRICES.index(name)]
        if (scales := shape.weights.scales_of(*size)) is None:
            return {name: matrix(*size)}
        values = torch.randn(size, generator=generator, device=device) * 4
        spread = 0.5 + torch.rand(scales, generator=generator, device=device)
        small = torch.arange(size[0], device=device) // (SCALE_BLOCK if len(scales) == 2 else 1) % 2 == 1
        values[small] *= 2.0**-9
        spread[1::2] *= 2.0**9
        return {name: values.to(torch.float8_e4m3fn), f"{name}_scales": spread * (size[1] ** -0.5 / 4)}

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator, device=device)).bfloat16()

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=norm(shape.hidden),
            **weight("qkv"),
            **weight("o"),
            middle_norm=norm(shape.hidden),
            **weight("gate_up"),
            **weight("down"),
            qkv_bias=matrix(1, shape.qkv_size, 0.1)[0] if shape.qkv_bias else None,
            q_norm=norm(shape.head_dim) if shape.qk_norm else None,
            k_norm=norm(shape.head_dim) if shape.qk_norm else None,
        )

    frequency = 10000.0 ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    angle = torch.arange(positions, device=device)[:, None] * frequency
    return Weights(
        embedding=matrix(shape.vocab, shape.hidden, 1.0),
        layers=tuple(layer() for _ in range(shape.layers)),
        final_norm=norm(shape.hidden),
        head=matrix(shape.vocab, shape.hidden),
        rotary=torch.cat([angle.cos(), angle.sin()], dim=-1).float(),
    )


def step(case: StepCase, *, seed: int, device: str = "cpu") -> tuple[Cache, StepInputs]:
    """A random cache and a step over it. Slots come in random order, and the cache's other slots are NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape, requests = case.shape, len(case.prefixes)
    longest = max(case.prefixes) + case.tokens
    table = 1 + torch.randperm(2 * (requests + 1) * longest, generator=generator)[: (requests + 1) * longest]
    table = table.view(requests + 1, longest).int()
    rows = torch.randperm(requests + 1, generator=generator)[:requests]
    positions = torch.cat([torch.arange(prefix, prefix + case.tokens) for prefix in case.prefixes])
    request = torch.arange(requests).repeat_interleave(case.tokens)
    inputs = StepInputs(
        input_ids=torch.randint(0, shape.vocab, (requests * case.tokens,), generator=generator),
        positions=positions,
        cache_locs=table[rows[request], positions].long(),
        seq_lens=torch.tensor(case.prefixes),
        req_pool_indices=rows,
        req_to_token=table,
    )
    used = torch.cat([table[rows[index], :prefix].long() for index, prefix in enumerate(case.prefixes)])

    def cache() -> tuple[Tensor, ...]:
        size = (shape.layers, 2 * (requests + 1) * longest + 1, shape.kv_heads, shape.head_dim)
        full = torch.full(size, float("nan"), dtype=torch.bfloat16)
        full[:, used] = torch.randn(shape.layers, used.numel(), *size[2:], generator=generator).bfloat16()
        full = full.to(torch.float8_e4m3fn) if shape.kv_fp8 else full
        return tuple(layer.clone().to(device) for layer in full)

    on_device = StepInputs(**{name: value.to(device) for name, value in vars(inputs).items()})
    return Cache(keys=cache(), values=cache()), on_device


def arguments(case: StepCase, device: str, *, seed: int = 1) -> dict[str, Any]:
    """A case as a call of the seam ``target_forward``."""
    longest = max(case.prefixes) + case.tokens
    made = weights(case.shape, seed=seed, device=device, positions=longest)
    cache, inputs = step(case, seed=seed + 1, device=device)
    layers, rows = made.layers, inputs.input_ids.numel()
    bf16 = torch.bfloat16

    def each(name: str) -> list[Tensor] | None:
        found = [getattr(layer, name) for layer in layers]
        return None if found[0] is None else found

    return {
        **vars(inputs),
        "embedding": made.embedding,
        "input_norms": each("input_norm"),
        "qkv_weights": each("qkv"),
        "qkv_scales": each("qkv_scales"),
        "qkv_biases": each("qkv_bias"),
        "q_norms": each("q_norm"),
        "k_norms": each("k_norm"),
        "output_weights": each("o"),
        "output_scales": each("o_scales"),
        "mlp_norms": each("middle_norm"),
        "gate_up_weights": each("gate_up"),
        "gate_up_scales": each("gate_up_scales"),
        "down_weights": each("down"),
        "down_scales": each("down_scales"),
        "final_norm": made.final_norm,
        "lm_head_weight": made.head,
        "cos_sin": made.rotary,
        "eps": case.shape.eps,
        "taps": list(case.taps),
        "out_keys": list(cache.keys),
        "out_values": list(cache.values),
        "out_tapped": torch.zeros(rows, len(case.taps) * case.shape.hidden, dtype=bf16, device=device)
        if case.taps
        else None,
        "out_hidden": None if case.head else torch.zeros(rows, case.shape.hidden, dtype=bf16, device=device),
        "out_logits": torch.zeros(rows, case.shape.vocab, dtype=bf16, device=device) if case.head else None,
    }


QWEN3_8B = DenseShape(
    layers=36,
    hidden=4096,
    intermediate=12288,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    eps=1e-6,
    qk_norm=True,
)
#: Layers of Qwen3-8B, and contexts that need many blocks a split: for a GPU.
_WIDE = replace(QWEN3_8B, layers=2, vocab=1024)
LARGE_CASES = (
    StepCase("two layers of Qwen3-8B", _WIDE, 8, (1016,), 132),
    StepCase("two layers of Qwen3-8B, two requests", _WIDE, 8, (1016, 77), 132),
    StepCase("four requests of Qwen3-8B", _WIDE, 8, (1016, 77, 0, 500), 132),
    StepCase("32k positions, fp8 KV", _shape(256, 256, (8, 2), 128, layers=1, kv_fp8=True), 8, (32_760,), 132),
    StepCase("32k positions", _shape(256, 256, (8, 2), 128, layers=1), 8, (32_760,), 132),
    *(
        StepCase(f"two layers of Qwen3-8B, {kind}, {len(prefixes)} requests", _fp8(_WIDE, kind), 8, prefixes, 132)
        for kind in ("fp8-channel", "fp8-block")
        for prefixes in ((1016,), (1016, 77), (1016, 77, 0, 500))
    ),
    StepCase("SmolLM2's layer", _shape(576, 1536, (9, 3), vocab=49152, qk_norm=False), 8, (200,), 132),
)
#: Where an e4m3 key that lies near the middle of two, rounded the other way, is one of a few positions: the result then
#: moves by more than the bound allows. For tests that compare with the interpreted plan.
COARSE_CASES = frozenset({"fp8 KV, no context"})
#: Seconds each in the emulator.
SLOW_CASES = frozenset({"segments that stay", "segments that come again", "three segments, wide MLP"})


def cases() -> Iterator[Case]:
    """Every step as a case of the kit."""
    keep = frozenset({"out_keys", "out_values"})
    for case in (*CASES, *LARGE_CASES):
        if case.name in COARSE_CASES:
            continue
        only = case in LARGE_CASES or case.name in SLOW_CASES
        yield Case(case.name, partial(_made, case), keep=keep, kernel_only=only)


def _made(case: StepCase, device: str) -> dict[str, Any]:
    return arguments(case, device)
