"""`kv_staging` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT


def kv_staging(
    *,
    cache_locs: Tensor,
    positions: Tensor,
    commit_lens: Tensor,
    out_cache_locs: Tensor,
    out_positions: Tensor,
    out_commit_lens: Tensor,
) -> None:
    """See :class:`sgl_mega_plugin.contract.KvStaging`.

    SGLang 0.5.23 leaves the locations and positions of rows past B as they were, commit lengths 0 all the same.
    """
    batch, rows = cache_locs.shape
    for out, fill in ((out_cache_locs, PADDING_SLOT), (out_positions, 0), (out_commit_lens, 0)):
        out[batch:] = fill
    out_cache_locs[:batch] = cache_locs
    out_positions[:batch] = positions
    out_commit_lens[:batch] = commit_lens.clamp(0, rows)
