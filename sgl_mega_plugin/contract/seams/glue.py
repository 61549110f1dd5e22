"""Seams of the glue stage: what goes into the forwards and from step to step. Letters as in the package's docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class StepInputs(Protocol):
    """Positions, cache locations and draft inputs of a step, from the lengths on the device.

    Row t of request b sits at position ``seq_lens[b] + t`` and writes its KV to
    ``req_to_token[req_pool_indices[b], seq_lens[b] + t]``. A position past ``max_positions``
    or past the request's row (C columns) gets the last position, ``min(max_positions, C) - 1``, and the
    padding slot, so nothing is written past the request; so does a table row outside [0, Q) its slot.
    ``out_draft_ids`` is the anchor followed by the mask token.
    Padding rows: position 0, the padding slot, mask tokens.
    """

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,  # [B] int64 or int32, rows of req_to_token
        req_to_token: Tensor,  # [Q, C] int32
        seq_lens: Tensor,  # [B] int32 or int64
        verify_lens: Tensor,  # [B] int32 in [0, T]
        anchor_tokens: Tensor,  # [B] int64
        mask_token: int,
        max_positions: int,
        out_positions: Tensor,  # [B, T] int64
        out_cache_locs: Tensor,  # [B, T] int64
        out_draft_ids: Tensor,  # [B, G] int64
    ) -> None: ...
