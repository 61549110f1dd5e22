"""Paged KV memory of the embedded engine: pages, the request table, and each model's cache.

Target and draft share locations: slot s of either cache belongs to the same token. The engine
opens a row per request with all the slots it can ever need, so nothing runs dry half-way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_mega_plugin.contract import PADDING_SLOT

PAGE_SIZES = (1, 16, 64)


class PoolFullError(RuntimeError):
    """A request asks for more KV than the pool has free."""


class PageAllocator:
    """Hands out pages of ``page_size`` slots. The page that holds the padding slot is never given."""

    def __init__(self, slots: int, page_size: int) -> None:
        """``slots``: KV slots for requests, a multiple of ``page_size``; the padding page comes on top."""
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page size {page_size} is none of {PAGE_SIZES}")
        if slots < page_size or slots % page_size:
            raise ValueError(f"{slots} KV slots are no positive multiple of page size {page_size}")
        self.page_size = page_size
        # The last page freed is given first, so stale KV is read soon if it is read at all.
        self._free = list(range(slots // page_size, 0, -1))
        self._used: set[int] = set()
        self.allocated = 0  # pages ever handed out
        self.freed = 0  # pages ever returned

    @property
    def slots(self) -> int:
        """Slots of the cache, the padding page included."""
        return (len(self._free) + len(self._used) + 1) * self.page_size

    def fits(self, tokens: int) -> bool:
        """Whether ``tokens`` slots are free right now."""
        return self._pages(tokens) <= len(self._free)

    def could_fit(self, tokens: int) -> bool:
        """Whether ``tokens`` slots fit into the empty pool."""
        return self._pages(tokens) <= len(self._free) + len(self._used)

    def allocate(self, tokens: int) -> list[int]:
        """Pages that hold ``tokens`` slots; :class:`PoolFullError` when there are not that many."""
        wanted = self._pages(tokens)
        if wanted > len(self._free):
            raise PoolFullError(
                f"KV pool: {tokens} tokens need {wanted} pages of {self.page_size}, {len(self._free)} are free of "
                f"{len(self._free) + len(self._used)}; lower max_new_tokens or max_batch, or raise pool_tokens"
            )
        pages = [self._free.pop() for _ in range(wanted)]
        self._used.update(pages)
        self.allocated += wanted
        return pages

    def free(self, pages: list[int]) -> None:
        """Take pages back; a page that is not out raises ``ValueError``."""
        wrong = sorted(set(pages) - self._used)
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"KV pool: pages {wrong or pages} freed twice or never allocated")
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))
        self.freed += len(pages)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class Cache:
    """One model's keys and values: L tensors [S, H, D] each."""

    def __init__(self, layers: int, slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        shape = (slots, heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def fill(self, value: float) -> None:
        """Overwrite all slots, the padding slot included: tests poison with NaN."""
        for tensor in (*self.keys, *self.values):
            tensor.fill_(value)


@dataclass(frozen=True)
class Row:
    """A request's place: its row of the table, and the pages behind it."""

    index: int
    pages: tuple[int, ...]


class PagedKv:
    """The request table [Q, C] int32 over both caches. Column c of a row is the slot of position c."""

    def __init__(
        self, *, rows: int, columns: int, slots: int, page_size: int, target: Cache, draft: Cache | None, device: str
    ) -> None:
        self.allocator = PageAllocator(slots, page_size)
        self.target, self.draft = target, draft
        self.req_to_token = torch.full((rows, columns), PADDING_SLOT, dtype=torch.int32, device=device)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def open(self, tokens: int) -> Row:
        """A row whose first ``tokens`` positions have slots; the rest points at the padding slot."""
        rows, columns = self.req_to_token.shape
        if tokens > columns:
            raise ValueError(f"a row of {tokens} tokens is longer than the table's {columns} columns")
        if not self._free_rows:
            raise PoolFullError(f"request table: all {rows} rows are in use; raise max_batch")
        pages = self.allocator.allocate(tokens)
        row = Row(self._free_rows.pop(), tuple(pages))
        size = self.allocator.page_size
        starts = torch.tensor(pages, dtype=torch.int32).unsqueeze(1) * size
        locations = (starts + torch.arange(size, dtype=torch.int32)).flatten()[:tokens]
        self.req_to_token[row.index, :tokens] = locations.to(self.req_to_token.device)
        return row

    def close(self, row: Row) -> None:
        """Return a row's pages; the row points at the padding slot again."""
        self.allocator.free(list(row.pages))
        self.req_to_token[row.index] = PADDING_SLOT
        self._free_rows.append(row.index)
