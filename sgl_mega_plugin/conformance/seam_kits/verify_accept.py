"""Kits of the verify-accept stage's seams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import turn_winners
from sgl_mega_plugin.conformance.seam_kits.draw import FAR, INF, NOTHING_KEPT, Draw, Drawn
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments, Range, SeamKit

_CLEAR = 2.0**-10  # of a mass from top_p or min_p: far above the rounding of sums, far below a step of eighths
_TRIES = 50


def greedy_accept(draw: Draw) -> Drawn:
    batch, rows, vocab = draw.batch(), draw.size("T", 2, 6), draw.vocab()
    values = _accept(draw, batch, rows, vocab)
    values["target_tokens"] = None
    if draw.fact("target tokens", draw.chance(0.35)):
        known = torch.where(values["target_logits"].isnan(), -INF, values["target_logits"].float())
        tokens = known.argmax(-1).view(batch, rows)
        if draw.chance(0.3):
            tokens[draw.random.randrange(batch), draw.random.randrange(rows)] = draw.random.choice(FAR)
        values["target_logits"], values["target_tokens"] = None, draw.lay(tokens)
    return values, NOTHING_KEPT


def sampled_accept(draw: Draw) -> Drawn:
    batch, rows, vocab = draw.batch(), draw.size("T", 2, 6), draw.vocab()
    temperatures = draw.temperatures("temperatures", batch)
    q_temperatures = torch.where(temperatures > 0, temperatures, 1.0) if draw.chance(0.7) else torch.ones(batch)
    kept = draw.fact("draft logits", draw.chance(0.6))
    known = max(1, vocab - draw.random.randrange(vocab)) if draw.chance(0.3) else vocab
    draw.facts["draft's V"] = known
    q = draw.logits(batch * (rows - 1), known, draw.dtype("q"), 4).view(batch, rows - 1, known) if kept else None
    values = _accept(draw, batch, rows, vocab)
    if q is not None:
        law = (torch.nan_to_num(q.float(), -INF, 50.0, -INF) / q_temperatures[:, None, None]).softmax(-1)
        drafts = torch.multinomial(law.nan_to_num(1.0).flatten(0, 1), 1, generator=draw.numbers).view(batch, -1)
        drawn = torch.rand(batch, 1, generator=draw.numbers) < 0.8  # other rows keep ids of any kind
        values["candidates"][:, 1:] = torch.where(drawn, drafts, values["candidates"][:, 1:])
    seed = torch.tensor([draw.random.getrandbits(31)], dtype=torch.int32)
    return values | {
        "draft_logits": None if q is None else draw.lay(q),
        "target_temperatures": draw.lay(temperatures),
        "draft_temperatures": draw.lay(q_temperatures),
        "target_cutoffs": _cutoffs(draw, values["target_logits"]) if draw.chance(0.4) else None,
        "noise_key": draw.random.getrandbits(64),
        "noise_offset": draw.lay(torch.tensor([draw.random.getrandbits(40)])),
        "simulated_seed": None if values["simulated_correct"] is None else draw.lay(seed),
    }, NOTHING_KEPT


def sampling_cutoffs(draw: Draw) -> Drawn:
    batch, rows, vocab = draw.batch(), draw.size("T", 2, 6), draw.vocab()
    logits = draw.logits(batch * rows, vocab, draw.dtype("logits"), 4)
    temperatures = draw.temperatures("temperatures", batch)
    choices = (0, -1, 1, 2, 5, vocab // 2, vocab - 1, vocab, 1 << 30)
    top_ks = draw.fact("top_ks", [draw.random.choice(choices) for _ in range(batch)])
    top_ps, min_ps = [1.0] * batch, [0.0] * batch
    for request in range(batch):
        mass, above = _masses(logits[request * rows : (request + 1) * rows], temperatures[request], top_ks[request])
        if draw.chance(0.6):
            top_ps[request] = _clear_of(draw, above, 1.0)
        if draw.chance(0.4):
            min_ps[request] = _clear_of(draw, mass, 0.0)
    lens = draw.fact("verify_lens", draw.ints(batch, 0, rows))
    return {
        "target_logits": draw.lay(logits),
        "temperatures": draw.lay(temperatures),
        "top_ks": draw.lay(torch.tensor(top_ks, dtype=torch.int32)),
        "top_ps": draw.lay(torch.tensor(draw.fact("top_ps", top_ps))),
        "min_ps": draw.lay(torch.tensor(draw.fact("min_ps", min_ps))),
        "verify_lens": draw.lay(torch.tensor(lens, dtype=torch.int32)),
        "out_cutoffs": draw.zeros(batch * rows, dtype=torch.float32),
    }, NOTHING_KEPT


def _masses(logits: Tensor, temperature: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Masses of the logits of rows in descending order, and the parts of what top-k keeps that lie before each."""
    values = torch.where(logits.isnan(), -INF, logits.float()).clamp(max=1e30).sort(-1, descending=True).values.double()
    mass = ((values - values[:, :1]) / (temperature if temperature > 0 else 1.0)).exp().nan_to_num(0.0)
    last = values[:, min(top_k, values.shape[-1]) - 1 if top_k > 0 else -1, None]
    mass = torch.where(values >= last, mass, 0.0)
    return mass, (mass.cumsum(-1) - mass) / mass.sum(-1, keepdim=True).clamp(min=1e-30)


def _clear_of(draw: Draw, places: Tensor, otherwise: float) -> float:
    """A number in (0, 1) that no place is near, or one that asks for nothing."""
    for _ in range(_TRIES):
        found = draw.random.choice([0.02, 0.1, 0.5, 0.8, 0.9, 0.95]) + draw.random.uniform(-0.02, 0.04)
        if found > 0 and not bool(((places - found).abs() < _CLEAR).any()):
            return found
    return otherwise


def _cutoffs(draw: Draw, logits: Tensor) -> Tensor:
    """A logit of each row less 1/16, which no eighth is near; or what cuts nothing, or everything."""
    picks = torch.randint(0, logits.shape[1], (len(logits), 1), generator=draw.numbers)
    found = logits.float().gather(1, picks).squeeze(1) - 1 / 16
    kinds = torch.randint(0, 8, (len(logits),), generator=draw.numbers)
    found = torch.where(kinds == 0, -INF, torch.where(kinds == 1, INF, found))
    return draw.lay(torch.where(found.isnan(), -INF, found))


def _accept(draw: Draw, batch: int, rows: int, vocab: int) -> dict[str, Any]:
    """What both accepts take: drafts that mostly agree with the row before them."""
    logits = draw.logits(batch * rows, vocab, draw.dtype("logits"), 2)
    if draw.fact("near ties", draw.chance(0.5)):
        turn_winners(logits, torch.rand(len(logits), generator=draw.numbers) < 0.5)
    known = torch.where(logits.isnan(), -INF, logits.float())
    candidates = torch.zeros(batch, rows, dtype=torch.int64)
    candidates[:, 1:] = known.argmax(-1).view(batch, rows)[:, :-1]
    for request in range(batch):
        if draw.chance(0.6):
            wrong = draw.random.choice([*FAR, vocab, draw.random.randrange(vocab)])
            candidates[request, draw.random.randrange(1, rows)] = wrong
    seq_dtype = draw.index_dtype("seq_lens")
    lens = draw.fact("verify_lens", draw.ints(batch, 0, rows))
    simulated = None
    if draw.chance(0.2):
        length = draw.fact("simulated", draw.random.randint(-1, rows))
        simulated = draw.lay(torch.tensor([length], dtype=draw.index_dtype("simulated_correct")))
    return {
        "candidates": draw.lay(candidates),
        "target_logits": draw.lay(logits),
        "seq_lens": draw.lay(torch.tensor(draw.ints(batch, 0, 1 << 20), dtype=seq_dtype)),
        "verify_lens": draw.lay(torch.tensor(lens, dtype=torch.int32)),
        "simulated_correct": simulated,
        "out_correct_lens": draw.zeros(batch, dtype=torch.int32),
        "out_bonus_tokens": draw.zeros(batch),
        "out_commit_lens": draw.zeros(batch, dtype=torch.int32),
        "out_new_seq_lens": draw.zeros(batch, dtype=seq_dtype),
        "out_tokens": draw.zeros(batch, rows),
    }


def _accept_ranges(arguments: Arguments) -> tuple[Range, ...]:
    rows, logits = arguments["candidates"].shape[1], arguments["target_logits"]
    vocab = 1 << 31 if logits is None else logits.shape[-1]  # the argmax alone does not show V
    return (
        ("out_correct_lens", 0, rows - 1),
        ("out_bonus_tokens", 0, vocab - 1),
        ("out_commit_lens", 0, rows),
        ("out_tokens", 0, vocab - 1),
    )


def _sizes(arguments: Arguments) -> tuple[int, int, int]:
    batch, rows = arguments["candidates"].shape
    logits = arguments["target_logits"]
    return batch, rows - 1, 1 if logits is None else logits.shape[1]


def _row_sizes(arguments: Arguments) -> tuple[int, int, int]:
    batch = len(arguments["verify_lens"])
    rows, vocab = arguments["target_logits"].shape
    return batch, rows // batch - 1, vocab


KITS = (
    SeamKit("greedy_accept", greedy_accept, _sizes, _accept_ranges),
    SeamKit(
        "sampled_accept",
        sampled_accept,
        _sizes,
        _accept_ranges,
        {"target_logits": "target_temperatures", "draft_logits": "draft_temperatures"},
    ),
    SeamKit("sampling_cutoffs", sampling_cutoffs, _row_sizes),
)
