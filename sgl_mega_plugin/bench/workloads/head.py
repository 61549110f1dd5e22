"""Workloads of the LM head's seams."""

from __future__ import annotations

from typing import Any

import torch

from sgl_mega_plugin.bench.records import Cost, Size
from sgl_mega_plugin.bench.workloads import sizes
from sgl_mega_plugin.bench.workloads.workload import Arguments, Source, Workload, dtype_of, nbytes, slot_vocab


def _head_shared(size: Size, source: Source) -> dict[str, Any]:
    """A weight [V, H] whose logits have unit variance: larger than L2, so it is cold without a flush too."""
    weight = source.normal(slot_vocab(size), sizes.HIDDEN, dtype=dtype_of(size))
    return {"lm_head_weight": weight.mul_(sizes.HIDDEN**-0.5), "divisor": 1.0, "vocab_size": slot_vocab(size)}


def _draft_logits(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, dtype = size.batch, dtype_of(size)
    tokens = size.variant == "tokens"
    logits = (batch, sizes.GAMMA, shared["vocab_size"])
    return shared | {
        "hidden": source.normal(batch, sizes.GAMMA, sizes.HIDDEN, dtype=dtype),
        "out_logits": None if tokens else source.empty(*logits, dtype=dtype),
        "out_tokens": source.empty(batch, sizes.GAMMA) if tokens else None,
    }


def _target_argmax(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, rows = size.batch, sizes.GAMMA + 1
    return shared | {
        "hidden": source.normal(batch * rows, sizes.HIDDEN, dtype=dtype_of(size)),
        "verify_lens": torch.full((batch,), rows, dtype=torch.int32, device=source.device),
        "out_tokens": source.empty(batch, rows),
    }


def _cost(a: Arguments) -> Cost:
    """The first V rows of the weight once, the hidden rows, the outputs."""
    outputs = [value for name, value in a.items() if name.startswith("out_") and value is not None]
    read = nbytes(a["lm_head_weight"][: a["vocab_size"]], a["hidden"])
    read += nbytes(a["verify_lens"]) if "verify_lens" in a else 0
    return Cost(bytes_read=read, bytes_written=nbytes(*outputs), note="the weight once, whatever B is")


WORKLOADS = (
    Workload("draft_logits", _head_shared, _draft_logits, _cost, variants=("logits", "tokens")),
    Workload("target_argmax", _head_shared, _target_argmax, _cost),
)
