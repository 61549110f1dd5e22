"""Launch of `deferred_kv`: `context_kv`'s kernel, whose last program of a request disarms it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.commit.context_kv.launch import launch_write
from sgl_mega_slots.common.checks import require_triton


class DeferredKv:
    """`staged_kv` as one launch.

    Commit lengths may only be cleared when every program of the request has read its own. So each counts itself in,
    while its loads are under way, and the last one clears; nothing waits. The counters are 0 between calls.
    """

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "deferred_kv")
        self._setup = setup
        self._arrivals = torch.zeros(setup.max_batch, dtype=torch.int32, device=setup.device)

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
        eps: float,
        kv_scales: Tensor | None,
        out_commit_lens: Tensor,
        out_keys: Sequence[Tensor],
        out_values: Sequence[Tensor],
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.StagedKv`. Every buffer has the same dtype and strides.

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
            lens_name="out_commit_lens",
            commit_lens=out_commit_lens,
            arrivals=self._arrivals,
            eps=eps,
            kv_scales=kv_scales,
            out_keys=out_keys,
            out_values=out_values,
        )
