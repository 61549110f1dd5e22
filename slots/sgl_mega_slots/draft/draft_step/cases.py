"""Blocks by name for `draft_step`: what differs from the steps of `target_step`, whose makers these are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from sgl_mega_plugin.contract import SEAMS, Case
from sgl_mega_slots.target.target_step.cases import PLAIN, QWEN3_8B, StepCase, arguments
from sgl_mega_slots.target.target_step.shape import DenseShape, WeightKind

_FP8 = replace(PLAIN, hidden=256, intermediate=384, layers=1)


def _block(name: str, tokens: int, prefixes: tuple[int, ...], sms: int = 4, shape: DenseShape = PLAIN) -> StepCase:
    return StepCase(name, shape, tokens, prefixes, sms, taps=(), head=False, causal=False)


CASES = (
    _block("one request", 7, (92,)),
    _block("an anchor that drafts nothing", 8, (92,)),
    _block("no context", 7, (0,)),
    _block("one row", 1, (5,)),
    _block("more rows than a block of positions", 17, (33,), shape=replace(PLAIN, layers=1)),
    _block("four requests", 7, (92, 0, 292, 56)),
    _block("heads of 128, split contexts", 7, (592,), 5, replace(PLAIN, q_heads=4, kv_heads=1, head_dim=128)),
    _block("fp8 weights, a scale a row", 7, (92, 29), shape=replace(_FP8, weights=WeightKind.FP8_CHANNEL)),
    _block("fp8 weights, a scale a block", 7, (92,), shape=replace(_FP8, weights=WeightKind.FP8_BLOCK)),
    _block("no head norm, a bias", 5, (4, 60), 3, replace(PLAIN, qk_norm=False, qkv_bias=True)),
)
_WIDE = replace(QWEN3_8B, layers=5, vocab=1024)
#: A published draft's shape, for a GPU.
LARGE_CASES = (
    _block("the draft of Qwen3-8B", 7, (1016,), 132, _WIDE),
    _block("the draft of Qwen3-8B, four requests", 7, (1016, 77, 0, 500), 132, _WIDE),
)


def cases() -> Iterator[Case]:
    """Every block as a case of the kit."""
    keep = frozenset({"out_keys", "out_values"})
    for case in (*CASES, *LARGE_CASES):
        yield Case(case.name, partial(arguments_of, case), keep=keep, kernel_only=case in LARGE_CASES)


def arguments_of(case: StepCase, device: str) -> dict[str, Any]:
    """A case as a call of the seam ``draft_forward``."""
    made = arguments(case, device)
    return {name: made[name] for name in SEAMS["draft_forward"].parameters}
