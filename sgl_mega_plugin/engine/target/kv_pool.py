"""The KV pool of a forward as the seam's caches, or why it is none. Pools are made after the spec's build."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: dtypes of keys and values that the seam has, with what SGLang keeps them as.
_KEPT = ((torch.bfloat16, torch.bfloat16), (torch.float8_e4m3fn, torch.uint8))


def pool_reasons(pool: Any, backend: Any) -> list[str]:
    """Why a pool's keys and values do not go into the seam; empty when they do.

    Args:
        pool: SGLang's KV pool of the running forward.
        backend: the attention backend of that forward.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool:
        return [f"the KV pool is a {type(pool).__name__}, not an MHATokenToKVPool"]
    reasons = []
    if pool.kv_cache_layout != "nhd":
        reasons.append(f"the KV pool's layout is {pool.kv_cache_layout!r}, not 'nhd': a row a token")
    if pool.is_quantized_kv_cache or (pool.dtype, pool.store_dtype) not in _KEPT:
        kept = " or ".join(str(dtype) for dtype, _ in _KEPT)
        reasons.append(f"the KV pool keeps {pool.dtype} as {pool.store_dtype}, not {kept}")
    translator = getattr(backend, "kv_index_translator", None)
    if translator is not None and translator.reads_are_translated:
        reasons.append("the KV pool has virtual slots, which the request table names")
    return reasons


def caches_of(pool: Any, layers: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of each layer, ``[S, H, D]`` bf16 or e4m3: the pool's own memory."""
    keys = tuple(pool.get_key_buffer(layer) for layer in range(layers))
    values = tuple(pool.get_value_buffer(layer) for layer in range(layers))
    return keys, values
