"""Launch of `context_kv`: checks the arguments and picks the grid.

The layers' buffers reach the kernel as a tuple of pointers, so there is no table of addresses to
allocate, to fill before a capture or to keep up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT, SlotSetup
from sgl_mega_slots.commit.arguments import require_context
from sgl_mega_slots.commit.context_kv.kernel import write_context_kv
from sgl_mega_slots.common.checks import require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION

_LARGEST_TILE = 4096  # elements of half a row's heads that a program holds in registers


@dataclass(frozen=True)
class ContextKvLaunch:
    """Tile of the one launch: every head by half a head's size a program."""

    block_h: int
    block_d: int
    num_warps: int

    @classmethod
    def plan(cls, *, heads: int, head_size: int) -> ContextKvLaunch:
        block_h, block_d = triton.next_power_of_2(heads), triton.next_power_of_2(head_size // 2)
        if block_h * block_d > _LARGEST_TILE:
            raise ValueError(
                f"projected_kv: H {heads} by D {head_size}; half of it must fit {_LARGEST_TILE} elements a program"
            )
        return cls(block_h=block_h, block_d=block_d, num_warps=max(1, min(4, block_h * block_d // 128)))


class ContextKv:
    """`context_kv` as one launch over rows and layers; holds no memory."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "context_kv")
        self._setup = setup

    def __call__(
        self,
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
        commit_lens: Tensor,
        eps: float,
        kv_scales: Tensor | None,
        out_keys: Sequence[Tensor],
        out_values: Sequence[Tensor],
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.ContextKv`. Every buffer has the same dtype and strides.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        launch_write(
            self._setup,
            projected_kv=projected_kv,
            k_norm_weights=k_norm_weights,
            cos_sin=cos_sin,
            neox=neox,
            positions=positions,
            cache_locs=cache_locs,
            location_map=location_map,
            ring_rows=ring_rows,
            ring_size=ring_size,
            lens_name="commit_lens",
            commit_lens=commit_lens,
            arrivals=None,
            eps=eps,
            kv_scales=kv_scales,
            out_keys=out_keys,
            out_values=out_values,
        )


def launch_write(
    setup: SlotSetup,
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
    lens_name: str,
    commit_lens: Tensor,
    arrivals: Tensor | None,
    eps: float,
    kv_scales: Tensor | None,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
) -> None:
    """Check and launch. With ``arrivals`` [B] int32, zeros, the call leaves ``commit_lens`` and them at 0."""
    require_context(
        setup,
        projected_kv=projected_kv,
        k_norm_weights=k_norm_weights,
        cos_sin=cos_sin,
        positions=positions,
        cache_locs=cache_locs,
        location_map=location_map,
        ring_rows=ring_rows,
        ring_size=ring_size,
        kv_scales=kv_scales,
        lens_name=lens_name,
        commit_lens=commit_lens,
        eps=eps,
        out_keys=out_keys,
        out_values=out_values,
    )
    batch, rows = positions.shape
    _, layers, _, heads, size = projected_kv.shape
    launch = ContextKvLaunch.plan(heads=heads, head_size=size)
    # An absent tensor's place is taken by one that is there and is not read for it.
    write_context_kv[(batch * rows, layers)](
        projected_kv,
        projected_kv.stride(0),
        projected_kv.stride(1),
        projected_kv.stride(2),
        projected_kv.stride(3),
        k_norm_weights,
        k_norm_weights.stride(0),
        cos_sin,
        cos_sin.stride(0),
        positions,
        positions.stride(0),
        cache_locs,
        cache_locs.stride(0),
        cache_locs if location_map is None else location_map,
        cache_locs if ring_rows is None else ring_rows,
        cos_sin if kv_scales is None else kv_scales,
        0 if kv_scales is None else kv_scales.stride(0),
        commit_lens,
        commit_lens if arrivals is None else arrivals,
        eps,
        tuple(out_keys),
        tuple(out_values),
        out_keys[0].stride(0),
        out_keys[0].stride(1),
        rows,
        cos_sin.shape[0],
        out_keys[0].shape[0],
        0 if location_map is None else location_map.shape[0],
        1 if ring_rows is None else ring_size,
        H=heads,
        D=size,
        ROTATED=cos_sin.shape[1],
        NEOX=neox,
        HAS_MAP=location_map is not None,
        HAS_RING=ring_rows is not None,
        SCALED=kv_scales is not None,
        DISARM=arrivals is not None,
        PADDING=PADDING_SLOT,
        BLOCK_H=launch.block_h,
        BLOCK_D=launch.block_d,
        num_warps=launch.num_warps,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
