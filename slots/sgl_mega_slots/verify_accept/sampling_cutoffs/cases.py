"""Conformance cases of `sampling_cutoffs`.

Logits are eighths, so a row has many equal ones, and each top_p and min_p is put in the middle of the widest gap
near the one asked for: no case hangs on the rounding of a mass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import generator, mostly, strided
from sgl_mega_slots.verify_accept.sampling_cutoffs.reference import ladder

NAN, INF = float("nan"), float("inf")
_REACH = 0.04  # how far from the one asked for a top_p or min_p may be put


def arguments(
    logits: Tensor,
    temperatures: list[float],
    top_ks: list[int],
    top_ps: list[float],
    min_ps: list[float] | None = None,
    *,
    verify_lens: list[int] | None = None,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments on the logits' device: logits [B * T, V], a parameter a request."""
    batch, device = len(temperatures), logits.device
    lens = [len(logits) // batch] * batch if verify_lens is None else verify_lens
    spread = strided if stride else torch.clone
    return {
        "target_logits": spread(logits),
        "temperatures": torch.tensor(temperatures, device=device),
        "top_ks": torch.tensor(top_ks, dtype=torch.int32, device=device),
        "top_ps": torch.tensor(top_ps, device=device),
        "min_ps": torch.tensor(min_ps or [0.0] * batch, device=device),
        "verify_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "out_cutoffs": spread(torch.zeros(len(logits), device=device)),
    }


def settled(values: dict[str, Any]) -> dict[str, Any]:
    """The same with each top_p in (0, 1) and min_p in (0, 1] moved away from where a row's answer changes."""
    batch, vocab = len(values["temperatures"]), values["target_logits"].shape[-1]
    rows = len(values["target_logits"]) // batch
    logits = values["target_logits"].view(batch, rows, vocab)
    for request in range(batch):
        top_k = int(values["top_ks"][request])
        at = values["temperatures"][request].expand(rows)
        _, mass, greater, above = ladder(logits[request], at)
        kept = (greater < top_k) | (not 0 < top_k < vocab)
        whole = torch.where(kept, mass, 0).sum(-1, keepdim=True)
        for name, places in (("top_ps", above / whole), ("min_ps", mass)):
            wanted = float(values[name][request])
            if 0 < wanted < 1:
                values[name][request] = _clear(places, wanted)
    return values


def _clear(places: Tensor, wanted: float) -> float:
    """The middle of the widest gap between places near a wanted value."""
    low, high = max(wanted - _REACH, 0.0), min(wanted + _REACH, 1.0)
    ends = places.flatten().nan_to_num(0).clamp(low, high).unique()
    ends = torch.cat([ends.new_tensor([low]), ends, ends.new_tensor([high])])
    gaps = ends.diff()
    widest = int(gaps.argmax())
    return float(ends[widest] + gaps[widest] / 2)


def eighths(rows: int, vocab: int, seed: int, *, spread: float = 3.0) -> Tensor:
    """Normal logits of this spread, as multiples of 1/8."""
    return (8 * spread * torch.randn(rows, vocab, generator=generator(seed))).round() / 8


def _made(
    id_: str,
    rows: int,
    vocab: int,
    temperatures: list[float],
    top_ks: list[int],
    top_ps: list[float],
    min_ps: list[float] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    spread: float = 3.0,
    large: bool = False,
    **kwargs: Any,
) -> Case:
    """``rows`` T."""

    def make(device: str) -> dict[str, Any]:
        logits = eighths(rows * len(temperatures), vocab, len(id_), spread=spread).to(dtype)
        values = settled(arguments(logits, temperatures, top_ks, top_ps, min_ps, **kwargs))
        if device == "cpu":
            return values
        moved = arguments(logits.to(device), temperatures, top_ks, top_ps, min_ps, **kwargs)
        for name in ("top_ps", "min_ps"):
            moved[name].copy_(values[name])
        return moved

    return Case(id_, make, kernel_only=large)


def _odd_rows(device: str) -> dict[str, Any]:
    """Rows of nothing, of one number, of equal numbers, of infinities and of signed zeros, cut in every way."""
    rows = [
        mostly(NAN, {}),
        mostly(-INF, {}),
        mostly(-INF, {36: -1e4}),
        mostly(NAN, {36: -1e4, 3: -2e4}),
        mostly(1.0, {}),
        mostly(1.0, {3: NAN, 20: INF}),
        mostly(1.0, {5: INF, 20: INF}),
        mostly(-0.0, {4: 0.0, 9: -1.0}),
    ]
    logits = torch.stack([row(37) for row in rows]).repeat(4, 1).to(device)
    return arguments(logits, [0.7] * 4, [3, 0, 0, 2], [1.0, 0.7, 1.0, 0.3], [0.0, 0.0, 0.01, 0.3])


def _ties(device: str) -> dict[str, Any]:
    """Equal logits at the last place: all of them stay, across groups and lists."""
    logits = torch.full((6, 97), -4.0)
    logits[0, :40:2] = 2.0
    logits[0, 90] = 3.0
    logits[1, 30:] = 1.0
    logits[2, ::9] = 5.0
    logits[3:] = logits[:3].flip(-1)
    return arguments(logits.to(device), [1.0] * 3, [5, 5, 11], [1.0, 0.4, 0.95])


def _greedy_rows(device: str) -> dict[str, Any]:
    """Temperature 0; .7 with top_k 1, which is greedy; .7 alone, which is not. Nothing is asked of the last."""
    logits = eighths(6, 50, 4).to(device)
    return arguments(logits, [0.0, 0.7, 0.7], [20, 1, 1 << 30], [0.9, 1.0, 1.0])


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    one = 1.0
    yield _made("top_k", 2, 97, [1.0, 0.7, 1.3], [20, 3, 96], [one] * 3)
    yield _made("top_k_1", 3, 64, [0.7], [1], [one])
    yield _made("top_p", 2, 97, [1.0, 0.7, 1.3], [0, -1, 1 << 30], [0.95, 0.5, 0.05])
    yield _made("min_p", 2, 97, [1.0, 0.7, 1.3], [0, 0, 97], [one] * 3, [0.1, 0.001, 0.9])
    yield _made(
        "all_three_bf16", 2, 97, [1.0, 0.7, 3.0, 0.3], [20, 50, 8, 5], [0.9, 0.8, 0.5, 0.95], [0.05] * 4, dtype=bf16
    )
    yield _made("top_p_and_min_p_fp16", 2, 131, [1.0, 2.0], [0, 0], [0.9, 0.99], [0.01, 0.2], dtype=f16)
    yield _made("flat_rows_overflow_every_list", 2, 131, [1.0, 1.0], [90, 0], [0.9, 0.9], spread=0.4)
    yield _made("rows_of_a_batch_differ_strided", 3, 70, [0.9] * 5, [5, 0, 70, 0, 4], [one, 0.6, one, 2.0, 0.9],
                [0.0, 0.0, 0.0, -1.0, 0.3], verify_lens=[3, 2, 3, 1, 0], stride=True)  # fmt: skip
    yield _made("ends_of_the_parameters", 2, 40, [1.0] * 6, [0, 0, 39, 40, 0, 0], [0.0, -1.0, one, one, NAN, one],
                [0.0, 0.0, 0.0, 0.0, 0.0, 2.0])  # fmt: skip
    yield _made("high_and_low_temperatures", 2, 97, [0.01, 30.0, 1e-9], [20, 20, 20], [0.9, 0.9, 0.9])
    yield _made("v1", 2, 1, [1.0], [1], [0.5])
    yield _made("v2", 2, 2, [1.0, 0.5], [1, 0], [0.5, 0.7])
    yield Case("odd_rows", _odd_rows)
    yield Case("ties", _ties)
    yield Case("greedy_rows", _greedy_rows)
    qwen = 151_936
    yield _made("qwen3_k20_p95", 8, qwen, [0.6] * 4, [20] * 4, [0.95] * 4, dtype=bf16, large=True)
    yield _made("qwen3_k20_fp32_mixed", 8, qwen, [1.0, 0.0, 0.6], [20, 20, 0], [one, one, 0.8], dtype=f32, large=True)
    yield _made("qwen3_top_p_flat", 4, qwen, [1.0, 1.0], [0, 0], [0.9, 0.95], dtype=bf16, large=True)
    yield _made("qwen3_top_p_peaked", 4, qwen, [0.3, 0.15], [0, 0], [0.9, 0.95], dtype=f32, large=True)
    yield _made("qwen3_many_kept", 2, qwen, [1.0] * 3, [600, 5_000, 150_000], [one, 0.9, 0.99], large=True)
    yield _made("smollm2_min_p_fp16_strided", 5, 49_152, [0.8] * 5, [0] * 5, [one] * 5, [0.05, 0.1, 0.001, 0.5, 0.01],
                dtype=f16, large=True, stride=True)  # fmt: skip
