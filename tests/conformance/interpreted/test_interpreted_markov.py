"""`markov`'s kernel beyond its cases: the law of its draws, its counter, its rows, its error in fp32."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.contract import Backend, Case, SlotSetup
from sgl_mega_slots.common.case_tools import generator
from sgl_mega_slots.common.processors import Processors
from sgl_mega_slots.draft.markov import launch
from sgl_mega_slots.draft.markov.cases import arguments, cases
from sgl_mega_slots.draft.markov.kernel import EMPTY
from sgl_mega_slots.draft.markov.launch import Markov, MarkovLaunch
from sgl_mega_slots.draft.markov.reference import draft_block

_PROBABILITIES = [0.5, 0.3, 0.15, 0.05, 0.0]


def _slot(values: dict[str, Any]) -> Markov:
    batch, gamma, vocab = values["base_logits"].shape
    return Markov(SlotSetup(backend=Backend.INTERPRETER, device="cpu", max_batch=batch, gamma=gamma, vocab_size=vocab))


def _run(values: dict[str, Any]) -> Tensor:
    _slot(values)(**values)
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


_WANTED = (
    "b3_mixed_strided",
    "bf16_everywhere",
    "fp32_weights_bf16_logits",
    "features",
    "ties_take_the_lowest_id",
    "b9_g1",
    "b33_no_step_logits",
    "b18_rank_72_strided",
    "dead_rows_in_a_batch",
)
_ONE_LAUNCH = [pytest.param(case, id=case.id) for case in cases() if case.id in _WANTED]


@pytest.mark.parametrize("case", _ONE_LAUNCH)
def test_all_steps_in_one_launch_are_steps_of_a_launch_each(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but with one program: the interpreter runs programs one after the other, so none can wait."""

    def one_launch(*arguments: Any) -> MarkovLaunch:
        backend, batch, vocab, rank, weight_bytes, _ = arguments
        launches = MarkovLaunch.plan(
            backend=backend,
            batch=batch,
            vocab=vocab,
            rank=rank,
            weight_bytes=weight_bytes,
            processors=Processors(count=1, shared_bytes=0),
        )
        return dataclasses.replace(launches, programs=1, tiles=-(-vocab // launches.block_v), one_launch=True)

    values, expected = case.make("cpu"), case.make("cpu")
    monkeypatch.setattr(launch, "_plan", one_launch)
    _run(values)
    draft_block(**expected)
    for name in ("out_draft_tokens", "out_step_logits", "out_features"):
        if values[name] is not None:
            torch.testing.assert_close(values[name], expected[name], rtol=0, atol=0, equal_nan=True)


def test_every_call_leaves_its_words_empty() -> None:
    """A word that stays would be taken for a winner of the next call."""
    source = generator(8)
    logits, w1, w2 = (torch.randn(*shape, generator=source) for shape in ((3, 4, 200), (200, 16), (200, 16)))
    values = arguments(logits, w1, w2, [0.0] * 3)
    slot = _slot(values)
    for _ in range(2):
        slot(**values)
        assert bool((slot._words == EMPTY.value).all())


_SHAPES = [
    (1, 151_936, 256, 2, 132, 227),
    (4, 49_152, 256, 2, 132, 227),
    (9, 151_936, 256, 2, 132, 227),
    (32, 151_936, 256, 2, 132, 227),
    (33, 100, 256, 2, 132, 227),
    (64, 151_936, 512, 2, 132, 227),
    (65, 151_936, 256, 2, 132, 227),
    (128, 262_144, 512, 2, 148, 227),
    (64, 151_936, 512, 2, 188, 99),
    (1, 97, 16, 2, 132, 227),
    (9, 151_936, 24, 4, 132, 99),
    (9000, 151_936, 256, 2, 132, 227),
]


@pytest.mark.parametrize("shape", _SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_a_plan_covers_the_vocabulary_and_fits_the_gpu(shape: tuple[int, ...]) -> None:
    batch, vocab, rank, weight_bytes, count, kib = shape
    plan = MarkovLaunch.plan(
        backend=Backend.KERNEL,
        batch=batch,
        vocab=vocab,
        rank=rank,
        weight_bytes=weight_bytes,
        processors=Processors(count=count, shared_bytes=kib * 1024),
    )
    assert plan.programs * plan.tiles * plan.block_v >= vocab
    assert (plan.tiles - 1) * plan.programs * plan.block_v < vocab, "a tile with no id"
    assert plan.block_r >= rank or plan.num_stages == 1, "a pipelined loop may not read factors ahead"
    assert weight_bytes == 4 or plan.block_r * weight_bytes * plan.block_v * plan.num_stages <= kib * 1024
    resident = count * (2 if weight_bytes == 4 else 1)
    assert not plan.one_launch or plan.programs * -(-batch // plan.block_b) <= resident, "a program that waits for room"


def test_a_launch_without_room_says_which_slot_has_none() -> None:
    plan = MarkovLaunch.plan(
        backend=Backend.KERNEL,
        batch=32,
        vocab=151_936,
        rank=256,
        weight_bytes=2,
        processors=Processors(count=132, shared_bytes=227 * 1024),
    )
    with (
        pytest.raises(RuntimeError, match=r"markov: 132 x 1 programs .*too many blocks.* 132 multiprocessors .*MPS"),
        launch._all_at_once(plan, 1, Processors(count=132, shared_bytes=227 * 1024)),
    ):
        raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
    with (
        pytest.raises(RuntimeError, match=r"^out of memory$"),
        launch._all_at_once(plan, 1, Processors(count=132, shared_bytes=227 * 1024)),
    ):
        raise RuntimeError("out of memory")


def test_a_rank_that_fits_no_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="markov_w1: R 4096; two tiles of 16 ids"):
        MarkovLaunch.plan(
            backend=Backend.KERNEL,
            batch=1,
            vocab=1000,
            rank=4096,
            weight_bytes=2,
            processors=Processors(count=132, shared_bytes=227 * 1024),
        )


class _Recorded:
    """A kernel that only notes how it was launched."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launches.append(options)


@pytest.mark.parametrize("name", ["gated", "rnn"])
def test_the_last_of_a_mixers_launches_waits_for_its_other_programs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its last program reads the words of all; on a GPU they run at the same time, unlike here."""
    case = next(case for case in cases() if name in case.id and not case.kernel_only)
    recorded = _Recorded()
    monkeypatch.setattr(launch, "markov_steps", recorded)
    values = case.make("cpu")
    _slot(values)(**values)
    assert len(recorded.launches) == values["base_logits"].shape[1]
    assert {options["LOOKS"] for options in recorded.launches} == {launch._LOOKS}
    assert launch._LOOKS >= 1 << 20
