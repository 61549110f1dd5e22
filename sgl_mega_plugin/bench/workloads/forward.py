"""Workload of the target's forward: a step of each Qwen3 size over a context of 1,024.

A size's weights are the real model's, up to 16 GB: for a GPU. Tests make ``MODELS`` and the rest small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.bench.records import Cost, Size
from sgl_mega_plugin.bench.workloads import sizes
from sgl_mega_plugin.bench.workloads.workload import Arguments, Source, Workload, nbytes

#: L, E, F, A of a model; H 8, D 128 and V 151,936 are the same in all of them.
MODELS = {
    "qwen3-0.6b": (28, 1024, 3072, 16),
    "qwen3-1.7b": (28, 2048, 6144, 16),
    "qwen3-4b": (36, 2560, 9728, 32),
    "qwen3-8b": (36, 4096, 12288, 32),
}
VOCAB, CONTEXT = 151_936, 1_024
_ROWS = sizes.GAMMA + 1
_BF16 = torch.bfloat16


def _shared(size: Size, source: Source) -> dict[str, Any]:
    """Weights whose activations stay near one: larger than L2, so they are cold without a flush too."""
    layers, hidden, inner, queries = MODELS[size.variant]
    heads, head = sizes.HEADS, sizes.HEAD_SIZE

    def each(*shape: int) -> list[Tensor]:
        return [source.normal(*shape, dtype=_BF16).mul_(shape[-1] ** -0.5) for _ in range(layers)]

    def norms(width: int) -> list[Tensor]:
        return [source.normal(width, dtype=_BF16).mul_(0.2).add_(1) for _ in range(layers)]

    def caches() -> list[Tensor]:
        slots = max(sizes.KV_SLOTS, 1 + size.batch * (CONTEXT + _ROWS))
        return [source.normal(slots, heads, head, dtype=_BF16) for _ in range(layers)]

    angles = source.uniform(CONTEXT + _ROWS, head // 2) * 6.3
    return {
        "embedding": source.normal(VOCAB, hidden, dtype=_BF16),
        "input_norms": norms(hidden),
        "qkv_weights": each((queries + 2 * heads) * head, hidden),
        "qkv_biases": None,
        "q_norms": norms(head),
        "k_norms": norms(head),
        "output_weights": each(hidden, queries * head),
        "mlp_norms": norms(hidden),
        "gate_up_weights": each(2 * inner, hidden),
        "down_weights": each(hidden, inner),
        "final_norm": norms(hidden)[0],
        "lm_head_weight": source.normal(VOCAB, hidden, dtype=_BF16).mul_(hidden**-0.5),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "eps": 1e-6,
        "taps": [layers * part // 4 for part in (1, 2, 3)],
        "out_keys": caches(),
        "out_values": caches(),
    }


def _target_forward(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, columns = size.batch, CONTEXT + _ROWS
    hidden, slots = shared["embedding"].shape[1], len(shared["out_keys"][0])
    table = 1 + source.distinct(batch * columns, slots - 1).view(batch, columns)
    return shared | {
        "input_ids": source.integers(0, VOCAB, batch * _ROWS),
        "positions": torch.arange(CONTEXT, columns, device=source.device).repeat(batch),
        "cache_locs": table[:, CONTEXT:].flatten(),
        "seq_lens": torch.full((batch,), CONTEXT, device=source.device),
        "req_pool_indices": torch.arange(batch, device=source.device),
        "req_to_token": table.int(),
        "out_tapped": source.empty(batch * _ROWS, len(shared["taps"]) * hidden, dtype=_BF16),
        "out_hidden": None,
        "out_logits": source.empty(batch * _ROWS, VOCAB, dtype=_BF16),
    }


def _cost(a: Arguments) -> Cost:
    """Every matrix once, the context's keys and values, and what is written."""
    matrices = [weight for name, value in a.items() if name.endswith("_weights") for weight in value]
    token = nbytes(*(cache[0] for cache in (*a["out_keys"], *a["out_values"])))
    return Cost(
        bytes_read=nbytes(*matrices, a["lm_head_weight"]) + token * int(a["seq_lens"].sum()),
        bytes_written=nbytes(a["out_tapped"], a["out_logits"]) + token * a["input_ids"].numel(),
        note=f"weights once whatever B is, and a context of {CONTEXT} a request",
    )


WORKLOADS = (Workload("target_forward", _shared, _target_forward, _cost, variants=tuple(MODELS), shows_vocab=False),)
