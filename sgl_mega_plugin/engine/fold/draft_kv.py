"""How a step's tapped hidden states become KV of the draft, and where it goes; or why the fold cannot write it.

SGLang describes its own fused write of this KV, for bf16 weights and a bf16 cache, and writes layer by layer where
either is fp8. The fold's slot writes an fp8 cache too, and fp8 weights are put into bf16 once: SGLang quantises what it
multiplies these with, so its draft sees other roundings, which changes what is proposed and not what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import ContextKv
from sgl_mega_plugin.engine.target.kv_pool import pool_reasons
from sgl_mega_plugin.engine.target.linears import linear_reasons, plain_matrix_of

#: Why there is none.
NONE = (
    "the draft's KV pool or its weights are neither plain bf16 nor fp8 as SGLang's own methods keep it, "
    "with one RoPE table"
)


@dataclass(frozen=True)
class DraftKv:
    """What a folded step commits context KV with."""

    project: Callable[[Tensor], Tensor]  # [N, taps * H] -> [N, L, 2, heads, D]
    k_norm_weights: Tensor
    cos_sin: Tensor
    neox: bool
    eps: float
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    scales: Tensor | None = None  # [L, 2] fp32, what keys and values of an fp8 pool are divided by

    def commit(
        self,
        context_kv: ContextKv,
        hidden: Tensor,  # [B * T, taps * H]
        *,
        positions: Tensor,  # [B, T]
        cache_locs: Tensor,  # [B, T]
        commit_lens: Tensor,  # [B]
    ) -> None:
        """Write the accepted rows' KV by a slot."""
        context_kv(
            projected_kv=self.project(hidden),
            k_norm_weights=self.k_norm_weights,
            cos_sin=self.cos_sin,
            positions=positions,
            cache_locs=cache_locs,
            commit_lens=commit_lens,
            eps=self.eps,
            neox=self.neox,
            location_map=None,
            ring_rows=None,
            ring_size=0,
            kv_scales=self.scales,
            out_keys=self.keys,
            out_values=self.values,
        )


def bundle_of(model: Any, pool: Any) -> Any:
    """SGLang's description of the write into a draft's pool; None for :data:`NONE`.

    Where SGLang fuses none, for weights or pool are fp8, it has no ``project``.
    """
    return model._fused_kv_write_bundle(pool) or _fp8_bundle(model, pool)


def draft_kv(model: Any, pool: Any) -> DraftKv:
    """The context KV of SGLang's draft model in its pool, of which :func:`bundle_of` knows."""
    bundle = bundle_of(model, pool)
    columns_of = bundle.project or _projection(model)
    heads = bundle.kv_size // bundle.head_dim
    layers = [layer.self_attn.attn.layer_id for layer in model.layers]

    def project(hidden: Tensor) -> Tensor:
        columns: Tensor = columns_of(model.project_target_hidden(hidden))
        return columns.view(len(columns), len(layers), 2, heads, bundle.head_dim)

    return DraftKv(
        project=project,
        k_norm_weights=bundle.k_norm_weights,
        cos_sin=bundle.cos_sin,
        neox=bundle.is_neox_style,
        eps=bundle.eps,
        keys=tuple(pool.get_key_buffer(layer) for layer in layers),
        values=tuple(pool.get_value_buffer(layer) for layer in layers),
        scales=_scales_of(model, pool),
    )


def _fp8_bundle(model: Any, pool: Any) -> Any:
    """The same where weights or pool are fp8."""
    attentions = [layer.self_attn for layer in model.layers]
    if pool_reasons(pool, None) or not attentions or not all(map(_is_served, attentions)):
        return None
    return model._fused_kv_write_layout(_AsBf16(pool), project=None)


def _projection(model: Any) -> Callable[[Tensor], Tensor]:
    """Every layer's keys and values of hidden states, side by side, with weights put into bf16 here."""
    attentions = [layer.self_attn for layer in model.layers]
    weights = torch.cat(
        [plain_matrix_of(each.qkv_proj)[each.q_size : each.q_size + 2 * each.kv_size] for each in attentions]
    )
    return lambda hidden: torch.nn.functional.linear(hidden, weights)


def _is_served(attention: Any) -> bool:
    """Whether keys and values are the projection and no more."""
    projection = attention.qkv_proj
    more = projection.bias is not None or getattr(attention, "v_scale", None) is not None
    return not more and not any(linear_reasons("qkv", projection))


def _scales_of(model: Any, pool: Any) -> Tensor | None:
    """The layers' scales of an fp8 pool; None where all are one. SGLang keeps bf16 without."""
    caches = [layer.self_attn.attn for layer in model.layers]
    keys = pool.get_key_buffer(caches[0].layer_id)
    if keys.dtype == torch.bfloat16:
        return None
    scales = [[1.0 if each is None else float(each) for each in (cache.k_scale, cache.v_scale)] for cache in caches]
    if all(each == [1.0, 1.0] for each in scales):
        return None
    return torch.tensor(scales, dtype=torch.float32, device=keys.device)


class _AsBf16:
    """A pool of the same shapes in bf16, without memory: SGLang checks a layout on it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_key_buffer(self, layer: int) -> Tensor:
        return _as_bf16(self._pool.get_key_buffer(layer))

    def get_value_buffer(self, layer: int) -> Tensor:
        return _as_bf16(self._pool.get_value_buffer(layer))


def _as_bf16(buffer: Tensor) -> Tensor:
    return torch.empty_strided(buffer.shape, buffer.stride(), dtype=torch.bfloat16, device="meta")
