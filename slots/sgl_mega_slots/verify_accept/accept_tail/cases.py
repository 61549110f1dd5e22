"""Conformance cases of `greedy_accept`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import generator, mostly, strided
from sgl_mega_slots.common.pick import lowest_argmax

NAN, INF = float("nan"), float("inf")


def arguments(
    logits: Tensor,
    candidates: Tensor,
    *,
    verify_lens: list[int] | None = None,
    simulated: int | None = None,
    seq_dtype: torch.dtype = torch.int64,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments on the logits' device: logits [B * T, V], candidates [B, T]."""
    batch, rows = candidates.shape
    device = logits.device
    lens = [rows] * batch if verify_lens is None else verify_lens
    spread = strided if stride else torch.clone
    return {
        "candidates": spread(candidates.to(device)),
        "target_logits": spread(logits),
        "target_tokens": None,
        "seq_lens": (torch.arange(batch, device=device) * 7 + 5).to(seq_dtype),
        "verify_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "simulated_correct": None if simulated is None else torch.tensor([simulated], dtype=torch.int32, device=device),
        "out_correct_lens": torch.zeros(batch, dtype=torch.int32, device=device),
        "out_bonus_tokens": torch.zeros(batch, dtype=torch.int64, device=device),
        "out_commit_lens": torch.zeros(batch, dtype=torch.int32, device=device),
        "out_new_seq_lens": torch.zeros(batch, dtype=seq_dtype, device=device),
        "out_tokens": spread(torch.zeros(batch, rows, dtype=torch.int64, device=device)),
    }


def of_tokens(values: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with the argmax in the place of the logits."""
    shape = values["candidates"].shape
    tokens = lowest_argmax(values["target_logits"]).view(shape)
    spread = torch.clone if values["out_tokens"].is_contiguous() else strided
    return values | {"target_logits": None, "target_tokens": spread(tokens)}


def _block(batch: int, rows: int, vocab: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random logits whose winners agree with the drafts up to a position that differs by request."""
    logits = torch.randn(batch * rows, vocab, generator=generator(seed)).to(dtype)
    winners = logits.float().argmax(-1).view(batch, rows)
    candidates = torch.zeros(batch, rows, dtype=torch.int64)
    candidates[:, 0] = 1
    candidates[:, 1:] = winners[:, :-1]
    for request in range(batch):
        wrong = 1 + (request + seed) % rows  # T means that every draft stands
        if wrong < rows:
            candidates[request, wrong] = (candidates[request, wrong] + 1) % vocab
    return logits, candidates


def _random(id_: str, batch: int, rows: int, vocab: int, dtype: torch.dtype, **kwargs: Any) -> Case:
    large = batch * rows * vocab > 20_000
    tokens = kwargs.pop("tokens", False)

    def make(device: str) -> dict[str, Any]:
        logits, candidates = _block(batch, rows, vocab, len(id_), dtype)
        values = arguments(logits.to(device), candidates, **kwargs)
        return of_tokens(values) if tokens else values

    return Case(id_, make, kernel_only=large)


def _dead_row(id_: str, row: Callable[[int], Tensor], vocab: int = 5) -> Case:
    """One request, T 3, drafts [2, 3]: row 0 of the target is this one, row 1 agrees with its draft."""

    def make(device: str) -> dict[str, Any]:
        logits = torch.zeros(3, vocab)
        logits[1, 3] = logits[2, 4] = 1.0
        logits[0] = row(vocab)
        return arguments(logits.to(device), torch.tensor([[0, 2, 3]]))

    return Case(id_, make)


_DEAD_ROWS = {
    "dead_row_nan": mostly(NAN, {}),
    "dead_row_minus_inf": mostly(-INF, {}),
    "one_finite_entry": mostly(-INF, {2: -1e30}),
    "one_finite_among_nan": mostly(NAN, {2: -3.0}),
    "nan_beside_the_winner": mostly(NAN, {1: -2.0, 2: 9.0, 4: 8.0}),
    "infinity_wins_over_nan": mostly(NAN, {0: -INF, 2: INF, 3: 9.0, 4: INF}),
}


def _ranged(id_: str, candidates: list[int], vocab: int = 9) -> Case:
    """Drafts outside [0, V): a rejection there, although the row before them agrees."""

    def make(device: str) -> dict[str, Any]:
        logits = torch.zeros(3, vocab)
        logits[0, 1] = logits[1, 6] = logits[2, 8] = 2.0
        return arguments(logits.to(device), torch.tensor([candidates]))

    return Case(id_, make)


def _ties(device: str) -> dict[str, Any]:
    """Equal logits within a split, across splits, and signed zeros: the lowest id."""
    logits = torch.full((4, 70), -1.0)
    logits[0, [5, 6, 69]] = 1.0
    logits[1] = 0.0
    logits[2, [33, 66]] = 4.0
    logits[3, 40] = 0.0
    logits[3, 3] = -0.0
    return arguments(logits.to(device), torch.tensor([[9, 5, 0, 33]]))


def _padded(device: str) -> dict[str, Any]:
    """Four rows in the graph, two live; the dead rows' logits are NaN and their candidates out of range."""
    logits, candidates = _block(4, 4, 37, 3, torch.float32)
    logits[8:] = NAN
    candidates[2:] = 0x7FFFFFFF
    return arguments(logits.to(device), candidates, verify_lens=[4, 2, 0, 0])


def _odd_tokens(device: str) -> dict[str, Any]:
    """Target tokens outside [0, 2**31) count as id 0 and equal no draft outside it; drafts there are refused."""
    candidates = torch.tensor([[1, -1, 5], [1, 0, 5], [1, 1 << 40, 5], [1, 3, 1 << 33]])
    tokens = torch.tensor([[-1, 5, 2], [-7, 5, 2], [1 << 40, 5, 2], [3, 1 << 33, 2]], device=device)
    return arguments(torch.zeros(12, 9, device=device), candidates) | {"target_logits": None, "target_tokens": tokens}


def _simulated_ids(device: str) -> dict[str, Any]:
    """Simulated acceptance of drafts that are no ids: they are committed as id 0."""
    logits = torch.zeros(6, 9, device=device)
    logits[:, 4] = 1.0
    return arguments(logits, torch.tensor([[0, -1, 9], [0, 4, 1 << 40]]), simulated=2)


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    yield _random("b1_v97", 1, 4, 97, f32)
    yield _random("b3_v97_bf16_strided", 3, 4, 97, bf16, stride=True)
    yield _random("b5_t8_fp16_int32_lengths", 5, 8, 131, f16, seq_dtype=torch.int32)
    yield _random("b9_t2", 9, 2, 64, f32)
    yield _random("every_verify_length", 5, 4, 65, bf16, verify_lens=[0, 1, 2, 3, 4])
    yield _random("v1", 2, 3, 1, f32)
    for id_, row in _DEAD_ROWS.items():
        yield _dead_row(id_, row)
    yield _ranged("draft_minus_one", [0, 1, -1])
    yield _ranged("draft_at_vocab", [0, 1, 9])
    yield _ranged("draft_huge", [0, 2**40 + 1, 6])
    yield _ranged("draft_in_range", [0, 1, 6])
    yield Case("ties_take_the_lowest_id", _ties)
    yield Case("padded_rows", _padded)
    yield _random("tokens_b1", 1, 4, 97, f32, tokens=True)
    yield _random("tokens_b5_t8_strided", 5, 8, 97, bf16, tokens=True, stride=True, seq_dtype=torch.int32)
    yield _random("tokens_every_verify_length", 5, 4, 65, f32, tokens=True, verify_lens=[0, 1, 2, 3, 4])
    yield Case("tokens_out_of_range", _odd_tokens)
    yield _random("simulated_b3", 3, 5, 97, f32, simulated=3)
    yield _random("simulated_every_verify_length", 5, 4, 65, f32, simulated=2, verify_lens=[0, 1, 2, 3, 4])
    yield _random("simulated_tokens", 4, 4, 65, f32, simulated=0, tokens=True, verify_lens=[4, 1, 0, 3])
    yield _random("simulated_below_zero", 2, 4, 65, f32, simulated=-3)
    yield Case("simulated_drafts_out_of_range", _simulated_ids)
    for batch in (1, 3, 16, 65):
        yield _random(f"b{batch}_qwen3_vocab", batch, 8, 151_936, bf16)
    yield _random("b7_smollm2_vocab_fp32_strided", 7, 5, 49_152, f32, stride=True)
