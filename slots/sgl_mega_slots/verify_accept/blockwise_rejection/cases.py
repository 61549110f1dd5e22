"""Conformance cases of `sampled_accept`.

Seeds are such that no coin is close to p / q and each drawn id leads by more than rounding can move it; a test
holds the cases to that, so they are compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import generator, mostly, strided

NAN, INF = float("nan"), float("inf")
NOISE_KEY = 0x9ABCDEF012345678
#: CASES of public bug reports use these two laws: p / q of id 2 is 0.4, and only id 0 is left of p - q.
P, Q = (0.5, 0.3, 0.2, 0.0), (0.2, 0.3, 0.5, 0.0)


def arguments(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    candidates: Tensor,
    temperatures: list[float],
    *,
    draft_temperatures: list[float] | None = None,
    verify_lens: list[int] | None = None,
    cutoffs: Tensor | None = None,
    simulated: int | None = None,
    noise_key: int = NOISE_KEY,
    noise_offset: int = 0,
    seq_dtype: torch.dtype = torch.int64,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments on the target logits' device: [B * T, V], drafts' [B, G, V], candidates [B, T]."""
    batch, rows = candidates.shape
    device = target_logits.device
    spread = strided if stride else torch.clone
    lens = [rows] * batch if verify_lens is None else verify_lens

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return {
        "candidates": spread(candidates.to(device)),
        "target_logits": spread(target_logits),
        "draft_logits": None if draft_logits is None else spread(draft_logits.to(device)),
        "target_temperatures": column(temperatures),
        "draft_temperatures": column(temperatures if draft_temperatures is None else draft_temperatures),
        "target_cutoffs": None if cutoffs is None else spread(cutoffs.to(device)),
        "seq_lens": (torch.arange(batch, device=device) * 7 + 5).to(seq_dtype),
        "verify_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "noise_key": noise_key,
        "noise_offset": torch.tensor([noise_offset], device=device),
        "simulated_correct": None if simulated is None else torch.tensor([simulated], dtype=torch.int32, device=device),
        "simulated_seed": None if simulated is None else torch.tensor([77], dtype=torch.int32, device=device),
        "out_correct_lens": torch.zeros(batch, dtype=torch.int32, device=device),
        "out_bonus_tokens": torch.zeros(batch, dtype=torch.int64, device=device),
        "out_commit_lens": torch.zeros(batch, dtype=torch.int32, device=device),
        "out_new_seq_lens": torch.zeros(batch, dtype=seq_dtype, device=device),
        "out_tokens": spread(torch.zeros(batch, rows, dtype=torch.int64, device=device)),
    }


def block(
    batch: int, rows: int, vocab: int, temperatures: list[float], seed: int, *, apart: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    """Target logits [B * T, V], draft logits [B, G, V] that far apart, and candidates drawn from the draft's law.

    Request b's draft (b + seed) mod T is one that the draft loves and the target does not, so every position
    sees a rejection; G means that every draft may stand.
    """
    source = generator(seed)
    target = 2 * torch.randn(batch, rows, vocab, generator=source)
    draft = target[:, :-1] + apart * torch.randn(batch, rows - 1, vocab, generator=source)
    candidates = torch.zeros(batch, rows, dtype=torch.int64)
    for request, temperature in enumerate(temperatures):
        wrong = (request + seed) % rows
        if wrong < rows - 1:
            loved = (7 * request + 3) % vocab
            draft[request, wrong, loved], target[request, wrong, loved] = 14.0, -9.0
        scores = draft[request]
        if temperature > 0:
            uniform = torch.rand(scores.shape, generator=source).clamp(min=1e-6, max=1 - 1e-6)
            scores = scores / temperature - torch.log(-torch.log(uniform))
        candidates[request, 1:] = scores.argmax(-1)
    return target.view(batch * rows, vocab), draft, candidates


def _random(
    id_: str,
    batch: int,
    rows: int,
    vocab: int,
    temperatures: list[float],
    *,
    target: torch.dtype = torch.float32,
    draft: torch.dtype | None = torch.float32,
    seed: int = 1,
    apart: float = 0.5,
    known: int | None = None,
    top_k: int | None = None,
    large: bool = False,
    **kwargs: Any,
) -> Case:
    """``known``: the draft's vocabulary, of which its drafts are; ``top_k``: each row has a cutoff below so many."""

    def make(device: str) -> dict[str, Any]:
        p, q, candidates = block(batch, rows, vocab, temperatures, seed, apart=apart)
        if known is not None:
            q = q[..., :known]
            drawn = q.argmax(-1)
            candidates[:, 1:] = torch.where(candidates[:, 1:] < known, candidates[:, 1:], drawn)
        logits = None if draft is None else q.to(device, draft)
        p = p.to(target)
        cutoffs = None if top_k is None else p.float().topk(top_k).values[:, -1].contiguous()
        return arguments(p.to(device), logits, candidates, temperatures, cutoffs=cutoffs, **kwargs)

    return Case(id_, make, kernel_only=large)


def _equal(dtype: torch.dtype) -> Callable[[str], dict[str, Any]]:
    """Draft logits that are the target's: every draft stands, whatever the coin."""

    def make(device: str) -> dict[str, Any]:
        target, _, candidates = block(6, 5, 90, [0.7] * 6, 4)
        target = target.to(device, dtype)
        same = target.view(6, 5, 90)[:, :-1]
        return arguments(target, same, candidates, [0.3, 0.7, 1.0, 1.3, 5.0, 0.05])

    return make


def _dead_row(id_: str, row: Callable[[int], Tensor], *, of_draft: bool, at: int = 0) -> Case:
    """One request, T 3, V 37, drafts [2, 3]: this row of the target, or of the draft, is odd."""

    def make(device: str) -> dict[str, Any]:
        target, draft, _ = block(1, 3, 37, [0.8], 5)
        draft[0, 0, 2] = draft[0, 1, 3] = target[0, 2] = target[1, 3] = 8.0
        if of_draft:
            draft[0, at] = row(37)
        else:
            target[at] = row(37)
        return arguments(target.to(device), draft, torch.tensor([[0, 2, 3]]), [0.8])

    return Case(id_, make)


_DEAD_ROWS = {
    "nan": mostly(NAN, {}),
    "minus_inf": mostly(-INF, {}),
    "one_finite_entry": mostly(-INF, {36: -1e4}),
    "one_finite_among_nan": mostly(NAN, {36: -1e4}),
    "infinity": mostly(1.0, {3: NAN, 20: INF}),
    "two_infinities": mostly(1.0, {5: INF, 20: INF}),
}


def _ranged(id_: str, drafts: list[int], *, one_hot: bool = False) -> Case:
    """Drafts outside [0, V), or without mass in q: a rejection, and the next token has the law p."""

    def make(device: str) -> dict[str, Any]:
        target, draft, _ = block(4, 3, 50, [0.8] * 4, 6)
        target.view(4, 3, 50)[:, 0, 1] = draft[:, 0, 1] = 9.0
        draft[:, :, 7] = -INF
        logits = None if one_hot else draft
        return arguments(target.to(device), logits, torch.tensor([[0, *drafts]] * 4), [0.8, 0.0, 1.0, 0.6])

    return Case(id_, make)


def _known_laws(device: str) -> dict[str, Any]:
    """p and q of the bug reports, draft 2, in many rows: accepted iff the coin is below 0.4, else id 0."""
    batch = 20
    target = torch.tensor(P).log().expand(batch * 2, 4).contiguous()
    draft = torch.tensor(Q).log().expand(batch, 1, 4).contiguous()
    return arguments(target.to(device), draft, torch.tensor([[0, 2]] * batch), [1.0] * batch)


def _padded(device: str) -> dict[str, Any]:
    """Four rows in the graph, two live; the dead rows' logits are NaN and their candidates out of range."""
    temperatures = [0.9, 0.0, 0.7, 1.1]
    target, draft, candidates = block(4, 4, 37, temperatures, 3)
    target[8:] = NAN
    draft[2:] = NAN
    candidates[2:] = 0x7FFFFFFF
    return arguments(target.to(device), draft, candidates, temperatures, verify_lens=[4, 2, 0, 0])


def _uniform(device: str) -> dict[str, Any]:
    """Equal logits in every row: only the noise tells the requests apart."""
    return arguments(torch.zeros(8 * 3, 64, device=device), None, torch.tensor([[0, 64, 64]] * 8), [1.0] * 8)


def _narrow(device: str) -> dict[str, Any]:
    """A draft that knows 40 of 70 ids: one past them has no q, and is a rejection where it is drafted."""
    target, draft, candidates = block(5, 4, 70, [0.9] * 5, 10)
    narrow = draft[..., :40].contiguous()
    candidates[:, 1:] = narrow.argmax(-1)
    candidates[4, 2] = 55
    return arguments(target.to(device), narrow, candidates, [0.9] * 5)


def _odd_cutoffs(device: str) -> dict[str, Any]:
    """Cutoffs that cut nothing, all but one, all but infinities, and everything, of which id 0 is left."""
    target, draft, candidates = block(6, 4, 50, [0.8] * 6, 12)
    target[8:12, 7] = INF
    top = target.clamp(max=1e30).amax(-1)
    cutoffs = torch.cat([top[:4] * 0 - INF, top[4:8], top[8:12], top[12:16] + 1, top[16:20] * NAN, top[20:] * 0 + INF])
    return arguments(target.to(device), draft, candidates, [0.8] * 6, cutoffs=cutoffs)


def mixed(batch: int) -> list[float]:
    """Temperatures of a batch with greedy rows among sampled ones."""
    return [(0.8, 0.0, 1.0, 0.3)[row % 4] for row in range(batch)]


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    yield _random("b1_v97", 1, 4, 97, [1.0])
    yield _random("b1_t2", 1, 2, 64, [0.7], seed=2)
    yield _random("b5_every_position_refused", 5, 5, 97, [1.0] * 5)
    yield _random("b6_mixed_strided", 6, 4, 97, mixed(6), stride=True, seed=3)
    yield _random("b7_t8_bf16", 7, 8, 131, mixed(7), target=bf16, draft=bf16, seed=4)
    yield _random("b3_fp16_fp32_drafts_int32_lengths", 3, 4, 70, [0.5] * 3, target=f16, seq_dtype=torch.int32)
    yield _random("b3_t16", 3, 16, 40, [1.0, 0.0, 0.6], seed=5)
    yield _random("all_greedy", 4, 4, 97, [0.0] * 4)
    yield _random("one_hot_drafts", 6, 4, 97, mixed(6), draft=None, seed=6)
    yield _random("argmax_drafts_with_logits", 4, 4, 97, [0.9] * 4, draft_temperatures=[0.0, 0.9, 0.0, 0.9], seed=7)
    yield _random("other_draft_temperature", 4, 4, 97, [0.9] * 4, draft_temperatures=[0.5, 1.5, 0.9, 2.0], seed=8)
    yield _random("every_verify_length", 10, 4, 65, [1.0, 0.0] * 5, verify_lens=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    yield _random(
        "cut_behind_drafts_that_stand", 6, 5, 65, [1.0] * 6, apart=0.0, seed=5, verify_lens=[1, 2, 3, 4, 5, 2]
    )
    yield _random("high_and_low_temperatures", 5, 4, 97, [0.01, 0.1, 3.0, 30.0, 1e-9], seed=9)
    yield _random("late_offset", 2, 3, 64, [1.0, 1.0], noise_offset=(1 << 40) + 7, noise_key=-1)
    yield _random("small_key", 2, 3, 64, [1.0, 1.0], noise_offset=(1 << 62) + 3, noise_key=1)
    yield _random("v1", 2, 3, 1, [1.0, 0.0])
    yield _random("narrow_mixed_every_verify_length", 10, 4, 70, mixed(10), known=33, seed=13,
                  verify_lens=[0, 1, 2, 3, 4, 4, 3, 2, 1, 0])  # fmt: skip
    yield _random("one_hot_every_verify_length", 10, 4, 65, mixed(10), draft=None, seed=6,
                  verify_lens=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4])  # fmt: skip
    yield _random("cutoffs_mixed", 6, 4, 97, mixed(6), top_k=5, seed=14)
    yield _random("cutoffs_one_hot_bf16", 5, 4, 97, mixed(5), draft=None, top_k=3, target=bf16, seed=15)
    yield _random("cutoffs_narrow_capped_strided", 6, 4, 97, [0.9] * 6, known=40, top_k=8, seed=16, stride=True,
                  verify_lens=[4, 3, 2, 1, 0, 4])  # fmt: skip
    yield Case("cutoffs_odd", _odd_cutoffs)
    yield _random("simulated_mixed", 6, 5, 97, mixed(6), simulated=3, seed=17)
    yield _random("simulated_every_verify_length", 5, 4, 65, [0.7] * 5, simulated=2, draft=None,
                  verify_lens=[0, 1, 2, 3, 4])  # fmt: skip
    yield _random("simulated_cutoffs", 4, 4, 97, mixed(4), simulated=0, top_k=4, seed=18)
    yield Case("equal_laws_fp32", _equal(f32))
    yield Case("equal_laws_bf16", _equal(bf16))
    yield Case("known_laws", _known_laws)
    yield Case("equal_rows_draw_apart", _uniform)
    yield Case("padded_rows", _padded)
    yield Case("narrow_draft_vocabulary", _narrow)
    for id_, row in _DEAD_ROWS.items():
        yield _dead_row(f"target_row_{id_}", row, of_draft=False)
        yield _dead_row(f"bonus_row_{id_}", row, of_draft=False, at=2)
        yield _dead_row(f"draft_row_{id_}", row, of_draft=True)
    for id_, drafts in (
        ("minus_one", [1, -1]),
        ("at_vocab", [1, 50]),
        ("huge", [2**40 + 1, 6]),
        ("without_mass", [1, 7]),
    ):
        yield _ranged(f"draft_{id_}", drafts)
    yield _ranged("one_hot_draft_at_vocab", [1, 50], one_hot=True)
    yield _random("qwen3_vocab_cutoffs", 4, 8, 151_936, mixed(4), top_k=20, large=True, seed=24)
    yield _random("qwen3_vocab_simulated", 4, 8, 151_936, mixed(4), simulated=4, large=True, seed=25)
    for batch in (1, 4, 16):
        yield _random(
            f"qwen3_vocab_b{batch}", batch, 8, 151_936, mixed(batch), target=bf16, draft=bf16, large=True, seed=batch
        )
    yield _random("qwen3_vocab_fp32_one_hot", 4, 8, 151_936, mixed(4), draft=None, large=True, seed=21)
    yield _random("smollm2_vocab_b64", 64, 4, 49_152, mixed(64), target=bf16, draft=f32, large=True, seed=22)
    yield _random("smollm2_vocab_fp16_strided", 5, 5, 49_152, mixed(5), target=f16, draft=f16, large=True, stride=True)
