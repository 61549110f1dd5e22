"""The references against right values written out by hand, naive twins and the law they promise.

A kernel is only ever compared with its reference, so what the reference computes is settled here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgl_mega_plugin.contract import NumericsKind
from sgl_mega_slots.commit.context_kv.reference import rms_norm, rope
from sgl_mega_slots.common.case_tools import generator
from sgl_mega_slots.common.philox import LARGEST_UNIFORM, philox_4x32_10, uniforms
from sgl_mega_slots.common.pick import lowest_argmax
from sgl_mega_slots.draft.markov import cases as markov_cases
from sgl_mega_slots.draft.markov.reference import draft_block, gumbel_noise
from sgl_mega_slots.draft.markov.spec import MARKOV
from sgl_mega_slots.glue.step_inputs import cases as step_cases
from sgl_mega_slots.glue.step_inputs.reference import step_inputs
from sgl_mega_slots.verify_accept.accept_tail import cases as accept_cases
from sgl_mega_slots.verify_accept.accept_tail.reference import greedy_accept

_INF, _NAN = float("inf"), float("nan")
_HUGE = 0x7FFFFFFF


# Known answers that Random123 publishes for philox4x32, 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter: tuple[int, int, int, int], key: int, words: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    found = tuple(int(word) for word in philox_4x32_10(key, (c0, c1, c2, c3)))
    assert [hex(word) for word in found] == [hex(word) for word in words]


def test_uniforms_stay_inside_the_open_interval() -> None:
    found = uniforms(torch.tensor([0, 1 << 31, 0xFFFFFFFF])).tolist()
    assert found == [2.0**-33, 0.5, LARGEST_UNIFORM]
    assert all(math.isfinite(-math.log(-math.log1p(-u))) for u in found)


@pytest.mark.parametrize(
    ("row", "winner"),
    [
        ([_NAN] * 5, 0),
        ([-_INF] * 5, 0),
        ([_NAN, -_INF, _NAN], 0),
        ([-_INF, -_INF, -6e4, -_INF], 2),
        ([_NAN, _NAN, -6e4], 2),
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-0.0, 0.0, -1.0], 0),
        ([9.0, _NAN, _INF, _INF], 2),
        ([7.0], 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lowest_argmax(row: list[float], winner: int, dtype: torch.dtype) -> None:
    assert int(lowest_argmax(torch.tensor(row).to(dtype))) == winner


def _accepted(logits: Tensor, candidates: list[list[int]], verify_lens: list[int] | None = None) -> dict[str, Any]:
    values = accept_cases.arguments(logits, torch.tensor(candidates), verify_lens=verify_lens)
    greedy_accept(**values)
    return {name[4:]: value.tolist() for name, value in values.items() if name.startswith("out_")}


def _winners(ids: list[int], vocab: int = 9) -> Tensor:
    logits = torch.zeros(len(ids), vocab)
    logits[torch.arange(len(ids)), torch.tensor(ids)] = 1.0
    return logits


# Each row: the target's winners, the anchor and drafts, verify length; then accepted, bonus, tokens.
@pytest.mark.parametrize(
    ("winners", "candidates", "verify", "correct", "bonus", "tokens"),
    [
        ([1, 6, 8], [0, 1, 6], 3, 2, 8, [1, 6, 8]),  # all stand
        ([1, 6, 8], [0, 1, 5], 3, 1, 6, [1, 6, 0]),
        ([1, 6, 8], [0, 2, 6], 3, 0, 1, [1, 0, 0]),  # a match after a miss does not count
        ([1, 6, 8], [0, 1, 6], 2, 1, 6, [1, 6, 0]),  # the verify length caps
        ([1, 6, 8], [0, 1, 6], 1, 0, 1, [1, 0, 0]),
        ([1, 6, 8], [0, 1, 6], 0, 0, 0, [0, 0, 0]),  # padding
        ([1, 6, 8], [0, 1, -1], 3, 1, 6, [1, 6, 0]),
        ([1, 6, 8], [0, 1, 9], 3, 1, 6, [1, 6, 0]),  # V is outside the vocabulary
        ([1, 6, 8], [_HUGE, _HUGE, 6], 3, 0, 1, [1, 0, 0]),
        ([0, 0, 0], [5, 0, 0], 3, 2, 0, [0, 0, 0]),  # id 0, an end of text say, is an id like any other
    ],
)
def test_greedy_accept(
    winners: list[int], candidates: list[int], verify: int, correct: int, bonus: int, tokens: list[int]
) -> None:
    found = _accepted(_winners(winners), [candidates], [verify])
    commit = correct + 1 if verify else 0
    assert found == {
        "correct_lens": [correct],
        "bonus_tokens": [bonus],
        "commit_lens": [commit],
        "new_seq_lens": [5 + commit],
        "tokens": [tokens],
    }


@pytest.mark.parametrize(
    ("row", "winner"),
    [([_NAN] * 5, 0), ([-_INF] * 5, 0), ([-_INF, -_INF, -_INF, -9.0, -_INF], 3), ([_NAN, _NAN, 1.0, 0.0, _NAN], 2)],
    ids=["nan", "minus_inf", "one_finite", "nan_and_finite"],
)
def test_dead_target_row(row: list[float], winner: int) -> None:
    logits = _winners([0, 3, 4], vocab=5)
    logits[0] = torch.tensor(row)
    found = _accepted(logits, [[0, 2, 3]])
    stands = winner == 2
    assert found["correct_lens"] == [2 if stands else 0]
    assert found["bonus_tokens"] == [4 if stands else winner]


def test_live_rows_do_not_depend_on_padding() -> None:
    """Graph for four, two live, everything else 0x7fffffff: the live rows equal a run of two."""
    live = _winners([1, 2, 3, 4, 5, 6, 7, 8])
    dead = torch.full((8, 9), _NAN)
    drafts = [[0, 1, 2, 0], [0, 5, 6, 7]]
    two = _accepted(live, drafts, [4, 2])
    four = _accepted(torch.cat([live, dead]), [*drafts, [_HUGE] * 4, [_HUGE] * 4], [4, 2, 0, 0])
    for name, values in two.items():
        assert four[name][:2] == values, name
    assert four["commit_lens"][2:] == [0, 0]
    assert four["tokens"][2:] == [[0] * 4] * 2


def _step(**kwargs: Any) -> dict[str, Any]:
    values = step_cases.arguments("cpu", **kwargs)
    step_inputs(**values)
    return {name[4:]: value.tolist() for name, value in values.items() if name.startswith("out_") and value is not None}


def test_step_inputs_at_the_end_of_the_context() -> None:
    """Context 64: what would be past it is at the last position and in the padding slot."""
    found = _step(seq_lens=[61, 64], gamma=3, pool=[1, 2])
    assert found["positions"] == [[61, 62, 63, 63], [63, 63, 63, 63]]
    assert found["cache_locs"] == [[1062, 1063, 1064, 0], [0, 0, 0, 0]]
    assert found["draft_ids"] == [[3, step_cases.MASK_TOKEN, step_cases.MASK_TOKEN], [14] + [step_cases.MASK_TOKEN] * 2]


def test_step_inputs_of_padding() -> None:
    found = _step(seq_lens=[2, _HUGE], gamma=2, pool=[1, _HUGE], verify_lens=[1, 0])
    assert found["positions"] == [[2, 3, 4], [0, 0, 0]]
    assert found["cache_locs"] == [[1003, 1004, 1005], [0, 0, 0]]
    assert found["draft_ids"][1] == [step_cases.MASK_TOKEN] * 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_step_inputs_against_a_loop(data: st.DataObject) -> None:
    batch, gamma = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rows, columns, limit = gamma + 1, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))

    def of(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=batch, max_size=batch))

    lengths, pool, verify = of(-2, 14), of(-1, batch + 3), of(0, rows)
    found = _step(seq_lens=lengths, gamma=gamma, pool=pool, verify_lens=verify, columns=columns, max_positions=limit)
    last = min(limit, columns) - 1
    for b in range(batch):
        for t in range(rows):
            position, location = 0, 0
            if verify[b] > 0:
                wanted = lengths[b] + t
                position = max(0, min(wanted, last))
                if 0 <= wanted <= last and 0 <= pool[b] < batch + 2:
                    location = pool[b] * 1000 + wanted + 1
            assert (found["positions"][b][t], found["cache_locs"][b][t]) == (position, location), (b, t)


def test_rope_turns_pairs_and_norm_has_unit_mean_square() -> None:
    keys = torch.randn(3, 2, 8, generator=generator(1))
    table = torch.cat([torch.zeros(3, 4), torch.ones(3, 4)], dim=1)  # a quarter turn
    assert torch.equal(rope(keys, table, neox=True), torch.cat([-keys[..., 4:], keys[..., :4]], dim=-1))
    squares = rms_norm(keys, torch.ones(8), 0.0).square().mean(-1)
    # Eight squares, each within 4 roundings of 2**-24.
    assert (squares - 1).abs().max().item() <= 8 * 2.0**-23


def _draws(probabilities: list[float], rows: int, temperature: float) -> Tensor:
    logits = torch.tensor(probabilities).log() * temperature
    nothing = torch.zeros(len(probabilities), 16)
    values = markov_cases.arguments(
        logits.expand(rows, 2, -1), nothing, nothing, [temperature] * rows, noise_offset=3, step_logits=False
    )
    draft_block(**values)
    tokens: Tensor = values["out_draft_tokens"]
    return tokens


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_twenty_thousand_draws_have_the_law_of_softmax(temperature: float) -> None:
    probabilities, count = [0.5, 0.3, 0.2, 0.0], 20_000
    draws = _draws(probabilities, count, temperature)
    for step in range(2):
        frequencies = torch.bincount(draws[:, step], minlength=4) / count
        for token, probability in enumerate(probabilities):
            # Five standard deviations of a binomial count.
            bound = 5 * math.sqrt(probability * (1 - probability) / count)
            error = abs(frequencies[token].item() - probability)
            assert error <= bound, f"step {step}, token {token}: {frequencies[token]}, {probability} +- {bound}"
    both = (draws[:, 0] == 0) & (draws[:, 1] == 0)
    bound = 5 * math.sqrt(0.25 * 0.75 / count)
    assert abs(both.float().mean().item() - 0.25) <= bound, "the two steps do not draw independently"


def test_greedy_rows_and_the_offset() -> None:
    logits = torch.randn(2, 2, 9, generator=generator(2))
    nothing = torch.zeros(9, 16)
    rows = []
    for offset in range(3):
        values = markov_cases.arguments(logits, nothing, nothing, [0.0, 1.0], noise_offset=offset)
        values["out_step_logits"].fill_(_NAN)
        draft_block(**values)
        rows.append(values["out_draft_tokens"].tolist())
        assert values["out_step_logits"][0].isnan().all(), "a greedy row's step logits were written"
        assert torch.equal(values["out_step_logits"][1], logits[1])
    assert {str(row[0]) for row in rows} == {str(logits[0].argmax(-1).tolist())}
    assert len({str(row[1]) for row in rows}) > 1


def _margin(values: dict[str, Any]) -> tuple[float, float]:
    """The least lead of a winner over the next score, and the largest finite score in size."""
    batch, gamma, vocab = values["base_logits"].shape
    draft_block(**values)
    least, largest = _INF, 1.0
    for step in range(gamma):
        for row in range(batch):
            if values["temperatures"][row] <= 0:
                continue
            logits = values["out_step_logits"][row, step].double()
            noise = gumbel_noise(batch, vocab, step, values["noise_key"], values["noise_offset"])[row].double()
            scores = (logits / values["temperatures"][row].double() + noise).nan_to_num(-1e9, 1e9, -1e9)
            first, second = scores.topk(2).values.tolist()
            if abs(first) < 1e9:
                least = min(least, first - second)
                largest = max(largest, abs(first))
    return least, largest


@pytest.mark.slow
def test_sampled_winners_of_the_cases_lead_by_more_than_rounding() -> None:
    """What the slot's numerics promise of tokens is only tested where the winner is clear."""
    assert MARKOV.numerics.kind is NumericsKind.TOLERANCE
    looked_at = 0
    for case in markov_cases.cases():
        values = case.make("cpu")
        if not bool((values["temperatures"] > 0).any()) or values["base_logits"].shape[-1] == 1:
            continue
        if values["out_step_logits"] is None:
            values["out_step_logits"] = torch.zeros_like(values["base_logits"])
        lead, size = _margin(values)
        # Exact: as numerics.because says. Else the tolerance of two logits of 24, over a temperature of 0.8.
        required = 2.0**-16 * size if case.exact else 2 * MARKOV.numerics.bound * 24 / 0.8
        assert lead > required, f"{case.id}: lead {lead}, required {required}"
        looked_at += 1
    assert looked_at >= 15
