"""Launch of `attn_metadata`: checks the arguments and picks the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT, SlotSetup
from sgl_mega_slots.common.checks import INDEX_DTYPES, require_batch, require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.glue.attn_metadata.kernel import fill_attention_metadata

_INT32_MAX = 2**31 - 1
#: Name, value, shape (None: one axis of any length) and dtypes of an argument.
_Wanted = tuple[str, Tensor | None, tuple[int, ...] | None, tuple[torch.dtype, ...]]


@dataclass(frozen=True)
class AttentionMetadataLaunch:
    """Each program reads BLOCK_B lengths and copies BLOCK_C table entries at a time of one request.

    Up to ``most_programs`` share the work: about eight on each multiprocessor of a Hopper, all at once.
    """

    block_b: int
    block_c: int = 1024  # two 16-byte loads a thread
    most_programs: int = 1024
    num_warps: int = 4

    @classmethod
    def plan(cls, *, batch: int) -> AttentionMetadataLaunch:
        return cls(block_b=triton.next_power_of_2(batch))

    def chunks(self, *, batch: int, width: int) -> int:
        """Programs a request, for at most ``width`` entries of its table row."""
        return max(1, min(-(-width // self.block_c), self.most_programs // batch))


class AttentionMetadata:
    """`attn_metadata` as one launch; holds no memory, so it is capturable from its second call on."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "attn_metadata")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self.launch = AttentionMetadataLaunch.plan(batch=setup.max_batch)

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        seq_lens: Tensor,
        verify_lens: Tensor,
        query_rows: int,
        kv_rows: int,
        page_size: int,
        window: int,
        location_map: Tensor | None,
        out_kv_lens: Tensor,
        out_kv_indptr: Tensor,
        out_qo_indptr: Tensor | None,
        out_mask_indptr: Tensor | None,
        out_page_table: Tensor | None,
        out_window_page_table: Tensor | None,
        out_kv_indices: Tensor | None,
        out_window_kv_indptr: Tensor | None,
        out_window_kv_indices: Tensor | None,
        out_window_kv_offsets: Tensor | None,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.AttentionMetadata`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's, a number is out of range,
                or a window's output is given without what it goes with.
        """
        batch, launch = out_kv_lens.shape[0], self.launch
        require_batch("out_kv_lens", batch, self._setup.max_batch)
        _require_numbers(query_rows=query_rows, kv_rows=kv_rows, page_size=page_size, window=window)
        pool_rows, columns = req_to_token.shape
        int32, index = (torch.int32,), INDEX_DTYPES
        wanted: tuple[_Wanted, ...] = (
            ("req_pool_indices", req_pool_indices, (batch,), index),
            ("req_to_token", req_to_token, (pool_rows, columns), int32),
            ("seq_lens", seq_lens, (batch,), index),
            ("verify_lens", verify_lens, (batch,), int32),
            ("out_kv_lens", out_kv_lens, (batch,), int32),
            ("out_kv_indptr", out_kv_indptr, (batch + 1,), int32),
            ("location_map", location_map, None, index),
            ("out_qo_indptr", out_qo_indptr, (batch + 1,), int32),
            ("out_mask_indptr", out_mask_indptr, (batch + 1,), (torch.int64,)),
            ("out_kv_indices", out_kv_indices, None, index),
            ("out_window_kv_indptr", out_window_kv_indptr, (batch + 1,), int32),
            ("out_window_kv_indices", out_window_kv_indices, None, index),
            ("out_window_kv_offsets", out_window_kv_offsets, (batch,), int32),
        )
        self._require(wanted)
        limit = columns
        for name, table in (("out_page_table", out_page_table), ("out_window_page_table", out_window_page_table)):
            if table is not None:
                pages = table.shape[-1]
                require_tensor(name, table, shape=(batch, pages), dtypes=int32, device=self._device)
                limit = min(limit, pages * page_size)
        if limit < 1:
            raise ValueError("req_to_token and the page tables: no column; each must have 1 or more")
        _require_window(
            window,
            out_window_kv_indptr=out_window_kv_indptr,
            out_window_kv_indices=out_window_kv_indices,
            out_window_kv_offsets=out_window_kv_offsets,
        )

        listed = out_kv_indices is not None
        paged = out_page_table is not None or out_window_page_table is not None
        width = -(-limit // page_size) if paged else 1
        if out_window_kv_indices is not None:
            width = max(width, min(limit, window + kv_rows))
        width = limit if listed else width
        fill_attention_metadata[(launch.chunks(batch=batch, width=width), batch)](
            req_pool_indices,
            req_to_token,
            req_to_token.stride(0),
            seq_lens,
            verify_lens,
            location_map,
            out_kv_lens,
            out_kv_indptr,
            out_qo_indptr,
            out_mask_indptr,
            out_page_table,
            0 if out_page_table is None else out_page_table.stride(0),
            out_window_page_table,
            0 if out_window_page_table is None else out_window_page_table.stride(0),
            out_kv_indices,
            out_window_kv_indptr,
            out_window_kv_indices,
            out_window_kv_offsets,
            batch,
            pool_rows,
            0 if location_map is None else location_map.shape[0],
            limit,
            _room(out_kv_indices),
            _room(out_window_kv_indices),
            query_rows,
            kv_rows,
            window,
            PAGE_SIZE=page_size,
            PADDING=PADDING_SLOT,
            BLOCK_B=launch.block_b,
            BLOCK_C=launch.block_c,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )

    def _require(self, wanted: tuple[_Wanted, ...]) -> None:
        """Check every tensor that is given."""
        for name, value, shape, dtypes in wanted:
            if value is not None:
                found = (value.numel(),) if shape is None else shape
                require_tensor(name, value, shape=found, dtypes=dtypes, device=self._device)


def _room(indices: Tensor | None) -> int:
    """Entries that int32 sums may reach."""
    return _INT32_MAX if indices is None else min(indices.shape[0], _INT32_MAX)


def _require_numbers(*, query_rows: int, kv_rows: int, page_size: int, window: int) -> None:
    for name, value, least in (("query_rows", query_rows, 1), ("kv_rows", kv_rows, 0), ("window", window, 0)):
        if not least <= value <= _INT32_MAX:
            raise ValueError(f"{name}: {value}; must be {least} to {_INT32_MAX}")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size: {page_size}; must be a power of two")


def _require_window(window: int, **outputs: Tensor | None) -> None:
    given = [name for name, value in outputs.items() if value is not None]
    if given and window == 0:
        raise ValueError(f"{given[0]}: given with window 0; pass None or a window of 1 token or more")
    if "out_window_kv_indices" in given and "out_window_kv_indptr" not in given:
        raise ValueError("out_window_kv_indices: given without out_window_kv_indptr, which says whose each entry is")
