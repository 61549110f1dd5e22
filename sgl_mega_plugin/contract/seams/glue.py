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

    With ``relay_lens`` and ``relay_tokens``, the tables that :class:`Relay` fills, a request's length and anchor are
    what stands in its table row there, whoever sat beside it in the step before; ``seq_lens`` and ``anchor_tokens``
    are then not read, and a table row outside [0, Q) makes the row padding. ``out_seq_lens`` and
    ``out_anchor_tokens`` hand the lengths and anchors that were used to the stages behind, unchanged; padding rows: 0.
    """

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,  # [B] int64 or int32, rows of req_to_token
        req_to_token: Tensor,  # [Q, C] int32
        seq_lens: Tensor,  # [B] int32 or int64
        verify_lens: Tensor,  # [B] int32 in [0, T]
        anchor_tokens: Tensor,  # [B] int64
        relay_lens: Tensor | None,  # [Q] int64; both relays or neither
        relay_tokens: Tensor | None,  # [Q] int64
        mask_token: int,
        max_positions: int,
        out_positions: Tensor,  # [B, T] int64
        out_cache_locs: Tensor,  # [B, T] int64
        out_draft_ids: Tensor,  # [B, G] int64
        out_seq_lens: Tensor | None,  # [B] int64
        out_anchor_tokens: Tensor | None,  # [B] int64
    ) -> None: ...


class AttentionMetadata(Protocol):
    """Where the attention of a forward of ``query_rows`` rows a request finds its KV: the target's verify (T rows) and
    the draft's block (G or G + 1) alike.

    Request b has ``p = seq_lens[b]`` committed tokens, at least 0 and at most L, and its attention reads
    ``k = min(p + kv_rows, L)`` of its row of ``req_to_token``. L is the least of C and the tokens that each page table
    given has room for, M * page_size. Causal attention lines up the last query row with the last token read, so L
    has to hold ``kv_rows`` beyond the longest context: a length that was cut costs the rows their last keys.

    - ``out_kv_lens``: k. ``out_kv_indptr``: its running sum from 0, at most the room of ``out_kv_indices`` (without
      one 2**31 - 1); where that room ends, k ends too. In SGLang ``cache_seqlens_int32`` and ``cu_seqlens_k`` of
      FlashAttention 3 and ``kv_indptr`` of FlashInfer, both with ``kv_rows = query_rows``; ``kv_indptr`` of the Triton
      backend, which reads the prefix: ``kv_rows = 0``.
    - ``out_qo_indptr``: ``b * query_rows``. ``out_mask_indptr``: the running sum of ``query_rows * (p + query_rows)``.
    - ``out_page_table``: entry c of row b is ``req_to_token[req_pool_indices[b], c * page_size] // page_size``, for the
      pages that hold k tokens. ``out_window_page_table``: the same of each slot's place in ``location_map``.
    - ``out_kv_indices``: the k slots of each request, from ``out_kv_indptr[b]`` on.
    - ``out_window_kv_indptr``, ``out_window_kv_indices``, ``out_window_kv_offsets``: the same, in ``location_map``, of
      tokens from ``s = max(p - window, 0)`` on; the offset is s. They go with ``window > 0``, the indices with their
      indptr, whose end is at most their room.

    A slot below 0, one outside [0, S) of ``location_map`` and one that is mapped below 0 become the padding slot.
    Padding rows and rows with a table row outside [0, Q): p = k = 0, and the first page is the padding slot's. Page
    tables and indices are written that far, and the rest keeps what it held: their readers stop at the lengths.
    FlashInfer's ``kv_last_page_len`` is all ones at page 1 and never changes.
    """

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,  # [B] int64 or int32, rows of req_to_token
        req_to_token: Tensor,  # [Q, C] int32
        seq_lens: Tensor,  # [B] int32 or int64, without this step's rows
        verify_lens: Tensor,  # [B] int32; 0 is padding
        query_rows: int,  # at least 1
        kv_rows: int,  # rows of this step that are read as KV; at least 0
        page_size: int,  # tokens, a power of two
        window: int,  # tokens before a request's first row that it sees; 0: all
        location_map: Tensor | None,  # [S] int64 or int32: slot -> slot of the window's pool; None: the same
        out_kv_lens: Tensor,  # [B] int32
        out_kv_indptr: Tensor,  # [B + 1] int32
        out_qo_indptr: Tensor | None,  # [B + 1] int32
        out_mask_indptr: Tensor | None,  # [B + 1] int64
        out_page_table: Tensor | None,  # [B, M] int32
        out_window_page_table: Tensor | None,  # [B, M] int32
        out_kv_indices: Tensor | None,  # [N] int32 or int64
        out_window_kv_indptr: Tensor | None,  # [B + 1] int32
        out_window_kv_indices: Tensor | None,  # [N'] int32 or int64
        out_window_kv_offsets: Tensor | None,  # [B] int32
    ) -> None: ...


class Relay(Protocol):
    """What the next step starts from, handed over on the device: lengths and bonus tokens of the accept.

    Row ``req_pool_indices[b]`` of the tables gets ``new_seq_lens[b]`` and ``bonus_tokens[b]``; a later step of any
    batch finds its requests there (``relay_lens`` and ``relay_tokens`` of :class:`StepInputs`). Every other row keeps
    what it held. Padding rows and table rows outside [0, Q) write nothing there; live rows name different table rows.
    ``out_next_seq_lens`` and ``out_next_anchors`` are the same by batch row, for a next step of the same batch; they
    may be this step's own ``seq_lens`` and anchors. Padding rows: 0.
    """

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,  # [B] int64 or int32
        verify_lens: Tensor,  # [B] int32; 0 is padding
        new_seq_lens: Tensor,  # [B] int32 or int64
        bonus_tokens: Tensor,  # [B] int64
        out_relay_lens: Tensor,  # [Q] int64
        out_relay_tokens: Tensor,  # [Q] int64
        out_next_seq_lens: Tensor | None,  # [B], dtype of new_seq_lens
        out_next_anchors: Tensor | None,  # [B] int64
    ) -> None: ...


class StepParams(Protocol):
    """A step's sampling parameters in the fixed rows that draft and accept read, from the values on the device.

    A row is greedy if its top_k is 1 or less, or its temperature, in fp32, is not above 0 (NaN too).
    ``out_temperatures`` is the temperature, at least 1e-5 (NaN: 1e-5); ``out_step_temperatures`` the same, and 0 in
    greedy rows: what ``draft_block`` and ``sampled_accept`` take.
    ``n`` may be less than B. Rows from n on and padding rows: temperature 1, greedy, step temperature 0.
    """

    def __call__(
        self,
        *,
        temperatures: Tensor,  # [n] or [n, 1], any float dtype
        top_ks: Tensor,  # [n] int32 or int64
        verify_lens: Tensor | None,  # [B] int32; 0 is padding; None: the first n rows are live
        out_temperatures: Tensor,  # [B] fp32
        out_greedy: Tensor,  # [B] bool
        out_step_temperatures: Tensor,  # [B] fp32
    ) -> None: ...
