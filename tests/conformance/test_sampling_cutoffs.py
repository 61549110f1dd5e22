"""What `sampling_cutoffs`' reference keeps: by hand, against a naive twin, and through the accept that reads it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.embedded import stages
from sgl_mega_slots.common.case_tools import generator
from sgl_mega_slots.verify_accept.accept_tail import cases as greedy_cases
from sgl_mega_slots.verify_accept.accept_tail.reference import greedy_accept
from sgl_mega_slots.verify_accept.blockwise_rejection import cases as rejection_cases
from sgl_mega_slots.verify_accept.blockwise_rejection.reference import sampled_accept
from sgl_mega_slots.verify_accept.sampling_cutoffs import cases as cutoff_cases
from sgl_mega_slots.verify_accept.sampling_cutoffs.cases import arguments
from sgl_mega_slots.verify_accept.sampling_cutoffs.reference import ladder, sampling_cutoffs

_INF, _NAN = float("inf"), float("nan")
#: log of masses 8, 4, 2, 1, 1: parts of 1/2, 1/4, 1/8, 1/16, 1/16.
_ROW = [math.log(mass) for mass in (2.0, 8.0, 1.0, 4.0, 1.0)]


def _cutoff(
    row: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0
) -> float:
    values = arguments(torch.tensor([row]), [temperature], [top_k], [top_p], [min_p])
    values["out_cutoffs"].fill_(_NAN)
    sampling_cutoffs(**values)
    return float(values["out_cutoffs"])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, 0.0),
        (-1, 1.5, -1.0, 0.0),
        (5, 1.0, 0.0, 0.0),  # V: nothing is cut
        (1, 1.0, 0.0, 8.0),
        (2, 1.0, 0.0, 4.0),
        (4, 1.0, 0.0, 1.0),  # the fourth and the fifth are equal: both stay
        (0, 0.49, 0.0, 8.0),
        (0, 0.51, 0.0, 4.0),
        (0, 0.8, 0.0, 2.0),
        (0, 0.9, 0.0, 1.0),
        (0, 0.0, 0.0, 8.0),
        (0, -1.0, 0.0, 8.0),
        (2, 0.6, 0.0, 8.0),  # 8 of the 12 that top-k keeps
        (3, 0.6, 0.0, 4.0),  # 8 of 14 are not enough
        (0, 1.0, 0.3, 4.0),
        (0, 1.0, 0.2, 2.0),
        (0, 1.0, 0.1, 1.0),
        (0, 1.0, 7.0, 8.0),
        (3, 0.9, 0.3, 4.0),  # top-k to 2, top-p too, min-p to 4
        (0, _NAN, _NAN, 0.0),
    ],
)
def test_by_hand(top_k: int, top_p: float, min_p: float, kept: float) -> None:
    found = _cutoff(_ROW, top_k, top_p, min_p)
    assert found == (torch.tensor(math.log(kept)).item() if kept else -_INF)


@pytest.mark.parametrize(
    ("row", "cutoff"),
    [
        ([_NAN] * 4, -_INF),
        ([-_INF] * 4, -_INF),
        ([-_INF, _NAN, -3.0, -_INF], -_INF),  # fewer than three there
        ([_INF, 5.0, _INF, _INF], 1e30),
        ([1.0, 1.0, 1.0, 1.0], 1.0),
        ([-0.0, 0.0, -0.0, -1.0], 0.0),
    ],
    ids=["nan", "minus_inf", "one", "infinities", "equal", "signed_zeros"],
)
def test_odd_rows(row: list[float], cutoff: float) -> None:
    found = _cutoff(row, top_k=3)
    assert found == torch.tensor(cutoff).item()
    assert math.copysign(1.0, found) == math.copysign(1.0, cutoff)


def test_temperature_counts_for_masses_and_not_for_ranks() -> None:
    assert _cutoff(_ROW, top_k=2, temperature=0.1) == _cutoff(_ROW, top_k=2)
    assert _cutoff(_ROW, top_p=0.9, temperature=0.5) == torch.tensor(math.log(4.0)).item()  # 64 + 16 of 86
    assert _cutoff(_ROW, top_p=0.9, temperature=0.0) == -_INF


def _kept(row: list[float], top_k: int, top_p: float, min_p: float, temperature: float) -> set[float]:
    """Values that stay, step by step as the seam has it."""
    values = sorted(({x for x in row if x == x} or {-_INF}), reverse=True)
    mass = {x: math.exp((x - values[0]) / temperature) * row.count(x) for x in values}
    count, kept = 0, []
    for x in values:
        if not 0 < top_k < len(row) or count < top_k:
            kept.append(x)
        count += row.count(x)
    whole, before, left = sum(mass[x] for x in kept), 0.0, []
    for x in kept:
        if top_p >= 1 or before < top_p * whole or x == values[0]:
            left.append(x)
        before += mass[x]
    return {x for x in left if min_p <= 0 or math.exp((x - values[0]) / temperature) >= min_p or x == values[0]}


@pytest.mark.parametrize("seed", range(5))
def test_a_naive_twin_keeps_the_same(seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(60):
        vocab = numbers.randint(2, 40)
        row = [numbers.randint(-24, 24) / 8 for _ in range(vocab)]
        temperature = numbers.choice([0.3, 0.7, 1.0, 1.6])
        asked = numbers.choice([0, 1, 3, vocab - 1]), numbers.uniform(0.01, 1.1), numbers.choice([0.0, 0.033, 0.4])
        found = _cutoff(row, *asked, temperature)
        assert {x for x in row if x >= found} == _kept(row, *asked, temperature), (row, asked, temperature)


def test_greedy_by_temperature_or_by_top_k_among_sampled_rows() -> None:
    """Temperature 0; .7 with top_k 1; .7: greedy, greedy, drawn. The second by its cutoff, whatever the noise."""
    batch, rows, vocab = 3, 4, 50
    target = torch.randn(batch * rows, vocab, generator=generator(8))
    winners = target.view(batch, rows, vocab).argmax(-1)
    candidates = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), winners[:, :-1]], dim=1)
    candidates[:, 3] = (candidates[:, 3] + 1) % vocab
    cut = arguments(target, [0.0, 0.7, 0.7], [1, 1, 1 << 30], [1.0] * 3)
    sampling_cutoffs(**cut)
    alone = greedy_cases.arguments(target, candidates)
    greedy_accept(**alone)
    drawn = set()
    for offset in range(8):
        values = rejection_cases.arguments(
            target, None, candidates, [0.0, 0.7, 0.7], cutoffs=cut["out_cutoffs"], noise_offset=offset
        )
        sampled_accept(**values)
        assert values["out_tokens"][:2].tolist() == alone["out_tokens"][:2].tolist()
        drawn.add(tuple(values["out_tokens"][2].tolist()))
    assert len(drawn) > 4


def _nearest(values: dict[str, Any]) -> float:
    """How near a top_p or min_p comes to where a row's answer changes, as a part of the row's mass or its greatest."""
    batch, (count, vocab) = len(values["verify_lens"]), values["target_logits"].shape
    logits, nearest = values["target_logits"].view(batch, count // batch, vocab), 1.0
    for request in range(batch):
        top_k, top_p, min_p = (float(values[name][request]) for name in ("top_ks", "top_ps", "min_ps"))
        _, mass, greater, above = ladder(logits[request], values["temperatures"][request].expand(count // batch))
        kept = (greater < top_k) | (not 0 < top_k < vocab)
        places = (above / torch.where(kept, mass, 0).sum(-1, keepdim=True))[kept & (greater > 0)]
        if 0 < top_p < 1 and len(places):
            nearest = min(nearest, float((places - top_p).abs().min()))
        if 0 < min_p < 1 and bool((mass > 0).any()):
            nearest = min(nearest, float((mass - min_p).abs().min()))
    return nearest


def test_the_cases_are_clear_of_rounding() -> None:
    for case in cutoff_cases.cases():
        if not case.kernel_only and case.id not in ("odd_rows", "ties"):  # few and equal masses there
            assert _nearest(case.make("cpu")) > 2.0**-16, case.id


@pytest.mark.slow
def test_the_large_cases_are_clear_of_rounding() -> None:
    looked_at = 0
    for case in cutoff_cases.cases():
        if case.kernel_only:
            assert _nearest(case.make("cpu")) > 2.0**-16, case.id
            looked_at += 1
    assert looked_at >= 5


def _outputs(call: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
    call(**copies)
    return {name: value for name, value in copies.items() if name.startswith("out_")}


@pytest.mark.parametrize(
    ("module", "reference", "stage"),
    [
        (cutoff_cases, sampling_cutoffs, stages.sampling_cutoffs),
        (greedy_cases, greedy_accept, stages.greedy_accept),
        (rejection_cases, sampled_accept, stages.sampled_accept),
    ],
    ids=["sampling_cutoffs", "greedy_accept", "sampled_accept"],
)
def test_the_embedded_engines_stage_is_another_way_to_the_same(module: Any, reference: Any, stage: Any) -> None:
    for case in module.cases():
        if case.kernel_only or case.id == "high_and_low_temperatures":  # where fp64's own ends differ
            continue
        values = case.make("cpu")
        expected, found = _outputs(reference, values), _outputs(stage, values)
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{case.id}: {name}"
