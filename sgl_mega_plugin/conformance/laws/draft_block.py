"""The law of ``draft_block``: a Markov chain of G tokens a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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

_BUCKETS = 64
_BATCH = 960  # with G 8, DRAWS tokens a temperature take eight blocks


def _chain_arguments(device: str) -> dict[str, Any]:
    """V 8, G 8: bias up to 1/2 by the token before, and one id that has no mass."""
    numbers = torch.Generator().manual_seed(1)
    base = torch.tensor([1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.0, -torch.inf])
    w1 = torch.zeros(IDS, 16)
    w1[:, 0] = torch.randint(-4, 5, (IDS,), generator=numbers) / 8
    w2 = torch.zeros(IDS, 16)
    w2[:, 0] = torch.randint(-8, 9, (IDS,), generator=numbers) / 8
    return _block_arguments(base.expand(_BATCH, 8, IDS).contiguous(), w1, w2, device)


def _wide_arguments(device: str) -> dict[str, Any]:
    """V 151,936, G 8: no bias, and half of the mass on the first 64 ids of 4096 each in turn."""
    base = torch.randn(QWEN3_VOCAB, generator=torch.Generator().manual_seed(2))
    base[:: QWEN3_VOCAB // _BUCKETS] += 7.0
    weights = torch.zeros(QWEN3_VOCAB, 16)
    # Rows and steps share their logits: gigabytes less.
    return _block_arguments(base.to(device).expand(_BATCH, 8, -1), weights, weights, device)


def _block_arguments(base: Tensor, w1: Tensor, w2: Tensor, device: str) -> dict[str, Any]:
    return {
        "base_logits": base.to(device),
        "anchor_tokens": torch.arange(_BATCH, device=device) % (IDS - 1),
        "markov_w1": w1.to(device),
        "markov_w2": w2.to(device),
        "draft_hidden": None,
        "mixer_weight": None,
        "mixer_bias": None,
        "temperatures": mixed_temperatures(device, _BATCH),
        "noise_key": KEY,
        "noise_offset": torch.zeros(1, dtype=torch.int64, device=device),
        "out_draft_tokens": torch.zeros(*base.shape[:2], dtype=torch.int64, device=device),
        "out_step_logits": None,
        "out_features": None,
    }


def _blocks(call: Call, values: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """(token before, token) [B, G] of enough blocks, each with the next offset."""
    tokens = values["out_draft_tokens"]
    for offset in range(-(-DRAWS // (_BATCH // len(TEMPERATURES) * tokens.shape[1]))):
        values["noise_offset"].fill_(offset)
        tokens.fill_(0x7FFFFFFF)
        call(**values)
        yield torch.cat([values["anchor_tokens"][:, None], tokens[:, :-1]], 1), tokens


def _chain(call: Call, values: dict[str, Any]) -> list[str]:
    """Tokens after each token. Visits to one state of a Markov chain leave it independently, so counts are binomial."""
    bias = values["markov_w1"].double().cpu() @ values["markov_w2"].double().cpu().T
    logits = values["base_logits"][0, 0].double().cpu() + bias
    tallies = {
        at: Tally(
            f"temperature {at}", lambda cell: f"id {cell % IDS} after id {cell // IDS}", softmax(logits, at).flatten()
        )
        for at in TEMPERATURES
    }
    for before, tokens in _blocks(call, values):
        for at, tally in tallies.items():
            rows = rows_at(at)
            cells = (before[rows] * IDS + tokens[rows]).flatten()
            wrong = outside(tokens[rows], IDS) or outside(before[rows], IDS)
            if wrong:
                return [f"out_draft_tokens at temperature {at}: {wrong}"]
            seen = torch.bincount(cells, minlength=IDS**2).double().cpu()
            tally.count += seen
            tally.trials += seen.view(IDS, IDS).sum(1, keepdim=True).expand(-1, IDS).flatten()
    return [line for tally in tallies.values() for line in tally.problems()]


def _wide(call: Call, values: dict[str, Any]) -> list[str]:
    """The 64 heaviest ids, then 64 buckets of the others by id modulo 64."""
    vocab = values["base_logits"].shape[-1]
    logits = values["base_logits"][0, 0]
    bucket = _BUCKETS + torch.arange(vocab) % _BUCKETS
    bucket[:: vocab // _BUCKETS] = torch.arange(len(bucket[:: vocab // _BUCKETS])).clamp(max=_BUCKETS - 1)
    bucket_there = bucket.to(logits.device)
    tallies = {}
    for at in TEMPERATURES:
        mass = torch.zeros(2 * _BUCKETS, dtype=torch.float64).index_add_(0, bucket, softmax(logits, at))
        tallies[at] = Tally(f"temperature {at}", lambda part: f"bucket {part} of {2 * _BUCKETS}", mass)
    for _, tokens in _blocks(call, values):
        for at, tally in tallies.items():
            drawn = tokens[rows_at(at)].flatten()
            wrong = outside(drawn, vocab)
            if wrong:
                return [f"out_draft_tokens at temperature {at}: {wrong}"]
            tally.count += torch.bincount(bucket_there[drawn], minlength=2 * _BUCKETS).cpu()
            tally.trials += len(drawn)
    return [line for tally in tallies.values() for line in tally.problems()]


DRAFT_BLOCK = (
    Law("law-v8", _chain_arguments, _chain),
    Law("law-v151936", _wide_arguments, _wide, kernel_only=True),
)
