"""Seams of the commit stage: write what the accepted tokens leave behind. Letters as in the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ContextKv(Protocol):
    """Write the draft's context KV of the accepted rows.

    For each row t < ``commit_lens[b]`` and each layer: ``k`` is RMS-normalised in fp32
    (eps, weight), rounded to the KV dtype, rotated by the RoPE table (neox pairs i and
    i + D/2) and stored; ``v`` is stored as it is. Rows past the commit length, rows whose
    location is the padding slot or outside [0, S) or whose position is outside [0, P), and padding
    rows are neither read nor written.
    """

    def __call__(
        self,
        *,
        projected_kv: Tensor,  # [B * T, L, 2, H, D] bf16 / fp16 / fp32: k then v of each layer
        k_norm_weights: Tensor,  # [L, D]
        cos_sin: Tensor,  # [P, D] fp32: cos of D/2 frequencies, then sin
        positions: Tensor,  # [B, T] int64
        cache_locs: Tensor,  # [B, T] int64
        commit_lens: Tensor,  # [B] int32 in [0, T]
        eps: float,
        out_keys: Sequence[Tensor],  # L x [S, H, D], dtype of projected_kv
        out_values: Sequence[Tensor],  # L x [S, H, D]
    ) -> None: ...
