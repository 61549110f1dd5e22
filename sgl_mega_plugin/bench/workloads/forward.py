"""Workloads of the forwards: a step of each Qwen3 size, and of its draft, over a context of 1,024.

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
#: Layers of a published draft; else it has its target's sizes.
DRAFT_LAYERS = 5
#: Of the four matrices of a layer: bf16, or fp8 with a scale a row or one a block of 128 x 128.
WEIGHT_KINDS = ("bf16", "fp8-channel", "fp8-block")
WEIGHTS = "bf16"
#: Of keys and values.
KV_KINDS = ("bf16", "fp8")
KV = "bf16"
_ROWS = sizes.GAMMA + 1
_BF16 = torch.bfloat16


def _weights(size: Size, source: Source, layers: int) -> dict[str, Any]:
    """Weights whose activations stay near one: larger than L2, so they are cold without a flush too."""
    _, hidden, inner, queries = MODELS[size.variant]
    heads, head = sizes.HEADS, sizes.HEAD_SIZE

    def each(*shape: int) -> list[Tensor]:
        return [source.normal(*shape, dtype=_BF16).mul_(shape[-1] ** -0.5) for _ in range(layers)]

    def matrices(name: str, outputs: int, inputs: int) -> dict[str, Any]:
        if WEIGHTS == "bf16":
            return {f"{name}_weights": each(outputs, inputs), f"{name}_scales": None}
        of_layer = (outputs,) if WEIGHTS == "fp8-channel" else (-(-outputs // 128), -(-inputs // 128))
        values = [source.normal(outputs, inputs, dtype=_BF16).mul_(8).to(torch.float8_e4m3fn) for _ in range(layers)]
        scales = [(0.5 + source.uniform(*of_layer)).mul_(inputs**-0.5 / 8) for _ in range(layers)]
        return {f"{name}_weights": values, f"{name}_scales": scales}

    def norms(width: int) -> list[Tensor]:
        return [source.normal(width, dtype=_BF16).mul_(0.2).add_(1) for _ in range(layers)]

    def caches() -> list[Tensor]:
        slots = max(sizes.KV_SLOTS, 1 + size.batch * (CONTEXT + _ROWS))
        dtype = _BF16 if KV == "bf16" else torch.float8_e4m3fn
        return [source.normal(slots, heads, head, dtype=_BF16).to(dtype) for _ in range(layers)]

    angles = source.uniform(CONTEXT + _ROWS, head // 2) * 6.3
    return {
        "embedding": source.normal(VOCAB, hidden, dtype=_BF16),
        "input_norms": norms(hidden),
        **matrices("qkv", (queries + 2 * heads) * head, hidden),
        "qkv_biases": None,
        "q_norms": norms(head),
        "k_norms": norms(head),
        **matrices("output", hidden, queries * head),
        "mlp_norms": norms(hidden),
        **matrices("gate_up", 2 * inner, hidden),
        **matrices("down", hidden, inner),
        "final_norm": norms(hidden)[0],
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1),
        "eps": 1e-6,
        "out_keys": caches(),
        "out_values": caches(),
    }


def _target(size: Size, source: Source) -> dict[str, Any]:
    layers, hidden, *_ = MODELS[size.variant]
    return _weights(size, source, layers) | {
        "lm_head_weight": source.normal(VOCAB, hidden, dtype=_BF16).mul_(hidden**-0.5),
        "taps": [layers * part // 4 for part in (1, 2, 3)],
    }


def _draft(size: Size, source: Source) -> dict[str, Any]:
    return _weights(size, source, DRAFT_LAYERS)


def _inputs(size: Size, source: Source, shared: dict[str, Any], rows: int) -> dict[str, Any]:
    batch, columns = size.batch, CONTEXT + rows
    table = 1 + source.distinct(batch * columns, len(shared["out_keys"][0]) - 1).view(batch, columns)
    return shared | {
        "input_ids": source.integers(0, VOCAB, batch * rows),
        "positions": torch.arange(CONTEXT, columns, device=source.device).repeat(batch),
        "cache_locs": table[:, CONTEXT:].flatten(),
        "seq_lens": torch.full((batch,), CONTEXT, device=source.device),
        "req_pool_indices": torch.arange(batch, device=source.device),
        "req_to_token": table.int(),
    }


def _target_forward(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, hidden = size.batch, shared["embedding"].shape[1]
    return _inputs(size, source, shared, _ROWS) | {
        "out_tapped": source.empty(batch * _ROWS, len(shared["taps"]) * hidden, dtype=_BF16),
        "out_hidden": None,
        "out_logits": source.empty(batch * _ROWS, VOCAB, dtype=_BF16),
    }


def _draft_forward(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    hidden = shared["embedding"].shape[1]
    return _inputs(size, source, shared, sizes.GAMMA) | {
        "out_hidden": source.empty(size.batch * sizes.GAMMA, hidden, dtype=_BF16),
    }


def _cost(a: Arguments) -> Cost:
    """Every matrix once with its scales, the context's keys and values, and what is written."""
    lists = [value for name, value in a.items() if name.endswith(("_weights", "_scales")) and value is not None]
    matrices = [tensor for value in lists for tensor in value]
    matrices += [a["lm_head_weight"]] if "lm_head_weight" in a else []
    outputs = [a[name] for name in ("out_tapped", "out_logits", "out_hidden") if a.get(name) is not None]
    token = nbytes(*(cache[0] for cache in (*a["out_keys"], *a["out_values"])))
    return Cost(
        bytes_read=nbytes(*matrices) + token * int(a["seq_lens"].sum()),
        bytes_written=nbytes(*outputs) + token * a["input_ids"].numel(),
        note=f"weights once whatever B is, and a context of {CONTEXT} a request",
    )


WORKLOADS = (
    Workload("target_forward", _target, _target_forward, _cost, variants=tuple(MODELS), shows_vocab=False),
    Workload("draft_forward", _draft, _draft_forward, _cost, variants=tuple(MODELS), shows_vocab=False),
)
