"""Paged attention in plain torch: what the embedded models call as ``attend``.

One object serves one forward of either model. It writes the new rows' keys and values to their
slots, gathers each request's context and attends, causally (target) or over the block (draft).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT
from sgl_mega_plugin.embedded.kv import Cache


class PagedAttention:
    """Attention of a [B, T] grid of rows, T rows a request, flattened to N = B * T."""

    def __init__(
        self,
        cache: Cache,
        *,
        page_table: Tensor,
        page_size: int,
        kv_lens: Tensor,
        positions: Tensor,
        cache_locs: Tensor,
        longest: int,
        causal: bool,
    ) -> None:
        """
        ``page_table`` [B, M] and ``kv_lens`` [B]: where a request's KV is and how much of it may be read,
        this step's rows included, as the seam ``attention_metadata`` writes them: what lies in the table past a
        request's length is not used. ``positions`` and ``cache_locs`` [B, T] int64; ``longest``: the largest
        length, known to the host. A causal row reads up to its own position, any other row all ``kv_lens``.
        A row at the padding slot stores nothing; a request of length 0 gets NaN.
        """
        self._cache = cache
        self._shape = positions.shape
        columns = torch.arange(longest, device=positions.device)
        readable = columns < kv_lens.unsqueeze(1)
        slots = page_table[:, columns // page_size].long() * page_size + columns % page_size
        # Columns out of reach repeat the request's first slot: finite, where a free slot may hold anything.
        self._context = torch.where(readable, slots, slots[:, :1])
        mask = readable.unsqueeze(1)
        if causal:
            mask = mask & (columns <= positions.unsqueeze(-1))
        self._hidden = ~mask.expand(-1, positions.shape[1], -1)[:, None, None]  # [B, 1, 1, T, K]
        flat = cache_locs.flatten()
        self._stored = (flat != PADDING_SLOT).nonzero().squeeze(1)
        self._slots = flat[self._stored]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q`` [N, heads, D], ``k`` and ``v`` [N, kv_heads, D] -> [N, heads, D] in the dtype of ``q``."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, self._slots, k[self._stored])
        values.index_copy_(0, self._slots, v[self._stored])
        batch, rows = self._shape
        heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
        context_k = keys[self._context].transpose(1, 2)  # [B, kv_heads, K, D]
        context_v = values[self._context].transpose(1, 2)
        grouped = q.view(batch, rows, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
        scores = grouped.flatten(2, 3) @ context_k.transpose(-1, -2) / math.sqrt(size)
        scores = scores.view(batch, kv_heads, heads // kv_heads, rows, -1)
        weights = scores.float().masked_fill(self._hidden, -math.inf).softmax(-1).to(q.dtype)
        out = (weights.flatten(2, 3) @ context_v).view(batch, heads, rows, size)
        return out.transpose(1, 2).reshape(batch * rows, heads, size)
