"""The law of ``sampled_accept``: drafts are drawn here, committed tokens and accepted drafts counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.arguments import Arguments
from sgl_mega_plugin.conformance.laws.tally import (
    DRAWS,
    IDS,
    KEY,
    QWEN3_VOCAB,
    TEMPERATURES,
    Call,
    Law,
    Tally,
    mixed_temperatures,
    outside,
    rows_at,
    softmax,
)

_ROWS = 4
_BATCH = 2304  # DRAWS tokens a temperature take a dozen calls
_CUTOFF = 0.25  # of the target: four of its eight ids stay
_NARROW = 5  # ids that a narrow draft knows
_VERIFY = (4, 3, 2)
_BINS = IDS + 1


def _accept_arguments(
    device: str, *, kept: bool, vocab: int = IDS, known: int | None = None, cut: bool = False
) -> dict[str, Any]:
    """T 4; p and q of every position alike, each with one id that has no mass. ``known``: the draft's own V."""
    p = torch.tensor([1.5, 0.0, 1.0, -0.5, 0.5, -torch.inf, 0.75, -1.0])
    q = torch.tensor([0.0, 1.0, -torch.inf, 0.5, 1.5, 0.25, -0.5, 1.0])
    if vocab > IDS:
        numbers = torch.Generator().manual_seed(3)
        p, q = (torch.cat([row + 9.0, torch.randn(vocab - IDS, generator=numbers)]) for row in (p, q))
    p, q = p.to(device), q[:known].to(device)
    lens = [_VERIFY[(row // len(TEMPERATURES)) % len(_VERIFY)] for row in range(_BATCH)]
    return {
        "candidates": torch.zeros(_BATCH, _ROWS, dtype=torch.int64, device=device),
        # Rows share their logits: gigabytes less.
        "target_logits": p.expand(_BATCH * _ROWS, -1),
        "draft_logits": q.expand(_BATCH, _ROWS - 1, -1) if kept else None,
        "target_temperatures": mixed_temperatures(device, _BATCH),
        "draft_temperatures": torch.ones(_BATCH, device=device),
        "target_cutoffs": torch.full((_BATCH * _ROWS,), _CUTOFF, device=device) if cut else None,
        "seq_lens": torch.zeros(_BATCH, dtype=torch.int64, device=device),
        "verify_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "noise_key": KEY,
        "noise_offset": torch.zeros(1, dtype=torch.int64, device=device),
        "simulated_correct": None,
        "simulated_seed": None,
        "out_correct_lens": torch.zeros(_BATCH, dtype=torch.int32, device=device),
        "out_bonus_tokens": torch.zeros(_BATCH, dtype=torch.int64, device=device),
        "out_commit_lens": torch.zeros(_BATCH, dtype=torch.int32, device=device),
        "out_new_seq_lens": torch.zeros(_BATCH, dtype=torch.int64, device=device),
        "out_tokens": torch.zeros(_BATCH, _ROWS, dtype=torch.int64, device=device),
    }


@dataclass
class _Tallies:
    """Of the rows at one temperature; ids from 8 on, where there are any, are one bin."""

    tokens: Tally  # committed, at any position: the law p
    stands: Tally  # drafts that were reached and accepted, by id
    pairs: Tally  # committed at a position whose draft was reached, by draft and token

    @classmethod
    def of(cls, at: float, target_logits: Tensor, q: Tensor | None) -> Self:
        p = softmax(target_logits, at)
        where = f"temperature {at}"
        if q is None or at == 0:
            stands = _binned(p)
            pairs = stands.expand(_BINS, -1)  # a one-hot draft changes nothing in what is committed
        else:
            stands = _binned_mean((p / q).clamp(max=1.0).nan_to_num(0.0), q)
            rest = (p - q).clamp(min=0)
            pairs = stands.diag() + (1 - stands)[:, None] * _binned(rest / rest.sum())
        return cls(
            Tally(where, lambda bin_: f"committed {_name(bin_)}", _binned(p)),
            Tally(where, lambda bin_: f"accepted draft {_name(bin_)}", stands),
            Tally(where, lambda pair: f"{_name(pair % _BINS)} for draft {_name(pair // _BINS)}", pairs.flatten()),
        )

    def count(self, drafts: Tensor, tokens: Tensor, committed: Tensor, reached: Tensor) -> None:
        """Add rows: drafts and reached are [N, G], tokens and committed [N, T]."""
        d, i = drafts.clamp(max=IDS), tokens.clamp(max=IDS)
        self.tokens.count += torch.bincount(i[committed], minlength=_BINS)
        self.tokens.trials += int(committed.sum())
        asked = torch.bincount(d[reached], minlength=_BINS)
        self.stands.trials += asked
        self.stands.count += torch.bincount(d[reached & committed[:, 1:]], minlength=_BINS)
        self.pairs.trials += asked[:, None].expand(-1, _BINS).flatten()
        self.pairs.count += torch.bincount((d * _BINS + i[:, :-1])[reached], minlength=_BINS**2)

    def problems(self) -> list[str]:
        return [*self.tokens.problems(), *self.stands.problems(), *self.pairs.problems()]


def _accept(call: Call, values: dict[str, Any]) -> list[str]:
    """Committed tokens have the law p; a draft d that is reached stands with min(1, p(d) / q(d)), one-hot with p(d)."""
    vocab = values["target_logits"].shape[-1]
    kept = values["draft_logits"] is not None
    # A one-hot draft may be any id, the one without mass included.
    q = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    if kept:
        known = softmax(values["draft_logits"][0, 0], 1.0)
        q = torch.nn.functional.pad(known, (0, vocab - len(known)))
    logits = values["target_logits"][0]
    if values["target_cutoffs"] is not None:
        logits = torch.where(logits < values["target_cutoffs"][0], -torch.inf, logits)
    tallies = {at: _Tallies.of(at, logits, q if kept else None) for at in TEMPERATURES}
    numbers = torch.Generator(values["candidates"].device).manual_seed(4)
    weights = q.to(values["candidates"].device)
    offset = 0
    while any(float(tally.tokens.trials[0]) < DRAWS for tally in tallies.values()):
        drafts = torch.multinomial(weights, _BATCH * (_ROWS - 1), replacement=True, generator=numbers).view(_BATCH, -1)
        values["candidates"][:, 1:] = drafts
        values["noise_offset"].fill_(offset)
        values["out_tokens"].fill_(0x7FFFFFFF)
        values["out_commit_lens"].fill_(0x7FFFFFFF)
        call(**values)
        offset += 1
        problems = _count(values, drafts.cpu(), tallies)
        if problems:
            return problems
    return [line for tally in tallies.values() for line in tally.problems()]


def _count(values: Arguments, drafts: Tensor, tallies: dict[float, _Tallies]) -> list[str]:
    """Add one step to the tallies; returns what makes it uncountable."""
    commit, out, lens = (values[name].cpu() for name in ("out_commit_lens", "out_tokens", "verify_lens"))
    wrong = (commit < 1) | (commit > lens)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        return [f"out_commit_lens[{row}]: found {int(commit[row])}, allowed 1 to {int(lens[row])}"]
    position = torch.arange(_ROWS)
    committed = position < commit[:, None]
    reached = (position[1:] <= commit[:, None]) & (position[1:] < lens[:, None])
    for at, tally in tallies.items():
        rows = rows_at(at)
        odd = outside(out[rows][committed[rows]], values["target_logits"].shape[-1])
        if odd:
            return [f"out_tokens at temperature {at}: {odd}"]
        tally.count(drafts[rows], out[rows], committed[rows], reached[rows])
    return []


def _name(id_: int) -> str:
    return f"id {id_}" if id_ < IDS else f"ids from {IDS} on"


def _binned(law: Tensor) -> Tensor:
    """[9]: the first eight ids, and all others together."""
    return torch.cat([law[:IDS], law[IDS:].sum()[None]])


def _binned_mean(accepted: Tensor, q: Tensor) -> Tensor:
    """[9]: the chance that a draft stands, for the first eight ids and for the others as q draws them."""
    weight = q[IDS:].double()
    rest = (accepted[IDS:] * weight).sum() / weight.sum() if len(weight) else torch.zeros((), dtype=torch.float64)
    return torch.cat([accepted[:IDS].double(), rest[None]])


def _law(id_: str, *, kept: bool, vocab: int = IDS, known: int | None = None, cut: bool = False) -> Law:
    def arguments(device: str) -> dict[str, Any]:
        return _accept_arguments(device, kept=kept, vocab=vocab, known=known, cut=cut)

    return Law(id_, arguments, _accept, vocab > IDS)


SAMPLED_ACCEPT = (
    _law("law-v8-draft-logits", kept=True),
    _law("law-v8-one-hot", kept=False),
    _law("law-v8-cutoffs", kept=True, cut=True),
    _law("law-v8-cutoffs-one-hot", kept=False, cut=True),
    _law("law-v8-narrow-draft", kept=True, known=_NARROW),
    _law("law-v151936-draft-logits", kept=True, vocab=QWEN3_VOCAB),
)
