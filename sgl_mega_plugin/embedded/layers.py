"""What the embedded target and draft share: RMS norm, rotary embedding, gated MLP, the attention call."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Attend(Protocol):
    """Store one layer's keys and values, then attend. The cache behind it is the engine's."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q`` [N, heads, D], ``k`` and ``v`` [N, kv_heads, D], q and k rotated -> [N, heads, D]."""
        ...


class RMSNorm(nn.Module):
    """RMS norm over the last axis, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * self.weight.float()).to(x.dtype)


def rope_table(max_positions: int, head_dim: int, theta: float) -> Tensor:
    """[max_positions, head_dim] fp32: the cosines of head_dim / 2 frequencies, then their sines."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), inverse)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def rotate(x: Tensor, rows: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of ``x`` [N, heads, D] by ``rows`` [N, D], rows of a RoPE table."""
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Grouped-query attention around an :class:`Attend`; with ``qk_eps``, q and k are normed per head."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, qk_eps: float | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, qk_eps) if qk_eps is not None else nn.Identity()
        self.k_norm = RMSNorm(head_dim, qk_eps) if qk_eps is not None else nn.Identity()

    def forward(self, layer: int, x: Tensor, rope_rows: Tensor, attend: Attend) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        q, k = rotate(self.q_norm(q), rope_rows), rotate(self.k_norm(k), rope_rows)
        out: Tensor = self.o_proj(attend(layer, q, k, v).flatten(-2))
        return out


class Block(nn.Module):
    """A pre-norm transformer layer, named as Hugging Face names its weights."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, eps: float, *, qk_norm: bool
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(hidden, heads, kv_heads, head_dim, eps if qk_norm else None)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, intermediate)

    def forward(self, layer: int, x: Tensor, rope_rows: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(layer, self.input_layernorm(x), rope_rows, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def place(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Move a model's weights to a device and dtype; its RoPE table stays fp32."""
    table = model.get_buffer("cos_sin")
    model.to(device=device, dtype=dtype)
    model.register_buffer("cos_sin", table.to(device), persistent=False)
