"""`staged_kv` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sgl_mega_slots.commit.context_kv.reference import context_kv


def staged_kv(
    *,
    projected_kv: Tensor,
    k_norm_weights: Tensor,
    cos_sin: Tensor,
    neox: bool,
    positions: Tensor,
    cache_locs: Tensor,
    location_map: Tensor | None,
    ring_rows: Tensor | None,
    ring_size: int,
    eps: float,
    kv_scales: Tensor | None,
    out_commit_lens: Tensor,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
) -> None:
    """See :class:`sgl_mega_plugin.contract.StagedKv`."""
    context_kv(
        projected_kv=projected_kv,
        k_norm_weights=k_norm_weights,
        cos_sin=cos_sin,
        neox=neox,
        positions=positions,
        cache_locs=cache_locs,
        location_map=location_map,
        ring_rows=ring_rows,
        ring_size=ring_size,
        commit_lens=out_commit_lens,
        eps=eps,
        kv_scales=kv_scales,
        out_keys=out_keys,
        out_values=out_values,
    )
    out_commit_lens.zero_()
