"""Decoders and steps by name for `target_step`: small, and each with something at its edge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_mega_slots.target.target_step.plan import StepPlan
from sgl_mega_slots.target.target_step.shape import DenseShape
from sgl_mega_slots.target.target_step.weights import Cache, LayerWeights, StepInputs, Weights


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

    def plan(self, sms: int | None = None) -> StepPlan:
        """The case's plan, on its own number of SMs or a GPU's."""
        requests = len(self.prefixes)
        return StepPlan(self.shape, requests, self.tokens, sms or self.sms, taps=self.taps, head=self.head)


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


_PLAIN = _shape(128, 192, (4, 2))

CASES = (
    StepCase("one request", _PLAIN, 8, (92,), 4),
    StepCase("no context", _PLAIN, 8, (0,), 4),
    StepCase("one row", _shape(64, 64, (1, 1), layers=1, vocab=64, qk_norm=False), 1, (0,), 1, taps=(0, 1)),
    StepCase("five rows and a bias", _shape(128, 192, (4, 2), qk_norm=False, qkv_bias=True), 5, (4,), 3, (0, 2), False),
    StepCase("two requests", _PLAIN, 8, (92, 29), 4),
    StepCase("four requests", _shape(192, 128, (6, 2), qk_norm=False), 8, (92, 0, 292, 56), 4, taps=()),
    StepCase("heads of 128, split contexts", _shape(128, 192, (4, 1), 128, vocab=264), 8, (592,), 5),
    StepCase("seven heads share a KV head", _shape(448, 192, (7, 1), qkv_bias=True, qk_norm=False), 8, (325,), 6),
    StepCase("three segments, wide MLP", _shape(128, 4288, (2, 1)), 8, (12,), 4),
    StepCase("segments that stay", _shape(2560, 256, (2, 1), layers=1), 8, (12,), 6),
    StepCase("segments that come again", _shape(1536, 1600, (2, 1), layers=1), 8, (12, 62), 3),
    StepCase("more SMs than work", _shape(64, 64, (1, 1), vocab=64), 8, (40,), 12),
)


def weights(shape: DenseShape, *, seed: int, device: str = "cpu", positions: int = 2048) -> Weights:
    """Random weights whose activations stay near one, on a device."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float | None = None) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return (values * (columns**-0.5 if scale is None else scale)).bfloat16()

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator, device=device)).bfloat16()

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=norm(shape.hidden),
            qkv=matrix(shape.qkv_size, shape.hidden),
            o=matrix(shape.hidden, shape.q_size),
            middle_norm=norm(shape.hidden),
            gate_up=matrix(2 * shape.intermediate, shape.hidden),
            down=matrix(shape.hidden, shape.intermediate),
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
    """A random cache and a step over it. Places come in random order, and the cache's other places are NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape, requests = case.shape, len(case.prefixes)
    longest = max(case.prefixes) + case.tokens
    table = torch.randperm(2 * (requests + 1) * longest, generator=generator)[: (requests + 1) * longest]
    table = table.view(requests + 1, longest).int()
    rows = torch.randperm(requests + 1, generator=generator)[:requests]
    positions = torch.cat([torch.arange(prefix, prefix + case.tokens) for prefix in case.prefixes])
    request = torch.arange(requests).repeat_interleave(case.tokens)
    inputs = StepInputs(
        input_ids=torch.randint(0, shape.vocab, (requests * case.tokens,), generator=generator),
        positions=positions,
        out_cache_loc=table[rows[request], positions].long(),
        prefix_lengths=torch.tensor(case.prefixes),
        request_rows=rows,
        token_table=table,
    )
    used = torch.cat([table[rows[index], :prefix].long() for index, prefix in enumerate(case.prefixes)])

    def cache() -> tuple[Tensor, ...]:
        size = (shape.layers, 2 * (requests + 1) * longest, shape.kv_heads, shape.head_dim)
        full = torch.full(size, float("nan"), dtype=torch.bfloat16)
        full[:, used] = torch.randn(shape.layers, used.numel(), *size[2:], generator=generator).bfloat16()
        return tuple(full.to(device).unbind(0))

    on_device = StepInputs(**{name: value.to(device) for name, value in vars(inputs).items()})
    return Cache(keys=cache(), values=cache()), on_device
