"""`markov`'s kernel beyond its cases: the law of its draws, its counter, its rows, its error in fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.case_tools import generator
from sgl_mega_slots.draft.markov.cases import arguments
from sgl_mega_slots.draft.markov.launch import Markov
from sgl_mega_slots.draft.markov.reference import draft_block

_PROBABILITIES = [0.5, 0.3, 0.15, 0.05, 0.0]


def _run(values: dict[str, Any]) -> Tensor:
    batch, gamma, vocab = values["base_logits"].shape
    setup = SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=batch, gamma=gamma, vocab_size=vocab)
    Markov(setup)(**values)
    tokens: Tensor = values["out_draft_tokens"]
    return tokens


def _rows_of(probabilities: list[float], batch: int, offset: int, temperature: float = 1.0) -> dict[str, Any]:
    logits = torch.tensor(probabilities).log() * temperature
    nothing = torch.zeros(len(probabilities), 16)
    return arguments(
        logits.expand(batch, 2, -1),
        nothing,
        nothing,
        [temperature] * batch,
        noise_offset=offset,
        step_logits=False,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_have_the_law_of_softmax(temperature: float) -> None:
    draws = torch.cat([_run(_rows_of(_PROBABILITIES, 64, offset, temperature)) for offset in range(16)])
    count = draws.shape[0]
    for step in range(2):
        frequencies = torch.bincount(draws[:, step], minlength=5) / count
        for token, probability in enumerate(_PROBABILITIES):
            # Five standard deviations of a binomial count.
            bound = 5 * math.sqrt(probability * (1 - probability) / count)
            error = abs(frequencies[token].item() - probability)
            assert error <= bound, f"step {step}, token {token}: {frequencies[token]}, {probability} +- {bound}"


def test_each_offset_draws_anew_and_the_same_again() -> None:
    flat = [0.125] * 8
    draws = [_run(_rows_of(flat, 32, offset)).tolist() for offset in (0, 1, 2, 0)]
    assert draws[0] == draws[3]
    assert len({str(draw) for draw in draws}) == 3


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    source = generator(5)
    logits, w1, w2 = (torch.randn(*shape, generator=source) for shape in ((4, 3, 50), (50, 16), (50, 16)))
    alone = _run(arguments(logits[:1], w1, w2, [0.7], anchors=[9]))
    four = _run(arguments(logits, w1, w2, [0.7, 0.0, 1.2, 0.3], anchors=[9, 1, 2, 3]))
    assert four[0].tolist() == alone[0].tolist()


def test_a_larger_setup_serves_a_smaller_batch() -> None:
    source = generator(6)
    values = arguments(torch.randn(2, 3, 50, generator=source), torch.zeros(50, 16), torch.zeros(50, 16), [0.0, 1.0])
    setup = SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=9, gamma=3, vocab_size=50)
    expected = values | {"out_draft_tokens": torch.zeros(2, 3, dtype=torch.int64)}
    Markov(setup)(**values)
    draft_block(**expected)
    assert values["out_draft_tokens"].tolist() == expected["out_draft_tokens"].tolist()


def test_fp32_logits_differ_by_the_order_of_the_sum_alone() -> None:
    source, rank = generator(7), 32
    logits, w1, w2 = (torch.randn(*shape, generator=source) for shape in ((2, 1, 90), (90, rank), (90, rank)))
    values = arguments(logits, w1, w2, [1.0, 1.0])
    _run(values)
    rows = w1[values["anchor_tokens"]]
    exact = logits[:, 0].double() + rows.double() @ w2.double().T
    # Each of R additions and the last one rounds once: at most R + 1 units of 2**-24 of the sum of magnitudes.
    bound = (rank + 1) * 2.0**-24 * (rows.abs() @ w2.abs().T + logits[:, 0].abs())
    error = (values["out_step_logits"][:, 0].double() - exact).abs()
    worst = (error / bound).argmax()
    assert bool((error <= bound).all()), f"element {worst}: error {error.flatten()[worst]}, {bound.flatten()[worst]}"
