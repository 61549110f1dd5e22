"""Seams of the commit stage: write what the accepted tokens leave behind. Letters as in the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ContextKv(Protocol):
    """Write the draft's context KV of the accepted rows, t < ``commit_lens[b]``, in every layer.

    ``k`` is RMS-normalised in fp32 (eps, weight) and rounded to the dtype of ``projected_kv``; of its D elements the
    first R are rotated by the RoPE table and rounded again: pairs (i, i + R/2) where ``neox`` is true, else
    (2i, 2i + 1). ``v`` is not changed. In a KV cache of that dtype both are stored as they are.

    In an fp8 cache each is divided in fp32 by its layer's scale (k's, then v's; none without ``kv_scales``), the
    quotient rounded to the dtype of ``projected_kv``, then to nearest even: e4m3 saturates at 448, e5m2 overflows to
    infinity, NaN stays NaN. So a row has the bytes of SGLang's CUDA commit, for scales that are numbers of that dtype.

    The slot of a row is ``cache_locs``; with ``location_map`` it is the map's entry there (a sliding-window pool of its
    own); with ``ring_rows`` it is ``ring_rows[b] * ring_size + position % ring_size``. Not both. Of a commit that is
    longer than the ring only the last ``ring_size`` rows are written.

    Never written, and their KV not read: rows past the commit length and padding rows; rows whose location is negative,
    the padding slot or, under a map, outside [0, S_full); rows whose slot is outside [0, S) or the padding slot; rows
    of ring 0, which padding owns; rows whose position is outside [0, P).
    """

    def __call__(
        self,
        *,
        projected_kv: Tensor,  # [B * T, L, 2, H, D] bf16 / fp16 / fp32: k then v of each layer
        k_norm_weights: Tensor,  # [L, D]
        cos_sin: Tensor,  # [P, R] fp32, R even and at most D: cos of R/2 frequencies, then sin
        neox: bool,
        positions: Tensor,  # [B, T] int64
        cache_locs: Tensor,  # [B, T] int64
        location_map: Tensor | None,  # [S_full] int64 or int32
        ring_rows: Tensor | None,  # [B] int64
        ring_size: int,  # at least 1 with ring_rows
        commit_lens: Tensor,  # [B] int32 in [0, T]
        eps: float,  # above 0
        kv_scales: Tensor | None,  # [L, 2] fp32, of an fp8 cache
        out_keys: Sequence[Tensor],  # L x [S, H, D], dtype of projected_kv, float8_e4m3fn or float8_e5m2
        out_values: Sequence[Tensor],  # L x [S, H, D]
    ) -> None: ...


class KvStaging(Protocol):
    """Keep what a commit needs until the next draft, in buffers of fixed addresses.

    The first B rows of the outputs are the inputs', commit lengths clamped to [0, T]. Rows past B have commit length 0,
    the padding slot and position 0, so what an earlier and larger batch staged there is gone. The projected KV itself
    is no argument: the projection writes it straight into the buffer that :class:`StagedKv` reads.
    """

    def __call__(
        self,
        *,
        cache_locs: Tensor,  # [B, T] int64
        positions: Tensor,  # [B, T] int64
        commit_lens: Tensor,  # [B] int32
        out_cache_locs: Tensor,  # [M, T] int64, M at least B
        out_positions: Tensor,  # [M, T] int64
        out_commit_lens: Tensor,  # [M] int32
    ) -> None: ...


class StagedKv(Protocol):
    """Write a staged commit, then disarm it.

    As :class:`ContextKv` with ``out_commit_lens`` for the commit lengths: read, and 0 when the call is over. So a
    staging is written at most once, and a replay without a new one writes nothing. B is the rows that are given, which
    may be fewer than were staged: rows that are not given stay armed. ``ring_rows`` are those of the staged requests.
    """

    def __call__(
        self,
        *,
        projected_kv: Tensor,  # [B * T, L, 2, H, D] bf16 / fp16 / fp32: k then v of each layer
        k_norm_weights: Tensor,  # [L, D]
        cos_sin: Tensor,  # [P, R] fp32
        neox: bool,
        positions: Tensor,  # [B, T] int64
        cache_locs: Tensor,  # [B, T] int64
        location_map: Tensor | None,  # [S_full] int64 or int32
        ring_rows: Tensor | None,  # [B] int64
        ring_size: int,
        eps: float,  # above 0
        kv_scales: Tensor | None,  # [L, 2] fp32
        out_commit_lens: Tensor,  # [B] int32 in [0, T]
        out_keys: Sequence[Tensor],  # L x [S, H, D]
        out_values: Sequence[Tensor],  # L x [S, H, D]
    ) -> None: ...


class HistoryCommit(Protocol):
    """Append the committed tokens to each request's history of its last N token ids.

    Row ``req_pool_indices[b]`` becomes the last N of (its old ids, ``tokens[b, :commit]``), oldest first. The anchor is
    the first token appended and the bonus none: it is the next step's anchor. Tokens from the commit length on are
    not read. A row with commit length 0 or a table row outside [0, Q) changes nothing; no two other rows share a table
    row.
    """

    def __call__(
        self,
        *,
        tokens: Tensor,  # [B, T] int64: the ids that were verified, the anchor first
        req_pool_indices: Tensor,  # [B] int64 or int32
        commit_lens: Tensor,  # [B] int32 in [0, T]
        out_histories: Tensor,  # [Q, N] int32 or int64
    ) -> None: ...
